"""Markdown tables, and the line above a table that names its device, date and commit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table: the first column left-aligned, the others right-aligned."""
    lines = [f"| {' | '.join(columns)} |", "| --- |" + " ---: |" * (len(columns) - 1)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def page(caption: str, *parts: str) -> str:
    """Return a caption as a sentence, and below it tables or paragraphs."""
    return "\n\n".join([f"{caption}.", *parts])


def origin(result: Mapping[str, Any]) -> str:
    """Return the device, its threads, the date and the commit of a result, as far as it has them."""
    device = result.get("device")
    facts = device if isinstance(device, Mapping) else {"name": device, "threads": result.get("threads")}
    parts = [str(facts["name"])] if facts["name"] else []
    parts += [f"{facts['threads']} threads"] if facts.get("threads") else []
    return ", ".join([*parts, result["date"], f"commit {result['commit']}"])


def percent(share: float | None, digits: int = 1, sign: str = "") -> str:
    """Return a share in percent; an empty string for None."""
    return "" if share is None else f"{100 * share:{sign}.{digits}f} %"
