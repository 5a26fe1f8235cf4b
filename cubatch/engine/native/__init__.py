"""The engine's operations on hand-written kernels: grids and arguments; a launcher runs them."""
