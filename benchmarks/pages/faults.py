"""The campaign of faults as Markdown: a row a kind of fault, and what was lost."""

from __future__ import annotations

from typing import Any

from benchmarks.pages.tables import table

_MUST_BE_NOUGHT = ("lost", "twice", "no_answer", "wrong", "orphans", "late")


def faults(result: dict[str, Any]) -> str:
    """What runs met, and what did not hold."""
    rows = [
        [
            row["kind"] + (" *" if row["kind"] in result["virtual"] else ""),
            *(f"{row[name]:,}" for name in ("runs", "sessions", "faults", "timings")),
            *(str(row[name]) for name in _MUST_BE_NOUGHT),
        ]
        for row in result["summary"]
    ]
    rows.append(
        [
            "**all**",
            *(
                f"**{sum(row[name] for row in result['summary']):,}**"
                for name in ("runs", "sessions", "faults", "timings")
            ),
            *(f"**{sum(row[name] for row in result['summary'])}**" for name in _MUST_BE_NOUGHT),
        ]
    )
    said = sum(row["said"] for row in result["summary"])
    caption = (
        f"{result['date']}, commit {result['commit']}, seed {result['seed']}. Kinds with * are devices in virtual time "
        f"with a real store, the others real processes. {said} runs, whose disk was still full or failing in the end, "
        "said that not all was kept."
    )
    head = [
        "fault", "runs", "sessions", "faults met", "readings kept", "lost", "taken twice", "no answer", "wrong answer",
        "orphans", "beyond a deadline",
    ]  # fmt: skip
    return f"{caption}\n\n{table(head, rows)}"
