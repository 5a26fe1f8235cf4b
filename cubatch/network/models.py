"""The named networks, and the resolver of every argument that stands for a spec."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from cubatch import files
from cubatch.errors import InvalidArgument, InvalidSpec, UnknownName
from cubatch.network.extents import Extents, check_integer
from cubatch.network.graph import Network, Spec, check_input_shape
from cubatch.network.layer import Layer
from cubatch.network.sketches.sketch import Sketch
from cubatch.network.sketches.table import SKETCHES
from cubatch.network.specfile import from_mapping, load_spec
from cubatch.user_code import is_torch_module

# Files of parameters, without the layers that they belong to.
_WEIGHTS = frozenset({".pt", ".pth", ".ckpt", ".bin", ".safetensors", ".h5", ".keras", ".npz"})
_NO_LAYERS = (
    "Such a file holds weights, not layers: give package.module:build, a function that builds the module, or "
    "the .onnx file that torch.onnx.export writes; in Python autotune_module(module, input_shape) takes it as it is. "
    "`cubatch train MODEL --weights FILE` begins with .safetensors or .npz."
)


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
    Build a named network.

    Some networks pool to a fixed size before the classifier: alexnet to 6 x 6, vgg to 7 x 7. Other input sizes work if
    the features divide into that number of equal windows; 224 needs no pooling.

    Args:
        name: One of `names()`; letter case, hyphens, underscores and spaces are ignored: "ResNet50", "mnist_cnn".
        input_shape: (h, w, c) of one sample; None is the usual one of the network.
        classes: Outputs of the last layer; None is 1000, or 10 for the networks of handwritten digits.

    Returns:
        Network: Its layers have the names that they have in torchvision or timm.

    Raises:
        UnknownName: If no network has the name.
        InvalidArgument: If the input shape does not fit the network, or classes is not a whole number of at least 1.
            Also if `classes` is given for a network without a classifier (go-net).

    Example:
        >>> build("resnet50").parameters, build("resnet50", classes=10).output_shape
        (25557032, (1, 1, 10))
    """
    if not isinstance(name, str):
        raise InvalidArgument("model", name, "a name: " + ", ".join(SKETCHES))
    if _letters(name) not in _KNOWN:
        raise UnknownName("model", name, SKETCHES)
    name = _KNOWN[_letters(name)]
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


def _letters(name: str) -> str:
    return re.sub(r"[-_ ]", "", name.lower())


_KNOWN = {_letters(name): name for name in SKETCHES}


SpecLike = Spec | Mapping[str, Any] | str | Path


def resolve(
    spec: SpecLike, *, input_shape: Extents | None = None, classes: int | None = None, opaque: bool = False
) -> Spec:
    """
    Return the layer or network that an argument stands for.

    Args:
        spec: A layer, a network, a mapping in the form of a spec file, or text. Text is a model's name, the path of a
            spec or ONNX file, or "package.module:function", which builds a torch.nn.Module or a network.
        input_shape: (h, w, c) of one sample, for a model's name, a PyTorch module, or an ONNX file that leaves it open.
            (1, 1, c) are features, (h, 1, c) tokens. None: that of the model or file.
        classes: As for `build`; for a model's name only. None: the model's own.
        opaque: As for `load_onnx` and `from_torch`.

    Raises:
        InvalidArgument: If `spec` is none of these, or `input_shape` or `classes` does not apply.
        CubatchError: As from `build`, `load_spec`, `load_onnx` and `from_torch`.

    Example:
        >>> resolve({"type": "linear", "c": 1000, "k": 100}).parameters
        100100
    """
    form = _form(spec)
    if form == "name":
        return build(cast("str", spec), input_shape=input_shape, classes=classes)
    if classes is not None:
        raise InvalidArgument("classes", classes, "left out: only a model's name can take it")
    if form == "factory":
        from cubatch.network.importers import factories

        return factories.call_factory(cast("str", spec), input_shape=input_shape, opaque=opaque)
    if form == "onnx":
        from cubatch.network.importers import onnx_file

        extents = None if input_shape is None else check_input_shape(input_shape)
        return onnx_file.read(cast("str | Path", spec), extents=extents, opaque=opaque)
    if input_shape is not None:
        raise InvalidArgument("input_shape", input_shape, "left out: a spec has its own")
    if form == "file":
        return load_spec(cast("str | Path", spec))
    return from_mapping(spec) if isinstance(spec, Mapping) else cast("Spec", spec)


def _form(spec: object) -> str:
    """
    Return "name", "file", "onnx" or "factory" for text or a path, and "" for a layer, network or mapping.

    Raises InvalidArgument for anything else, and for a file of weights.
    """
    if isinstance(spec, str | Path):
        suffix = Path(spec).suffix.lower()
        if suffix == ".onnx":
            return "onnx"
        if suffix in _WEIGHTS:
            raise InvalidArgument("model", str(spec), "a name, a spec or ONNX file, or package.module:name", _NO_LAYERS)
        if isinstance(spec, Path) or suffix in {".toml", ".json"}:
            return "file"
        if _letters(spec) in _KNOWN:  # even if there is a file of this name: ./resnet50 is the file
            return "name"
        if files.is_file(spec):
            return "file"
        return "factory" if ":" in spec else "name"
    if not isinstance(spec, Layer | Network | Mapping):
        forms = "a layer, a Network, a mapping, a model's name, a spec or ONNX file, or package.module:name"
        raise InvalidArgument("layer_spec", spec, forms, _way_in(spec))
    return ""


def _way_in(thing: object) -> str:
    """Return a sentence that names the public function for this kind of object; "" if there is none."""
    if is_torch_module(thing):
        return "autotune_module(module, input_shape) tunes a PyTorch module; from_torch imports it as a Network."
    if callable(thing):
        return "autotune_callable(make_step) tunes steps of any framework."
    return ""
