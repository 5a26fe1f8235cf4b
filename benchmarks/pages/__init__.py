"""Tables of the Markdown pages, made from the JSON in benchmarks/results."""
