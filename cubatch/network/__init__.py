"""Layers, networks, spec files, the named networks, weights and importers."""
