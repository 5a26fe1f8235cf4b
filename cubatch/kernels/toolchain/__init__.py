"""From CUDA sources to machine code, and back to what it is made of."""
