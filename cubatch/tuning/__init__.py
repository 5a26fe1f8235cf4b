"""Tuning and prediction of the batch size: autotune(), predict(), the store of cached timings."""
