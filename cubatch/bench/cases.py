"""
What is measured: one call of one of the engine's operations, with what it computes and moves.

A case names its arrays, so that it can be built on any array module, cut down to a sample of its results for a
check, and described without any memory at all.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import attrs

from cubatch.bench.calls import BUILDERS, Operand
from cubatch.errors import InvalidArgument, UnknownName
from cubatch.hardware.arithmetic import peak_flops_per_second
from cubatch.hardware.facts import BYTES_PER_ELEMENT, Device
from cubatch.network import layers as kinds
from cubatch.network.graph import Network, layer_passes
from cubatch.network.layer import Layer, extents, without_bias
from cubatch.network.passes import Pass, linear_of

_PASSES = {pass_.layout: pass_ for pass_ in Pass}
LAYOUTS = tuple(sorted(_PASSES))
_LEFT_OUT = {"type", "h", "w", "c", "k", "r", "s", "bias", "eps", "momentum"}
"""Of a case's name: what is written in another way, or changes nothing that is measured."""


@attrs.frozen(kw_only=True, eq=False)
class Case:
    """
    One call of an operation.

    Attributes:
        name: In words, unique among the cases of a run: "conv2d 56x56x64 to 64, 3x3, pad 1, n=32, fprop".
        operation: Its name in `engine.functional`.
        pass_: Which product of a layer it is; None for what is no pass.
        layer: The layer, without name and bias; None for what is no layer.
        batch_size: Samples, or the extent that plays them.
        dtype: Storage of the elements; "tf32" is float32 whose products may be made on tensor cores.
        operands: Arrays by name.
        arguments: Names of what goes by position; a tuple of names goes as a list.
        results: Names of what is written: those not among `arguments` go by keyword.
        lists: Keywords that take several arrays: their names.
        options: Further keywords.
        prepare: The forward pass that fills in what a backward pass finds saved; empty where nothing follows from
            other arrays.
        flops: A multiply-add is two.
        traffic_bytes: Every array moved once: what the roofline counts.
        moved_bytes: What passes over data that is needed whole before it is needed again really move.
        updates: Names of results that are read too, beside those among `arguments`.
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
    arguments: tuple[str | tuple[str, ...], ...]
    results: tuple[str, ...] = ("out",)
    lists: Mapping[str, tuple[str, ...]] = attrs.field(factory=dict)
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
        """Give the storage type of one of its arrays."""
        return self.operands[name].dtype or self.dtype

    def itemsize(self, name: str) -> int:
        """Give the bytes of an element of one of its arrays."""
        return {"uint8": 1, "int32": 4, **BYTES_PER_ELEMENT}[self.dtype_of(name)]

    def reads(self, name: str) -> bool:
        """Tell whether an array is read: such a result is written over."""
        return name in self._by_position or name in self.updates or name not in self.results

    @property
    def _by_position(self) -> set[str]:
        return {part for name in self.arguments for part in ([name] if isinstance(name, str) else name)}

    def call(self, operations: Any, arrays: Mapping[str, Any], **changes: Any) -> None:
        """
        Call the operation.

        Args:
            operations: What holds it by name: `engine.functional`, or its twin on our kernels.
            arrays: By name.
            changes: Options that differ from the case's.
        """
        given = [arrays[name] if isinstance(name, str) else [arrays[part] for part in name] for name in self.arguments]
        listed = {part for names in self.lists.values() for part in names}
        by_keyword = {name: arrays[name] for name in self.operands if name not in self._by_position | listed}
        by_keyword |= {keyword: [arrays[name] for name in names] for keyword, names in self.lists.items()}
        getattr(operations, self.operation)(*given, **by_keyword, **{**self.options, **changes})

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
        """Say which roof it lies under: "compute", "memory", or None where a rate is not known."""
        found = self.roofline_seconds(device)
        if found is None:
            return None
        return "memory" if found == self.traffic_bytes / (device.peak_bytes_per_second or 1) else "compute"

    def to_mapping(self) -> dict[str, Any]:
        """Give what identifies it, for JSON."""
        return {
            "name": self.name,
            "operation": self.operation,
            "pass": self.pass_.value if self.pass_ else None,
            "layer": self.layer.to_mapping() if self.layer else None,
            "batch_size": self.batch_size,
            "dtype": self.dtype,
            "options": {
                name: list(value) if isinstance(value, tuple) else value for name, value in self.options.items()
            },
            "flops": self.flops,
            "traffic_bytes": self.traffic_bytes,
            "moved_bytes": self.moved_bytes,
            "multiplicity": self.multiplicity,
            "layers": list(self.layers),
        }


def gemm(m: int, n: int, k: int, *, layout: str = "nt", dtype: str = "float32") -> Case:
    """
    Give a matrix product (m, k) x (k, n): a linear layer's pass, which is what the engine calls it for.

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


def of_layer(layer: Layer, pass_: Pass, batch_size: int, dtype: str = "float32", *, with_bias: bool = False) -> Case:
    """
    Give one pass of a layer at a batch size, with nothing fused.

    Args:
        layer: With its extents known. Batch norm's fprop is that of training, attention's that of inference; their
            dgrad gives all gradients.
        pass_: Which product.
        batch_size: Samples.
        dtype: Storage of the elements.
        with_bias: Whether a layer's bias takes part; libraries are compared without.

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
    build = BUILDERS.get((type(layer), pass_))
    if build is None:
        raise InvalidArgument(
            "layer", f"{layer.type}, {pass_.value}", "a layer and pass that the engine has a kernel for"
        )
    plain = extents(layer) if with_bias else without_bias(extents(layer))
    facts = build(plain, batch_size)
    itemsize = BYTES_PER_ELEMENT[dtype]
    flops = facts.pop("flops", plain.pass_flops(pass_, batch_size))
    traffic = facts.pop("traffic", plain.traffic(pass_, batch_size)) * itemsize
    more = facts.pop("repeated", 0) * itemsize + facts.pop("extra_bytes", 0)
    return Case(
        name=f"{_of_layer(plain)}, n={batch_size}, {pass_.value}{of_dtype(dtype)}",
        pass_=pass_,
        layer=plain,
        batch_size=batch_size,
        dtype=dtype,
        flops=flops,
        traffic_bytes=traffic,
        moved_bytes=traffic + more,
        **facts,
    )


def left_out(network: Network) -> list[str]:
    """
    Name the kinds of layers of a network that take time but have no case of their own.

    Example:
        >>> from cubatch.network import models
        >>> left_out(models.build("resnet18")), left_out(models.build("deit-tiny"))
        ([], ['class_token', 'tokens'])
    """
    layers = [node.layer for node in network.nodes if not node.layer.aliases_input]
    return sorted({layer.type for layer in layers if not any(has_case(layer, pass_) for pass_ in Pass)})


def has_case(layer: Layer, pass_: Pass) -> bool:
    """Say whether a layer has a pass that can be measured by itself."""
    return (type(layer), pass_) in BUILDERS


def of_network(
    network: Network, passes: Iterable[Pass], batch_size: int, dtype: str = "float32", *, only_products: bool = False
) -> list[Case]:
    """
    List the distinct layer passes of a network, each with how often it occurs.

    Args:
        network: Its layers; the gradient of the network's input is left out, nobody needs it.
        passes: Which products.
        batch_size: Samples.
        dtype: Storage of the elements.
        only_products: Leave out layers that only move bytes.

    Example:
        >>> from cubatch.network import models
        >>> found = of_network(models.build("go-net"), [Pass.FPROP], 32, only_products=True)
        >>> [(case.name, case.multiplicity) for case in found]
        [('conv2d 19x19x128 to 128, 3x3, pad 1, n=32, fprop', 80)]
    """
    wanted = set(passes)
    found: dict[str, Case] = {}
    for node, pass_ in layer_passes(network, "training"):
        if pass_ not in wanted or not has_case(node.layer, pass_):
            continue
        case = of_layer(node.layer, pass_, batch_size, dtype)
        if only_products and not case.flops:
            continue
        before = found.get(case.name)
        names = (*(before.layers if before else ()), node.name)
        found[case.name] = attrs.evolve(case, multiplicity=len(names), layers=names)
    return list(found.values())


def of_dtype(dtype: str) -> str:
    """Write a dtype behind a name; float32 is not said."""
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
