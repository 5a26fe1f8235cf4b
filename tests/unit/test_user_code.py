"""Where what a user names is looked for: in a folder of theirs too, last, and no longer than it is used."""

from __future__ import annotations

import sys

import pytest

from cubatch import user_code
from cubatch.errors import InvalidArgument, OutOfMemory


@pytest.fixture
def path(monkeypatch):
    """A path of our own, which `sys.path` is for a test."""
    monkeypatch.setattr(sys, "path", ["installed"])
    return sys.path


def test_a_folder_is_the_last_place_while_it_is_used(path):
    """Also where what is looked for raises."""
    seen = []

    def look():
        with user_code.beside("here"):
            seen.extend(path)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        look()
    assert seen == ["installed", "here"]
    assert path == ["installed"]


def test_whoever_has_it_on_the_path_keeps_it_where_it_is(path):
    """Before, after, or as the empty string, which is the current folder."""
    for own in (["here", "installed"], ["", "installed"]):
        path[:] = own
        with user_code.beside("here"):
            assert path == own
        assert path == own


def test_what_the_users_code_does_to_the_path_stays(monkeypatch, path):
    """An entry of theirs for the same folder, first; a path that is made anew and has it not."""
    with user_code.beside("here"):
        path.insert(0, "here")
    assert path == ["here", "installed"]
    path.remove("here")
    with user_code.beside("here"):
        monkeypatch.setattr(sys, "path", ["theirs"])
    assert sys.path == ["theirs"]


def test_a_folder_that_is_gone_is_none(monkeypatch, tmp_path, path):
    """What is installed is found without it."""
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert user_code.current_folder() is None
    with user_code.beside(None):
        assert path == ["installed"]


def called(build):
    """Call what a user has named."""
    with user_code.users("module", "pkg:build", "a function"):
        build()


def test_what_the_users_code_raised_is_told_with_its_line(tmp_path):
    """The innermost line of their own, though a library raised."""
    file = tmp_path / "pkg.py"
    file.write_text("import json\n\ndef build():\n    return json.loads('{')\n")
    code: dict = {}
    exec(compile(file.read_text(), file, "exec"), code)  # noqa: S102 - it is ours
    with pytest.raises(InvalidArgument, match=rf"It raised JSONDecodeError: .*, at {file}:4\.$"):
        called(code["build"])


def test_a_want_of_memory_is_no_fault_of_the_users_code():
    """It is told as one, as everywhere else."""

    def build():
        raise MemoryError("too much")

    with pytest.raises(OutOfMemory, match="pkg:build: MemoryError: too much"):
        called(build)


def test_a_script_that_ends_the_process_is_named_and_sees_no_arguments(monkeypatch):
    """textgen#3016: importing a training script parsed the command line of the process that imported it."""
    monkeypatch.setattr(sys, "argv", ["cubatch", "tune", "--budget", "5"])
    seen = []

    def build():
        seen.append(list(sys.argv))
        sys.exit(2)

    with pytest.raises(InvalidArgument, match=r"It raised SystemExit: 2, at .* Move what a script runs under `if __na"):
        called(build)
    assert seen == [["cubatch"]]
    assert sys.argv == ["cubatch", "tune", "--budget", "5"]
