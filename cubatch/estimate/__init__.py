"""How long a step takes, without measuring."""
