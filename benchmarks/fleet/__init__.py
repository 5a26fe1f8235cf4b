"""Fleets that are not here: what Dask's scheduler costs, measured, and the caller's own code beside it."""
