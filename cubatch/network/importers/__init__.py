"""Importers: networks of PyTorch and ONNX as layers of cubatch."""
