"""Files that are written whole or not at all, by one process or several at the same time."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from cubatch import whole_file
from tests.unit.tuning.small_runs import CHECKOUT

BOTH = pytest.mark.parametrize("is_shared", [False, True])


def half_written(path, error, *, is_shared):
    with whole_file.replacing(path, is_shared=is_shared) as partial:
        partial.write_bytes(b"half")
        raise error


@BOTH
def test_what_fails_on_the_way_leaves_the_file_as_it_was(tmp_path, is_shared):
    """An error of whoever writes, Ctrl-C too, is raised on; nothing lies beside the file then."""
    path = tmp_path / "a.json"
    whole_file.write(path, b"before", is_shared=is_shared)
    for error in (ValueError, KeyboardInterrupt):
        with pytest.raises(error):
            half_written(path, error, is_shared=is_shared)
    assert path.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [path]


@BOTH
def test_nothing_but_the_system_says_no(tmp_path, is_shared):
    """A folder that is not there is the system's own error, for the caller to put into words."""
    with pytest.raises(FileNotFoundError):
        whole_file.write(tmp_path / "none" / "a.json", b"", is_shared=is_shared)


@pytest.mark.parametrize(("is_shared", "left"), [(False, 1), (True, 2)])
def test_kills_leave_the_file_and_little_beside_it(tmp_path, is_shared, left):
    """Two processes that end without cleaning up: one rest, which the next writing overwrites, or one of each."""
    path = tmp_path / "a.json"
    path.write_bytes(b"before")
    script = f"""if True:
        import os, pathlib
        from cubatch import whole_file
        with whole_file.replacing(pathlib.Path({str(path)!r}), is_shared={is_shared}) as partial:
            partial.write_bytes(b"half")
            os._exit(9)
    """
    for _ in range(2):
        assert subprocess.run([sys.executable, "-c", script], env=CHECKOUT, check=False).returncode == 9
    rests = [one for one in tmp_path.iterdir() if one.suffix == ".partial"]
    assert (path.read_bytes(), len(rests)) == (b"before", left)
    whole_file.write(path, b"after", is_shared=is_shared)
    assert path.read_bytes() == b"after"
    assert len(list(tmp_path.iterdir())) == (1 if not is_shared else 3)


def test_those_who_share_a_file_do_not_meet_beside_it(tmp_path):
    """Two threads have their own halves at the same time; the file is in the end what one of them wrote."""
    path, both = tmp_path / "a.json", threading.Barrier(2)
    seen = []

    def write(content):
        with whole_file.replacing(path, is_shared=True) as partial:
            partial.write_bytes(content)
            seen.append(partial)
            both.wait()

    threads = [threading.Thread(target=write, args=(content,)) for content in (b"a" * 9, b"b" * 9)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert len(set(seen)) == 2
    assert path.read_bytes() in (b"a" * 9, b"b" * 9)
    assert list(tmp_path.iterdir()) == [path]
