"""The cache of a study: findings of the same question return, also after a kill and with other runs."""

from __future__ import annotations

import math
import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import pytest

from cubatch.errors import InvalidArgument
from cubatch.studies import study_cache
from cubatch.studies.study_cache import StudyCache


def test_findings_return_for_the_same_question_only(tmp_path):
    """Also with tuples and infinities in the key, which JSON does not have."""
    path, key = tmp_path / "cells.jsonl", {"shape": (1, 2), "limit": math.inf, 3: None}
    StudyCache(path, key).add("a", {"seconds": 1.5})
    StudyCache(path, key | {"seed": 1}).add("a", {"seconds": 7})
    StudyCache(path, key).add("b", {"seconds": math.nan})
    assert StudyCache(path, key).findings == {"a": {"seconds": 1.5}, "b": {"seconds": None}}
    assert StudyCache(path, key | {"seed": 1}).findings == {"a": {"seconds": 7}}


def test_a_line_that_a_kill_cut_off_costs_nothing_else(tmp_path):
    """What was added before and after it returns."""
    path = tmp_path / "cells.jsonl"
    StudyCache(path, {}).add("a", {"seconds": 1})
    StudyCache(path, {}).add("b", {"seconds": 2})
    path.write_bytes(path.read_bytes()[:-9])
    StudyCache(path, {}).add("c", {"seconds": 3})
    assert set(StudyCache(path, {}).findings) == {"a", "c"}


def add_all(path, name):
    """Add twenty findings."""
    cache = StudyCache(path, {})
    for number in range(20):
        cache.add(f"{name} {number}", {"seconds": number})


def test_two_processes_lose_nothing_of_each_other(tmp_path):
    """Twenty findings each at the same time: all forty return."""
    path = tmp_path / "cells.jsonl"
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        list(pool.map(add_all, [path] * 2, "ab"))
    assert len(StudyCache(path, {}).findings) == 40


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    """Before anything is measured; here a folder has its name."""
    path = tmp_path / "cells.jsonl"
    path.mkdir()
    with pytest.raises(InvalidArgument, match="Is a directory") as caught:
        StudyCache(path, {})
    assert (caught.value.field, caught.value.value) == ("out", str(path))


def test_a_file_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    """As the study's folder; earlier findings stay."""
    path = tmp_path / "cells.jsonl"
    StudyCache(path, {}).add("a", {})

    def full(_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(study_cache.os, "fsync", full)
        with pytest.raises(InvalidArgument, match="No space left") as caught:
            StudyCache(path, {}).add("b", {})
    assert (caught.value.field, caught.value.value) == ("out", str(tmp_path))
    assert "a" in StudyCache(path, {}).findings
