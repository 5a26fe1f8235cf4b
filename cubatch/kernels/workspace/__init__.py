"""How the kernels cut their work, and the scratch memory that follows from it."""
