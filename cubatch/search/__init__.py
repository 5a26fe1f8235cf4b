"""Choose the batch size to measure next, and when to stop."""
