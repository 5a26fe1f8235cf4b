"""The figures of README and benchmarks/README, rendered from the results."""
