"""Files of named arrays: what comes back, what a kill leaves, and what is refused."""

from __future__ import annotations

import os
import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.extra import numpy as arrays_of

from cubatch import array_file
from cubatch.errors import InvalidArgument, InvalidData

TYPES = ("float64", "float32", "float16", "int64", "int32", "uint16", "bool")
ARRAYS = st.dictionaries(
    st.text("abcw.01", min_size=1, max_size=8),
    st.sampled_from(TYPES).flatmap(lambda kind: arrays_of.arrays(kind, arrays_of.array_shapes(min_dims=0, min_side=0))),
    min_size=1,
    max_size=4,
)


@pytest.mark.parametrize("ending", array_file.ENDINGS)
@settings(max_examples=25, deadline=None)
@given(arrays=ARRAYS, notes=st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3), turned=st.booleans())
def test_what_is_written_comes_back(tmp_path_factory, ending, arrays, notes, turned):
    """Names, types, shapes, every bit and the notes, also of arrays that do not lie in C order."""
    path = tmp_path_factory.mktemp("files") / f"a{ending}"
    arrays = {name: array.T if turned else array for name, array in arrays.items()}
    array_file.write(path, arrays, notes)
    found, told = array_file.read(path)
    assert told == notes
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
        assert found[name].tobytes() == array.tobytes()
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("ending", array_file.ENDINGS)
@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_write_that_does_not_end_leaves_what_was_there(tmp_path, monkeypatch, ending, step):
    """Ended before the data are on the disk, or before they take the old file's place: the old file is whole."""
    path = tmp_path / f"a{ending}"
    array_file.write(path, {"w": np.zeros(3)}, {})
    with monkeypatch.context() as ended:

        def end(*_):
            raise OSError(28, "No space left on device")

        ended.setattr("os.fsync" if step == "fsync" else "pathlib.Path.replace", end)
        with pytest.raises(InvalidData, match="No space left"):
            array_file.write(path, {"w": np.ones(3)}, {})
    assert array_file.read(path)[0]["w"].tolist() == [0, 0, 0]
    assert list(tmp_path.iterdir()) == [path]


def test_the_data_are_on_the_disk_before_they_take_the_old_files_place(tmp_path, monkeypatch):
    """fsync of the new file, then the rename."""
    order = []
    fsync, replace = os.fsync, type(tmp_path).replace

    def synced(descriptor):
        order.append(Path(f"/proc/self/fd/{descriptor}").readlink().suffix)
        fsync(descriptor)

    def replaced(self, target):
        order.append("replace")
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(type(tmp_path), "replace", replaced)
    array_file.write(tmp_path / "a.safetensors", {"w": np.ones(3)}, {})
    assert order == [".partial", "replace"]


@pytest.mark.parametrize("ending", array_file.ENDINGS)
@pytest.mark.parametrize("keep", [0, 4, 60, -1])
def test_a_damaged_file_is_named(tmp_path, ending, keep):
    """Cut short anywhere, with its path and what is wrong."""
    path = tmp_path / f"a{ending}"
    array_file.write(path, {"w": np.ones(30)}, {"format": "x"})
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(InvalidData, match=path.name):
        array_file.read(path)


def test_python_objects_are_never_loaded(tmp_path):
    """An npz file with a pickled object in it is refused, and the object not made."""

    class Trap:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "sprung"),))

    np.savez(tmp_path / "a.npz", w=np.array([Trap()], dtype=object))
    with pytest.raises(InvalidData, match=r"a\.npz"):
        array_file.read(tmp_path / "a.npz")
    (tmp_path / "b.npz").write_bytes(pickle.dumps(Trap()))
    with pytest.raises(InvalidData, match=r"b\.npz"):
        array_file.read(tmp_path / "b.npz")
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("name", ["a.pt", "a.bin", "a"])
def test_other_endings_are_refused(tmp_path, name):
    """With the two that will do, and for PyTorch's pickles with what writes one of them."""
    with pytest.raises(InvalidArgument, match=r"\.safetensors or \.npz") as caught:
        array_file.read(tmp_path / name)
    assert ("save_file" in str(caught.value)) == (name != "a")
    with pytest.raises(InvalidArgument, match=r"\.safetensors or \.npz"):
        array_file.write(tmp_path / name, {}, {})


def test_a_file_that_is_missing_and_a_folder_that_is_missing_are_named(tmp_path):
    """Reading says the path, writing the folder."""
    with pytest.raises(InvalidData, match=r"nothing\.npz.*No such file"):
        array_file.read(tmp_path / "nothing.npz")
    with pytest.raises(InvalidData, match=r"nothing\.safetensors.*No such file"):
        array_file.read(tmp_path / "nothing.safetensors")
    with pytest.raises(InvalidArgument, match="folder that exists"):
        array_file.write(tmp_path / "no" / "a.npz", {}, {})


def test_a_lone_array_under_the_name_of_many_is_named(tmp_path):
    """NumPy opens it all the same, as what has no names."""
    path = tmp_path / "one.npz"
    with path.open("wb") as file:
        np.save(file, np.ones(3))
    with pytest.raises(InvalidData, match=r"one\.npz"):
        array_file.read(path)


def test_more_than_there_is_memory_for_is_refused(tmp_path):
    """A header of a hundred bytes may promise 256 PiB."""
    header = {"descr": "<f8", "fortran_order": False, "shape": (2**55,)}
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as whole, whole.open("w.npy", "w") as entry:
        np.lib.format.write_array_header_1_0(entry, header)
    with pytest.raises(InvalidData, match=r"a\.npz: declares more data than there is memory for"):
        array_file.read(tmp_path / "a.npz")


@pytest.mark.parametrize("notes", ["3", '{"cubatch weights": 3}'])
def test_notes_that_are_no_text_by_name_are_refused(tmp_path, notes):
    """Whoever looks for a note in them would fail otherwise."""
    np.savez(tmp_path / "a.npz", w=np.ones(2), __metadata__=np.array(notes))
    with pytest.raises(InvalidData, match=r"a\.npz"):
        array_file.read(tmp_path / "a.npz")
