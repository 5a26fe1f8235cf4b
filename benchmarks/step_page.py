"""
Where the time of a whole step goes: by kind of operation, with its floor by bytes and by FLOP.

    python -m benchmarks.step_page "resnet50, training, batch 256, float16" --device h200-sxm [--results FILE...]
    python -m benchmarks.step_page --list

Operations and how often they occur come from the schedule.  Their times come from the results of `benchmarks.gpu_pass`
on that GPU where there are any, else from the predictor; the page counts both.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu.steps import STEPS, step_named
from benchmarks.pages.gpu_step import step_page
from cubatch.errors import CubatchError
from cubatch.hardware import catalogue


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", nargs="?", help="its name, as --list prints it")
    parser.add_argument("--device", default="h200-sxm", help="a GPU of the catalogue")
    parser.add_argument("--results", nargs="+", type=Path, default=[], metavar="FILE", help="later files win")
    parser.add_argument("--list", action="store_true", help="print the names of the steps")
    given = parser.parse_args(arguments)
    if given.list:
        print("\n".join(step.name for step in STEPS))
        return 0
    if given.step is None:
        parser.error("name a step; --list prints the names")
    try:
        step, device = step_named(given.step), catalogue.find(given.device)
        results = [json.loads(path.read_text(encoding="utf-8")) for path in given.results]
        print(step_page(step, device, results))
    except (CubatchError, OSError, ValueError) as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
