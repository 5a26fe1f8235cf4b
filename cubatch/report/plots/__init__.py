"""The figures of single commands."""
