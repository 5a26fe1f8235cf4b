"""
Run Python with real CuPy on simulated GPUs: python -m tests.cudasim [OPTIONS] -m cubatch tune mnist-cnn --device cuda
"""

from __future__ import annotations

import argparse
import subprocess
import sys

from tests.cudasim import building, environment


def main() -> None:
    """Set the simulation up, then become Python with the arguments that are left."""
    parser = argparse.ArgumentParser(prog="python -m tests.cudasim", description=__doc__, allow_abbrev=False)
    parser.add_argument("--devices", default="h100", help="titan-x, v100, a100, h100, separated by commas")
    parser.add_argument("--late", action="store_true", help="work in streams waits until somebody waits for it")
    parser.add_argument("--faults", default="", help="planted faults, separated by commas: see src/faults.cpp")
    own, command = parser.parse_known_args()
    if reason := building.reason_to_skip():
        sys.exit(reason)
    found = environment.of(building.built(), devices=own.devices, late=own.late, faults=own.faults)
    sys.exit(subprocess.run([sys.executable, *command], env=found, check=False).returncode)


if __name__ == "__main__":
    main()
