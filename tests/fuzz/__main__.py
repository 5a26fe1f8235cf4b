"""
Fuzz what reads what others wrote: `python -m tests.fuzz [--seconds 60] [TARGET ...]`, ten minutes each with 600.

Each target runs in a process of its own, on inputs that hypothesis draws by editing those of `tests/data/corpus`.  A
finding is any exception but `CubatchError`, more than 5 s of the CPU for one input, or more than 1 GiB of memory: it is
made small, printed, and kept in `fuzz-findings`; mended, it goes into the corpus.  Steps of networks and compiling take
as long as they say, and are no targets.
"""

from __future__ import annotations

import argparse
import faulthandler
import hashlib
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

import hypothesis
from hypothesis import HealthCheck, Phase, given, settings

from tests.fuzz.targets import TARGETS, run

MOST_SECONDS, MOST_BYTES = 5.0, 2**30
HANG_SECONDS = 300.0  # of any clock: then the process says where it is, and ends
BATCH = 100  # inputs between two looks at the clock


class TooMuch(AssertionError):
    """An input that took more than it may."""


def tried(target, value):
    """Run a target on an input, and look at what that took."""
    faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
    begun = time.process_time()
    run(target, value)
    spent = time.process_time() - begun
    faulthandler.cancel_dump_traceback_later()
    if spent > MOST_SECONDS:
        raise TooMuch(f"{spent:.1f} s of the CPU")


def fuzz(name, seconds, seed):
    """Draw inputs for so long; give how many, and the longest that one took."""
    target, count, longest = TARGETS[name], 0, 0.0
    begun = time.monotonic()
    _drawn(target, lambda value: run(target, value), 3, seed)  # what is loaded once is not an input's
    _bound_memory()
    while time.monotonic() - begun < seconds:

        def one(value):
            nonlocal count, longest
            count += 1
            before = time.process_time()
            tried(target, value)
            longest = max(longest, time.process_time() - before)

        _drawn(target, one, BATCH, seed)
        seed += 1
    return count, longest


def _drawn(target, test, examples, seed):
    phases = (Phase.generate, Phase.shrink)
    options = {"database": None, "deadline": None, "suppress_health_check": list(HealthCheck), "phases": phases}
    chosen = settings(max_examples=examples, derandomize=False, print_blob=False, **options)
    hypothesis.seed(seed)(chosen(given(target.inputs)(_kept(target, test))))()


def _kept(target, test):
    """Keep the input of a finding: the last that hypothesis tries is the smallest."""

    def call(value):
        try:
            test(value)
        except Exception:
            text = json.dumps(value, default=repr, indent=1)
            name = next(name for name, one in TARGETS.items() if one is target)
            path = Path("fuzz-findings") / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}.json"
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
            raise

    return call


def _bound_memory():
    """Let this process have so much more than it has: what takes more is a MemoryError."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    most = pages * resource.getpagesize() + MOST_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def main():
    """Fuzz each target in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=", ".join(TARGETS))
    parser.add_argument("--seconds", type=float, default=60.0, help="of each target")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--here", action="store_true", help="in this process: one target")
    asked = parser.parse_args()
    names = asked.targets or list(TARGETS)
    if asked.here:
        (name,) = names
        count, longest = fuzz(name, asked.seconds, asked.seed)
        print(f"{name}: {count} inputs, the longest took {longest:.2f} s of the CPU")  # noqa: T201
        return 0
    options = ["--here", "--seconds", str(asked.seconds), "--seed", str(asked.seed)]
    failed = [
        name
        for name in names
        if subprocess.run([sys.executable, "-m", "tests.fuzz", *options, name], check=False).returncode
    ]
    if failed:
        print(f"findings in {', '.join(failed)}: their inputs are in fuzz-findings/")  # noqa: T201
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
