"""
Named arrays in one file, safetensors or npz by the name's ending: replaced atomically, read without pickle.

Other frameworks read the safetensors file as it is. Its metadata are texts by name ("__metadata__"); an npz file holds
the same texts as an array of that name.
"""

from __future__ import annotations

import json
import os
import tokenize
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from cubatch import checks, files, whole_file
from cubatch.errors import InvalidArgument, InvalidData

ENDINGS = (".safetensors", ".npz")
WEIGHTS, CHECKPOINT = "cubatch weights", "cubatch checkpoint"
"""Metadata that identify files of cubatch."""

_NOTES = "__metadata__"
_AGAIN = "Save or download it again."
_NOT_NUMPYS = {"BF16": "<u2"}  # its bits are the upper half of a float32's
_TYPES = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", **_NOT_NUMPYS, "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1",
    "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "u1", "BOOL": "?",
}  # fmt: skip


# Exceptions of NumPy and zipfile for files that are damaged, or of another format.
_DAMAGED = (ValueError, EOFError, AttributeError, TypeError, RuntimeError, zipfile.BadZipFile, zlib.error,
            tokenize.TokenError)  # fmt: skip


def check_path(field: str, path: str | Path) -> Path:
    """
    Return a path as a Path; raise InvalidArgument if it does not end in .safetensors or .npz, or cannot be written.

    `field` is the name of the argument, for the error.

    Example:
        >>> check_path("save", "trained.npz").suffix
        '.npz'
    """
    checks.check_path(path, field)
    path = Path(path)
    if path.suffix.lower() not in ENDINGS:
        raise InvalidArgument(field, str(path), "a file that ends in " + " or ".join(ENDINGS))
    if not files.is_folder(path.parent):
        raise InvalidArgument(field, str(path), "a file in a folder that exists", "Make the folder first.")
    if files.is_folder(path):
        raise InvalidArgument(field, str(path), "a file, not a folder")
    if trouble := files.trouble(path):
        raise InvalidArgument(field, str(path), "a file that can be written", f"{trouble}.")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise InvalidArgument(field, str(path), "in a folder where you may create files", "Choose another folder.")
    return path


def write(path: str | Path, arrays: Mapping[str, np.ndarray[Any, Any]], notes: Mapping[str, str]) -> None:
    """
    Write named arrays and metadata to a file; an existing file is replaced once the new one is complete on disk.

    Args:
        path: Ends in .safetensors or .npz.
        arrays: The arrays by name.
        notes: Metadata of the file: texts by name.

    Raises:
        InvalidArgument: If the path has another ending or cannot be written.
        InvalidData: If writing fails.
    """
    path = check_path("path", path)
    whole = {name: np.ascontiguousarray(array).reshape(np.shape(array)) for name, array in arrays.items()}
    try:
        if path.suffix.lower() == ".npz":
            with whole_file.replacing(path) as partial, partial.open("wb") as file:
                np.savez(file, **{_NOTES: np.array(json.dumps(dict(notes)))}, **whole)  # type: ignore[arg-type]
        else:
            from safetensors.numpy import save

            whole_file.write(path, save(whole, dict(notes)))  # its save_file leaves partial files
    except OSError as error:
        raise InvalidData(str(path), f"cannot be written: {error.strerror or error}") from error


def read(path: str | Path) -> tuple[dict[str, np.ndarray[Any, Any]], dict[str, str]]:
    """
    Return the arrays by name and the metadata of a .safetensors or .npz file; bfloat16 arrays become float32.

    Raises:
        InvalidArgument: If the path has another ending.
        InvalidData: If the file cannot be read, is damaged, or holds a dtype that is not supported.
    """
    checks.check_path(path, "file")
    path = Path(path)
    if path.suffix.lower() not in ENDINGS:
        remedy = ""
        if path.suffix.lower() in {".pt", ".pth", ".bin", ".ckpt"}:
            remedy = "It may hold pickled code: write safetensors.torch.save_file(model.state_dict(), path) instead."
        raise InvalidArgument("file", str(path), "a file that ends in " + " or ".join(ENDINGS), remedy)
    try:
        return _read_npz(path) if path.suffix.lower() == ".npz" else _read_safetensors(path)
    except OSError as error:
        raise InvalidData(str(path), f"cannot be read: {files.reason(error)}") from error


def _read_npz(path: Path) -> tuple[dict[str, np.ndarray[Any, Any]], dict[str, str]]:
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
        notes = json.loads(str(arrays.pop(_NOTES, "{}")))
    except MemoryError as error:
        raise InvalidData(str(path), "declares more data than there is memory for", _AGAIN) from error
    except _DAMAGED as error:
        raise InvalidData(str(path), f"is no npz file of arrays: {error}", _AGAIN) from error
    if not isinstance(notes, dict) or not all(isinstance(note, str) for note in notes.values()):
        raise InvalidData(str(path), f"has metadata ({_NOTES}) that are no JSON object of texts", _AGAIN)
    return arrays, notes


def _read_safetensors(path: Path) -> tuple[dict[str, np.ndarray[Any, Any]], dict[str, str]]:
    from safetensors import SafetensorError, deserialize, safe_open

    try:
        with path.open("rb") as whole, safe_open(path, framework="np") as file:
            notes = file.metadata() or {}
            tensors = deserialize(whole.read())  # type: ignore[no-untyped-call]
    except (SafetensorError, ValueError) as error:  # ValueError: a zero byte in the path
        raise InvalidData(str(path), f"is no safetensors file, or damaged: {error}", _AGAIN) from error
    arrays = {}
    for name, tensor in tensors:
        kind = tensor["dtype"]
        if kind not in _TYPES:
            raise InvalidData(str(path), f"holds {name} as {kind}, which is not supported", "Save it as float32.")
        array = np.frombuffer(tensor["data"], _TYPES[kind]).reshape(tensor["shape"])
        if kind in _NOT_NUMPYS:
            array = (array.astype(np.uint32) << 16).view(np.float32)
        arrays[name] = array
    return arrays, notes
