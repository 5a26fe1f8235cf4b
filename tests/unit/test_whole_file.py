"""Files that are written whole or not at all, by one process or several at the same time."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from cubatch import whole_file
from tests.unit.tuning.small_runs import CHECKOUT


def write_half(path, error):
    with whole_file.replacing(path) as partial:
        partial.write_bytes(b"half")
        raise error


def test_an_error_leaves_the_file_as_it_was(tmp_path):
    """Ctrl-C too; nothing is left next to the file."""
    path = tmp_path / "a.json"
    whole_file.write(path, b"before")
    for error in (ValueError, KeyboardInterrupt):
        with pytest.raises(error):
            write_half(path, error)
    assert path.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(FileNotFoundError):
        whole_file.write(tmp_path / "none" / "a.json", b"")


def test_a_killed_process_leaves_the_file_as_it_was(tmp_path):
    """Its half is next to the file until the file is written again; a half that is being written stays."""
    path = tmp_path / "a.json"
    path.write_bytes(b"before")
    script = f"""if True:
        import os, pathlib
        from cubatch import whole_file
        with whole_file.replacing(pathlib.Path({str(path)!r})) as partial:
            partial.write_bytes(b"half")
            os._exit(9)
    """
    assert subprocess.run([sys.executable, "-c", script], env=CHECKOUT, check=False).returncode == 9
    assert path.read_bytes() == b"before"
    (abandoned,) = (file for file in tmp_path.iterdir() if file.suffix == ".partial")
    whole_file.write(tmp_path / "b.json", b"")
    with whole_file.replacing(path) as partial:
        assert not abandoned.exists()
        partial.write_bytes(b"later")
        whole_file.write(path, b"after")  # leaves the file that is being written
        assert path.read_bytes() == b"after"
    assert path.read_bytes() == b"later"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.json", "b.json"]


def test_two_threads_write_the_same_file(tmp_path):
    """Each has its own half at the same time; the file is in the end what one of them wrote."""
    path, both = tmp_path / "a.json", threading.Barrier(2)
    halves = []

    def write(content):
        with whole_file.replacing(path) as partial:
            partial.write_bytes(content)
            halves.append(partial)
            both.wait()

    threads = [threading.Thread(target=write, args=(content,)) for content in (b"a" * 9, b"b" * 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(halves)) == 2
    assert path.read_bytes() in (b"a" * 9, b"b" * 9)
    assert list(tmp_path.iterdir()) == [path]
