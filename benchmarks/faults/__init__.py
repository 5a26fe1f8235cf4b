"""Devices, processes and disks that misbehave, and what must hold all the same."""
