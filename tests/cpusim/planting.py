"""Kernels for planted bugs, when a bug must be seen, and what its reports are like."""

from __future__ import annotations

import hashlib
import itertools
import os
import re
from pathlib import Path

import attrs
import pytest

from cubatch.kernels.variant import Kernel
from tests.cpusim import building
from tests.cpusim.simulator import SCHEDULES, Simulator
from tests.thorough import THOROUGH

PLANTED = Path(__file__).parent / "planted"
MODES = tuple(itertools.product(SCHEDULES, ("late", "early")))
WRONG = "wrong result"


def small_kernel(family, entry, source, threads, dynamic_shared_bytes=0):
    """Give a kernel without variants."""
    return Kernel(
        name=entry, family=family, source=str(source), operation=entry, entry=entry, dtype="float32", threads=threads,
        defines=(), dynamic_shared_bytes=dynamic_shared_bytes,
    )  # fmt: skip


def planted(entry, source, threads, dynamic_shared_bytes=0):
    return small_kernel("planted", entry, PLANTED / source, threads, dynamic_shared_bytes)


SGEMM = planted("sgemm", "sgemm.cu", 256)
CENTER_ROWS = planted("center_rows", "rows.cu", 128)

LATE = tuple(mode for mode in MODES if mode[1] == "late")
EARLY = tuple(mode for mode in MODES if mode[1] == "early")
ANY_FIRST = tuple(mode for mode in EARLY if mode[0] in {"shuffled", "warps"})


def not_in(*schedules):
    return tuple(mode for mode in MODES if mode[0] not in schedules)


def simulators(arch, mode, draws):
    """Give simulators of a mode, so many with draws of their own if its schedule is drawn, else one."""
    schedule, copies = mode
    for seed in range(1, 1 + (draws if schedule in {"shuffled", "warps"} else 1)):
        yield Simulator(arch, schedule=schedule, copies=copies, seed=seed)


def missed(bug, outcome):
    """Give the modes of a bug in which a run of its kernel comes out right, or otherwise than it must."""
    found = {mode: outcome(mode) for mode in bug.modes}
    return {mode: text for mode, text in found.items() if text == "right" or bug.pattern not in text}


def seen_always(names, *always):
    """Give the names of bugs as cases, of which these run always and the others where all is tried."""
    assert set(always) <= set(names)
    return [pytest.param(name, marks=() if name in always else pytest.mark.thorough) for name in names]


def running(cases):
    """Give the names of the cases that run this time."""
    return [case.values[0] for case in cases if THOROUGH or not case.marks]


def twin(entry, threads, dynamic_shared_bytes=0):
    return small_kernel("twins", entry, Path(__file__).parent / "twins.cu", threads, dynamic_shared_bytes)


def flat(name, texts):
    """
    Give a folder of the cache that holds these sources, so that what is compiled of them is compiled once.

    It is named after what it holds, too: other checkouts may write theirs at the same time.
    """
    digest = hashlib.sha256(repr(sorted(texts.items())).encode()).hexdigest()[:12]
    folder = building.cache_directory() / "mutants" / f"{re.sub('[^a-z]+', '-', name)}-{digest}"
    folder.mkdir(parents=True, exist_ok=True)
    for file, text in texts.items():
        if not (folder / file).exists():
            part = folder / f"{file}.{os.getpid()}"
            part.write_text(text)
            part.rename(folder / file)
    return folder


IN_PLACE = [
    pytest.mark.skipif(bool(building.reason_to_skip()), reason=building.reason_to_skip()),
    pytest.mark.skipif(os.environ.get("CUBATCH_CPUSIM", "plain") != "plain", reason="seen without a sanitizer"),
]
"""Marks of tests that plant bugs in the kernels themselves."""


def mutant(name, kernel, paths, changes):
    """
    Give a kernel whose sources are copies with changes, in one folder.

    Args:
        name: Of the folder.
        kernel: As it is; its source is among the paths.
        paths: The sources that are copied.
        changes: (file, old, new) of lines, each of which is there once.
    """
    texts = {path.name: path.read_text() for path in paths}
    for file, old, new in changes:
        assert texts[file].count(old) == 1, f"{old!r} in {file}"
        texts[file] = texts[file].replace(old, new)
    included = re.compile(rf'"[\w/]+/({"|".join(map(re.escape, texts))})"')
    folder = flat(name, {file: included.sub(r'"\1"', text) for file, text in texts.items()})
    return attrs.evolve(kernel, source=str(folder / Path(kernel.source).name))
