"""The tables of each command."""
