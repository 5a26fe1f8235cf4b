"""What a study keeps between its runs, and when it does not count."""

from __future__ import annotations

import errno
import json
import math
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from unittest.mock import Mock

import pytest

from cubatch import sqlite_file, whole_file
from cubatch.errors import InvalidArgument
from cubatch.studies.kept import Kept


def test_findings_of_the_same_question_come_back(tmp_path):
    """Also where what is known holds tuples and numbers without a place in JSON, which are read back otherwise."""
    path, known = tmp_path / "kept.json", {"shape": (1, 2), "limit": math.inf, 3: None}
    Kept(path, known).keep("a", {"seconds": 1.5})
    again = Kept(path, known)
    again.keep("b", {"seconds": math.nan})
    assert Kept(path, known).found == {"a": {"seconds": 1.5}, "b": {"seconds": None}}


def test_findings_of_other_questions_stay(tmp_path):
    """A quick look, another seed or another version in between costs nothing of what took hours."""
    path = tmp_path / "kept.json"
    for seed in (0, 1, 2):
        Kept(path, {"seed": seed}).keep("a", {"seconds": seed})
    Kept(path, {"seed": 1}).keep("b", {"seconds": 9})
    assert Kept(path, {"seed": 0}).found == {"a": {"seconds": 0}}
    assert Kept(path, {"seed": 1}).found == {"a": {"seconds": 1}, "b": {"seconds": 9}}
    assert Kept(path, {"seed": 2}).found == {"a": {"seconds": 2}}
    assert len(json.loads(path.read_text())["others"]) == 2


def test_two_runs_of_a_study_at_once_lose_nothing_of_each_other(tmp_path):
    """Both began before either had found a thing; another question in between stays too."""
    path = tmp_path / "kept.json"
    first, second, other = Kept(path, {"seed": 0}), Kept(path, {"seed": 0}), Kept(path, {"seed": 1})
    for kept, name in ((first, "a"), (other, "a"), (second, "b"), (first, "c"), (second, "d")):
        kept.keep(name, {"seconds": 1.0})
    assert set(Kept(path, {"seed": 0}).found) == set(second.found) == {"a", "b", "c", "d"}
    assert set(Kept(path, {"seed": 1}).found) == {"a"}


def keep_all(path, name):
    """Keep twenty findings."""
    kept = Kept(path, {"seed": 0})
    for number in range(20):
        kept.keep(f"{name} {number}", {"seconds": number})


def test_two_processes_that_keep_at_the_same_time_lose_nothing(tmp_path):
    """Twenty findings each, written one by one: forty are there."""
    path = tmp_path / "kept.json"
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        list(pool.map(keep_all, [path] * 2, "ab"))
    assert len(Kept(path, {"seed": 0}).found) == 40


def test_a_file_of_one_question_is_read_too(tmp_path):
    """As files were before they held others: it is gone on with, or stays."""
    path = tmp_path / "kept.json"
    path.write_text('{"known": {"seed": 0}, "found": {"a": {"seconds": 0}}}')
    assert Kept(path, {"seed": 0}).found == {"a": {"seconds": 0}}
    Kept(path, {"seed": 1}).keep("a", {})
    assert Kept(path, {"seed": 0}).found == {"a": {"seconds": 0}}


@pytest.mark.parametrize(
    "content",
    [
        "", "{", "[]", "7", '{"known": {"seed": 0}}', '{"known": {"seed": 0}, "found": []}', '{"found": {"a": {}}}',
        '{"known": 1, "found": {}, "others": 7}', '{"known": 1, "found": {}, "others": [7, {"known": {"seed": 0}}]}',
    ],
)  # fmt: skip
def test_what_is_no_such_file_counts_as_nothing(tmp_path, content):
    """Empty, cut off, of another form, or without findings; it can be written over."""
    path = tmp_path / "kept.json"
    path.write_text(content)
    kept = Kept(path, {"seed": 0})
    assert kept.found == {}
    kept.keep("a", {})
    assert Kept(path, {"seed": 0}).found == {"a": {}}


def test_a_file_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    """As the study's folder, and not as a traceback; what was kept before is left as it was."""
    path = tmp_path / "kept.json"
    Kept(path, {}).keep("a", {})

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(whole_file.os, "fsync", full)
    with pytest.raises(InvalidArgument, match="No space left") as caught:
        Kept(path, {}).keep("b", {})
    assert (caught.value.field, caught.value.value) == ("out", str(tmp_path))
    assert json.loads(path.read_text())["found"] == {"a": {}}


def test_a_file_system_without_locks_keeps_findings_all_the_same(tmp_path, monkeypatch):
    """As of Lustre mounted without them: two runs on it may lose each other's, a run's own are kept."""
    monkeypatch.setattr(sqlite_file.fcntl, "flock", Mock(side_effect=OSError(errno.ENOSYS, "no locks")))
    Kept(tmp_path / "f.json", {"seed": 0}).keep("a", {"seconds": 1})
    assert Kept(tmp_path / "f.json", {"seed": 0}).found == {"a": {"seconds": 1}}
