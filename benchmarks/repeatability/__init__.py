"""Repeated runs of the tuner, and a paired judge of their recommendations."""
