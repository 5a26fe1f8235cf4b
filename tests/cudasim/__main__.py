"""
Run Python with real CuPy on simulated GPUs.

python -m tests.cudasim [OPTIONS] -m cubatch tune mnist-cnn --device cuda

Without a command for Python it runs the tests of the simulation, and of cubatch in it.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import NoReturn

from tests.cudasim import building, environment
from tests.cudasim.simulation import ASKED


def main() -> NoReturn:
    """Set the simulation up, then run Python with the arguments that are left."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.cudasim", description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--devices", default="h100", help="titan-x, v100, a100, h100, separated by commas")
    parser.add_argument("--late", action="store_true", help="work in streams waits until somebody waits for it")
    parser.add_argument("--faults", default="", help="planted faults, separated by commas: see src/faults.cpp")
    parser.add_argument("--toolkit", default="cuda12", choices=building.TOOLKITS, help="releases of CuPy and CUDA")
    own, command = parser.parse_known_args()
    if reason := building.reason_to_skip():
        sys.exit(reason)
    home = building.built(own.toolkit)
    if command:
        found = environment.of(home, devices=own.devices, late=own.late, faults=own.faults)
    else:
        command = ["-m", "pytest", "-n", "auto", "--dist", "worksteal", str(environment.HERE)]
        found = {**os.environ, ASKED: "1"}
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, *command], found)  # noqa: S606 - whoever ends this process ends that


if __name__ == "__main__":
    main()
