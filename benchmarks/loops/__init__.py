"""Training loops with a data loader: each once in plain PyTorch, and once as its user passes it to cubatch."""
