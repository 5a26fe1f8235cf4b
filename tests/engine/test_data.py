"""IDX files as they come: plain, packed, damaged; and downloads that leave nothing wrong behind."""

from __future__ import annotations

import gzip
import hashlib
import http.client
import io
import shutil
import struct
import tracemalloc
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest

from cubatch.engine import data
from cubatch.errors import InvalidData

SAMPLE = Path(__file__).parents[1] / "data" / "mnist-sample"


def idx(array, kind=0x08):
    """Write an array of bytes as the format is published."""
    extents = b"".join(struct.pack(">I", extent) for extent in array.shape)
    return bytes([0, 0, kind, array.ndim]) + extents + array.astype(np.uint8).tobytes()


IMAGES = np.arange(3 * 4 * 5).reshape(3, 4, 5)


# --- reading -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "array", [IMAGES, np.array([7, 0, 255]), np.zeros((0, 28, 28))], ids=["images", "labels", "none"]
)
@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzip"])
def test_a_file_is_read_by_its_content_not_its_name(tmp_path, array, pack):
    """Plain or packed, whatever it is called, the elements and their shape come back."""
    path = tmp_path / "any-name.bin"
    path.write_bytes(pack(idx(array)))
    found = data.read_idx(path)
    assert found.dtype == np.uint8
    np.testing.assert_array_equal(found, array)
    np.testing.assert_array_equal(data.read_idx(str(path)), array)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        pytest.param(b"", "no IDX file", id="empty"),
        pytest.param(b"PNG and so on", "no IDX file", id="other format"),
        pytest.param(idx(IMAGES, kind=0x0D), "no IDX file of unsigned bytes", id="floats"),
        pytest.param(bytes([0, 0, 8, 255]) + b"\0\0\0\1" * 255 + b"x", "at most 8 dimensions", id="dimensions"),
        pytest.param(idx(IMAGES)[:-1], "should hold 60 elements", id="short"),
        pytest.param(idx(IMAGES) + b"\0", "should hold 60 elements", id="long"),
        pytest.param(idx(IMAGES)[:10], "inside its header", id="header"),
        pytest.param(gzip.compress(idx(IMAGES))[:-9], "cannot be read", id="cut gzip"),
        pytest.param(gzip.compress(idx(IMAGES))[:-8] + b"\xff" * 8, "cannot be read", id="damaged"),
    ],
)
def test_a_file_that_is_not_what_it_should_be_is_refused(tmp_path, content, says):
    """Truncated, damaged or of another type: an error with the path and what is wrong."""
    path = tmp_path / "images"
    path.write_bytes(content)
    with pytest.raises(InvalidData, match=says) as caught:
        data.read_idx(path)
    assert caught.value.path == str(path)


def test_a_file_that_is_not_there_or_a_folder_is_refused(tmp_path):
    """What the operating system refuses is our error, not its."""
    for path in (tmp_path / "missing", tmp_path):
        with pytest.raises(InvalidData, match="cannot be read"):
            data.read_idx(path)


def test_the_sample_is_mnist():
    """The 1000 images that ship: extents, classes, and both sets normalised alike by the training images."""
    training, test = data.load_mnist(SAMPLE)
    assert (len(training), len(test)) == (800, 200)
    assert training.images.shape[1:] == test.images.shape[1:] == (28, 28, 1)
    assert training.classes == test.classes == 10
    assert (training.mean, training.deviation) == (test.mean, test.deviation)
    images, labels = training.batch(slice(None))
    assert images.dtype == np.float32
    assert labels.dtype == np.int32
    assert float(images.mean(dtype=np.float64)) == pytest.approx(0, abs=1e-4)
    assert float(images.std(dtype=np.float64)) == pytest.approx(1, abs=1e-4)


def write_set(folder, images, labels):
    for part in ("train", "t10k"):
        (folder / f"{part}-images-idx3-ubyte").write_bytes(idx(images))
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(idx(labels))


def test_plain_and_packed_files_may_be_mixed(tmp_path):
    """Each of the four files is found with or without .gz."""
    shutil.copytree(SAMPLE, tmp_path, dirs_exist_ok=True)
    packed = tmp_path / "t10k-labels-idx1-ubyte.gz"
    packed.with_suffix("").write_bytes(gzip.decompress(packed.read_bytes()))
    packed.unlink()
    _, test = data.load_mnist(tmp_path)
    np.testing.assert_array_equal(test.labels, data.load_mnist(SAMPLE)[1].labels)


@pytest.mark.parametrize(
    ("images", "labels", "says"),
    [
        (IMAGES, np.zeros(2), "do not match"),
        (IMAGES[0], np.zeros(4), "do not match"),
        (IMAGES, np.zeros((3, 1)), "do not match"),
        (np.zeros((0, 4, 5)), np.zeros(0), "do not match"),
        (np.zeros((3, 0, 0)), np.zeros(3), "do not match"),
        (np.full((3, 4, 5), 9), np.zeros(3), "the same"),
    ],
)
def test_sets_that_do_not_belong_together_are_refused(tmp_path, images, labels, says):
    """Another number of labels, other dimensions, no images, or nothing to see on them."""
    write_set(tmp_path, images, labels)
    with pytest.raises(InvalidData, match=says):
        data.load_mnist(tmp_path)


def test_sets_of_other_shapes_are_refused(tmp_path):
    """Test images that are no network's for the training images: both shapes are said."""
    write_set(tmp_path, IMAGES, np.zeros(3))
    (tmp_path / "t10k-images-idx3-ubyte").write_bytes(idx(IMAGES.reshape(3, 5, 4)))
    with pytest.raises(InvalidData, match=r"train images are of shape \(4, 5\), and t10k images of \(5, 4\)"):
        data.load_mnist(tmp_path)


def test_mean_and_deviation_are_numpys_without_its_memory(tmp_path):
    """Of 3 MiB of pixels, to 1e-12: eight bytes beside them for each of a piece of 1 MiB, and not for all."""
    images = np.random.default_rng(5).integers(0, 200, (48, 256, 256))
    write_set(tmp_path, images, np.zeros(48))
    tracemalloc.start()
    training, _ = data.load_mnist(tmp_path)
    held, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert training.mean == pytest.approx(images.mean() / 255, rel=1e-12)
    assert training.deviation == pytest.approx(images.std() / 255, rel=1e-12)
    assert most - held < 10 * 2**20


def test_a_folder_without_the_files_says_how_to_get_them(tmp_path):
    """The error names the missing file and the option that fetches it."""
    with pytest.raises(InvalidData, match=r"train-images-idx3-ubyte.*--download"):
        data.load_mnist(tmp_path)


def test_a_shuffled_epoch_deals_every_image_once():
    """Whole batches, each image at most once, another order for another seed, the same for the same."""
    training, _ = data.load_mnist(SAMPLE)

    def labels(seed):
        return np.concatenate([labels for _, labels in training.shuffled(96, seed)])

    assert len(labels(0)) == 8 * 96
    seen = [image.tobytes() for images, _ in training.shuffled(100, 3) for image in images]
    all_of_them = {image.tobytes() for image in training.batch(slice(None))[0]}
    assert set(seen) == all_of_them
    np.testing.assert_array_equal(labels(1), labels(1))
    assert (labels(1) != labels(2)).any()


# --- downloading ---------------------------------------------------------------------------------------------


@pytest.fixture
def server(monkeypatch):
    """Four small files by name, served without a network; requests are noted."""
    files = {}
    for part, count in (("train", 5), ("t10k", 3)):
        files[f"{part}-images-idx3-ubyte.gz"] = idx(np.arange(count * 16).reshape(count, 4, 4))
        files[f"{part}-labels-idx1-ubyte.gz"] = idx(np.arange(count))
    sums = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    served = {name: gzip.compress(content) for name, content in files.items()}
    asked = []

    def urlopen(url, timeout):
        assert timeout > 0
        asked.append(url.rpartition("/")[2])
        content = served[asked[-1]]
        if isinstance(content, Exception):
            raise content
        return io.BytesIO(content)

    monkeypatch.setattr(data, "_MNIST_SHA256", sums)
    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    return served, asked


def test_a_download_fetches_what_is_missing(server, tmp_path):
    """Four files arrive and can be read; a second call requests nothing."""
    served, asked = server
    folder = tmp_path / "new" / "mnist"
    data.download_mnist(folder)
    assert sorted(asked) == sorted(served) == sorted(path.name for path in folder.iterdir())
    training, test = data.load_mnist(folder)
    assert (len(training), len(test)) == (5, 3)
    asked.clear()
    data.download_mnist(str(folder))
    assert asked == []


@pytest.mark.parametrize(("pack", "ending"), [(gzip.compress, ".gz"), (bytes, "")])
def test_a_download_leaves_another_data_set_as_it_is(server, tmp_path, pack, ending):
    """Fashion-MNIST has the names of MNIST's files: it is refused, byte for byte the same, and nothing is fetched."""
    _, asked = server
    own, content = tmp_path / f"t10k-labels-idx1-ubyte{ending}", pack(idx(np.array([3, 1, 2])))
    own.write_bytes(content)
    with pytest.raises(InvalidData, match=r"t10k-labels-idx1-ubyte.*: is not MNIST's.*Name another folder"):
        data.download_mnist(tmp_path)
    assert (own.read_bytes(), asked, list(tmp_path.iterdir())) == (content, [], [own])


def test_files_that_are_there_unpacked_are_not_fetched(server, tmp_path):
    """As `load_mnist` reads them without .gz, no network is needed for those."""
    served, asked = server
    for name, content in served.items():
        (tmp_path / name.removesuffix(".gz")).write_bytes(gzip.decompress(content))
    data.download_mnist(tmp_path)
    assert asked == []


@pytest.mark.parametrize(
    "content",
    [
        gzip.compress(b"something else"),
        b"<html>please log in</html>",
        gzip.compress(b"a" * 500)[:-20],
        urllib.error.URLError("no route to host"),
        urllib.error.HTTPError("http://x", 404, "Not Found", None, None),
        http.client.IncompleteRead(b"half"),
    ],
    ids=["other", "page", "cut", "offline", "404", "half"],
)
def test_a_download_that_fails_leaves_nothing_behind(server, tmp_path, content):
    """Offline, cut off or not what was published: an error with the address, and no file that was not right."""
    served, _ = server
    served["train-labels-idx1-ubyte.gz"] = content
    with pytest.raises(InvalidData, match="train-labels-idx1-ubyte"):
        data.download_mnist(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["train-images-idx3-ubyte.gz"]
    if isinstance(content, urllib.error.HTTPError):
        content.close()


def test_a_place_that_cannot_be_written_is_refused(server, tmp_path):
    """A file where the folder should be is our error too."""
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidData, match="cannot be written"):
        data.download_mnist(tmp_path / "file" / "mnist")
