"""PyTorch modules: what `autotune_module` answers on them, and what it says of their memory."""
