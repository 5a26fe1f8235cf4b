"""A package, so that no other `tests` on the path comes before it: the GPU pass takes its twins from here."""
