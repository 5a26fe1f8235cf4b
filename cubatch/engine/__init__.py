"""The cubatch engine: layers, networks and training on NumPy or CuPy arrays, independent of tuning."""
