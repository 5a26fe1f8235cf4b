"""
Weights of a network: kept in files, and carried to and from PyTorch's state dicts.

A file of ours is safetensors or npz; its tensors are named LAYER.ARRAY, as "conv1.w", in float32.  Its metadata hold
"cubatch weights": JSON with "version", "network" and "dtype".  It is one entry, since several have no order in a
safetensors file, and equal weights are to make equal files.  Any other such file is read as a state dict.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from cubatch import array_file
from cubatch.array_file import CHECKPOINT, WEIGHTS
from cubatch.errors import InvalidArgument, InvalidData, near_names
from cubatch.network import state_dict as pytorch
from cubatch.network.graph import Network
from cubatch.units import shown, visible

Weights = Mapping[str, Mapping[str, Any]]
"""Arrays by layer and name."""

VERSION = 1
_MOST_NAMED = 3


def save_weights(network: Network, path: str | Path) -> None:
    """
    Write the weights that a network has, parameters and running statistics, to a file.

    It is written whole or not at all: the file that was there stays until the new one is on the disk.

    Args:
        network: With weights: trained by `cubatch train`, loaded, or imported.
        path: Ends in .safetensors or .npz.

    Raises:
        InvalidArgument: If the network has no weights, or the path is none for such a file.
        InvalidData: If the file cannot be written.

    Example:
        >>> import cubatch as cb
        >>> cb.save_weights(cb.load_onnx("model.onnx"), "model.safetensors")     # doctest: +SKIP
    """
    wanted = _wanted(network)
    arrays = {f"{layer}.{name}": network.weights.get(layer, {}).get(name) for layer, name in wanted}
    missing = [key for key, array in arrays.items() if array is None]
    if missing:
        raise _incomplete(network, missing)
    told = json.dumps({"version": VERSION, "network": network.name, "dtype": "float32"})
    array_file.write(path, {key: _numbers(key, array) for key, array in arrays.items()}, {WEIGHTS: told})


def load_weights(network: Network, path: str | Path) -> Network:
    """
    Return the network with the weights of a file: a cubatch file, or a PyTorch state dict in safetensors or npz.

    Args:
        network: Whose layers the file's tensors belong to, one for one.
        path: Ends in .safetensors or .npz.

    Returns:
        Network: The same with weights, float32 whatever type the file has.

    Raises:
        InvalidArgument: If the file's name ends otherwise.
        InvalidData: If it is missing or damaged, or a tensor is unknown, missing, or of another shape; says which.

    Example:
        >>> import cubatch as cb
        >>> net = cb.load_weights(cb.models.build("resnet18"), "resnet18.safetensors")     # doctest: +SKIP
    """
    arrays, notes = array_file.read(path)
    if CHECKPOINT in notes:
        remedy = "`cubatch train --checkpoint` goes on with it, and with --save writes its weights."
        raise InvalidData(str(path), "is a checkpoint, and not only weights", remedy)
    if WEIGHTS not in notes:
        return _given(network, arrays, str(path))
    try:
        told = json.loads(notes[WEIGHTS])
        version, saved_from = told["version"], told["network"]
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise InvalidData(str(path), "is damaged: it does not say of what it holds the weights") from error
    if version != VERSION:
        raise InvalidData(str(path), f"is of version {shown(version)}, this cubatch reads {VERSION}", "Update it.")
    wanted = _wanted(network)
    shapes = {".".join(place): shape for place, shape in wanted.items()}
    remedy = "" if saved_from == network.name else f"It was saved from {visible(str(saved_from))}."
    _check(str(path), {key: array.shape for key, array in arrays.items()}, shapes, network.name, remedy)
    return _with(network, {place: _numbers(".".join(place), arrays[".".join(place)]) for place in wanted})


def from_state_dict(network: Network, state_dict: Mapping[str, Any]) -> Network:
    """
    Return the network with the weights of a PyTorch module, by names as in torchvision and timm's transformers.

    Any other network is taken to be of modules with our layers' names.  Filters become
    (k, r, s, c), and what a linear layer reads behind a flatten is put into the order of (h, w, c).

    Args:
        network: Of `models.build`, or any other.
        state_dict: Tensors, or arrays, by name: what `module.state_dict()` gives.

    Returns:
        Network: The same with weights, copies in float32.

    Raises:
        InvalidData: If a tensor is unknown, missing, or of another shape; says which.
        InvalidArgument: If the network has layers for which there is no rule, or it is no state dict.

    Example:
        >>> import torchvision, cubatch as cb                                           # doctest: +SKIP
        >>> module = torchvision.models.resnet18(weights="DEFAULT")                     # doctest: +SKIP
        >>> net = cb.from_state_dict(cb.models.build("resnet18"), module.state_dict())  # doctest: +SKIP
    """
    if not isinstance(state_dict, Mapping):
        raise InvalidArgument("state_dict", state_dict, "tensors by name", "module.state_dict() gives them.")
    for key, array in state_dict.items():
        if not isinstance(key, str) or not hasattr(array, "shape"):
            remedy = "Of what holds more than a state dict give that entry alone: what module.state_dict() gave."
            raise InvalidArgument(f"state_dict[{shown(key)}]", array, "a tensor, by a name that is text", remedy)
    return _given(network, state_dict, "the state dict")


def to_state_dict(network: Network) -> dict[str, np.ndarray[Any, Any]]:
    """
    Return a network's weights as the state dict of the PyTorch module that `from_state_dict` reads.

    Args:
        network: With weights.

    Returns:
        dict[str, numpy.ndarray]: float32 arrays, and the int64 counters of batch norms, at 0.

    Raises:
        InvalidArgument: If the network lacks weights, or has layers for which there is no rule.

    Example:
        >>> state = cb.to_state_dict(cb.load_weights(net, "trained.safetensors"))                   # doctest: +SKIP
        >>> module.load_state_dict({name: torch.tensor(array) for name, array in state.items()})   # doctest: +SKIP
    """
    state: dict[str, np.ndarray[Any, Any]] = {}
    missing = []
    for tensor in pytorch.tensors(network):
        array = network.weights.get(tensor.layer, {}).get(tensor.name)
        if array is None:
            missing.append(f"{tensor.layer}.{tensor.name}")
        else:
            state[tensor.key] = tensor.to_theirs(_numbers(tensor.key, array))
    if missing:
        raise _incomplete(network, missing)
    return state | {key: np.array(0, np.int64) for key in pytorch.counters(network)}


# --- below ---------------------------------------------------------------------------------------------------


def _given(network: Network, state: Mapping[str, Any], source: str) -> Network:
    wanted = {tensor.key: tensor for tensor in pytorch.tensors(network)}
    found = {key: array for key, array in state.items() if key in wanted or not pytorch.is_left_out(key)}
    shapes = {key: tuple(array.shape) for key, array in found.items()}
    remedy = "docs/reference/files.md lists the names that weights have in PyTorch."
    _check(source, shapes, {key: tensor.theirs for key, tensor in wanted.items()}, network.name, remedy)
    ours = {(one.layer, one.name): one.to_ours(_numbers(key, found[key])) for key, one in wanted.items()}
    return _with(network, ours)


def _wanted(network: Network) -> dict[tuple[str, str], tuple[int, ...]]:
    return {
        (node.name, name): shape
        for node in network.nodes
        for name, shape in {**node.layer.parameter_shapes, **node.layer.state_shapes}.items()
    }


def _with(network: Network, arrays: Mapping[tuple[str, str], np.ndarray[Any, Any]]) -> Network:
    weights: dict[str, dict[str, Any]] = {}
    for (layer, name), array in arrays.items():
        weights.setdefault(layer, {})[name] = array
    return attrs.evolve(network, weights=weights)


def _numbers(key: str, array: Any) -> np.ndarray[Any, Any]:
    """Return an array, or a tensor of PyTorch's wherever it lies, as float32 of its own."""
    if hasattr(array, "detach"):
        array = array.detach().cpu().float().numpy()
    numbers: np.ndarray[Any, Any] = np.asarray(array)
    if numbers.dtype.kind != "f":
        raise InvalidData(key, f"holds elements of type {numbers.dtype}, weights are floating-point numbers")
    return numbers.astype(np.float32)


def _check(
    source: str,
    found: Mapping[str, tuple[int, ...]],
    wanted: Mapping[str, tuple[int, ...]],
    network: str,
    remedy: str,
) -> None:
    """Refuse tensors that are missing, unknown or of another shape, by their names."""
    missing = [f"{key} {shape}" for key, shape in wanted.items() if key not in found]
    unknown = [key for key in found if key not in wanted]
    if missing:
        reason = f"lacks {_some(missing)} of {network}" + (f", and holds {_some(unknown)}" if unknown else "")
        raise InvalidData(source, reason, remedy)
    if unknown:
        near = near_names(unknown[0], wanted, 1)
        hint = f" ({near[0]} is the nearest name)" if near else ""
        raise InvalidData(source, f"holds {_some(unknown)}, which {network} does not have{hint}", remedy)
    for key, shape in wanted.items():
        if found[key] != shape:
            reason = f"holds {key} of shape {found[key]}, {network} needs {shape}"
            raise InvalidData(source, reason, remedy or "Give --classes and --input-shape as they were for the file.")


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more


def _incomplete(network: Network, missing: list[str]) -> InvalidArgument:
    remedy = f"It lacks {_some(missing)}; load_weights, from_state_dict and `cubatch train --save` give them."
    return InvalidArgument("network", network.name, "one with all its weights", remedy)
