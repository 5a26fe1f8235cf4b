"""What pytest is not to import here."""

collect_ignore = ["snippet_project.py"]  # a user's own file, which needs Lightning
