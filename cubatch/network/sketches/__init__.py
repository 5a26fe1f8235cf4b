"""Definitions of the named networks, by family; `table` lists them."""
