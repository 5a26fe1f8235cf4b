"""
Weights of a network: saved in files, and converted to and from PyTorch's state dicts.

A file of cubatch is safetensors or npz with float32 tensors named LAYER.ARRAY, such as "conv1.w". The entry
"cubatch weights" of its metadata is JSON with "version", "network" and "dtype". It is a single entry, so that equal
weights make equal files: several entries have no order in a safetensors file. Any other file is read as a state dict.
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
from cubatch.checks import check_kind
from cubatch.errors import InvalidArgument, InvalidData, near_names
from cubatch.network import state_dict as pytorch
from cubatch.network.graph import Network
from cubatch.units import shown, visible

Weights = Mapping[str, Mapping[str, Any]]
"""Arrays by layer and name."""

VERSION = 1
_MOST_NAMED = 3
_A_NETWORK = "a Network, as cubatch.models.build() returns it"


def save_weights(network: Network, path: str | Path) -> None:
    """
    Write the weights of a network, parameters and running statistics, to a file.

    An existing file is replaced only when the new one is complete.

    Args:
        network: A network that has weights: trained by `cubatch train`, loaded, or imported.
        path: A .safetensors or .npz file.

    Raises:
        InvalidArgument: If the network lacks weights of a layer, or the path has another ending.
        InvalidData: If the file cannot be written, or an array is not floating-point.

    Example:
        >>> import cubatch as cb
        >>> cb.save_weights(cb.load_onnx("model.onnx"), "model.safetensors")     # doctest: +SKIP
    """
    check_kind("network", network, Network, _A_NETWORK)
    shapes = _shapes(network)
    arrays = {f"{layer}.{name}": network.weights.get(layer, {}).get(name) for layer, name in shapes}
    missing = [key for key, array in arrays.items() if array is None]
    if missing:
        raise _incomplete(network, missing)
    entry = json.dumps({"version": VERSION, "network": network.name, "dtype": "float32"})
    array_file.write(path, {key: _float32(key, array) for key, array in arrays.items()}, {WEIGHTS: entry})


def load_weights(network: Network, path: str | Path) -> Network:
    """
    Return a copy of a network with weights from a file of `save_weights` or a PyTorch state dict.

    Args:
        network: The network; the file must have exactly its tensors.
        path: Ends in .safetensors or .npz.

    Returns:
        Network: The copy, with float32 weights.

    Raises:
        InvalidArgument: If the path has another ending, or a layer has no counterpart in PyTorch while the file is a
            state dict.
        InvalidData: If the file is missing, damaged, a checkpoint, or of another version. Also if a tensor is unknown,
            missing, not floating-point, or of another shape.

    Example:
        >>> import cubatch as cb
        >>> net = cb.load_weights(cb.models.build("resnet18"), "resnet18.safetensors")     # doctest: +SKIP
    """
    check_kind("network", network, Network, _A_NETWORK)
    arrays, notes = array_file.read(path)
    if CHECKPOINT in notes:
        remedy = "`cubatch train --checkpoint` goes on with it, and with --save writes its weights."
        raise InvalidData(str(path), "is a checkpoint, and not only weights", remedy)
    if WEIGHTS not in notes:
        return _convert(network, arrays, str(path))
    try:
        entry = json.loads(notes[WEIGHTS])
        version, saved_from = entry["version"], entry["network"]
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        remedy = "Save the weights again."
        raise InvalidData(str(path), "is damaged: its metadata lack the network and version", remedy) from error
    if version != VERSION:
        raise InvalidData(str(path), f"is of version {shown(version)}, this cubatch reads {VERSION}", "Update cubatch.")
    shapes = _shapes(network)
    by_key = {".".join(place): shape for place, shape in shapes.items()}
    remedy = "Build the network with the layers that it had when the file was saved."
    if saved_from != network.name:
        remedy = f"It was saved from {visible(str(saved_from))}: load it into that network."
    _check(str(path), {key: array.shape for key, array in arrays.items()}, by_key, network.name, remedy)
    return _with(network, {place: _float32(".".join(place), arrays[".".join(place)]) for place in shapes})


def from_state_dict(network: Network, state_dict: Mapping[str, Any]) -> Network:
    """
    Return the network with the weights of a PyTorch module, by names as in torchvision and timm's transformers.

    Modules of any other network must have the names of its layers. Filters become (k, r, s, c), and weights of a linear
    layer after a flatten are put into the order of (h, w, c).

    Args:
        network: A network of `models.build`, or any other.
        state_dict: Tensors or arrays by name, as `module.state_dict()` returns them.

    Returns:
        Network: A copy with weights, in float32.

    Raises:
        InvalidData: If a tensor is unknown, missing, not floating-point, or of another shape.
        InvalidArgument: If a layer of the network has no counterpart in PyTorch, or the argument is not a state dict.

    Example:
        >>> import torchvision, cubatch as cb                                           # doctest: +SKIP
        >>> module = torchvision.models.resnet18(weights="DEFAULT")                     # doctest: +SKIP
        >>> net = cb.from_state_dict(cb.models.build("resnet18"), module.state_dict())  # doctest: +SKIP
    """
    check_kind("network", network, Network, _A_NETWORK)
    if not isinstance(state_dict, Mapping):
        raise InvalidArgument("state_dict", state_dict, "tensors by name", "module.state_dict() returns them.")
    for key, array in state_dict.items():
        if not isinstance(key, str) or not hasattr(array, "shape"):
            remedy = "Of a larger mapping pass only the entry that module.state_dict() returned."
            raise InvalidArgument(f"state_dict[{shown(key)}]", array, "a tensor, by a name that is text", remedy)
    return _convert(network, state_dict, "the state dict")


def to_state_dict(network: Network) -> dict[str, np.ndarray[Any, Any]]:
    """
    Return a network's weights as a PyTorch state dict with NumPy arrays, the inverse of `from_state_dict`.

    Args:
        network: A network with weights.

    Returns:
        dict[str, numpy.ndarray]: float32 arrays, and the int64 counters of batch norms, at 0.

    Raises:
        InvalidArgument: If the network lacks weights of a layer, or a layer has no counterpart in PyTorch.
        InvalidData: If an array is not floating-point.

    Example:
        >>> state = cb.to_state_dict(cb.load_weights(net, "trained.safetensors"))                   # doctest: +SKIP
        >>> module.load_state_dict({name: torch.tensor(array) for name, array in state.items()})   # doctest: +SKIP
    """
    check_kind("network", network, Network, _A_NETWORK)
    state: dict[str, np.ndarray[Any, Any]] = {}
    missing = []
    for tensor in pytorch.tensors(network):
        array = network.weights.get(tensor.layer, {}).get(tensor.name)
        if array is None:
            missing.append(f"{tensor.layer}.{tensor.name}")
        else:
            state[tensor.key] = tensor.to_torch(_float32(tensor.key, array))
    if missing:
        raise _incomplete(network, missing)
    return state | {key: np.array(0, np.int64) for key in pytorch.counters(network)}


def _convert(network: Network, state: Mapping[str, Any], source: str) -> Network:
    tensors = {tensor.key: tensor for tensor in pytorch.tensors(network)}
    arrays = {key: array for key, array in state.items() if key in tensors or not pytorch.is_left_out(key)}
    shapes = {key: tuple(array.shape) for key, array in arrays.items()}
    remedy = "docs/reference/files.md lists the names that weights have in PyTorch."
    _check(source, shapes, {key: tensor.torch_shape for key, tensor in tensors.items()}, network.name, remedy)
    converted = {
        (tensor.layer, tensor.name): tensor.from_torch(_float32(key, arrays[key])) for key, tensor in tensors.items()
    }
    return _with(network, converted)


def _shapes(network: Network) -> dict[tuple[str, str], tuple[int, ...]]:
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


def _float32(key: str, array: Any) -> np.ndarray[Any, Any]:
    """Return a float32 copy of a floating-point array or PyTorch tensor; raise InvalidData for other types."""
    if hasattr(array, "detach"):
        array = array.detach().cpu().float().numpy()
    numbers: np.ndarray[Any, Any] = np.asarray(array)
    if numbers.dtype.kind != "f":
        reason = f"holds elements of type {numbers.dtype}, weights are floating-point numbers"
        raise InvalidData(key, reason, "Convert it to float32.")
    return numbers.astype(np.float32)


def _check(
    source: str,
    shapes: Mapping[str, tuple[int, ...]],
    expected: Mapping[str, tuple[int, ...]],
    network: str,
    remedy: str,
) -> None:
    """
    Raise InvalidData if tensors are missing, unknown or of another shape than expected; both mappings are by name.

    The message names `source`, the file, and `network`; `remedy` is its next step for missing and unknown tensors.
    """
    missing = [f"{key} {shape}" for key, shape in expected.items() if key not in shapes]
    unknown = [key for key in shapes if key not in expected]
    if missing:
        reason = f"lacks {_some(missing)} of {network}" + (f", and holds {_some(unknown)}" if unknown else "")
        raise InvalidData(source, reason, remedy)
    if unknown:
        near = near_names(unknown[0], expected, 1)
        hint = f" ({near[0]} is the nearest name)" if near else ""
        raise InvalidData(source, f"holds {_some(unknown)}, which {network} does not have{hint}", remedy)
    for key, shape in expected.items():
        if shapes[key] != shape:
            reason = f"holds {key} of shape {shapes[key]}, {network} needs {shape}"
            raise InvalidData(source, reason, "Build the network with the classes and input shape of the file.")


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more


def _incomplete(network: Network, missing: list[str]) -> InvalidArgument:
    remedy = f"It lacks {_some(missing)}; load_weights and from_state_dict add them."
    return InvalidArgument("network", network.name, "one with all its weights", remedy)
