"""What the sanitizers say, with places in the source."""

from __future__ import annotations

import os
import re
import subprocess
from functools import cache
from pathlib import Path

from tests.cpusim import building

# A frame whose library was loaded after the first report: the sanitizers' symbolizer does not know it.
_BARE_FRAME = re.compile(r"^(\s*#\d+ ).*\((?:\S*/)?(\S+\.so)\+(0x[0-9a-f]+)\)\s*$", re.MULTILINE)
_KNOWN_FRAME = re.compile(r"\S+:\d+")
_RACE = re.compile(r"^=+\n(WARNING: .*?)^=+\n", re.MULTILINE | re.DOTALL)
_MOST_SHOWN = 3

_seen = [0]  # length of ThreadSanitizer's log at the last look


def new_races() -> str:
    """Give what ThreadSanitizer wrote to its log since the last look, the first few races; empty if nothing."""
    path = Path(f"{os.environ['CUBATCH_CPUSIM_REPORTS']}.{os.getpid()}")
    if not path.is_file():
        return ""
    text = path.read_text(errors="replace")
    new, _seen[0] = text[_seen[0] :], len(text)
    races = _RACE.findall(new)
    more = f"({len(races) - _MOST_SHOWN} more)\n" if len(races) > _MOST_SHOWN else ""
    return with_places("\n".join(races[:_MOST_SHOWN]) + more if races else new)


def with_places(report: str) -> str:
    """Put functions and lines into the frames of a report that lack them."""

    def place(frame: re.Match[str]) -> str:
        known = _KNOWN_FRAME.search(frame[0].partition("(")[0])
        return frame[0] if known else frame[1] + _place(frame[2], frame[3])

    return _BARE_FRAME.sub(place, report)


@cache
def _place(library: str, address: str) -> str:
    command = ["addr2line", "-Cfipe", str(building.cache_directory() / library), address]
    found = subprocess.run(command, capture_output=True, text=True, check=False, env=building.plain_environment())
    return found.stdout.strip() or f"({library}+{address})"
