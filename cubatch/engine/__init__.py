"""The NumPy-style CNN: arrays in, arrays out; knows nothing of tuning."""
