"""Fitting and scoring the model of time with published measurements."""
