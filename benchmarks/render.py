"""
Write the figures of Markdown pages from the results in benchmarks/results; no figure in a table is typed by hand.

    python -m benchmarks.render            # rewrites all pages and figures
    python -m benchmarks.render --check    # exits 1 if a page or figure is not what the results say

A section begins with `<!-- results: KIND PATH... -->` and ends with `<!-- end -->`.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import shutil
import sys
import tempfile
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.pages import (
    batch_by_extent,
    cpu,
    gpu,
    kernel_means,
    memory_tools,
    modules,
    predictor,
    repeatability,
    rooms,
    search,
    serving,
    step_graphs,
    training_loops,
    trust,
)
from cubatch import TuningResult

ROOT = Path(__file__).parent.parent
PAGES = ("*.md", "cubatch/*.md", "kernels/*.md", "docs/**/*.md", "benchmarks/**/*.md")
FIGURES = {"docs/images/resnet18-training-h100.svg": "benchmarks/results/h100-sxm/tune-resnet18-training-6000d47.json"}
_SECTION = re.compile(r"(<!-- results: (\S+) (\S+(?: \S+)*) -->\n).*?(<!-- end -->)", re.DOTALL)

KINDS: dict[str, Callable[..., str]] = {
    "trust": trust.trust,
    "tuning": cpu.tuning,
    "engine-cpu": cpu.engine_cpu,
    "engine-cpu-means": cpu.engine_cpu_means,
    "training": cpu.training,
    "mixed-precision": cpu.mixed_precision,
    "imports": cpu.imports,
    "search": search.search,
    "search-best": search.search_best,
    "search-classes": search.search_classes,
    "ablation": search.ablation,
    "hosts": search.hosts,
    "faults": search.faults,
    "repeatability": repeatability.repeatability,
    "training-loops": training_loops.training_loops,
    "predictor": predictor.scores,
    "predictor-goals": predictor.goals,
    "predictor-absent": predictor.absent,
    "predictor-clocks": predictor.clocks,
    "predictor-launches": predictor.launches,
    "predict-speed": predictor.speed,
    "memory-errors": modules.memory_errors,
    "engine-memory": modules.engine_memory,
    "module-memory": modules.memory,
    "published-memory": modules.published_memory,
    "memory-tools": memory_tools.memory_tools,
    "module-answers": modules.answers,
    "page-faults": modules.page_faults,
    "step-graphs": step_graphs.step_graphs,
    "rooms": rooms.rooms,
    "extents": batch_by_extent.extents,
    "serving": serving.serving,
    "gpu-means": kernel_means.means,
    **gpu.KINDS,
}


def pages(root: Path) -> list[Path]:
    """Return the Markdown pages that have a section."""
    paths = {path for pattern in PAGES for path in root.glob(pattern)}
    return sorted(path for path in paths if _SECTION.search(path.read_text(encoding="utf-8")))


def rendered(page: str, root: Path) -> str:
    """Return the text of a page with each section made from its results."""

    def section(match: re.Match[str]) -> str:
        begin, kind, paths, end = match.groups()
        return f"{begin}\n{KINDS[kind](*(_read(root / path) for path in paths.split()))}\n\n{end}"

    return _SECTION.sub(section, page)


@functools.lru_cache(maxsize=8)  # a page has up to ten tables of one pass of several megabytes
def _read(path: Path) -> dict[str, Any]:
    text = path.read_text(encoding="utf-8")
    return tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw the curve of a tuning result; `layers`, which large results leave out, are not in the picture."""
    measurements = [{"layers": [], **measurement} for measurement in result["measurements"]]
    TuningResult.from_json(json.dumps({**result, "measurements": measurements})).plot(path)


def words(svg: Path) -> set[str]:
    """Return the texts of a picture: Matplotlib writes each as a comment before its outlines."""
    return set(re.findall(r"<!-- (.*?) -->", svg.read_text(encoding="utf-8"))) if svg.exists() else set()


def stale_figures(root: Path, *, mend: bool) -> list[str]:
    """Return the figures whose texts are not those of their results; replace them with `mend`."""
    stale = []
    with tempfile.TemporaryDirectory() as folder:
        for name, source in FIGURES.items():
            fresh = Path(folder) / Path(name).name
            draw(_read(root / source), fresh)
            if words(fresh) != words(root / name):
                stale.append(name)
                if mend:
                    shutil.copyfile(fresh, root / name)
    return stale


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    stale = []
    for path in pages(ROOT):
        page = path.read_text(encoding="utf-8")
        new = rendered(page, ROOT)
        if new != page:
            stale.append(str(path.relative_to(ROOT)))
            if not arguments.check:
                path.write_text(new, encoding="utf-8")
    stale += stale_figures(ROOT, mend=not arguments.check)
    if arguments.check and stale:
        print(f"not what the results say: {', '.join(stale)}; run python -m benchmarks.render", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
