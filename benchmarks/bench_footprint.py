"""
Compare the memory that `cb.footprint` predicts for PyTorch modules on a GPU with the memory that their steps take.

    python -m benchmarks.bench_footprint --json FILE

Each module runs STEPS steps on the GPU while PyTorch records what its allocator does. Three figures are compared: the
bytes of tensors, the bytes that the allocator reserves, and what NVML reports for the process. The recorded
allocations are also replayed by `cubatch.memory.caching_allocator`, which must reserve the same.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import cubatch as cb
from benchmarks.modules import zoo
from benchmarks.provenance import run_on, write
from cubatch.frameworks.torch_module import MODES
from cubatch.hardware import nvml, probe
from cubatch.hardware.facts import Device
from cubatch.memory.caching_allocator import Block, CachingAllocator

STEPS = 3
_MOST_RECORDED = 1_000_000


def replay(entries: Iterable[Mapping[str, Any]]) -> int:
    """
    Return the bytes that the simulated allocator reserves for recorded allocations.

    Args:
        entries: A device's entries of "device_traces" in `torch.cuda.memory._snapshot()`.
    """
    allocator, blocks = CachingAllocator(), dict[int, Block]()
    for entry in entries:
        if entry["action"] == "alloc":
            blocks[entry["addr"]] = allocator.allocate(entry["size"])
        elif entry["action"] == "free_completed" and entry["addr"] in blocks:
            allocator.free(blocks.pop(entry["addr"]))
    return allocator.reserved_bytes


def score(name: str, mode: str, batch_size: int, device: Device) -> dict[str, Any]:
    """Predict the memory of a step, run some, and return both."""
    place = torch.device(device.address)
    torch.cuda.empty_cache()
    torch.cuda.memory._record_memory_history(max_entries=_MOST_RECORDED)  # noqa: SLF001 - its only name
    torch.cuda.reset_peak_memory_stats(place)
    module = zoo.build(name).to(place).train(mode == "training")
    example = zoo.example(name)
    optimizer = "adam" if mode == "training" else "sgd"
    predicted = cb.footprint(module, example, batch_size=batch_size, mode=mode, optimizer=optimizer, device=device)
    inputs = (
        torch.rand(batch_size, *example, device=place)
        if isinstance(example, tuple)
        else example.expand(batch_size, -1).to(place)
    )
    optimizer = torch.optim.Adam(module.parameters(), lr=0.0)
    for _ in range(STEPS):
        with torch.inference_mode(mode == "inference"):
            loss = module(inputs).float().square().mean()
            if mode == "training":
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    torch.cuda.synchronize(place)
    entries = torch.cuda.memory._snapshot()["device_traces"][place.index or 0]  # noqa: SLF001 - its only name
    torch.cuda.memory._record_memory_history(enabled=None)  # noqa: SLF001 - its only name
    return {
        "module": name, "mode": mode, "batch_size": batch_size, "predicted": predicted.to_mapping(),
        "allocated": torch.cuda.max_memory_allocated(place), "reserved": torch.cuda.max_memory_reserved(place),
        "replayed": replay(entries), "process": nvml.Monitor(device.uuid or "").process_bytes(),
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """Score the modules and print a line for each; `arguments` None: those of the process."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").strip().splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--modules", nargs="*", choices=zoo.NAMES, default=list(zoo.NAMES))
    parser.add_argument("--batch-sizes", nargs="*", type=int, default=[16, 128])
    options = parser.parse_args(arguments)
    device = probe.resolve("gpu")
    rows = []
    for name in options.modules:
        for mode in MODES:
            for batch_size in options.batch_sizes:
                row = score(name, mode, batch_size, device)
                rows.append(row)
                reserved = row["reserved"]
                predicted = row["predicted"]["total"] - row["predicted"]["overhead"]
                errors = f"predicted {predicted / reserved - 1:+.1%}, replayed {row['replayed'] / reserved - 1:+.1%}"
                print(f"{name} {mode} {batch_size}: reserved {reserved}, {errors}")
                if options.json:
                    content = {**run_on(device, "footprint"), "rows": rows}
                    write(options.json, content)


if __name__ == "__main__":
    main()
