"""Records of the cubatch kernels, whose CUDA sources are in `kernels/` at the top of the repository."""
