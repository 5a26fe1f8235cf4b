"""
Notes for the user about a run, in addition to the recommendation.

A note is a record with a code and values. The pipeline and its subjects make records; only `sentence` makes text.
"""

from __future__ import annotations

import os
import shlex
import string
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from cubatch.hardware.cpu_load import CpuLoad
from cubatch.hardware.memory_limit import MemoryLimit
from cubatch.measure.runner import Remark
from cubatch.units import format_bytes, format_counted, format_seconds, format_whole_percent

_OTHER_CPUS = 0.2  # CPUs kept busy by others, and share of stolen CPU time, that move a median known to 1 %
_STEAL_SHARE = 0.02
_ROUNDED_AWAY = 0.1  # a process that keeps 1.02 CPUs busy leaves the second of two to the step

STATE_REMAINS = "state_remains"
"""Code of the note that batch sizes did not start from the same state of a module."""

WARNINGS = frozenset({
    "answered_from_cache", "cached_interference", "cache_continued", "interference", STATE_REMAINS, "output_stays",
    "targets_unused",
})  # fmt: skip
"""Codes of notes that come right after the recommendation: they put the timings themselves in doubt."""

WITHHOLDS = frozenset({"inputs_stay", "step_does_not_grow", "step_time_falls"})
"""Codes of notes that come first, in place of a recommendation: what was timed is no growing batch."""

CONDITIONS = frozenset({"not_timed", "step_time_stays"})
"""Codes of notes that come first, as the condition of a recommendation: it holds if the answer to them is yes."""

_TEXT: Mapping[str, str] = {
    # --- cached timings
    "cache_waited": "Waited {waited_seconds} for another process that measured the same run.",
    "cache_conditions": "Cached timings do not apply: {differences}.",
    "cache_damaged": (
        "Run {run} of the store {path} has a damaged row ({reason}): this call measures again, and `cubatch store "
        "clear {run} --store {path}` deletes that run."
    ),
    "cache_unusable": "Timings are not cached: the store {path} cannot be used: {reason}.",
    "answered_from_cache": "Answered from the store of cached timings: no batch size was measured now; {remedy}.",
    "cached_interference": 'While the cached timings were taken: "{message}"',
    "cache_continued": "This run continues from cached timings; {remedy}.",
    "no_cache": "Timings were not cached. To cache them, name the module: 'package.module:build'.",
    "kernel_choices_kept": "The kernel choices of earlier runs could not be discarded: {error}",
    # --- the machine while timings were taken
    "another_run": (
        "Another cubatch process measured on this device at the same time, which distorts the timings of both: run "
        "them one after the other."
    ),
    "interference": "{message}",
    "cpus_busy": (
        "Other processes kept {busy} of {cpus} busy during the measurement{stolen}: end them{fewer} and measure again."
    ),
    "cpus_stolen": (
        "The hypervisor took {stolen_share} of the CPU time (steal): measure again when the other machines of this "
        "host are quiet, or on CPUs of your own."
    ),
    "page_faults": (
        "At batch size {batch_size} the system took {cpu_share} of the CPU time for {faults} page faults a step: glibc "
        "returns freed memory and requests it again. To avoid that at the cost of more memory, set {variables}, and no "
        "other variables of malloc, here and where you train."
    ),
    "heap_thresholds": (
        "Timed while glibc kept freed memory ({variables}): a process without these environment variables may be "
        "slower."
    ),
    "heap_compacted": (
        "From batch size {batch_size} on, which might have exceeded the memory limit, the C library's heap was "
        "compacted (mallopt). A process that does not do so keeps freed blocks and takes twice the memory, or more."
    ),
    "host_clock": (
        "Timed with the host's clock, because no loaded library has CUDA events and a GPU. A step ends when it "
        "returns, or when block_until_ready() of its result returns."
    ),
    "step_time_stays": (
        "Check that the step uses its batch size: one of {large} samples took {last_seconds}, one of {small} "
        "{first_seconds}."
    ),
    "step_time_falls": (
        "No recommendation: the larger the batch, the less time a step took, {last_seconds} of {large} samples and "
        "{first_seconds} of {small}. A step must run one batch, not a whole data set in batches of that size."
    ),
    "launched_singly": (
        "The {launches} kernels of a step were launched one by one, which may slow small batches: no CUDA graph could "
        "be made of them ({refusal})."
    ),
    # --- the module
    "not_timed": "Not timed: {parts}. Check that this takes little time next to a step.",
    "inputs_written": (
        "Steps write to {inputs}: each got a copy that no step had written to, and copying is part of its time."
    ),
    "targets_unused": (
        "The batches have targets, but no loss was given: a step took the `loss` of the module's output, or else the "
        "mean of its squares. Pass the loss of your loop, as loss=torch.nn.functional.cross_entropy."
    ),
    "evaluation_mode": (
        "{first} was in evaluation mode and stayed so (parts in evaluation mode: {count}). Call module.train() to put "
        "all parts into training mode."
    ),
    "constant_inputs": "Inputs that were the same at every batch size: {inputs}.",
    "inputs_stay": (
        "No recommendation: {inputs} did not grow with the batch; pass a function from a batch size to inputs, two "
        "batches of different size, or constant_inputs={names}."
    ),
    "step_does_not_grow": (
        "No recommendation: neither the output of the module nor its work grows with the batch; pass a function from a "
        "batch size to inputs, or two batches of different size."
    ),
    "output_stays": (
        "The output of the module has shape {shape} for {count} samples, without a row for each sample: check that its "
        "code uses the size of its input, not a fixed batch size that would mix samples."
    ),
    "uneven_samples": (
        "Samples are of unequal length: a time in the table is that of one typical batch of the size, and batches of a "
        "loop may differ from it."
    ),
    "multiples_only": (
        "Only multiples of {multiple} were proposed: batches of other sizes raised an error. State what is accepted "
        "with multiple_of."
    ),
    "data_set_size": "No batch larger than the data set was proposed; samples in it: {count}.",
    STATE_REMAINS: (
        "Steps changed {attributes} of the module, which cannot be restored: batch sizes did not start from the same "
        "state. Reset it in forward()."
    ),
    "data_dependent": "Sizes of the results of {operators} depend on data: the memory prediction is less certain.",
    "batch_as_time": (
        "{first} reads axis 0 of its input as time, but the batch is axis 0, so that batch sizes are lengths of "
        "sequences (such parts: {count}). With batch_first=True it reads (batch, time, features)."
    ),
    "loader_unknown": "The rate of the data loader is unknown: it raised {error}.",
    "loop_failed": (
        "The loop of data loader and step could not be run ({error}): its rate is computed from those of both."
    ),
    "compiled": (
        "Compilation took {compile_seconds} (batch sizes compiled: {count}). The first time, and up to 10 s or half "
        "the budget if that is more, do not count towards the budget."
    ),
    "compiled_without_one": (
        "A batch of 1 was left out, since torch.compile compiles it separately from all others. To measure it, name it "
        "in batch_sizes."
    ),
    "compiled_for_each_size": (
        "The module was compiled separately for {count} batch sizes, which took {compile_seconds}: its code depends on "
        "the batch size beyond shapes. So few sizes were tried; name the sizes of interest in batch_sizes."
    ),
    # --- memory
    "memory_lowered": "Memory is limited to {limit_bytes}: {reason}.",
    "memory_held": "{message}",
    "memory_not_watched": ("memory_limit was not watched: no library that reports its memory is loaded and has a GPU."),
    "memory_not_bounded": "Memory was not bounded before measuring: {reason}.",
    "largest_unknown": (
        "The largest batch size that fits is unknown: the memory of a step could not be traced, and the sizes that ran "
        "took too little of it. Raise max_batch_size or budget."
    ),
    "largest_unchecked": (
        "By a trace alone {most} samples fit, but the sizes that ran took too little memory to check that. List larger "
        "batch_sizes to check it."
    ),
    "memory_measured": (
        "Memory was predicted from measured steps alone: {reason}. It is unknown below the smallest of them."
    ),
    # --- the device and its ranks
    "no_tensor_cores": "{device} has no Tensor Cores for {dtype}: values are stored in it, arithmetic is float32.",
    "ranks": "{count} ranks were measured together; sizes and rates are those of one of them.",
    "shared_step": "{cost}. Sizes and rates above are those of one of them.",
    "shared_step_unknown": (
        "Sizes and rates above are those of one of {count} devices; the cost of sharing a step is not known: {error}"
    ),
}


@attrs.frozen
class Note:
    """A fact that a user should know; made by `note`."""

    code: str  # the kind of fact: a key of the table of texts in this module
    # its numbers and names; names of sizes, times and shares end in `_bytes`, `_seconds`, `_share`
    values: Mapping[str, Any]

    @property
    def is_warning(self) -> bool:
        """Whether the note is shown as a warning, right after the recommendation."""
        return self.code in WARNINGS

    @property
    def is_condition(self) -> bool:
        """Whether the recommendation holds on a condition only, which the note asks the user to check."""
        return self.code in CONDITIONS

    @property
    def withholds(self) -> bool:
        """Whether the note prevents a recommendation, so that the result's `batch_size` is None."""
        return self.code in WITHHOLDS


def note(code: str, **values: Any) -> Note:
    """
    Return the note of a code, with the values that its text names.

    Raises:
        ValueError: If the code is unknown or its values are not those that its text names.
    """
    names = {name for _, name, _, _ in string.Formatter().parse(_TEXT.get(code, "")) if name}
    if code not in _TEXT or names != values.keys():
        expected = f"its text takes {sorted(names)}" if code in _TEXT else "there is no such note"
        raise ValueError(f"note {code!r} with values {sorted(values)}: {expected}")
    return Note(code, values)


def measure_again(run: int, path: Path | None) -> str:
    """Return a phrase on how to measure a cached run again; `path` is its store, None for the default one."""
    if path is None:
        return "--fresh (store='refresh') measures again"
    return f"after `cubatch store clear {run} --store {shlex.quote(str(path))}` the same call measures again"


def of_remark(remark: Remark) -> Note:
    """Return the note of a runner's remark, which has a code and values."""
    return note(remark["code"], **remark["values"])


def sentence(given: Note) -> str:
    """
    Return the text of a note for a user.

    Example:
        >>> sentence(note("memory_lowered", limit_bytes=2**30, reason="2 ranks share it"))
        'Memory is limited to 1.00 GiB: 2 ranks share it.'
    """
    return _TEXT[given.code].format_map({name: _format(name, value) for name, value in given.values.items()})


def _format(name: str, value: Any) -> Any:
    for suffix, formatted in _FORMATS.items():
        if name.endswith(suffix):
            return formatted(value)
    return value


_FORMATS = {"_bytes": format_bytes, "_seconds": format_seconds, "_share": format_whole_percent}


def memory_notes(memory: MemoryLimit) -> list[Note]:
    """Return notes about a memory limit below the requested one, and about other processes that hold device memory."""
    notes = []
    if memory.is_lowered:
        notes.append(note("memory_lowered", limit_bytes=memory.bytes, reason=memory.note))
    if memory.others:
        notes.append(note("memory_held", message=memory.others))
    return notes


def interference(load: CpuLoad, threads: int) -> Note | None:
    """
    Return a note about CPU time of other processes during a measurement; None if it is too little to matter.

    Args:
        load: The CPU time of other processes.
        threads: Threads of the measured step. If fewer threads would have had CPUs of their own, the note names an
            affinity mask, from which every library counts its threads.
    """
    is_stolen = load.steal >= _STEAL_SHARE
    if load.others < _OTHER_CPUS:
        return note("cpus_stolen", stolen_share=load.steal) if is_stolen else None
    steal = format_whole_percent(load.steal)
    stolen = f", and the hypervisor took {steal} of the CPU time (steal)" if is_stolen else ""
    left, fewer = max(1, int(load.num_cpus - load.others + _ROUNDED_AWAY)), ""
    if left < threads:
        names = ",".join(map(str, sorted(os.sched_getaffinity(0))[:left]))
        fewer = f", or measure on {_cpus(left)} (start the command with taskset --cpu-list {names}),"
    return note("cpus_busy", busy=f"{load.others:.1f}", cpus=_cpus(load.num_cpus), stolen=stolen, fewer=fewer)


def _cpus(count: int) -> str:
    return format_counted(count, "CPU")
