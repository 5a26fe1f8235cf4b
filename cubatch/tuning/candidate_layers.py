"""Waves of blocks, padding of channels and predicted seconds of each layer at each candidate batch size."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from cubatch.choices import Dtype, Library, Mode
from cubatch.estimate import roofline
from cubatch.estimate.on_sms import on_sms
from cubatch.hardware import arithmetic, probe
from cubatch.hardware.arithmetic import tensor_core_multiple
from cubatch.hardware.facts import Device
from cubatch.measure.records import Candidate
from cubatch.network import graph, models
from cubatch.network.graph import Node
from cubatch.network.layer import Layer, extents
from cubatch.network.models import SpecLike
from cubatch.network.passes import Pass
from cubatch.tuning.ladder import candidates


def explain(
    spec: SpecLike,  # a layer, a network, a mapping, a model's name or a path to a spec file
    sizes: Sequence[Candidate] | None = None,  # the candidates; None calls `candidates` with all the arguments
    *,
    device: Device | str | None = None,  # a GPU; the list is empty for a CPU, which has no SMs
    mode: Mode = "inference",  # mode, dtype, library: as for `candidates`
    dtype: Dtype = "float32",
    library: Library = "auto",
    **options: Any,  # further arguments of `candidates`
) -> list[dict[str, Any]]:
    """
    Return for each candidate the waves of each layer's blocks, and channels that need padding for Tensor Cores.

    Returns:
        list[dict]: A row per candidate and distinct matrix product of the network; layers of equal extents share a
            row. Keys are `batch_size`, `layer` (the first), `layers` (their number), `pass`, and `predicted_seconds` of
            all these layers, None if unknown. Waves, the busiest SM and fill are those of `on_sms.on_sms`. `padding`
            has, for each number of channels c or k that is no multiple for Tensor Cores, the next multiple: {"c": 8}.
    """
    gpu, resolved = probe.resolve(device, live=False), models.resolve(spec)
    chosen = arithmetic.resolve_library(library, gpu, dtype)
    if gpu.num_sms is None:
        return []
    if sizes is None:
        sizes = candidates(resolved, device=gpu, mode=mode, dtype=dtype, library=library, **options)
    multiple = tensor_core_multiple(gpu, dtype)
    alike: dict[object, list[tuple[Node, Pass]]] = {}
    for node, pass_ in graph.layer_passes(resolved, mode):
        if node.layer.gemms(pass_, 1):
            alike.setdefault((pass_, extents(node.layer)), []).append((node, pass_))
    rows = []
    for size, same in itertools.product((candidate.batch_size for candidate in sizes), alike.values()):
        node, pass_ = same[0]
        seconds = roofline.layer_seconds(node.layer, pass_, size, gpu, dtype)
        rows.append({
            "batch_size": size,
            "layer": node.name,
            "layers": len(same),
            "pass": pass_.value,
            **on_sms(node.layer, pass_, size, device=gpu, dtype=dtype, library=chosen),
            "predicted_seconds": None if seconds is None else seconds * len(same),
            "padding": _padding(node.layer, multiple),
        })  # fmt: skip
    return rows


def _padding(layer: Layer, multiple: int | None) -> dict[str, int]:
    """
    Return the channels per group that a layer would need to fill Tensor Cores: "c" in, "k" out, rounded up.

    A number of channels that is a multiple of `multiple` has no key; empty if `multiple` is None.
    """
    if multiple is None:
        return {}
    return {name: -(-size // multiple) * multiple for name, size in layer.product_channels.items() if size % multiple}
