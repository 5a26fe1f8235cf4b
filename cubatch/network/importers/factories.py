"""`package.module:build`: networks by the name of a function that builds a PyTorch module or a Network."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import attrs

from cubatch import user_code
from cubatch.errors import InvalidArgument
from cubatch.network.extents import Extents
from cubatch.network.graph import Network, Spec, SuspiciousSpec
from cubatch.network.importers.refusal import UnsupportedOperator
from cubatch.network.importers.torch_export import CannotTrace, from_torch
from cubatch.network.layer import Layer

USUAL_INPUT = (224, 224, 3)
_OTHER_INPUTS = (
    "A module with several inputs, or none of images, needs its batches: --library torch with --batches or "
    "--example-inputs (tune, memory, predict)."
)


def call_factory(text: str, *, input_shape: Extents | None = None, opaque: bool = False) -> Spec:
    """
    Return the layer or network that a user's function builds; its module is imported from the current folder or path.

    Args:
        text: "package.module:name"; the name of a function or class without arguments, or of a network.
        input_shape: (h, w, c) of one sample, for a PyTorch module; None is (224, 224, 3). (h, 1, c) are tokens if the
            module cannot be traced on images of this shape.
        opaque: As for `from_torch`.

    Returns:
        Layer or Network: A torch.nn.Module is imported by `from_torch` and named `text`.

    Warns:
        UserWarning: With the assumed shape, if none was given.

    Raises:
        InvalidArgument: If the function does not exist, raises an error or builds something else, or if `input_shape`
            is given for a layer or network.
        CubatchError: As from `from_torch`.
    """
    built = _build(text)
    if user_code.is_torch_module(built):
        extents = input_shape or USUAL_INPUT
        origin = "was given as" if input_shape else "is assumed to be"
        shape_note = (
            f"One sample {origin} {','.join(map(str, extents))} (height, width, channels; PyTorch has channels first); "
            "for another shape give input_shape=(h, w, c), as an option --input-shape H,W,C."
        )
        try:
            network = _trace(built, extents, opaque=opaque)
        except CannotTrace as error:
            remedy = f"{error.remedy} {shape_note} {_OTHER_INPUTS}"
            raise CannotTrace(error.field, error.value, error.allowed, remedy) from error
        if input_shape is None:
            warnings.warn(shape_note, stacklevel=2)
        with warnings.catch_warnings(action="ignore", category=SuspiciousSpec):  # the import has issued it already
            return attrs.evolve(network, name=text)  # the class may have the name of another network
    if not isinstance(built, Layer | Network):
        allowed = f"the name of a function that builds a torch.nn.Module or a Network, not {type(built).__name__}"
        raise InvalidArgument("model", text, allowed)
    if input_shape is not None:
        raise InvalidArgument("input_shape", input_shape, f"left out: {text} has its own")
    return built


def _trace(module: Any, extents: Extents, *, opaque: bool) -> Network:
    """
    Return a module imported by a trace on images (c, h, w), or on features (c,) if h and w are 1.

    If only w is 1, tokens (h, c) are tried after images, and `opaque`, as for `from_torch`, is used only after both
    failed without it. If all fail, the first error is raised.
    """
    h, w, c = extents
    image, tokens = channels_first(extents), (h, c)
    if not w == 1 < h:
        return from_torch(module, image, opaque=opaque)
    errors: list[CannotTrace | UnsupportedOperator] = []
    for shape, as_opaque in [(image, False), (tokens, False), *([(tokens, True), (image, True)] if opaque else [])]:
        try:
            return from_torch(module, shape, opaque=as_opaque)
        except (CannotTrace, UnsupportedOperator) as error:  # positions of tokens can be added to an image, too
            errors.append(error)
    raise errors[0]


def channels_first(extents: Extents) -> tuple[int, ...]:
    """
    Return the shape (h, w, c) in PyTorch's order: (c, h, w), or (c,) for features.

    Example:
        >>> channels_first((224, 160, 3)), channels_first((1, 1, 10))
        ((3, 224, 160), (10,))
    """
    h, w, c = extents
    return (c, h, w) if (h, w) != (1, 1) else (c,)


def _build(text: str) -> Any:
    module, _, name = text.partition(":")
    allowed = "package.module:name of what can be imported and called without arguments"
    with user_code.beside(user_code.current_folder()), user_code.users("model", text, allowed):
        built = user_code.part_of(importlib.import_module(module), name, "model", "a name")
        is_network = isinstance(built, Layer | Network) or (callable(built) and hasattr(built, "forward"))
        return built if is_network and not isinstance(built, type) else built()
