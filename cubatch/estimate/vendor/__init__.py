"""The vendor's libraries: an analytic model, fitted to published measurements."""
