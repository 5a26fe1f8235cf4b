"""Benchmarks of cubatch, run from the root of the repository as `python -m benchmarks.NAME`."""
