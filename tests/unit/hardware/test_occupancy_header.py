"""Occupancy against NVIDIA's cuda_occupancy.h itself, compiled from the wheel of the CUDA runtime's headers."""

from __future__ import annotations

import importlib.metadata
import os
import random
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest

from cubatch.hardware import architectures, waves

SOURCE = Path(__file__).with_name("occupancy_header.cpp")
WHEEL = "nvidia-cuda-runtime"  # of CUDA 13.5: 12.9 does not know 11.0, and 13.0 had more barriers on 10.3
KNOWN = architectures.known()
DRAWS = 400  # for each of the architectures
NO_LIMIT = 2**31 - 1
FACTORS = {1: "warps", 2: "registers", 4: "shared_memory", 8: "blocks", 16: "barriers"}


@attrs.frozen
class Launch:
    """What is asked of both; `carveout` in percent of the largest, -1 without a wish."""

    arch: int
    threads: int
    registers: int
    static: int
    dynamic: int
    carveout: int
    barriers: int


def draw(arch: int, limits: list[int], source: random.Random) -> Launch:
    """Draw a launch on one architecture: sizes of all magnitudes, and those next to where an answer changes."""
    near = source.choice([source.randrange(0, 49153), 128 * source.randrange(1, 385)])
    static = max(0, min(49152, near + source.choice([-1, 0, 0, 1]))) if source.random() < 0.7 else 0
    most = source.choice(limits)
    dynamic = source.choice([0, source.randrange(0, most + 2049), max(0, most + source.choice([-1, 0, 1]) - static)])
    return Launch(
        arch=arch,
        threads=source.choice([source.randint(1, 1024), 32 * source.randint(1, 32)]),
        registers=source.choice([source.randint(0, 255), 8 * source.randint(1, 31) + source.choice([0, 1])]),
        static=static,
        dynamic=dynamic,
        carveout=source.choice([-1, -1, 0, 50, 100, source.randint(0, 100)]),
        barriers=source.choice([0, 1, 1, 1, source.randint(2, 16)]),
    )


def include_folder() -> Path | None:
    """Find the folder of the header among the files of an installed wheel."""
    try:
        files = importlib.metadata.files(WHEEL) or ()
    except importlib.metadata.PackageNotFoundError:
        return None
    return next((Path(str(file.locate())).parent for file in files if file.name == "cuda_occupancy.h"), None)


@pytest.fixture(scope="module")
def header(tmp_path_factory) -> Path:
    """Compile the program; in CI a missing header or compiler is a failure."""
    folder, compiler = include_folder(), shutil.which("g++")
    if "CI" not in os.environ and not (folder and compiler):
        pytest.skip(f"needs g++ and the wheel {WHEEL}")
    program = tmp_path_factory.mktemp("occupancy") / "occupancy"
    assert folder, f"cuda_occupancy.h is not there: pip install {WHEEL}"
    subprocess.run(["g++", "-O1", "-w", f"-I{folder}", str(SOURCE), "-o", str(program)], check=True, timeout=120)
    return program


def ask(program: Path, launches: list[Launch]) -> tuple[list[tuple[int, int]], Iterator[list[int]]]:
    """Give the architectures that the program knows, and what the header says of each launch."""
    lines = "\n".join(" ".join(map(str, attrs.astuple(launch))) for launch in launches)
    done = subprocess.run([str(program)], input=lines, capture_output=True, text=True, check=True, timeout=120)
    first, *answers = done.stdout.splitlines()
    archs = [(int(major), int(minor)) for major, minor in (text.split(".") for text in first.split())]
    return archs, ([int(word) for word in line.split()] for line in answers)


def test_occupancy_is_what_nvidias_header_says(header):
    """
    Blocks, limiters and every single limit agree, launch by launch, on every architecture that we know.

    The program has limits of its own for each architecture, so the table of `hardware` is compared as well.
    """
    archs, _ = ask(header, [])
    assert set(archs) == set(KNOWN)
    source = random.Random(13)
    launches = [
        draw(
            number,
            [
                49152,
                KNOWN[arch].shared_bytes_per_block,
                KNOWN[arch].shared_bytes_per_sm,
            ],
            source,
        )
        for number, arch in enumerate(archs)
        for _ in range(DRAWS)
    ]
    assert len(launches) >= 5000
    seen = set()
    _, answers = ask(header, launches)
    for launch, (blocks, factors, *limits) in zip(launches, answers, strict=True):
        most = KNOWN[archs[launch.arch]].shared_bytes_per_sm
        found = waves.occupancy(
            compute_capability=archs[launch.arch],
            threads_per_block=launch.threads,
            registers_per_thread=launch.registers,
            shared_bytes_per_block=launch.static + launch.dynamic,
            shared_carveout_bytes=None if launch.carveout < 0 else launch.carveout * most // 100,
            barriers_per_block=launch.barriers,
        )
        expected = {name: limit for name, limit in zip(FACTORS.values(), limits, strict=True) if limit != NO_LIMIT}
        # Where barriers alone decide, the header goes on naming what would have decided without them.
        named = {name for factor, name in FACTORS.items() if factors & factor}
        limiters = {name for name in named if expected[name] == blocks}
        seen |= {(name, blocks == 0) for name in limiters}
        assert (found.blocks_per_sm, set(found.limiters)) == (blocks, limiters), (archs[launch.arch], launch)
        assert found.limits == expected, (archs[launch.arch], launch)
    # The draw reaches every limiter, and launches that cannot be for want of registers and of shared memory.
    assert seen >= {(name, False) for name in FACTORS.values()} | {("registers", True), ("shared_memory", True)}
