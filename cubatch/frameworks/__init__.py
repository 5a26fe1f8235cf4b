"""What users have already: PyTorch modules and ONNX files, their steps, and the memory that those take."""
