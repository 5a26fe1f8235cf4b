"""
Check every kernel for every architecture against kernels/resources.toml; no GPU is needed.

    python -m benchmarks.kernel_budget                 # compile, compare with the budget; exit status 1 on a problem
    python -m benchmarks.kernel_budget --family simt   # one family
    python -m benchmarks.kernel_budget --update        # check, then record the new figures as the budget
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.progress import Progress

from benchmarks.kernel_budget import budget as budgets
from benchmarks.kernel_budget.check import check
from cubatch.errors import CubatchError
from cubatch.kernels import survey, variant
from cubatch.kernels.survey import Row


def summary(rows: Sequence[Row], leftovers: Sequence[str], budget: budgets.Budget) -> list[str]:
    """Return a line for each problem with its architectures, and a last line of counts."""
    problems: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for problem in row.problems:
            problems.setdefault((row.kernel.name, problem), []).append(row.arch)
    lines = [f"{name}: {problem} ({', '.join(archs)})" for (name, problem), archs in problems.items()]
    lines += [f"{name}: in the budget, but no variant has this name" for name in leftovers]
    builds = {row.nvrtc for row in rows if row.nvrtc}
    compiled = sum(row.figures is not None for row in rows)
    count = (
        f"{len({row.kernel.name for row in rows})} variants, {compiled} compiled by NVRTC {', '.join(sorted(builds))}"
    )
    lines.append(f"{count}: {len(lines)} problems.")
    if builds - {budget.recorded.nvrtc}:
        lines.append(f"Figures were not compared: the budget is of NVRTC {budget.recorded.nvrtc}.")
    if less := budgets.savings(rows, budget):
        lines.append(f"{len(less)} variants take less than the budget allows, such as {less[0]}: --update lowers it.")
    return lines


def run(*, family: str | None, update: bool, root: Path | None = None, folder: Path | None = None) -> int:
    """
    Check the kernels, print problems, and update the budget if asked; return the exit status.

    Args:
        family: Only the variants of this family; None for all.
        update: Whether the budget is replaced if nothing is wrong.
        root: Folder of the sources; None: cubatch's own.
        folder: Cache of compiled kernels; None: the user's.
    """
    root = root or variant.kernels_path()
    path = root / "resources.toml"
    budget = budgets.read(path)
    known = variant.kernels()
    chosen = [kernel for kernel in known if family in {None, kernel.family}]
    if not chosen:
        print(f"No kernels of family {family!r}; known: {', '.join(sorted({each.family for each in known}))}.")
        return 2
    if update:
        budgets.require_compiler(budget)
    sources = budgets.digest(root)  # before minutes in which a file may change
    with Progress(disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("compiling kernels", total=None)
        checked = check(
            chosen, survey.ARCHS, may_spill=budget.recorded.may_spill, root=root, folder=folder,
            progress=lambda done, total, _: bar.update(task, completed=done, total=total),
        )  # fmt: skip
    leftovers = budgets.leftovers(known, budget)
    if update:
        rows, leftovers = [each.row for each in checked], []
    else:
        rows = budgets.excesses(checked, budget)
    for row in {row.kernel.source: row for row in rows if row.error is not None}.values():  # one log for each source
        print(row.error, file=sys.stderr)
    failed = bool(leftovers) or any(row.problems for row in rows)
    if update and not failed:
        budgets.write(path, budgets.budget_of(checked, budget, sources))
        budget = budgets.read(path)
        print(f"wrote {path}")
    print("\n".join(summary(rows, leftovers, budget)))
    return int(failed)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status; `arguments` None: those of the process."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, prog="benchmarks.kernel_budget"
    )
    parser.add_argument("--family", help="only the variants of this family: simt, mma, ...")
    parser.add_argument("--update", action="store_true", help="record the new figures if nothing is wrong")
    options = parser.parse_args(arguments)
    if options.update and options.family:
        parser.error("--update takes all kernels, not one family")
    try:
        return run(family=options.family, update=options.update)
    except CubatchError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
