"""The check of all kernels against their budget: registers, shared memory, spills, main loops and bank conflicts."""
