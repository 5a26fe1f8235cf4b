"""
Which expensive stages of .ci/run must run: those whose sources or compilers differ from those they passed on last.

    python -m tests.gate is-open STAGE        # status 3: these very sources have passed it; else it must run
    python -m tests.gate keys                 # what `.ci/passed` would hold for the sources as they are
    python -m tests.gate sample               # compile some twentieth of the kernels anew, others with each commit
    python -m tests.gate commit               # by which a sample is drawn: CUBATCH_SAMPLE draws of the kernels' tests

It fails safe: a stage is held open by any file that is not listed here as harmless to it, hence by every new one, by
a record that is missing, and where there is no git to ask for the files.  `.ci/run --record` renews the record.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

ROOT = Path(__file__).parents[1]
PASSED = ".ci/passed"
SHARE = 20
CLOSED = 3  # not 1, with which Python ends where anything fails
_HEADER = "# Sources and compilers that the expensive stages have passed on; renewed by `.ci/run --record`.\n"

_PAGES = (  # prose, and what only people and hosted services read
    "*.md", "docs/*", "LICENSE", ".gitignore", ".github/*", ".pre-commit-config.yaml", ".clang-format", "noxfile.py",
    "tests/language/*",
)  # fmt: skip
_WHEREVER = (  # prose, the record, rooms above the engine, how results are shown, other tests
    *_PAGES, PASSED, "benchmarks/results/*", "benchmarks/pages/*", "benchmarks/predictor/*",
    "benchmarks/search/*", "benchmarks/loops/*", "benchmarks/bench_loops.py", "benchmarks/render.py", "tests/unit/*",
    "tests/parity/*", "tests/gpu/*",
    "tests/cudasim/*", "tests/data/*", "tests/engine/test_*.py", "tests/test_*.py", "tests/fakes.py",
    "cubatch/estimate/*", "cubatch/frameworks/*", "cubatch/integrations/*", "cubatch/report/*", "cubatch/search/*",
    "cubatch/tuning/*", "cubatch/worker.py", "cubatch/__main__.py",
)  # fmt: skip
_MEASURING = ("benchmarks/*", "cubatch/bench/*")
_COMPILED = (  # what is neither compiled for GPUs nor says how
    *_WHEREVER, "pyproject.toml", "cubatch/engine/*", "cubatch/measure/*", "cubatch/memory/*", "tests/kernels/*",
    "tests/cpusim/*", "tests/engine/*", "tests/checks.py", "tests/thorough.py", "tests/conftest.py",
    "tests/reference.py", "cubatch/cli/*",
    *(f"!cubatch/cli/{name}.py" for name in ("kernels", "console", "options", "__init__")),
)  # fmt: skip
HARMLESS: Mapping[str, tuple[str, ...]] = {
    "kernels": (*_COMPILED, *_MEASURING, "!benchmarks/kernel_budget/*"),
    "gpu_pass": _COMPILED,
    "sanitizers": (
        *_WHEREVER, *_MEASURING, "cubatch/cli/*", "!cubatch/bench/*", "!benchmarks/kernel_budget/*",
        *(f"!cubatch/tuning/{name}.py" for name in ("__init__", "machine_lock", "notes")),
        *(f"!cubatch/frameworks/{name}.py" for name in ("__init__", "heap")), "!tests/gpu/here.py",
        *(f"cubatch/measure/{name}.py" for name in ("budget", "goal", "records", "remote", "stopping", "stopwatch")),
    ),
    "simulated": (  # all that tuning on a GPU goes through
        *_PAGES, PASSED, "benchmarks/results/*", "benchmarks/pages/*", "benchmarks/predictor/*",
        "benchmarks/search/*", "benchmarks/loops/*", "benchmarks/bench_loops.py", "benchmarks/render.py",
        "tests/unit/*", "tests/parity/*", "tests/data/*", "tests/engine/test_*.py", "tests/test_*.py",
        "cubatch/report/*", "cubatch/integrations/*",
    ),
}  # fmt: skip
"""Files whose change cannot alter what a stage finds, as patterns in which * matches / too; ! before one: but these."""

_WHEELS = ("nvidia-cuda-nvrtc-cu12", "nvidia-cuda-nvcc-cu12", "nvidia-cuda-nvdisasm")


def compilers(stage: str) -> tuple[str, ...]:
    """Give the versions of what a stage compiles with."""
    if stage == "sanitizers":
        if not shutil.which("g++"):
            return ("no g++",)
        return (subprocess.run(["g++", "--version"], capture_output=True, text=True, check=True).stdout,)
    found = {one.name.lower(): one.version for one in importlib.metadata.distributions() if one.name in _WHEELS}
    return tuple(f"{name} {found.get(name)}" for name in _WHEELS)


def files(root: Path) -> list[str]:
    """List all files that are git's or could become so, in order."""
    command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return sorted({name for name in listed.split("\0") if name and (root / name).is_file()})


def is_harmless(stage: str, name: str) -> bool:
    """Say whether a file is listed as one that cannot alter what a stage finds."""
    found = [pattern for pattern in HARMLESS[stage] if fnmatchcase(name, pattern.removeprefix("!"))]
    return bool(found) and not any(pattern.startswith("!") for pattern in found)


def key(stage: str, root: Path, versions: Sequence[str]) -> str:
    """Sum up what a stage's outcome depends on."""
    state = hashlib.sha256(repr((stage, *versions)).encode())
    for name in files(root):
        if not is_harmless(stage, name):
            state.update(f"{name}\0{hashlib.sha256((root / name).read_bytes()).hexdigest()}\n".encode())
    return state.hexdigest()


def is_open(stage: str, root: Path = ROOT, versions: Sequence[str] | None = None) -> bool:
    """Say whether a stage must run."""
    try:
        passed = (root / PASSED).read_text(encoding="utf-8").splitlines()
        return f"{stage} {key(stage, root, compilers(stage) if versions is None else versions)}" not in passed
    except (OSError, subprocess.CalledProcessError):
        return True


def record(root: Path = ROOT) -> str:
    """Give the text of the record for the sources as they are."""
    return _HEADER + "".join(f"{stage} {key(stage, root, compilers(stage))}\n" for stage in HARMLESS)


def commit(root: Path = ROOT) -> str:
    """Give the commit that is judged; what is drawn by it differs from commit to commit."""
    command = ["git", "-C", str(root), "rev-parse", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def is_drawn(name: str, commit: str) -> bool:
    """
    Draw one name in twenty by the commit.

    Example:
        >>> sum(is_drawn(f"kernel {number}", "0ddba11") for number in range(2000)) in range(70, 130)
        True
    """
    return int.from_bytes(hashlib.sha256(f"{commit} {name}".encode()).digest()[:4]) % SHARE == 0


def sample() -> int:
    """Compile the kernels that are drawn for every architecture, without what is cached; 1 if any has a problem."""
    from benchmarks.kernel_budget import budget as budgets
    from benchmarks.kernel_budget.check import check
    from cubatch.kernels import variant

    budget = budgets.read(variant.kernels_path() / "resources.toml")
    head = commit()
    chosen = [kernel for kernel in variant.kernels() if is_drawn(kernel.name, head)]
    with tempfile.TemporaryDirectory() as folder:
        checked = check(chosen, may_spill=budget.recorded.may_spill, folder=Path(folder))
    wrong = [row for row in budgets.excesses(checked, budget) if row.problems]
    for row in wrong:
        print(f"{row.kernel.name} on {row.arch}: {'; '.join(row.problems)}")  # noqa: T201 - a command's output
    print(f"{len(chosen)} kernels compiled anew, {len(wrong)} problems")  # noqa: T201
    return 1 if wrong else 0


def main(arguments: Sequence[str]) -> int:
    """Do what the command line says, and give the exit status."""
    match arguments:
        case ["is-open", stage] if stage in HARMLESS:
            return 0 if is_open(stage) else CLOSED
        case ["keys"]:
            sys.stdout.write(record())
            return 0
        case ["commit"]:
            print(commit() or "no commit")  # noqa: T201 - a command's output
            return 0
        case ["sample"]:
            return sample()
    print(__doc__, file=sys.stderr)  # noqa: T201 - a command's usage
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
