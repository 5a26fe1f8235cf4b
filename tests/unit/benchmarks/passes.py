"""Stages, commands and results of GPU passes that never were."""

from __future__ import annotations

import json
import sys
import textwrap

import attrs

from benchmarks import gpu_pass
from benchmarks.gpu import items as gpu_items
from benchmarks.gpu.process import Run, run_stage
from benchmarks.gpu.stages import Item, Stage
from cubatch.bench import cases
from cubatch.hardware import catalogue
from cubatch.network import layers as kinds
from cubatch.network.passes import Pass

H200 = catalogue.find("h200-sxm")


def tell(script, skipped):
    """A command that runs a script which tells its lines by say()."""
    head = """
    import json, os, sys, time
    start, seconds, skipped = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]
    def say(**facts): print(json.dumps(facts), flush=True)
    def do(index, **facts):
        say(begins=index, name=f"item {index}", limit=0.4)
        say(ends=index, item={"name": f"item {index}", "status": "ok", **facts})
    """
    text = textwrap.dedent(head) + textwrap.dedent(script)
    return lambda start, seconds: [sys.executable, "-c", text, str(start), str(seconds), *skipped]


def ran(script, skipped=None, planned=()):
    """What became of a stage, and how often it was saved; kernels that are left out go into `skipped`."""
    run, saved, skipped = Run("stage", 30.0, skipped=list(planned)), [], {} if skipped is None else skipped
    run_stage(tell(script, skipped), run, lambda: saved.append(len(run.items)), skipped)
    return run, saved


class Here:
    """A session without a GPU, whose time is over after so many questions."""

    device = H200

    def __init__(self, questions):
        self.questions = questions

    def seconds_left(self):
        """Count down."""
        self.questions -= 1
        return max(0.0, self.questions)


def lines_of(stage, monkeypatch, tmp_path, *, questions=100, **options):
    """What a child says."""
    monkeypatch.setattr(gpu_items, "session_here", lambda *_, **__: Here(questions))
    path = tmp_path / "lines"
    with path.open("w") as lines:
        gpu_pass.child(stage, **{"start": 0, "seconds": 1.0, "only": "", "lines": lines} | options)
    return [json.loads(line) for line in path.read_text().splitlines()]


def stage_of(*items):
    """A stage of functions."""
    return Stage("stage", "shows", 1.0, lambda _: [Item(f"item {n}", run) for n, run in enumerate(items)])


FACTS = {"device": {"name": "Test GPU"}, "environment": {"cupy": "14"}, "monitor": None}


def entry(seconds, *, side="ours", status="ok", ratio=None, copy=None, fill=1.0):
    """An entry as the JSON has it."""
    launch = {
        "kernel": "k", "grid": [10, 1, 1], "threads": 256, "spill_bytes": 0, "occupancy": 0.25, "fill": fill,
        "busiest_sm_blocks": 1,
    }  # fmt: skip
    return {
        "name": "k", "label": "simt 128x128x8", "side": side, "status": status, "seconds": seconds, "ratio": ratio,
        "ratio_interval": None if ratio is None else [ratio - 0.01, ratio + 0.01], "launches": [launch],
        "flops_per_second": 1e12, "bytes_per_second": 1e11, "roofline_fraction": 0.5, "copy_fraction": copy,
    }  # fmt: skip


def item_of(case, entries, bound="compute"):
    """An item as the JSON has it."""
    return {
        "name": case.name,
        "status": "ok",
        "result": {"case": case.to_mapping(), "bound": bound, "entries": entries},
    }


def result_of(**stages):
    """A pass of a device that there is not."""
    return {
        "schema": 1, "date": "2000-01-01", "commit": "0000000", "device": {"name": "Imaginary GPU"},
        "environment": {"cupy": "cupy 0", "torch": "0.0", "cudnn": "1"},
        "stages": [
            {"name": name, "status": "ok", "items": items, "skipped": ["left"] * skipped}
            for name, (items, skipped) in stages.items()
        ],
    }  # fmt: skip


def conv_case(r, layers=("resnet50/a",)):
    """A convolution of a network."""
    layer = kinds.Conv2d(h=8, w=8, c=4, k=4, r=r, s=r, pad=r // 2)
    return attrs.evolve(cases.of_layer(layer, Pass.FPROP, 32), layers=layers)
