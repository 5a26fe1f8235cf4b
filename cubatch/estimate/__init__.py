"""Predicted time of a step, without measuring."""
