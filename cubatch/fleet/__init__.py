"""Tuning on the devices of a Dask cluster: one measurement for each kind of device, kept by whoever asked."""
