"""
Print the time of a whole step by kind of operation, with its floor by bytes and by FLOP.

    python -m benchmarks.step_page "resnet50, training, batch 256, float16" --device h200-sxm [--results FILE...]
    python -m benchmarks.step_page --list

The operations and their counts come from the schedule.  Their times come from results of `benchmarks.gpu_pass` on that
GPU: by default from the committed ones, of which the newest counts for each operation.  Times of other operations are
predicted; the page counts both.
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

RESULTS = Path(__file__).parent / "results"


def committed(slug: str, folder: Path = RESULTS) -> list[Path]:
    """Return the committed passes of a GPU with all families of kernels, the oldest first."""
    passes = []
    for path in (folder / slug).glob("*.json"):
        content = json.loads(path.read_text(encoding="utf-8"))
        if content.get("benchmark") == "gpu_pass" and not content.get("without"):
            passes.append((content["date"], path.name, path))
    return [path for *_, path in sorted(passes)]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", nargs="?", help="its name, as --list prints it")
    parser.add_argument("--device", default="h200-sxm", help="a GPU of the catalogue")
    parser.add_argument(
        "--results", nargs="*", type=Path, metavar="FILE",
        help="results to use instead of the committed ones; later files take precedence; no file: predict everything",
    )  # fmt: skip
    parser.add_argument("--list", action="store_true", help="print the names of the steps")
    given = parser.parse_args(arguments)
    if given.list:
        print("\n".join(step.name for step in STEPS))
        return 0
    if given.step is None:
        parser.error("name a step; --list prints the names")
    try:
        step, device = step_named(given.step), catalogue.find(given.device)
        paths = committed(device.slug) if given.results is None else given.results
        print(step_page(step, device, [json.loads(path.read_text(encoding="utf-8")) for path in paths]))
    except (CubatchError, OSError, ValueError) as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
