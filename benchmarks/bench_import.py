"""
Time `import cubatch` and `cubatch --help` in a fresh interpreter.

    python -m benchmarks.bench_import --json benchmarks/results/<device>/import.json
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.provenance import provenance, write

COMMANDS = {
    "python -c pass": [sys.executable, "-c", "pass"],
    "import cubatch": [sys.executable, "-c", "import cubatch"],
    "cubatch --help": [sys.executable, "-m", "cubatch", "--help"],
}
GOALS = {"import cubatch": 0.1, "cubatch --help": 0.4}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    seconds: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(arguments.rounds):
        for name, command in COMMANDS.items():
            begun = time.perf_counter()
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            seconds[name].append(time.perf_counter() - begun)
    base = statistics.median(seconds["python -c pass"])
    rows = [
        {
            "what": name,
            "seconds": statistics.median(taken),
            "above_python": statistics.median(taken) - base,
            "goal": GOALS.get(name),
        }
        for name, taken in seconds.items()
    ]
    for row in rows:
        print(f"{row['what']:16} {row['seconds']:.3f} s, {row['above_python']:.3f} s above an empty Python")
    if arguments.json:
        from cubatch.engine.conditions import environment
        from cubatch.hardware import probe

        device = probe.device("cpu")
        facts = {
            "schema": 1,
            "benchmark": "import",
            **provenance(),
            "device": {"name": device.name, "threads": device.threads},
            "environment": environment(device),
            "rounds": arguments.rounds,
            "rows": rows,
            "seconds": seconds,
        }
        write(arguments.json, facts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
