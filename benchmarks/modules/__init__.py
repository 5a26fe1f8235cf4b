"""PyTorch modules, the finders that run on them, and judges of their recommendations."""
