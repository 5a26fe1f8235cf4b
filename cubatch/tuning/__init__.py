"""Which batch size, and why: autotune(), predict(), the store."""
