"""Which size to visit next, and when to stop."""
