"""Records that show themselves: printed, in IPython, and in a notebook."""

from __future__ import annotations

from typing import Any


class Shown:
    """
    Base of records that show themselves as tables in a terminal and as HTML in a notebook.

    The views of the classes are in `cubatch.report.views`.
    """

    __slots__ = ()

    def table(self) -> str:
        """Return the record as tables for a terminal."""
        from cubatch.report import views

        return views.text(self)

    def __str__(self) -> str:
        """Return the record as tables for a terminal, as `table` does."""
        return self.table()

    def _repr_pretty_(self, printer: Any, _: bool) -> None:  # noqa: FBT001 - IPython's call
        """Write the tables to IPython's printer."""
        printer.text(Shown.table(self))

    def _repr_html_(self) -> str:
        """Return HTML for a notebook: the page of a tuning result or forecast, the tables of other records."""
        from cubatch.report import views

        return views.html(self)
