"""Devices: facts, catalog, probing of this machine, memory limits and the arithmetic of SMs."""
