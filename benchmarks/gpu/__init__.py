"""What the GPU pass runs: plan, stages, items, cases, probes."""
