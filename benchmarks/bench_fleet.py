"""
Ask fleets of up to 10 000 devices that are not here, and see what breaks first.

    python -m benchmarks.bench_fleet --json benchmarks/results/amd-epyc-2-threads/fleet.json

What Dask's scheduler and client take for each call is measured here, on clusters of 1 to 64 processes; straight lines
through that say what larger ones cost.  Then `autotune_fleet`, as it is and with a real store, asks clusters in
virtual time whose workers say what real code says on GPUs of the catalogue in virtual time.  Some stay as they are,
in others workers come and go.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import math
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import cubatch as cb
from benchmarks.fleet import costs, streams
from benchmarks.fleet.costs import Costs, Line
from benchmarks.fleet.simulated import SimulatedClient, TooLong, Worker, standing_in
from benchmarks.fleet.streams import Stream
from benchmarks.provenance import provenance
from cubatch.fleet import tune_fleet
from cubatch.hardware import catalogue, probe
from cubatch.hardware.facts import Device
from cubatch.network import models
from cubatch.tuning import store

MEASURED = (1, 2, 4, 8, 16, 32, 64)
SIZES = (1, 10, 100, 1000, 10_000)
KINDS = 40
LIVES = (3600.0, 300.0)  # mean seconds that a worker stays, in fleets that change
NETWORK, OPTIONS = "resnet18", {"mode": "training", "budget": 60.0}
OPEN_FILES = 1024  # of a process, where nobody has raised it
LONGEST = 600.0  # virtual seconds after which a fleet counts as without an answer


def recorded(kinds: int) -> list[Stream]:
    """Record what so many kinds of GPU say, spread over the catalogue."""
    spec = json.loads(json.dumps(models.resolve(NETWORK).to_mapping()))
    devices = [device for device in catalogue.all_devices() if _is_known(device)]
    chosen = [devices[place * len(devices) // kinds] for place in range(kinds)]
    return [streams.record(spec, device, OPTIONS) for device in chosen]


def _is_known(device: Device) -> bool:
    try:
        cb.predict(NETWORK, device=device, mode=OPTIONS["mode"], batch_sizes=[1])
    except cb.CubatchError:
        return False
    return True


def fleet(size: int, kinds: Sequence[Stream], life: float | None, seed: int = 0) -> dict[str, Worker]:
    """Make workers of all kinds, in turn; who lives so long on average is followed by another of its kind."""
    draw, workers = random.Random(f"{seed}/{size}/{life}"), {}
    for place in range(size):
        comes, number = 0.0, 0
        while comes < LONGEST:
            goes = comes + draw.expovariate(1 / life) if life else float("inf")
            workers[f"tcp://{place}-{number}"] = Worker(kinds[place % len(kinds)], comes, goes)
            comes, number = goes, number + 1
    return workers


def ask(
    workers: dict[str, Worker], costs: Costs, cpu_seconds: Callable[[], float] = time.thread_time
) -> dict[str, Any]:
    """Have `autotune_fleet` ask a fleet, and give what came of it."""
    client = SimulatedClient(workers, costs, cpu_seconds, longest=LONGEST)
    answers: list[float] = []

    def progress(_: str, sentence: str) -> None:
        if sentence.startswith("the answer is"):
            answers.append(client.now)

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "store.sqlite3"
        with contextlib.suppress(TooLong), standing_in(client):
            cb.autotune_fleet(NETWORK, client, store=path, progress=progress, **OPTIONS)
        kept = sum(run.num_timings for run in store.list_runs(path))
        size = sum(file.stat().st_size for file in Path(folder).iterdir())
    return {
        "kinds": len({worker.stream.device.name for worker in workers.values()}),
        "answers": len(answers),
        "first_answer_seconds": min(answers, default=None),
        "seconds": client.now,
        "messages": client.messages,
        "message_bytes": client.message_bytes,
        "timings": kept,
        "store_bytes": size,
        "described": client.described,
        "scheduler_busy": client.busy["scheduler"] / client.now,
        "client_busy": client.busy["client"] / client.now,
    }


def limits(costs: Costs) -> list[dict[str, Any]]:
    """Say at how many workers each thing is used up, the first to be first; None where it does not grow."""
    look = Line(*(sum(getattr(line, part) for line in costs.poll.values()) for part in ("fixed", "each")))
    found = [
        ("files that a process may have open, as it is set by default", costs.files, OPEN_FILES),
        ("memory of the scheduler, of 8 GiB", costs.memory, 8 * 2**30),
        ("time of the scheduler, for heartbeats alone", costs.idle["scheduler"], 1.0),
        ("time between two looks at who is there", look, tune_fleet.TICK_SECONDS),
    ]
    rows = [
        {"what": what, "workers": int((most - line.fixed) / line.each) if line.each else None}
        for what, line, most in found
    ]
    return sorted(rows, key=lambda row: row["workers"] or math.inf)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what Dask costs, ask the fleets, and print a line for each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").strip().splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--measured", type=int, nargs="*", default=MEASURED, help="workers of the clusters measured")
    parser.add_argument("--sizes", type=int, nargs="*", default=SIZES, help="workers of the fleets in virtual time")
    parser.add_argument("--kinds", type=int, default=KINDS, help="of GPUs")
    options = parser.parse_args(arguments)
    measured = [costs.measure(workers) for workers in options.measured]
    for row in measured:
        print(row)
    known = Costs.of(measured)
    kinds, rows = recorded(options.kinds), []
    for size in options.sizes:
        for life in (None, *LIVES):
            rows.append({"workers": size, "life_seconds": life, **ask(fleet(size, kinds, life), known)})
            print(rows[-1])
            sys.stdout.flush()
    if options.json:
        device = probe.device("cpu")
        content = {
            "schema": 1, "benchmark": "fleet", **provenance(), "device": device.name, "threads": device.threads,
            "distributed": importlib.metadata.version("distributed"), "network": NETWORK, **OPTIONS,
            "measured": measured, "measuring_seconds": max(kind.seconds for kind in kinds), "rows": rows,
            "limits": limits(known),
        }  # fmt: skip
        options.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
