"""Runners of a user's PyTorch modules and ONNX files, and the memory that their steps take."""
