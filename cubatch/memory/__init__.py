"""The memory of a step: lifetimes and offsets of its buffers, its peak bytes, and the batch sizes that fit."""
