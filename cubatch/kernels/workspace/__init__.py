"""Grids and scratch memory of the kernels."""
