"""What users have already: steps of their PyTorch modules, and the memory that those will take."""
