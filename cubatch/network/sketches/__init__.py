"""How the named networks are drawn up, family by family; `table` lists them."""
