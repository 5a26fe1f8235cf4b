"""The cache of a study: findings of the same question return, also after a kill and with other runs."""

from __future__ import annotations

import math

import pytest

from cubatch.errors import InvalidArgument, InvalidData
from cubatch.studies.study_cache import StudyCache


def test_findings_return_for_the_same_question_only(tmp_path):
    """Also with tuples and infinities in the key, which JSON does not have."""
    path, key = tmp_path / "cells.jsonl", {"shape": (1, 2), "limit": math.inf, 3: None}
    StudyCache(path, key).get("a", lambda: {"seconds": 1.5})
    StudyCache(path, key | {"seed": 1}).get("a", lambda: {"seconds": 7})
    StudyCache(path, key).get("b", lambda: {"seconds": math.nan})
    assert StudyCache(path, key).findings == {"a": {"seconds": 1.5}, "b": {"seconds": None}}
    assert StudyCache(path, key | {"seed": 1}).findings == {"a": {"seconds": 7}}


def test_a_line_that_a_kill_cut_off_costs_nothing_else(tmp_path):
    """What was added before and after it returns."""
    path = tmp_path / "cells.jsonl"
    StudyCache(path, {}).get("a", lambda: {"seconds": 1})
    StudyCache(path, {}).get("b", lambda: {"seconds": 2})
    path.write_bytes(path.read_bytes()[:-9])
    StudyCache(path, {}).get("c", lambda: {"seconds": 3})
    assert set(StudyCache(path, {}).findings) == {"a", "c"}


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    """Before anything is measured; here a folder has its name."""
    path = tmp_path / "cells.jsonl"
    path.mkdir()
    with pytest.raises(InvalidArgument, match="Is a directory") as caught:
        StudyCache(path, {})
    assert (caught.value.field, caught.value.value) == ("out", str(path))


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    """As the study's folder, which was removed here."""
    cache = StudyCache(tmp_path / "gone" / "cells.jsonl", {})
    with pytest.raises(InvalidData, match="No such file") as caught:
        cache.get("a", dict)
    assert caught.value.path == str(tmp_path / "gone")
