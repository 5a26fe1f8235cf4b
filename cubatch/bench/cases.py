"""
What is measured: one call of one of the engine's operations, with what it computes and moves.

A case names its arrays.  So it can be built on any array module, cut down to a sample of its results for a check, and
described without memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import attrs

from cubatch.bench.calls import BUILDERS, VARIANTS, Operand
from cubatch.errors import InvalidArgument, UnknownName
from cubatch.hardware.arithmetic import peak_flops_per_second
from cubatch.hardware.facts import BYTES_PER_ELEMENT, Device
from cubatch.network import layers as kinds
from cubatch.network.layer import Layer, extents, without_bias
from cubatch.network.passes import Pass, linear_of

_PASSES = {pass_.layout: pass_ for pass_ in Pass}
LAYOUTS = tuple(sorted(_PASSES))
_EPILOGUE = {
    "b": "bias", "db": "bias gradient", "scale": "scale", "shift": "shift", "residual": "residual", "positive": "mask",
    "statistics": "statistics",
}  # fmt: skip
_LEFT_OUT = {"type", "h", "w", "c", "k", "r", "s", "bias", "eps", "momentum"}
"""Of a case's name: what is written in another way, or changes nothing that is measured."""


@attrs.frozen(kw_only=True, eq=False)
class Case:
    """
    A call of an operation.

    Attributes:
        name: In words, unique among the cases of a run: "conv2d 56x56x64 to 64, 3x3, pad 1, n=32, fprop".
        operation: Its name in `engine.functional`.
        pass_: Which product of a layer it is; None for what is no pass.
        layer: The layer, without name and bias; None for what is no layer.
        batch_size: Samples, or the extent that plays them.
        dtype: Storage of the elements; "tf32" is float32 whose products may be made on tensor cores.
        operands: Arrays by name.
        arguments: Names of what goes by position; a tuple of names goes as a list, in which None stays None.
        results: Names of what is written: those not among `arguments` go by keyword.
        lists: Keywords that take several arrays: their names.
        aliases: Keywords that name an array again, which the operation works in place on.
        options: Further keywords.
        prepare: The forward pass that fills in what a backward pass finds saved; empty where nothing follows from
            other arrays.
        flops: A multiply-add is two.
        traffic_bytes: Every array moved once: what the roofline counts.
        moved_bytes: What passes over data that is needed whole before it is needed again really move.
        updates: Names of results that are read too, in addition to those among `arguments`.
        terms: Longest sum behind a result.
        cuts: Ways to take a sample: axis of each operand by a name for what is cut.
        multiplicity: How often a network has it.
        layers: Names of the layers that have it.
    """

    name: str
    operation: str
    pass_: Pass | None = None
    layer: Layer | None = None
    batch_size: int = 1
    dtype: str = "float32"
    operands: Mapping[str, Operand]
    arguments: tuple[str | tuple[str | None, ...], ...]
    results: tuple[str, ...] = ("out",)
    lists: Mapping[str, tuple[str, ...]] = attrs.field(factory=dict)
    aliases: Mapping[str, str] = attrs.field(factory=dict)
    options: Mapping[str, Any] = attrs.field(factory=dict)
    prepare: str = ""
    flops: int = 0
    traffic_bytes: int
    moved_bytes: int
    updates: tuple[str, ...] = ()
    terms: int = 1
    cuts: Mapping[str, Mapping[str, int]] = attrs.field(factory=dict)
    multiplicity: int = 1
    layers: tuple[str, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Bytes of all its arrays."""
        return sum(math.prod(o.shape) * self.itemsize(name) for name, o in self.operands.items())

    def dtype_of(self, name: str) -> str:
        """Return the storage type of one of its arrays."""
        return self.operands[name].dtype or self.dtype

    def itemsize(self, name: str) -> int:
        """Return the bytes of an element of one of its arrays."""
        return {"uint8": 1, "int32": 4, **BYTES_PER_ELEMENT}[self.dtype_of(name)]

    def reads(self, name: str) -> bool:
        """Return whether an array is read: such a result is written over."""
        return name in self._by_position or name in self.updates or name not in self.results

    @property
    def kind(self) -> str:
        """Kind of operation, by which the times of a step are added up: "conv2d", "gelu backward"."""
        if self.operation.startswith("activation"):
            return f"{self.options['kind']}{' backward' if self.operation.endswith('backward') else ''}"
        # Depthwise convolutions have kernels of their own, bound by bytes: a page adds them up apart.
        shape = None if self.layer is None else self.layer.convolution
        is_depthwise = shape is not None and 1 < shape.groups == shape.c
        return ("depthwise " if is_depthwise else "") + self.operation.replace("_", " ")

    @property
    def epilogue(self) -> tuple[str, ...]:
        """Terms that the operation applies to its result, or makes of it, while it is at hand."""
        names = {*self.operands} - ({"statistics"} - {*self.results})  # a backward pass reads statistics
        found = tuple(term for name, term in _EPILOGUE.items() if name in names)
        return (*found, "relu") if self.options.get("relu") else found

    @property
    def _by_position(self) -> set[str | None]:
        return {part for name in self.arguments for part in ([name] if isinstance(name, str) else name)}

    def call(self, operations: Any, arrays: Mapping[str, Any], **changes: Any) -> None:
        """
        Call the operation.

        Args:
            operations: What holds it by name: `engine.functional`, or its twin on our kernels.
            arrays: By name.
            changes: Options that differ from the case's.
        """
        given = [
            arrays[name] if isinstance(name, str) else [None if part is None else arrays[part] for part in name]
            for name in self.arguments
        ]
        listed = {part for names in self.lists.values() for part in names}
        by_keyword = {name: arrays[name] for name in self.operands if name not in self._by_position | listed}
        by_keyword |= {keyword: [arrays[name] for name in names] for keyword, names in self.lists.items()}
        by_keyword |= {keyword: arrays[name] for keyword, name in self.aliases.items()}
        getattr(operations, self.operation)(*given, **by_keyword, **{**self.options, **changes})

    def unpadded(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arrays without channels that are only stored: what NumPy and other libraries are given."""
        cut = {name: self.operands[name].padded for name in arrays if name in self.operands}
        return {name: array[..., : -cut[name]].copy() if cut.get(name) else array for name, array in arrays.items()}

    def roofline_seconds(self, device: Device) -> float | None:
        """
        Bound its time from below: the larger of arithmetic at the peak and every array moved once.

        Returns:
            float | None: None where a rate that counts is not known.
        """
        peak, bandwidth = peak_flops_per_second(device, self.dtype), device.peak_bytes_per_second
        if bandwidth is None or (self.flops and peak is None):
            return None
        return max(self.flops / peak if peak else 0.0, self.traffic_bytes / bandwidth)

    def bound(self, device: Device) -> str | None:
        """Return which roof it lies under: "compute", "memory", or None where a rate is not known."""
        found = self.roofline_seconds(device)
        if found is None:
            return None
        return "memory" if found == self.traffic_bytes / (device.peak_bytes_per_second or 1) else "compute"

    def to_mapping(self) -> dict[str, Any]:
        """Return what identifies it, for JSON."""
        options = dict(self.options)
        if "window" in options:
            options |= options.pop("window")._asdict()
        return {
            "name": self.name,
            "operation": self.operation,
            "pass": self.pass_.value if self.pass_ else None,
            "layer": self.layer.to_mapping() if self.layer else None,
            "batch_size": self.batch_size,
            "dtype": self.dtype,
            "epilogue": list(self.epilogue),
            "options": {name: list(value) if isinstance(value, tuple) else value for name, value in options.items()},
            "flops": self.flops,
            "traffic_bytes": self.traffic_bytes,
            "moved_bytes": self.moved_bytes,
            "multiplicity": self.multiplicity,
            "layers": list(self.layers),
        }


def gemm(m: int, n: int, k: int, *, layout: str = "nt", dtype: str = "float32") -> Case:
    """
    Return a matrix product (m, k) x (k, n): a linear layer's pass, which is what the engine calls it for.

    Args:
        m, n, k: Extents.
        layout: "nt": (m, k) times the transpose of (n, k), a layer's output; "nn": (m, k) times (k, n), the
            gradient of its input; "tn": the transpose of (k, m) times (k, n), the gradient of its filter.
        dtype: Storage of the elements.

    Raises:
        InvalidArgument: If an extent is no whole number of at least 1, or there is no such layout.

    Example:
        >>> gemm(64, 32, 16, layout="tn").name, gemm(64, 32, 16).flops
        ('gemm tn 64 x 32 x 16', 65536)
    """
    for name, extent in (("m", m), ("n", n), ("k", k)):
        if isinstance(extent, bool) or not isinstance(extent, int) or extent < 1:
            raise InvalidArgument(name, extent, "a whole number of at least 1")
    if layout not in LAYOUTS:
        raise InvalidArgument("layout", layout, "one of " + ", ".join(LAYOUTS))
    pass_ = _PASSES[layout]
    rows, c, features = linear_of(pass_, m, n, k)
    found = of_layer(kinds.Linear(c=c, k=features, bias=False), pass_, rows, dtype)
    return attrs.evolve(found, name=f"gemm {layout} {m} x {n} x {k}{of_dtype(dtype)}")


def of_layer(
    layer: Layer, pass_: Pass, batch_size: int, dtype: str = "float32", *, with_bias: bool = False, mode: str = ""
) -> Case:
    """
    Return one pass of a layer at a batch size, with nothing fused.

    Args:
        layer: With its extents known. The dgrad of a layer that has no wgrad of its own gives all gradients.
        pass_: Which product.
        batch_size: Samples.
        dtype: Storage of the elements.
        with_bias: Whether a layer's bias takes part.
        mode: Whose forward pass: "training" or "inference". By default that of either which is timed most: batch norm
            and max pooling in training, attention and layer norm in inference.

    Raises:
        InvalidArgument: If the layer has no such pass, or none that the engine computes.

    Example:
        >>> from cubatch.network.layers import Conv2d
        >>> conv = Conv2d(h=56, w=56, c=64, k=64, r=3, s=3, pad=1)
        >>> of_layer(conv, Pass.FPROP, 32).name
        'conv2d 56x56x64 to 64, 3x3, pad 1, n=32, fprop'
    """
    if dtype not in BYTES_PER_ELEMENT or dtype == "float64":
        raise UnknownName("dtype", dtype, [name for name in BYTES_PER_ELEMENT if name != "float64"])
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise InvalidArgument("batch_size", batch_size, "a whole number of at least 1")
    build = (VARIANTS.get((type(layer), mode)) if pass_ is Pass.FPROP else None) or BUILDERS.get((type(layer), pass_))
    if build is None:
        raise InvalidArgument(
            "layer", f"{layer.type}, {pass_.value}", "a layer and pass that the engine has a kernel for"
        )
    plain = extents(layer) if with_bias else without_bias(extents(layer))
    facts = build(plain, batch_size)
    suffix = facts.pop("suffix", "")
    itemsize = BYTES_PER_ELEMENT[dtype]
    flops = facts.pop("flops", plain.pass_flops(pass_, batch_size))
    traffic = facts.pop("traffic", plain.traffic(pass_, batch_size)) * itemsize
    more = facts.pop("repeated", 0) * itemsize + facts.pop("extra_bytes", 0)
    return Case(
        name=f"{_of_layer(plain)}, n={batch_size}, {pass_.value}{of_dtype(dtype)}{suffix}",
        pass_=pass_,
        layer=plain,
        batch_size=batch_size,
        dtype=dtype,
        flops=flops,
        traffic_bytes=traffic,
        moved_bytes=traffic + more,
        **facts,
    )


def has_case(layer: Layer, pass_: Pass, mode: str = "") -> bool:
    """Return whether a layer has a pass that can be measured by itself, or a forward pass that differs in a mode."""
    return (type(layer), mode) in VARIANTS and pass_ is Pass.FPROP if mode else (type(layer), pass_) in BUILDERS


def of_dtype(dtype: str) -> str:
    """Write a dtype behind a name; float32 is left out."""
    return "" if dtype == "float32" else f", {dtype}"


def _of_layer(layer: Layer) -> str:
    """Write a layer's extents as a person would: what is usual is left out."""
    h, w, c = layer.input_shape
    facts = layer.to_mapping()
    text = f"{layer.type} {h}x{w}x{c}"
    if "k" in facts:
        text += f" to {facts['k']}"
    if "r" in facts:
        text += f", {facts['r']}x{facts['s']}"
    if getattr(layer, "bias", False):
        text += ", bias"
    others = [name for name in facts if name not in _LEFT_OUT]
    return text + "".join(f", {name}" if facts[name] is True else f", {name} {facts[name]}" for name in others)
