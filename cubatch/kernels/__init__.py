"""The hand-written kernels as records; their CUDA sources lie in `kernels/` at the top of the repository."""
