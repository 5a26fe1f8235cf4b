"""
Names and shapes in PyTorch's state dicts of the arrays w, b, gamma, beta, mean and var.

Named networks are torchvision's, vision transformers timm's. Modules of any other network have the names of its layers.
PyTorch has channels before pixels: filters are (k, c, r, s), and features after a flatten are (c, h, w).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import attrs
import numpy as np

from cubatch.errors import InvalidArgument
from cubatch.network import models
from cubatch.network.extents import Extents
from cubatch.network.graph import INPUT, Network, Node
from cubatch.network.passes import Pass

ARRAYS = {
    "w": "weight", "b": "bias", "gamma": "weight", "beta": "bias", "mean": "running_mean", "var": "running_var",
}  # fmt: skip

# Arrays with other names, by the layer's type: the name, and the number of axes of size 1 before and after the shape.
_SPECIAL = {
    ("tokens", "token"): ("cls_token", 2, 0), ("tokens", "position"): ("pos_embed", 1, 0),
    ("attention", "w_in"): ("{module}.qkv.weight", 0, 0), ("attention", "b_in"): ("{module}.qkv.bias", 0, 0),
    ("attention", "w_out"): ("{module}.proj.weight", 0, 0), ("attention", "b_out"): ("{module}.proj.bias", 0, 0),
    ("layer_scale", "gamma"): ("{module}", 0, 2),
}  # fmt: skip

_FILTER, _MATRIX = 4, 2  # axes of a convolution's w and of a linear layer's
COUNTER = "num_batches_tracked"  # of PyTorch's batch norms without momentum; it is not read, and written as 0
AUXILIARY = re.compile(r"(aux1|aux2)\.|AuxLogits\.")  # classifiers of GoogLeNet that only its training uses; not read


@attrs.frozen
class Tensor:
    """An array of a network, with its name, shape and order in PyTorch's state dict."""

    layer: str  # layer, name: its layer and name in cubatch: "conv1", "w"
    name: str
    key: str  # its name in PyTorch: "features.0.weight"
    shape: tuple[int, ...]  # its shape in cubatch
    pixels: tuple[int, int] | None  # (r, s) of a filter; None for other arrays
    torch_shape: tuple[int, ...]  # its shape in PyTorch
    # for each position along PyTorch's last axis, the position of that value in cubatch; None where both orders are
    # equal
    order: np.ndarray[Any, Any] | None = None

    def to_torch(self, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return an array in cubatch's order and shape in those of PyTorch."""
        if self.pixels is not None:
            array = array.reshape(self.shape[0], *self.pixels, -1).transpose(0, 3, 1, 2)
        if self.order is not None:
            array = array[..., self.order]
        return np.ascontiguousarray(array).reshape(self.torch_shape)

    def from_torch(self, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return an array in PyTorch's order and shape in those of cubatch."""
        if self.pixels is not None:
            array = array.reshape(self.shape[0], -1, *self.pixels).transpose(0, 2, 3, 1)
        array = np.ascontiguousarray(array).reshape(self.shape)
        return array if self.order is None else array[..., np.argsort(self.order)]


def tensors(network: Network) -> Iterator[Tensor]:
    """
    Yield the arrays of a network, parameters and running statistics, with their names and shapes in PyTorch.

    Raises:
        InvalidArgument: If a layer has no counterpart in PyTorch, or the order of its features after a flatten is not
            known.

    Example:
        >>> from cubatch.network import models
        >>> next(tensors(models.build("resnet18"))).key, next(tensors(models.build("alexnet"))).torch_shape
        ('conv1.weight', (64, 3, 11, 11))
    """
    modules, orders = _modules(network), _orders(network)
    for node in network.nodes:
        for name, shape in {**node.layer.parameter_shapes, **node.layer.state_shapes}.items():
            module, special = modules[node.name], _SPECIAL.get((node.layer.type, name))
            order = _order_of(network, node, name, shape, orders[node.inputs[0]])
            if special is not None:
                text, before, after = special
                torch_shape = (1,) * before + shape + (1,) * after
                yield Tensor(node.name, name, text.format(module=module), shape, None, torch_shape, order)
                continue
            if name not in ARRAYS or (name == "w" and len(shape) < _MATRIX):
                remedy = "save_weights and load_weights accept it, with the names of cubatch."
                raise InvalidArgument(
                    "network",
                    network.name,
                    f"one without {node.layer.type} ({node.name}), which PyTorch's state dict cannot hold",
                    remedy,
                )
            pixels, torch_shape = None, shape
            if name == "w" and len(shape) == _FILTER:
                k, r, s, c = shape
                pixels, torch_shape = (r, s), (k, c, r, s)
            yield Tensor(node.name, name, f"{module}.{ARRAYS[name]}", shape, pixels, torch_shape, order)


def counters(network: Network) -> list[str]:
    """Return the names in PyTorch's state dict of the counters of batches that batch norms have."""
    modules = _modules(network)
    return [f"{modules[node.name]}.{COUNTER}" for node in network.nodes if node.layer.has_statistics]


def is_left_out(key: str) -> bool:
    """Return whether cubatch ignores this key of a state dict: of a batch counter or an auxiliary classifier."""
    return key.endswith(COUNTER) or bool(AUXILIARY.match(key))


# --- the order of features -----------------------------------------------------------------------------------

_OF_OUTPUTS = frozenset({"b", "b_in", "w_out", "b_out"})  # arrays whose last axis is not the layer's input
Order = np.ndarray[Any, Any] | None
"""Index in cubatch of each channel of PyTorch; None where it is not known."""


def _orders(network: Network) -> dict[str, Order]:
    orders: dict[str, Order] = {INPUT: np.arange(network.input_shape[2])}
    for node in network.nodes:
        orders[node.name] = _order_after(network, node, [orders[name] for name in node.inputs])
    return orders


def _order_after(network: Network, node: Node, read: Sequence[Order]) -> Order:
    layer, channels = node.layer, np.arange(node.layer.output_shape[2])
    known = [order for order in read if order is not None]
    if layer.gemms(Pass.FPROP, 1):  # its weights decide the order of its outputs
        return channels
    if len(known) < len(read):
        return None
    if layer.aliases_input:
        return _flattened(network, layer.input_shape, known[0])
    if len(known) > 1 and sum(map(len, known)) == channels.size:  # concatenated
        starts = np.cumsum([0, *(len(order) for order in known)])
        return np.concatenate([start + order for start, order in zip(starts, known, strict=False)])
    if len(known[0]) == channels.size and all(np.array_equal(order, known[0]) for order in known):
        return known[0]  # norms, activations, pools, sums: channel by channel
    return channels if all(map(_is_plain, known)) else None


def _flattened(network: Network, shape: Extents, order: np.ndarray[Any, Any]) -> Order:
    """Return the `Order` of features after a flatten; None where the input (h, 1, c) may be an image or tokens."""
    indices, (h, w, _) = np.arange(math.prod(shape)).reshape(shape), shape
    is_one_column = w == 1 < h
    if is_one_column and any("position" in node.layer.parameter_shapes for node in network.nodes):
        return np.asarray(indices[:, :, order].reshape(-1))
    if is_one_column and network.input_shape[1] == 1:  # images of one column, or tokens
        return None
    return np.asarray(indices[:, :, order].transpose(2, 0, 1).reshape(-1))


def _is_plain(order: np.ndarray[Any, Any]) -> bool:
    return bool(np.array_equal(order, np.arange(len(order))))


def _order_of(network: Network, node: Node, name: str, shape: tuple[int, ...], order: Order) -> Order:
    """
    Return the order in which PyTorch stores the values along the last axis of an array; None if it is cubatch's order.

    `order` is that of the features that the layer reads. Raises InvalidArgument if these have an unknown order.
    """
    is_product = bool(node.layer.gemms(Pass.FPROP, 1))
    if (order is not None and _is_plain(order)) or name in _OF_OUTPUTS:
        return None
    if order is None or len(shape) != (_MATRIX if is_product else 1):
        allowed = f"one in which the order of the features that {node.name} reads after a flatten is known"
        raise InvalidArgument("network", network.name, allowed, "save_weights and load_weights accept it.")
    return order


# --- names of modules ----------------------------------------------------------------------------------------


def _modules(network: Network) -> dict[str, str]:
    for start, rule in _RULES.items():
        if network.name in models.names() and network.name.startswith(start):
            return dict(rule(network.nodes))
    return {node.name: node.name for node in network.nodes}


def _counted(nodes: Iterable[Node]) -> Iterator[tuple[str, str]]:
    """
    Yield the (layer, module) names of AlexNet and VGG.

    Modules are numbered in `features` up to the flatten, then in `classifier`.
    """
    part, number = "features", 0
    for node in nodes:
        if node.layer.aliases_input:
            part, number = "classifier", 0
        elif node.name != "avgpool":  # a module between the two lists
            yield node.name, f"{part}.{number}"
            number += 1


def _renamed(*rules: tuple[str, str]) -> Callable[[Iterable[Node]], Iterator[tuple[str, str]]]:
    """
    Return a function that yields the (layer, module) names of layers.

    The first rule whose pattern matches the whole layer name makes the module name; else both are equal.
    """

    def rename(nodes: Iterable[Node]) -> Iterator[tuple[str, str]]:
        for node in nodes:
            matches = ((re.fullmatch(pattern, node.name), template) for pattern, template in rules)
            yield node.name, next((match.expand(template) for match, template in matches if match), node.name)

    return rename


def _blocks(*rules: tuple[str, str]) -> Callable[[Sequence[Node]], Iterator[tuple[str, str]]]:
    """
    Return a function that yields the (layer, module) names of MobileNetV3 and EfficientNet.

    Parts of a block are numbered; in them a convolution is 0 and its norm 1.
    """
    rename = _renamed((r"(features\.\d+)\.conv", r"\1.0"), (r"(features\.\d+)\.bn", r"\1.1"), *rules)
    leaves = {"conv": "0", "bn": "1"}

    def name(nodes: Sequence[Node]) -> Iterator[tuple[str, str]]:
        parts: dict[str, list[str]] = {}
        for layer, renamed in rename(nodes):
            match = re.fullmatch(r"(features\.[\d.]+)\.(expand|depthwise|se|project)\.(\w+)", layer)
            if match is None:
                yield layer, renamed
                continue
            block, part, leaf = match.groups()
            known = parts.setdefault(block, [])
            if part not in known:
                known.append(part)
            yield layer, f"{block}.block.{known.index(part)}.{leaves.get(leaf, leaf)}"

    return name


_CONVNEXT = tuple(
    rule
    for stage in range(1, 5)
    for rule in (
        (rf"downsample{stage}\.norm", f"features.{2 * stage - 2}.0"),
        (rf"downsample{stage}\.conv", f"features.{2 * stage - 2}.1"),
        (rf"stage{stage}\.(\d+)\.depthwise", rf"features.{2 * stage - 1}.\1.block.0"),
        (rf"stage{stage}\.(\d+)\.norm", rf"features.{2 * stage - 1}.\1.block.2"),
        (rf"stage{stage}\.(\d+)\.fc1", rf"features.{2 * stage - 1}.\1.block.3"),
        (rf"stage{stage}\.(\d+)\.fc2", rf"features.{2 * stage - 1}.\1.block.5"),
        (rf"stage{stage}\.(\d+)\.layer_scale", rf"features.{2 * stage - 1}.\1.layer_scale"),
    )
)
_RULES: dict[str, Callable[[Sequence[Node]], Iterator[tuple[str, str]]]] = {
    "alexnet": _counted,
    "vgg": _counted,
    "resnet": _renamed((r"(.*\.downsample)\.conv", r"\1.0"), (r"(.*\.downsample)\.bn", r"\1.1")),
    "densenet": _renamed(("classifier", "classifier"), ("(.*)", r"features.\1")),
    "mobilenet-v3": _blocks(("fc1", "classifier.0"), ("fc2", "classifier.3")),
    "efficientnet": _blocks(("classifier", "classifier.1")),
    "deit": _renamed(("patch_embed", "patch_embed.proj")),
    "vit": _renamed(("patch_embed", "patch_embed.proj")),
    "convnext": _renamed(
        (r"stem\.conv", "features.0.0"), (r"stem\.norm", "features.0.1"), ("norm", "classifier.0"),
        ("classifier", "classifier.2"), *_CONVNEXT,
    ),
}  # fmt: skip
"""Renaming rules by the start of a network's name; modules of other networks have the names of their layers."""
