"""
Anchors: tuning results that correct a prediction.

Results that are unrelated to the prediction are rejected here; `sharpen` applies the others.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import attrs

from cubatch.errors import InvalidArgument
from cubatch.estimate.expected import missing_facts, takes_time
from cubatch.estimate.predictions import Z90
from cubatch.hardware import catalogue
from cubatch.hardware.facts import Device
from cubatch.network.graph import as_network
from cubatch.network.models import resolve
from cubatch.tuning.results import Measurement, TuningResult, load
from cubatch.workload import Workload

MEASURED_SD = 0.02
"""Least standard deviation of the logarithm of a median, however equal its timings: another board, another day."""
FEW_SD = 0.1
"""The same for fewer than five timings, which have no interval: judgement."""
_OF_OTHERS = ("torch", "onnxruntime")  # libraries that the model does not know


def gpu_of(work: Workload) -> str:
    """Return an identifier of the GPU: its name in the catalogue, else its UUID, else its name."""
    return work.device.slug or work.device.uuid or work.device.name


def source_of(work: Workload) -> tuple[str, str]:
    """Return (library, dtype), on which the GPU's correction factors depend."""
    return work.library, work.dtype


def work_of(work: Workload) -> str:
    """Return the spec and settings of a workload as JSON; predictions of workloads with equal text share an error."""
    mapping = {name: value for name, value in work.spec.to_mapping().items() if name != "name"}
    settings = [work.mode, work.library, work.dtype, work.is_recomputed, sorted(work.experimental)]
    return json.dumps([mapping, *settings], sort_keys=True)


@attrs.frozen
class Anchor:
    """A tuning result that corrects predictions, reduced to the fields that the time model uses."""

    origin: str  # its file, or its place in the list, for errors and notes
    work: Workload  # the measured workload
    seconds: Mapping[int, float]  # measured seconds of a step by batch size, of sizes with the status "ok"
    sds: Mapping[int, float]  # standard deviation of the logarithm of these seconds, by batch size


def read(anchors: Iterable[TuningResult | str | Path], work: Workload) -> list[Anchor]:
    """
    Return tuning results, or files of them, as anchors: measurements that correct the prediction for a workload.

    Each argument gives one anchor, in their order.

    Raises:
        InvalidData: If a file is no tuning result of this schema.
        InvalidArgument: If a result is of a CPU, several GPUs, a MIG slice or an unknown GPU. Also if it is of a
            callable, a PyTorch module, ONNX Runtime or "im2col" convolutions, or has no measured time. Also if it has
            neither the GPU of the prediction nor its library and dtype.
    """
    if isinstance(anchors, str | Path | TuningResult) or not isinstance(anchors, Iterable):
        raise InvalidArgument("anchors", anchors, "a list of tuning results or paths to their JSON")
    return [_read(given, f"anchors[{place}]", work) for place, given in enumerate(anchors)]


def _read(given: TuningResult | str | Path, place: str, predicted: Workload) -> Anchor:
    result = given if isinstance(given, TuningResult) else load(given, place)
    origin = place if result is given else str(given)

    def refused(wanted: str, remedy: str = "") -> InvalidArgument:
        return InvalidArgument("anchors", origin, wanted, remedy)

    if result.spec is None or result.mode is None or result.dtype is None or result.library in _OF_OTHERS:
        raise refused("results of a layer or network", "The model does not cover a callable, a module or ONNX Runtime.")
    spec = resolve(result.spec)
    work = Workload(
        spec=spec,
        device=_device(result, predicted.device, refused),
        mode=result.mode,
        dtype=result.dtype,
        optimizer=result.optimizer or predicted.optimizer,
        library="cubatch" if result.library == "cubatch" else "vendor",
        recompute=bool(result.recompute),
    )
    if result.library == "im2col" and any(node.layer.convolution for node in as_network(spec).nodes):
        remedy = 'It gathers operands in memory, which no library does; tune with library="cubatch".'
        raise refused('results of another library than "im2col" where there are convolutions', remedy)
    if missing := missing_facts(work.device, work.dtype, work.library):
        remedy = "Leave them out, or describe this GPU with these facts in a device file and predict for that."
        raise refused(f"results of a GPU with known {', '.join(missing)}", remedy)
    if not takes_time(work):
        raise refused("results of a layer or network that computes or moves data")
    seconds, sds = dict[int, float](), dict[int, float]()
    for m in result.measurements:
        if m.status == "ok" and m.latency_seconds is not None:
            seconds[m.batch_size], sds[m.batch_size] = m.latency_seconds, _sd(m)
    if not seconds:
        raise refused('results with a measurement whose status is "ok"', "Tune again with a larger budget.")
    if gpu_of(work) != gpu_of(predicted) and source_of(work) != source_of(predicted):
        pairs = (("library", work.library, predicted.library), ("dtype", work.dtype, predicted.dtype))
        other = [(name, measured) for name, measured, wanted in pairs if measured != wanted]
        python, shell = ", ".join(f'{n}="{v}"' for n, v in other), " ".join(f"--{n} {v}" for n, v in other)
        raise refused(
            f"results of {predicted.device}, or of library {predicted.library} in {predicted.dtype}",
            f"This is {work.device} with {work.library} in {work.dtype}, which share nothing with it; "
            f"predict with {python} (`{shell}`) to learn from it.",
        )
    return Anchor(origin, work, seconds, sds)


def _sd(measurement: Measurement) -> float:
    if measurement.latency_interval is not None:
        low, high = measurement.latency_interval
        return max(MEASURED_SD, math.log(high / low) / (2 * Z90))
    timings = measurement.timings_seconds
    return max(FEW_SD, math.log(max(timings) / min(timings)) / 2 if timings else 0.0)


def _device(result: TuningResult, predicted: Device, refused: Callable[..., InvalidArgument]) -> Device:
    """Return the GPU of a result; raise the error that `refused` makes for a CPU, several GPUs or a MIG slice."""
    if result.data_parallel is not None or result.environment.get("devices"):
        raise refused("results of one GPU", "Leave this one out: several devices shared its steps.")
    facts = result.device
    name, uuid, num_sms = str(facts.get("name") or ""), facts.get("uuid"), facts.get("num_sms")
    if facts.get("kind") == "cpu":
        raise refused("results of a GPU", f"This one was measured on a CPU ({name}).")
    is_same = name == predicted.name and (facts.get("slug") or predicted.slug) == predicted.slug
    gpu = predicted if is_same or (uuid is not None and uuid == predicted.uuid) else _catalogued(facts, name, refused)
    if num_sms is not None and num_sms != gpu.num_sms:
        raise refused(f"results of a whole {gpu}, of {gpu.num_sms} SMs", f"This one was measured on {num_sms}.")
    return predicted if gpu.slug == predicted.slug else gpu


def _catalogued(facts: Mapping[str, Any], name: str, refused: Callable[..., InvalidArgument]) -> Device:
    """Return the GPU of the catalogue with these facts; raise the error that `refused` makes if there is none."""
    try:
        return catalogue.find(facts.get("slug") or name)
    except InvalidArgument as error:
        chip, memory_bytes = tuple(facts.get("compute_capability") or ()), facts.get("memory_bytes")
        gpu = catalogue.board(name, chip, facts.get("num_sms"), memory_bytes)
        if gpu is None:
            raise refused("results of a GPU that `cubatch devices` lists", f"{str(error).rstrip('.')}.") from error
        return gpu
