"""What lives when, where it lies, what fits."""
