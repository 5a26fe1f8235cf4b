"""How long a step takes: clocks, trials, budget, runners, and the worker process."""
