"""How a result is shown: grids, tables, plots, pages.  Knows dictionaries and numbers only."""
