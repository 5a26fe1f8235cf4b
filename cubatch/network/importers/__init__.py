"""Networks that people have already, as ours: one builder, a front end for PyTorch modules and one for ONNX files."""
