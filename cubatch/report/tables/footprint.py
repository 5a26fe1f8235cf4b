"""Tables of `cubatch memory`: the memory plan, and the rules of thumb."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence, Sized
from typing import Any

import attrs

from cubatch.choices import Mode
from cubatch.frameworks.module_footprint import ModuleFootprint
from cubatch.memory.step_footprint import Footprint
from cubatch.memory.thumb_rules import Rule
from cubatch.report.grid import Grid
from cubatch.report.tables.common import shape, written
from cubatch.tuning.device_memory import DeviceMemory, ModeMemory
from cubatch.tuning.notes import note, sentence
from cubatch.units import format_bytes, format_count, format_price, join_words

_PARTS = (
    "weights", "inputs", "gradients", "optimizer", "activations", "activation_gradients", "workspace", "allocator",
    "overhead",
)  # fmt: skip
_SHOWN_SUBMODULES = 10
_NUMBERED = re.compile(r"(^|\.)\d+(?=\.)")  # of layers in a list; the last number of a name may be of any layer
_OF_THE_ENGINE = "Memory is planned for cubatch's own engine. A framework takes more: see --library torch."
_ON_A_CPU = "Without workspaces inside operations, and what the heap and the process take besides."
_OF_RECURRENT = (
    "Libraries keep results of all time steps of {}. Those of oneDNN are included. In training they may take less, as "
    "it does not write all of them; those of cuDNN are not known: measure a step."
)
_ON_A_GPU = (
    "“allocator” is what PyTorch's caching allocator reserves beyond the tensors, with {} segments. “overhead” is the "
    "CUDA context and libraries, {}. Without workspaces of convolutions in cuDNN."
)


def footprint(plan: Footprint, *, title: str) -> list[Grid]:
    """Return the tables of the memory of a step, by part and by layer."""
    return [_parts({"bytes": plan}, title), _by_layer(plan, "By layer")]


def of_module(taken: ModuleFootprint) -> list[Grid]:
    """Return the tables of the memory of a PyTorch module's step."""
    title = f"{taken.name}, {taken.mode}, batch {format_count(taken.batch_size)}: memory of a step at its peak"
    return [_parts({"bytes": taken}, title), _by_submodule(taken, "Activations by submodule")]


def _by_submodule(taken: ModuleFootprint, title: str) -> Grid:
    """
    Return the table of the submodules with the most activations.

    Submodules whose names differ only in the number of a layer share a row with their sum: "layers.*.mlp".
    """
    bytes_of: dict[str, int] = {}
    counts: dict[str, int] = {}
    itself = f"({taken.name})"
    for name, size in taken.by_submodule.items():
        has_parts = any(other.startswith(f"{name}.") for other in taken.by_submodule)  # "layers.3", of numbered blocks
        group = (_NUMBERED.sub(r"\1*", f"{name}.")[:-1] if has_parts else _NUMBERED.sub(r"\1*", name)) or itself
        bytes_of[group] = bytes_of.get(group, 0) + size
        counts[group] = counts.get(group, 0) + 1
    largest = sorted(bytes_of, key=lambda group: -bytes_of[group])
    shown, rest = largest[:_SHOWN_SUBMODULES], largest[_SHOWN_SUBMODULES:]
    rows = [[group, str(counts[group]), format_bytes(bytes_of[group])] for group in shown]
    if rest:
        sums = [sum(numbers[group] for group in rest) for numbers in (counts, bytes_of)]
        rows.append(["others", str(sums[0]), format_bytes(sums[1])])
    notes = [f"{itself} is the module itself, the loss and the optimizer."] if itself in shown else []
    return Grid(title=title, columns=["submodule", "modules", "bytes"], rows=rows, notes=notes)


def by_device(rows: Sequence[DeviceMemory], *, title: str) -> Grid:
    """Return the table of the memory that a step takes on each device, and the largest batch size that fits there."""
    size = next(iter(rows[0].modes.values())).footprint.batch_size
    columns = {
        "device": lambda of: _name(of[0]),
        "may take": lambda of: format_bytes(of[0].limit),
        "mode": lambda of: of[1],
        "takes": lambda of: format_bytes(of[2].footprint.total),
        f"batch {format_count(size)}": lambda of: "fits" if of[2].fits else "does not fit",
        "largest batch": lambda of: format_count(of[2].max_batch_size) if of[2].max_batch_size else "none",
        "per hour": lambda of: written(format_price, of[0].price),
    }
    records = [(row, mode, taken) for row in rows for mode, taken in row.modes.items()]
    footprints = [memory.footprint for row in rows for memory in row.modes.values()]
    on_gpus = [
        each for each in footprints if isinstance(each, ModuleFootprint) and each.expandable_segments is not None
    ]
    segments = sorted(set(map(_segments, on_gpus)))
    notes = [_cheapest(rows, size), *(f"PyTorch's allocator is simulated with {each} segments." for each in segments)]
    return Grid.of(records, columns, title=title, notes=notes)


def _segments(taken: ModuleFootprint) -> str:
    return "expandable" if taken.expandable_segments else "default"


def _cheapest(rows: Sequence[DeviceMemory], size: int) -> str:
    """Return a sentence with the devices on which a batch of `size` samples fits, and the cheapest of them per hour."""
    fitting = [row for row in rows if row.fits]
    if not fitting:
        return f"Batch {format_count(size)} fits on none of these devices."
    text = f"Batch {format_count(size)} fits on {join_words([_name(row) for row in fitting])}"
    priced = {_name(row): row.price for row in fitting if row.price is not None}
    if not priced:
        return f"{text}."
    if len(priced) == 1:
        return f"{text}. Only {next(iter(priced))} has a price." if len(fitting) > 1 else f"{text}."
    unpriced = [_name(row) for row in fitting if row.price is None]
    rest = f"; {join_words(unpriced)} {'has' if len(unpriced) == 1 else 'have'} no price" if unpriced else ""
    return f"{text}. The cheapest of them is {min(priced, key=lambda name: priced[name])}{rest}."


def _name(row: DeviceMemory) -> str:
    return row.device.slug or row.device.name


def modes(
    modes: Mapping[Mode, ModeMemory],  # the memory of each mode
    *,
    title: str,  # title of the first table
    limit: int,  # bytes that the largest batch fits into
    why: str = "",  # source of the limit; empty if the user gave it
    target: int | None = None,  # samples per optimizer step; None: gradients are not accumulated
) -> list[Grid]:
    """Return the tables of the memory of a step: by part for each mode, by layer, and the rules of thumb."""
    by_mode: dict[str, Footprint | ModuleFootprint] = {mode: memory.footprint for mode, memory in modes.items()}
    last, whole = list(by_mode.items())[-1]
    parts = _parts(by_mode, title)
    parts = attrs.evolve(parts, notes=[_fits(modes, limit, why, target), *parts.notes])
    if isinstance(whole, ModuleFootprint):
        return [parts, _by_submodule(whole, f"Activations by submodule, {last}")]
    if whole.members > 1 and whole.gradients:
        parts = attrs.evolve(parts, notes=[*parts.notes, f"Each of {whole.members} threads has its own gradients."])
    compared = [rules(memory.rules, mode=mode) for mode, memory in modes.items()]
    return [parts, _by_layer(whole, f"By layer, {last}"), *compared]


def _fits(modes: Mapping[Mode, ModeMemory], limit: int, why: str, target: int | None) -> str:
    """
    Return a sentence with the largest batch size of each mode, and the modes in which the requested size does not fit.

    `limit` is the available memory in bytes and `why` its source.  `target` is the number of samples per optimizer
    step; None: gradients are not accumulated.
    """
    requested = next(iter(modes.values())).footprint
    largest = {mode: memory.max_batch_size for mode, memory in modes.items()}
    sizes = join_words([f"{format_count(n) if n else 'no batch'}{_in([mode], modes)}" for mode, n in largest.items()])
    beyond = [mode for mode, memory in modes.items() if not memory.fits]
    does_not = f"; {format_count(requested.batch_size)} does not fit{_in(beyond, modes)}" if beyond else ""
    where = f"{format_bytes(limit)}{f' ({why})' if why else ''}"
    batch = "batch" if target is None else f"batch that divides {format_count(target)}"
    by = "trace" if isinstance(requested, ModuleFootprint) else "plan"
    return f"The largest {batch} whose step fits in {where}, by the {by}: {sizes}{does_not}."


def _in(some: Sequence[str], modes: Sized) -> str:
    return f" in {join_words(some)}" if len(modes) > 1 else ""


def _parts(plans: Mapping[str, Footprint | ModuleFootprint], title: str) -> Grid:
    sizes = {part: [int(getattr(plan, part, 0)) for plan in plans.values()] for part in _PARTS}
    rows: list[list[str | None]] = [
        [part.replace("_", " "), *(format_bytes(size) if size else None for size in taken)]
        for part, taken in sizes.items()
        if any(taken)
    ]
    networks = {name: plan for name, plan in plans.items() if isinstance(plan, Footprint)}
    notes = _notes_of_networks(networks) if networks else [_not_counted(plans)]
    rows.append(["peak" if networks else "total", *(format_bytes(plan.total) for plan in plans.values())])
    return Grid(title=title, columns=["part", *plans], rows=rows, marked=[len(rows) - 1], notes=notes)


def _not_counted(plans: Mapping[str, Footprint | ModuleFootprint]) -> str:
    modules = [plan for plan in plans.values() if isinstance(plan, ModuleFootprint)]
    source, recurrent = modules[0].overhead_source, modules[0].recurrent
    text = _ON_A_GPU.format(_segments(modules[0]), source) if source else _ON_A_CPU
    if operators := sorted(set().union(*(each.data_dependent for each in modules))):
        text += f" {sentence(note('data_dependent', operators=', '.join(operators)))}"
    return f"{text} {_OF_RECURRENT.format(join_words(recurrent))}" if recurrent else text


def _notes_of_networks(plans: Mapping[str, Footprint]) -> list[str]:
    peaks = [
        f"{format_bytes(plan.total)}, in {plan.peak_layer}{f' ({name})' if len(plans) > 1 else ''}"
        for name, plan in plans.items()
    ]
    counts = [plan.elements_per_sample for plan in plans.values()]
    size = next(iter(plans.values())).batch_size
    words = " forward, {} with gradients" if len(counts) > 1 else ""
    count = f"{format_count(counts[0])} elements per sample{words.format(format_count(counts[-1]))}"
    return [
        f"Peak {', '.join(peaks)}; parts are sums over all layers, which share memory, so that the peak is lower.",
        f"Textbook count: {count}; times {size} is {format_count(counts[-1] * size)} elements.",
        _OF_THE_ENGINE,
    ]


def _by_layer(plan: Footprint, title: str) -> Grid:
    def sized(part: str) -> Callable[[Mapping[str, Any]], str | None]:
        return lambda layer: format_bytes(layer[part]) if layer[part] else None

    columns = {
        "layer": lambda layer: layer["name"],
        "type": lambda layer: layer["type"],
        "output": lambda layer: shape(layer["output_shape"]),
        "parameters": lambda layer: format_count(layer["parameters"]) if layer["parameters"] else None,
        "weights": sized("weights"),
        "activations": sized("activations"),
        "gradients": sized("activation_gradients"),
        "workspace": sized("workspace"),
    }
    return Grid.of(plan.layers, columns, title=title)


def rules(compared: Sequence[Rule], *, mode: str) -> Grid:
    """Return the table that compares rules of thumb for the memory of a step with the memory plan."""

    def write(rule: Rule, value: float) -> str:
        return format_bytes(value) if rule.unit == "bytes" else format_count(value)

    columns = {
        "rule": lambda rule: rule.name,
        "gives": lambda rule: write(rule, rule.value),
        "plan": lambda rule: write(rule, rule.computed),
        "off by": lambda rule: f"{100 * rule.error:+.1f} %" if math.isfinite(rule.error) else None,
        "unit": lambda rule: rule.unit,
        "formula": lambda rule: rule.formula,
    }
    return Grid.of(compared, columns, title=f"Rules of thumb and the plan, {mode}")
