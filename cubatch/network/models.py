"""The named networks, as specs, and the one reading of whatever stands for a spec."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cubatch.errors import InvalidArgument, InvalidSpec, UnknownName
from cubatch.network.extents import Extents, check_integer
from cubatch.network.graph import Network, Spec, check_input_shape
from cubatch.network.layer import Layer
from cubatch.network.sketches import SKETCHES, Sketch
from cubatch.network.specfile import from_mapping, load_spec


def names() -> tuple[str, ...]:
    """
    List the names of the known networks.

    Example:
        >>> "resnet50" in names()
        True
    """
    return tuple(SKETCHES)


def build(name: str, *, input_shape: Extents | None = None, classes: int | None = None) -> Network:
    """
    Build a known network as a spec.

    Where a definition pools to a fixed size in front of its classifier (alexnet to 6 x 6, vgg16 to 7 x 7),
    other input sizes work if the features divide into that many equal windows; 224 needs no pooling at all.

    Args:
        name: One of `names()`.
        input_shape: (h, w, c) of one sample; None is what the network was made for.
        classes: Outputs of the last layer; None is 1000, or 10 for the networks of handwritten digits.

    Returns:
        Network: Its layers carry the names they have in torchvision or timm.

    Raises:
        UnknownName: If no network goes by the name.
        InvalidArgument: If the input shape is no shape or does not fit the network, or classes is
            not a whole number of at least 1, or the network classifies nothing (go-net).

    Example:
        >>> build("resnet50").parameters, build("resnet50", classes=10).output_shape
        (25557032, (1, 1, 10))
    """
    if not isinstance(name, str):
        raise InvalidArgument("model", name, "a name: " + ", ".join(SKETCHES))
    if name not in SKETCHES:
        raise UnknownName("model", name, SKETCHES)
    make, usual_shape, usual_classes = SKETCHES[name]
    shape = usual_shape if input_shape is None else check_input_shape(input_shape)
    if classes is not None:
        if usual_classes is None:
            raise InvalidArgument("classes", classes, f"left out: {name} has no classifier")
        check_integer(classes, "classes", 1)
    net = Sketch(shape, name, classes if classes is not None else usual_classes or 0)
    try:
        make(net)
        return Network(input_shape=shape, layers=net.layers, name=name)
    except InvalidSpec as error:
        remedy = f"{error}. The network was made for {usual_shape}."
        raise InvalidArgument("input_shape", shape, f"a shape that {name} can take", remedy) from None


SpecLike = Spec | Mapping[str, Any] | str | Path


def resolve(spec: SpecLike, *, input_shape: Extents | None = None, classes: int | None = None) -> Spec:
    """
    Turn whatever stands for a spec into one: the single reading of every `layer_spec` argument.

    Args:
        spec: A layer, a network, a mapping in the form of a spec file, a model's name, or a path to a
            .toml or .json file.
        input_shape, classes: As for `build`; only a model's name can take them.

    Raises:
        UnknownName: If a text is neither a model's name nor a spec file.
        InvalidSpec, InvalidArgument: If the spec makes no sense.

    Example:
        >>> resolve({"type": "linear", "c": 1000, "k": 100}).parameters
        100100
    """
    if isinstance(spec, str) and Path(spec).suffix.lower() not in {".toml", ".json"}:
        return build(spec, input_shape=input_shape, classes=classes)
    for name, value in (("input_shape", input_shape), ("classes", classes)):
        if value is not None:
            raise InvalidArgument(name, value, "left out: only a model's name can take it")
    if isinstance(spec, str | Path):
        return load_spec(spec)
    if isinstance(spec, Mapping):
        return from_mapping(spec)
    if not isinstance(spec, Layer | Network):
        raise InvalidArgument("layer_spec", spec, "a layer, a Network, a mapping, a model's name or a spec file")
    return spec
