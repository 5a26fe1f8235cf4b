"""Plans for a server that batches requests, from a measured latency curve."""
