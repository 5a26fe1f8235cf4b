"""On what it runs: facts of devices, the catalogue, this machine, its room, its arithmetic."""
