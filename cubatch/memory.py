"""
What fits: the footprint of a step, the largest batch for some memory, and the rules people go by.

All of it is read off the plan that the engine follows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import attrs

from cubatch import models, probe, report
from cubatch.errors import DoesNotFit, InvalidArgument, UnsupportedDtype
from cubatch.hardware import BYTES_PER_ELEMENT, Device
from cubatch.kinds import Flatten
from cubatch.layer import check_mode
from cubatch.models import SpecLike
from cubatch.plan import STATE_COPIES, Plan, buffer_sizes, bytes_alive, fixed_bytes, plan, schedule_of, shards
from cubatch.spec import INPUT, Spec
from cubatch.units import format_bytes, format_count, parse_bytes
from cubatch.waves import check_whole

LIBRARIES = ("auto", "cubatch", "im2col")
MAX_BATCH_SIZE = 2**31 - 1
_REACH = 16


@attrs.frozen(kw_only=True)
class Rule:
    """
    A rule of thumb beside the computed answer.

    Attributes:
        name: What the rule is known as.
        formula: The rule in words.
        value: What it gives.
        computed: What the memory plan gives for the same question.
        unit: "bytes", "elements" or "samples".
    """

    name: str
    formula: str
    value: float
    computed: float
    unit: str

    @property
    def error(self) -> float:
        """How far the rule is off, relative to the plan: 0.1 is ten percent too high."""
        return self.value / self.computed - 1 if self.computed else float("inf")

    def to_mapping(self) -> dict[str, Any]:
        """Give the rule and its error as a plain mapping."""
        return attrs.asdict(self) | {"error": self.error}


@attrs.frozen(kw_only=True)
class Footprint:
    """
    All device memory of one configuration, in bytes.

    Attributes:
        weights: Parameters and running statistics.
        gradients: Gradients of the parameters; 0 in inference.
        optimizer: The optimiser's state; with 16-bit weights also the float32 master weights, and the loss's scale.
        activations: The batch and every layer's output and saved values, each buffer once.
        activation_gradients: Gradients of outputs, each buffer once.
        workspace: Scratch of the kernels, each buffer once.
        total: The plan's peak: what is really taken, since buffers share memory when their lifetimes allow.
        elements_per_sample: The textbook count: input and layer outputs, in training also the gradients of
            the outputs, neither flatten nor in-place layers counted again.
        peak_layer: The layer during whose pass the most is alive.
        batch_size: Samples per step.
        layers: One mapping per layer: name, type, output shape, parameters, bytes by part.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    activation_gradients: int
    workspace: int
    total: int
    elements_per_sample: int
    peak_layer: str
    batch_size: int
    layers: tuple[dict[str, Any], ...]

    def to_mapping(self) -> dict[str, Any]:
        """Give the footprint as a plain mapping, for JSON."""
        return attrs.asdict(self) | {"layers": [dict(layer) for layer in self.layers]}

    def __str__(self) -> str:
        """Give the table, so that print shows what a person wants to know."""
        return self.table()

    def table(self) -> str:
        """Write the footprint by part and by layer as text."""
        parts = ("weights", "gradients", "optimizer", "activations", "activation_gradients", "workspace")
        rows = [[part.replace("_", " "), format_bytes(getattr(self, part))] for part in parts]
        notes = [
            f"peak {format_bytes(self.total)} at {self.peak_layer}; buffers share memory when their lifetimes allow",
            (
                f"textbook count: {format_count(self.elements_per_sample)} elements per sample, "
                f"{format_count(self.elements_per_sample * self.batch_size)} in all"
            ),
        ]
        title = f"batch {self.batch_size}"
        by_part = report.grid({"title": title, "columns": ["part", "bytes"], "rows": rows, "notes": notes})
        columns = ["layer", "type", "output", "parameters", "activations", "gradients", "workspace"]
        by_layer = [
            [
                layer["name"],
                layer["type"],
                "x".join(str(extent) for extent in layer["output_shape"]),
                format_count(layer["parameters"]),
                *(format_bytes(layer[part]) for part in ("activations", "activation_gradients", "workspace")),
            ]
            for layer in self.layers
        ]
        return by_part + "\n" + report.grid({"title": "by layer", "columns": columns, "rows": by_layer, "notes": []})


def resolve_library(library: str, device: Device, dtype: str = "float32") -> str:
    """
    Say which kernels "auto" stands for: our own on a GPU whose facts are known, else a BLAS.

    Args:
        library: "auto", "cubatch" or "im2col".
        device: What it is to run on.
        dtype: What is to be computed with, which the device takes; a BLAS takes float32 only, since between its
            products everything would be rounded to 16 bits where kernels sum in float32.

    Raises:
        InvalidArgument: If the library is unknown, or not for this device or dtype.

    Example:
        >>> resolve_library("auto", probe.device("v100-sxm2-16gb"), "float16")
        'cubatch'
    """
    if not isinstance(library, str) or library not in LIBRARIES:
        raise InvalidArgument("library", library, "one of " + ", ".join(LIBRARIES))
    if library == "cubatch" and device.kind == "cpu":
        raise InvalidArgument("library", library, '"im2col" or "auto"', "The kernels of cubatch need an NVIDIA GPU.")
    if library == "auto":
        known = device.num_sms is not None and device.compute_capability is not None
        library = "cubatch" if device.kind == "cuda" and known else "im2col"
        if library == "im2col" and device.kind == "cuda" and dtype != "float32":
            wanted = f"a GPU whose num_sms and compute_capability are known, to compute in {dtype}"
            raise InvalidArgument("device", str(device), wanted)
    if library == "im2col" and dtype != "float32":
        remedy = 'On a GPU, library="cubatch" takes it.'
        raise UnsupportedDtype(dtype, 'library="im2col"', ("float32",), remedy)
    return library


def _checked(
    spec: SpecLike, *, mode: str, dtype: str, optimizer: str, device: Device | str | None, library: str
) -> tuple[Spec, Device, str]:
    """Resolve a spec, a device and a library, and check the words beside them."""
    check_mode(mode)
    if not isinstance(optimizer, str) or optimizer not in STATE_COPIES:
        raise InvalidArgument("optimizer", optimizer, "one of " + ", ".join(STATE_COPIES))
    found = probe.resolve(device, live=False)
    probe.check_dtype(found, dtype)
    library = resolve_library(library, found, dtype)
    return models.resolve(spec), found, library


def check_batch_size(value: int, name: str = "batch_size") -> int:
    """Return a batch size, or raise InvalidArgument."""
    return check_whole(name, value, most=MAX_BATCH_SIZE)


def footprint(
    spec: SpecLike,
    *,
    batch_size: int = 256,
    mode: str = "training",
    dtype: str = "float32",
    optimizer: str = "sgd",
    recompute: bool = False,
    device: Device | str | None = None,
    library: str = "auto",
) -> Footprint:
    """
    Compute all memory that a step takes, by part and by layer.

    This is the plan that the engine follows, not an estimate; what the CUDA context and the vendor's
    libraries hold beside it is not in it.

    Args:
        spec: A layer, a network, a mapping, a model's name or a path to a spec file.
        batch_size: Samples per step.
        mode: "inference" or "training".
        dtype: Storage of activations and parameters.
        optimizer: "sgd", "momentum" or "adam"; counts in training only.
        recompute: Forget activations and compute them again in the backward pass.
        device: The GPU or CPU whose workspace rule holds; None is this machine's.
        library: Which kernels, see `autotune`.

    Returns:
        Footprint: Bytes by part, the peak, and the textbook count.

    Raises:
        InvalidArgument: If an argument is out of range (also a ValueError).

    Example:
        >>> print(footprint("mlp", batch_size=256, mode="training", device="cpu").elements_per_sample * 256)
        465920
    """
    size = check_batch_size(batch_size)
    spec, found, library = _checked(spec, mode=mode, dtype=dtype, optimizer=optimizer, device=device, library=library)
    options: dict[str, Any] = {"mode": mode, "dtype": dtype, "optimizer": optimizer, "recompute": recompute}
    whole = plan(spec, batch_size=size, device=found, library=library, **options)
    program = whole.schedule
    parts = dict.fromkeys(("activations", "activation_gradients", "workspace"), 0)
    by_node = {name: dict(parts) for name in [INPUT, *(node.name for node in program.network.nodes)]}
    for buffer, shard_bytes in zip(program.buffers, whole.sizes, strict=True):
        held = whole.members * whole.copies * shard_bytes
        parts[buffer.part] += held
        by_node[buffer.node][buffer.part] += held
    alive = bytes_alive(list(whole.sizes), program.lifetimes, len(program.ops))
    peak = max(range(len(alive)), key=alive.__getitem__, default=0)
    node = program.ops[peak].node if program.ops else None
    itemsize = BYTES_PER_ELEMENT[dtype]
    shape = program.network.input_shape
    layers = [{"name": INPUT, "type": INPUT, "output_shape": shape, "parameters": 0, "weights": 0}]
    layers += [
        {
            "name": node.name,
            "type": node.layer.type,
            "output_shape": node.layer.output_shape,
            "parameters": node.layer.parameters,
            "weights": node.layer.parameters * itemsize,
        }
        for node in program.network.nodes
    ]
    return Footprint(
        weights=whole.weight_bytes,
        gradients=whole.gradient_bytes,
        optimizer=whole.optimizer_bytes,
        **parts,
        total=whole.total,
        elements_per_sample=textbook_elements(spec, mode),
        peak_layer=node.name if node else program.network.nodes[-1].name,
        batch_size=size,
        layers=tuple(layer | by_node[str(layer["name"])] for layer in layers),
    )


def textbook_elements(spec: Spec, mode: str) -> int:
    """
    Count a sample's elements as textbooks do: input, every layer's output, in training their gradients.

    Layers that are another view of their input or commonly work in place (flatten, dropout,
    activations) are not counted again.  For `mlp` that is 1410, with gradients 1820.
    """
    network = schedule_of(spec, mode, recompute=False).network
    outputs = sum(
        math.prod(node.layer.output_shape)
        for node in network.nodes
        if not (node.layer.elementwise or isinstance(node.layer, Flatten))
    )
    return math.prod(network.input_shape) + outputs * (2 if mode == "training" else 1)


def max_batch_size(
    spec: SpecLike,
    memory: int | str,
    *,
    mode: str = "training",
    dtype: str = "float32",
    optimizer: str = "sgd",
    recompute: bool = False,
    device: Device | str | None = None,
    library: str = "auto",
) -> int:
    """
    Compute the largest batch whose plan fits into some memory.

    Args:
        spec: A layer, a network, a mapping, a model's name or a path to a spec file.
        memory: Bytes that may be taken, "12GiB", or "80%" of what is free on the device.
        mode, dtype, optimizer, recompute, device, library: As for `footprint`.

    Returns:
        int: The largest batch size, any integer, not only powers of two.

    Raises:
        DoesNotFit: If not even one sample fits (also a MemoryError).
        InvalidArgument: If an argument is out of range.

    Example:
        >>> options = {"mode": "training", "device": "v100-sxm2-16gb"}
        >>> most = max_batch_size("resnet50", "12GiB", **options)
        >>> totals = [footprint("resnet50", batch_size=n, **options).total for n in (most, most + 1)]
        >>> totals[0] <= 12 * 2**30 < totals[1]
        True
    """
    spec, found, library = _checked(spec, mode=mode, dtype=dtype, optimizer=optimizer, device=device, library=library)
    limit = limit_bytes(memory, found)
    program = schedule_of(spec, mode, recompute)
    spans = program.lifetimes

    def bound(size: int) -> int:
        members, shard = shards(size, found)
        sizes = buffer_sizes(program, shard, dtype, found, library)
        alive = max(bytes_alive(sizes, spans, len(program.ops)), default=0)
        return sum(fixed_bytes(program, dtype, optimizer, members).values()) + members * alive

    def planned(size: int) -> Plan:
        return plan(
            spec,
            batch_size=size,
            mode=mode,
            dtype=dtype,
            optimizer=optimizer,
            recompute=recompute,
            device=found,
            library=library,
        )

    def fits(size: int) -> bool:
        return bound(size) <= limit and planned(size).total <= limit

    if not fits(1):
        raise DoesNotFit(str(spec), str(found), planned(1).total, limit, mode)
    # No placement is below the bytes alive, which are cheap to count: bisect on those, then step down.
    size = _bisect(bound, limit, 1)
    low = 1
    while size > low:
        laid_out = planned(size)
        if laid_out.total <= limit:
            break
        fixed = laid_out.fixed_bytes
        size = max(low, min(size - 1, int(size * (limit - fixed) / (laid_out.total - fixed))))
    return size if size == MAX_BATCH_SIZE else _climb(fits, size)


def limit_bytes(memory: int | str, device: Device) -> int:
    """Read a size; a percentage is one of what is free on the device."""
    if isinstance(memory, str) and memory.strip().endswith("%"):
        return probe.memory_limit(device, memory).bytes
    try:
        return parse_bytes(memory)
    except (ValueError, OverflowError) as error:
        raise InvalidArgument("memory", memory, "a size in bytes or text such as '12GiB'", str(error)) from None


def _bisect(cost: Callable[[int], int], limit: int, low: int) -> int:
    """Return the largest size whose cost is within the limit; `low` is known to fit, the cost to grow."""
    high = low
    while high < MAX_BATCH_SIZE and cost(high) <= limit:
        low, high = high, min(2 * high, MAX_BATCH_SIZE)
    if cost(high) <= limit:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if cost(middle) <= limit else (low, middle)
    return low


def _climb(fits: Callable[[int], bool], size: int) -> int:
    """
    Step up from a size that fits: the proportional step down may have passed a few that fit too.

    Placement is greedy, so a size may fit where one a little smaller does not: some are tried beyond the first.
    """
    while size + _REACH <= MAX_BATCH_SIZE and fits(size + _REACH):
        size += _REACH
    following = size + 1
    while following <= min(size + _REACH, MAX_BATCH_SIZE):
        if fits(following):
            size = following
        following += 1
    return size


def rules_of_thumb(
    spec: SpecLike,
    *,
    batch_size: int = 256,
    memory: int | str | None = None,
    mode: str = "training",
    dtype: str = "float32",
    optimizer: str = "sgd",
    recompute: bool = False,
    device: Device | str | None = None,
    library: str = "auto",
) -> list[Rule]:
    """
    Give the rules that people go by, beside what the plan computes.

    Args:
        spec: A layer, a network, a mapping, a model's name or a path to a spec file.
        batch_size: For the rules about a given batch.
        memory: For the rule about the largest batch; left out without it.
        mode, dtype, optimizer, recompute, device, library: As for `footprint`.

    Returns:
        list[Rule]: Name, formula, value, the plan's value, and the error.

    Raises:
        InvalidArgument: If a word or a number makes no sense.
        DoesNotFit: If not even one sample fits into `memory`.

    Example:
        >>> rules_of_thumb("mlp", batch_size=256, device="cpu")[0].value
        465920
    """
    resolved = models.resolve(spec)
    options: dict[str, Any] = {
        "mode": mode, "dtype": dtype, "optimizer": optimizer, "recompute": recompute, "device": device,
        "library": library,
    }  # fmt: skip
    whole = footprint(resolved, batch_size=batch_size, **options)
    itemsize = BYTES_PER_ELEMENT[dtype]
    elements = textbook_elements(resolved, mode)
    buffers = whole.activations + whole.activation_gradients
    disk = 4 * resolved.parameters
    rules = [
        Rule(
            name="textbook count",
            formula="batch x (input + layer outputs, and their gradients in training)",
            value=elements * whole.batch_size,
            computed=buffers / itemsize,
            unit="elements",
        )
    ]
    rules += [
        Rule(name=name, formula=formula, value=factor * disk, computed=whole.total, unit="bytes")
        for name, formula, factor in (
            ("2x the file", "twice the size of the weights on disk", 2),
            ("3x the file", "weights, gradients and momentum, each the size of the file", 3),
            ("4.5x the file", "as once measured: what is beyond 3x are activations and workspace", 4.5),
        )
    ]
    if memory is not None:
        most = max_batch_size(resolved, memory, **options)
        limit = limit_bytes(memory, probe.resolve(device, live=False))
        rules.append(
            Rule(
                name="max batch formula",
                formula="memory bytes / 4 / (tensor sizes + trainable parameters)",
                value=limit // 4 // (textbook_elements(resolved, mode) + resolved.parameters),
                computed=most,
                unit="samples",
            )
        )
    return rules
