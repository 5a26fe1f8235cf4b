"""What is run: layers, networks, spec files, the named models."""
