"""`package.module:build`: a network by the name of what builds it, a PyTorch module or one of ours."""

from __future__ import annotations

import importlib
import sys
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


def called(text: str, *, input_shape: Extents | None = None, opaque: bool = False) -> Spec:
    """
    Import a module, as Python does from the current folder, and call what it says builds a network.

    Args:
        text: "package.module:name"; the name is that of a function or class without arguments, or of a network.
        input_shape: (h, w, c) of one sample, for a PyTorch module; None is (224, 224, 3).  (h, 1, c) are tokens where
            a module takes no images of it.
        opaque: As for `from_torch`.

    Returns:
        Layer or Network: What it built; a torch.nn.Module goes through `from_torch`, and is called `text`.

    Raises:
        InvalidArgument: If it cannot be imported or called, gives neither, or has a shape of its own.
        CubatchError: Whatever else building raises of ours.

    Warns:
        UserWarning: With the shape that was taken, if it was not given.
    """
    found = _built(text)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(found, torch.nn.Module):
        extents = input_shape or USUAL_INPUT
        taken = "was given as" if input_shape else "was taken to be, since nothing else was said,"
        told = (
            f"One sample {taken} {','.join(map(str, extents))} (height, width, channels; PyTorch has channels first): "
            "another is given as --input-shape H,W,C (input_shape)."
        )
        try:
            network = _traced(found, extents, opaque=opaque)
        except CannotTrace as error:
            raise CannotTrace(error.field, error.value, error.allowed, f"{error.remedy} {told}") from error
        if input_shape is None:
            warnings.warn(told, stacklevel=2)
        with warnings.catch_warnings(action="ignore", category=SuspiciousSpec):  # which was told already
            return attrs.evolve(network, name=text)  # as it was asked for: its class may be that of any other
    if not isinstance(found, Layer | Network):
        raise InvalidArgument(
            "model", text, f"of what gives a torch.nn.Module or a Network, not {type(found).__name__}"
        )
    if input_shape is not None:
        raise InvalidArgument("input_shape", input_shape, f"left out: {text} says its own")
    return found


def _traced(module: Any, extents: Extents, *, opaque: bool) -> Network:
    """Give a module as a network of images or features; of one column, of tokens where it is no whole one of images."""
    h, w, c = extents
    image, tokens = channels_first(extents), (h, c)
    if not w == 1 < h:
        return from_torch(module, image, opaque=opaque)
    errors: list[CannotTrace | UnsupportedOperator] = []
    for shape, keeps in [(image, False), (tokens, False), *([(tokens, True), (image, True)] if opaque else [])]:
        try:
            return from_torch(module, shape, opaque=keeps)
        except (CannotTrace, UnsupportedOperator) as error:  # learned positions of tokens are added to an image, too
            errors.append(error)
    raise errors[0]


def channels_first(extents: Extents) -> tuple[int, ...]:
    """
    Return (h, w, c) as PyTorch has it: features alone where there is no image.

    Example:
        >>> channels_first((224, 160, 3)), channels_first((1, 1, 10))
        ((3, 224, 160), (10,))
    """
    h, w, c = extents
    return (c, h, w) if (h, w) != (1, 1) else (c,)


def _built(text: str) -> Any:
    module, _, name = text.partition(":")
    what = "package.module:name of what can be imported and called without arguments"
    with user_code.beside(user_code.current_folder()), user_code.users("model", text, what):
        found = user_code.part_of(importlib.import_module(module), name, "model", "a name")
        is_ready = isinstance(found, Layer | Network) or (callable(found) and hasattr(found, "forward"))
        return found if is_ready and not isinstance(found, type) else found()
