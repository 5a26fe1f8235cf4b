"""Tuning on the devices of a Dask cluster: one measurement per distinct device."""
