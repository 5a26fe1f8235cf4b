"""What can be tuned: networks, PyTorch modules, ONNX files and callables, each as a `Subject`."""
