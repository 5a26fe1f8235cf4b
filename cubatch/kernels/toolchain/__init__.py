"""Compile CUDA sources, and read what the compiler reports."""
