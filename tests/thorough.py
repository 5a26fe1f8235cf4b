"""How much is tried: a little by default and for every change, all under `CUBATCH_THOROUGH=1` or `.ci/run --all`."""

from __future__ import annotations

import os

THOROUGH = os.environ.get("CUBATCH_THOROUGH", "") not in {"", "0"}
FEW = 30


def examples(many: int) -> int:
    """
    Give how many examples of a property are drawn, of the many that are drawn when all is tried.

    Example:
        >>> examples(20), examples(200) in {30, 200}
        (20, True)
    """
    return many if THOROUGH else min(many, FEW)
