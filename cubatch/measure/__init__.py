"""How long it takes: clocks, visits, budget, runners and the worker that may die."""
