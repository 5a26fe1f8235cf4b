"""
Data sets in IDX files, the format of MNIST: reading, checks, download, batches.

An IDX file begins with two zero bytes, a type and the number of dimensions. Each extent follows as a big-endian 32-bit
number, then the elements. gzip around it is recognized by its content, not its name.
"""

from __future__ import annotations

import gzip
import hashlib
import http.client
import math
import struct
import urllib.request
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from cubatch import files, whole_file
from cubatch.errors import InvalidArgument, InvalidData

_GZIP_MAGIC, _IDX_MAGIC = b"\x1f\x8b", b"\0\0\x08"  # the third byte is the type: unsigned bytes
_MNIST_URL = "https://ossci-datasets.s3.amazonaws.com/mnist/"
# SHA-256 of the decompressed files, which do not depend on the compressor.
_MNIST_SHA256 = {
    "train-images-idx3-ubyte.gz": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "train-labels-idx1-ubyte.gz": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "t10k-images-idx3-ubyte.gz": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "t10k-labels-idx1-ubyte.gz": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
}
_TIMEOUT_SECONDS = 30
_AGAIN = "Download or write it again."
_MOST_DIMENSIONS = 8
_CHUNK = 2**20


@attrs.frozen(eq=False)
class Dataset:
    """Images and their classes."""

    images: np.ndarray[Any, Any]  # (samples, h, w, c), uint8
    labels: np.ndarray[Any, Any]  # (samples,), int32
    # mean, deviation: mean and standard deviation of the training images scaled to 0..1, which normalize batches
    mean: float
    deviation: float

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def classes(self) -> int:
        """Number of classes: the largest label plus one."""
        return int(self.labels.max()) + 1

    def batch(self, index: Any) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Return the images at `index`, normalized, as float32, and their labels."""
        images = self.images[index].astype(np.float32)
        images -= np.float32(255 * self.mean)
        images /= np.float32(255 * self.deviation)
        return images, self.labels[index]

    def shuffled(
        self, batch_size: int, seed: int | Sequence[int], *, first: int = 0, part: slice = slice(None)
    ) -> Iterator[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
        """
        Yield images and labels of whole batches in a random order; a last incomplete batch is left out.

        Several numbers as `seed` draw an order for each combination. `first` batches are skipped, and `part` of each
        batch is returned.
        """
        order = np.random.default_rng(seed).permutation(len(self))
        for start in range(first * batch_size, len(self) - batch_size + 1, batch_size):
            yield self.batch(order[start : start + batch_size][part])


def read_idx(path: Path | str) -> np.ndarray[Any, Any]:
    """Return the array in an IDX file of unsigned bytes, plain or gzip; raise InvalidData for other files."""
    content = _unpacked(Path(path))
    dimensions = content[len(_IDX_MAGIC)] if len(content) > len(_IDX_MAGIC) else 0
    if not content.startswith(_IDX_MAGIC) or dimensions > _MOST_DIMENSIONS:
        wanted = f"it should begin with the bytes 00 00 08 and at most {_MOST_DIMENSIONS} dimensions"
        raise InvalidData(str(path), f"is no IDX file of unsigned bytes: {wanted}", _AGAIN)
    header = 4 + 4 * dimensions
    if len(content) < header:
        raise InvalidData(str(path), f"ends inside its header ({len(content)} of {header} bytes)", _AGAIN)
    shape = struct.unpack(f">{dimensions}I", content[4:header])
    if len(content) - header != math.prod(shape):
        wanted = f"{math.prod(shape)} elements of shape {shape}"
        raise InvalidData(str(path), f"should hold {wanted}, holds {len(content) - header}", _AGAIN)
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape)


def load_mnist(folder: Path | str) -> tuple[Dataset, Dataset]:
    """
    Read training and test set from a folder with MNIST's four files, plain or gzip.

    Returns:
        tuple: Training and test Dataset, (h, w) images as (h, w, 1), both normalized with the
        training images' mean and deviation.

    Raises:
        InvalidData: If a file is missing or damaged, shapes do not match, or all training pixels are equal.
    """
    parts = {}
    for part in ("train", "t10k"):
        images = read_idx(_find(Path(folder), f"{part}-images-idx3-ubyte"))
        labels = read_idx(_find(Path(folder), f"{part}-labels-idx1-ubyte"))
        if images.ndim != 3 or labels.ndim != 1 or len(images) != len(labels) or not images.size:  # noqa: PLR2004
            raise InvalidData(
                str(folder),
                f"{part} images of shape {images.shape} and labels of shape {labels.shape} do not match",
                "Download the files again.",
            )
        parts[part] = images[..., None], labels.astype(np.int32)
    shapes = [images.shape[1:3] for images, _ in parts.values()]
    if shapes[0] != shapes[1]:
        reason = f"train images are of shape {shapes[0]}, and t10k images of {shapes[1]}"
        raise InvalidData(str(folder), reason, "Use the training and test files of one data set.")
    mean, deviation = _statistics(parts["train"][0])
    if not deviation:
        raise InvalidData(str(folder), "all training pixels are the same", "Use images that differ.")
    train, test = (Dataset(*parts[part], mean, deviation) for part in ("train", "t10k"))
    return train, test


def both_sets(data: str | Path | tuple[Dataset, Dataset]) -> tuple[Dataset, Dataset]:
    """Return training and test set, of a tuple or read from a folder; raise InvalidArgument if image shapes differ."""
    if not isinstance(data, tuple):
        return load_mnist(data)
    wanted, other = (part.images.shape[1:] for part in data)
    if other != wanted:
        raise InvalidArgument(
            "data", f"test images of {other}", f"test images of {wanted}, the shape of training images"
        )
    return data


def _statistics(images: np.ndarray[Any, Any]) -> tuple[float, float]:
    """Return mean and standard deviation of pixels scaled to 0..1, without a float64 copy of each pixel."""
    pixels, values, counts = images.reshape(-1), np.arange(256), np.zeros(256, np.int64)
    for start in range(0, pixels.size, _CHUNK):
        counts += np.bincount(pixels[start : start + _CHUNK], minlength=256)
    mean = counts @ values / pixels.size
    return float(mean) / 255, math.sqrt(counts @ (values - mean) ** 2 / pixels.size) / 255


def download_mnist(folder: Path | str) -> None:
    """
    Download the MNIST files that a folder lacks both as plain and as gzip files.

    Raises:
        InvalidData: If the folder cannot be written, or a file cannot be downloaded or differs from the published one.
            Also if a file with such a name has another content; then nothing is downloaded. No wrong file is left.
    """
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in [name for name in _MNIST_SHA256 if not _is_there(folder, name)]:
            whole_file.write(folder / name, _fetched(name, folder))
    except OSError as error:
        raise InvalidData(str(folder), f"cannot be written: {error}", "Name another folder.") from error


def _is_there(folder: Path, name: str) -> bool:
    """Return whether a folder has one of MNIST's files, plain or gzip; raise InvalidData if its content differs."""
    present = [path for path in (folder / name.removesuffix(".gz"), folder / name) if path.exists()]
    for path in present:
        if hashlib.sha256(_unpacked(path)).hexdigest() != _MNIST_SHA256[name]:
            remedy = "Name another folder, or delete the file if it is damaged."
            raise InvalidData(str(path), "is not MNIST's, and is not replaced", remedy)
    return bool(present)


def _fetched(name: str, folder: Path) -> bytes:
    """
    Download one of MNIST's files and return its bytes; raise InvalidData if they differ from the published ones.

    Nothing is written: `folder` is where the error asks the user to put the file.
    """
    url, remedy = _MNIST_URL + name, f"Fetch it by other means into {folder}."
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_SECONDS) as answer:  # noqa: S310 - https
            content: bytes = answer.read()
        digest = hashlib.sha256(gzip.decompress(content)).hexdigest()
    except (OSError, EOFError, zlib.error, http.client.HTTPException) as error:
        raise InvalidData(url, f"cannot be fetched: {error}", remedy) from error
    if digest != _MNIST_SHA256[name]:
        wanted = f"it should unpack to SHA-256 {_MNIST_SHA256[name]}"
        raise InvalidData(url, f"differs from the published file: {wanted}", remedy)
    return content


def _unpacked(path: Path) -> bytes:
    try:
        content = path.read_bytes()
        return gzip.decompress(content) if content.startswith(_GZIP_MAGIC) else content
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise InvalidData(str(path), f"cannot be read: {files.reason(error)}", _AGAIN) from error


def _find(folder: Path, name: str) -> Path:
    for candidate in (folder / name, folder / f"{name}.gz"):
        if files.is_file(candidate):
            return candidate
    remedy = "Put MNIST's four IDX files there, plain or gzip, or fetch them with --download."
    raise InvalidData(str(folder), f"has neither {name} nor {name}.gz", remedy)
