"""Measuring the seconds of a step: clocks, trials, budget, runners, and the worker process."""
