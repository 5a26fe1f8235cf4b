"""How results are shown: tables, figures and HTML pages, from typed records."""
