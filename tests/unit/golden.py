"""
Whole pages as people see them, kept in tests/data/golden: one file for each page that is rendered.

What a page says of a case is tested by its facts, elsewhere; these files show the page, and every change of it in a
diff.  After a change that is meant, write them anew and look at what `git diff` says:

    CUBATCH_RENEW_GOLDEN=1 python -m pytest tests/unit/report/test_golden.py
"""

from __future__ import annotations

import difflib
import os
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "data" / "golden"
RENEW = "CUBATCH_RENEW_GOLDEN"


def check(name: str, text: str, *, folder: Path = FOLDER) -> None:
    """
    Compare a page with the file of its name, or write that file where the environment asks for it.

    Args:
        name: The file.
        text: The page.
        folder: Where the files are.
    """
    path, shown = folder / name, text.rstrip("\n") + "\n"
    if os.environ.get(RENEW):
        path.write_text(shown, encoding="utf-8")
    kept = path.read_text(encoding="utf-8") if path.exists() else ""
    if shown != kept:
        lines = difflib.unified_diff(
            kept.splitlines(), shown.splitlines(), f"{name}, kept", f"{name}, now", lineterm=""
        )
        pytest.fail("\n".join([*lines, f"If that is meant: {RENEW}=1, and look at git diff."]), pytrace=False)
