"""
Compare tools that predict a training step's memory without running it, on ten modules.

    pip install torch-kitsune accelerate transformers peft torchvision
    python -m benchmarks.bench_memory_tools --out benchmarks/results/intel-xeon-2-threads/memory-tools.json

Each prediction is made in a fresh process.  The tools are `cb.footprint`, `kitsune.predict.predict_memory`, the rule
of `accelerate estimate-memory` (for Adam four times the parameters and buffers), and PyTorch's `MemTracker`
(`torch.distributed._tools.mem_tracker`) in a `FakeTensorMode`.

The reference is the peak of a real step with Adam on the CPU, from the allocations that PyTorch's profiler records.  It
contains what oneDNN takes inside an operation.  It contains neither a
CUDA context nor the rounding of an allocator.  The loop clears gradients between forward and backward pass.  A loop
that clears them before the forward pass may take less, by their size at most.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch

import cubatch as cb
from benchmarks.modules import zoo
from benchmarks.provenance import on_cpu

ROOT = Path(__file__).parent.parent
MOST_SECONDS = 600.0
IMAGE, WORDS = (3, 224, 224), 30522
_SECOND_STEP = "second step"


@attrs.frozen
class Case:
    """A module and its batches."""

    build: Callable[[], torch.nn.Module]
    batches: Callable[[int], dict[str, torch.Tensor] | tuple[torch.Tensor, ...]]
    batch_size: int
    shape: tuple[int, ...]  # of a sample, for tools that draw floats of one shape


def images(n: int) -> tuple[torch.Tensor, ...]:
    """Return random images."""
    return (torch.rand(n, *IMAGE),)


def tokens(length: int, *, decoder: int = 0) -> Callable[[int], dict[str, torch.Tensor]]:
    """Return a function of batches of token numbers, for an encoder-decoder of `decoder` tokens as well."""

    def batch(n: int) -> dict[str, torch.Tensor]:
        names = {"input_ids": length} | ({"decoder_input_ids": decoder} if decoder else {})
        return {name: torch.randint(WORDS, (n, extent)) for name, extent in names.items()}

    return batch


def vision(name: str) -> Callable[[], torch.nn.Module]:
    """Return a function that builds a model of torchvision."""
    return getattr(zoo.torchvision_package().models, name)


def language(name: str, **settings: Any) -> Callable[[], torch.nn.Module]:
    """Return a function that builds a model of Transformers from the default configuration."""

    def build() -> torch.nn.Module:
        zoo.torchvision_package()  # Transformers imports torchvision, which needs help with a PyTorch without CUDA
        import transformers

        return getattr(transformers, f"{name}Model")(getattr(transformers, f"{name}Config")(**settings))

    return build


def adapted() -> torch.nn.Module:
    """Return GPT-2 with LoRA adapters."""
    import peft

    return peft.get_peft_model(language("GPT2")(), peft.LoraConfig(r=8, target_modules=["c_attn"]))


def checkpointed() -> torch.nn.Module:
    """Return BERT that computes its activations again in the backward pass."""
    module = language("Bert")()
    module.gradient_checkpointing_enable()
    return module


CASES = {
    "ResNet-50": Case(vision("resnet50"), images, 16, IMAGE),
    "MobileNetV3-Large": Case(vision("mobilenet_v3_large"), images, 32, IMAGE),
    "ConvNeXt-Tiny": Case(vision("convnext_tiny"), images, 8, IMAGE),
    "ViT-B/16": Case(vision("vit_b_16"), images, 8, IMAGE),
    "BERT-base": Case(language("Bert"), tokens(128), 8, (128,)),
    "GPT-2": Case(language("GPT2"), tokens(256), 4, (256,)),
    "T5-small": Case(language("T5"), tokens(128, decoder=64), 8, (128,)),
    "LSTM": Case(
        lambda: torch.nn.LSTM(256, 512, 2, batch_first=True), lambda n: (torch.rand(n, 100, 256),), 32, (100, 256)
    ),
    "GPT-2 with LoRA": Case(adapted, tokens(256), 4, (256,)),
    "BERT-base, checkpointed": Case(checkpointed, tokens(128), 16, (128,)),
}


def step_of(case: Case, module: torch.nn.Module) -> tuple[Callable[[], None], torch.optim.Optimizer, Any]:
    """Return a training step with Adam, its optimizer and its batch."""
    batch = case.batches(case.batch_size)
    optimizer = torch.optim.Adam([each for each in module.parameters() if each.requires_grad], lr=0.0)

    def step() -> None:
        output = module(**batch) if isinstance(batch, dict) else module(*batch)
        first = output if isinstance(output, torch.Tensor) else output[0]
        loss = first.float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step, optimizer, batch


def by_running(case: Case, _: torch.nn.Module) -> int:
    """Return the peak of a second real step in bytes; all that it uses is allocated while the profiler records."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        step, _, _ = step_of(case, case.build().train())
        step()
        with torch.profiler.record_function(_SECOND_STEP):
            step()
    events = sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    names = [event.name() for event in events]
    begin = names.index(_SECOND_STEP)
    allocated = itertools.accumulate(
        event.nbytes() if name == "[memory]" else 0 for event, name in zip(events, names, strict=True)
    )
    return max(itertools.islice(allocated, begin, None))


def by_cubatch(case: Case, module: torch.nn.Module) -> int:
    """Return what `cb.footprint` predicts for the tensors of a step."""
    options = {"batch_size": case.batch_size, "mode": "training", "optimizer": "adam", "device": "cpu"}
    return cb.footprint(module, case.batches, **options).total


def by_kitsune(case: Case, module: torch.nn.Module) -> int:
    """Return what torch-kitsune predicts: its only input is the shape of one sample of floats."""
    from kitsune.predict import predict_memory

    return predict_memory(module, case.shape, batch_size=case.batch_size, optimizer="adam", training=True).total_bytes


def by_accelerate(_: Case, module: torch.nn.Module) -> int:
    """Return the figure that `accelerate estimate-memory` prints for training with Adam."""
    from accelerate.commands.estimate import estimate_training_usage
    from accelerate.utils import calculate_maximum_sizes

    return max(estimate_training_usage(calculate_maximum_sizes(module)[0], "float32").values())


def by_mem_tracker(case: Case, module: torch.nn.Module) -> int:
    """Return the peak that PyTorch's tracker counts in two steps on fake tensors."""
    from torch._subclasses import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    torch.__future__.set_overwrite_module_params_on_conversion(True)
    with FakeTensorMode() as mode:
        module._apply(mode.from_tensor)  # noqa: SLF001 - some modules cannot be built without data
        step, optimizer, batch = step_of(case, module)
        tracker = MemTracker()
        tracker.track_external(module, optimizer, *torch.utils._pytree.tree_leaves(batch))  # noqa: SLF001 - no other
        with tracker:
            step()
            tracker.reset_mod_stats()
            step()
    return sum(each["Total"] for each in tracker.get_tracker_snapshot("peak").values())


TOOLS = {
    "measured": by_running,
    "cubatch": by_cubatch,
    "torch-kitsune": by_kitsune,
    "accelerate": by_accelerate,
    "MemTracker": by_mem_tracker,
}


def run(name: str, tool: str) -> dict[str, Any]:
    """Return a tool's bytes and its seconds without building the module, or its error."""
    torch.manual_seed(0)
    case = CASES[name]
    module = case.build().train()
    began = time.perf_counter()
    try:
        predicted = int(TOOLS[tool](case, module))
    except Exception as error:  # noqa: BLE001 - any error of a tool is its result
        return {"error": f"{type(error).__name__}: {str(error).strip().splitlines()[0][:120]}"}
    return {"bytes": predicted, "seconds": time.perf_counter() - began}


def in_fresh_process(name: str, tool: str) -> dict[str, Any]:
    """Run a prediction or the measurement in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.bench_memory_tools", "--task", json.dumps([name, tool])]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=MOST_SECONDS)
    if done.returncode:
        return {"error": f"exit status {done.returncode}: {done.stderr.strip().splitlines()[-1:]}"}
    return json.loads(done.stdout.splitlines()[-1])


def main(arguments: Sequence[str] | None = None) -> None:
    """Run all tools on all modules, and print a line for each module; `arguments` None: those of the process."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").strip().splitlines()[0])
    parser.add_argument("--out", type=Path, metavar="FILE")
    parser.add_argument("--modules", nargs="*", choices=list(CASES), default=list(CASES))
    parser.add_argument("--task", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.task:
        print(json.dumps(run(*options.task)))
        return
    versions = {name: importlib.metadata.version(name) for name in ("torch", "torch-kitsune", "accelerate")}
    rows = []
    for name in options.modules:
        row = {"module": name, "batch_size": CASES[name].batch_size}
        row |= {tool: in_fresh_process(name, tool) for tool in TOOLS}
        rows.append(row)
        print(name, {tool: row[tool] for tool in TOOLS}, flush=True)
        if options.out:
            content = {**on_cpu("memory_tools"), "versions": versions, "rows": rows}
            options.out.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
