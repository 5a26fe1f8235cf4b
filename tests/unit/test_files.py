"""Files that somebody else wrote: what has no end, is too large or is nested too deeply is refused, and said why."""

from __future__ import annotations

import os
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cubatch import files


def test_a_regular_file_is_read(tmp_path):
    """Up to the very byte that is allowed, by path or by its text."""
    path = tmp_path / "a.toml"
    path.write_text("größe", encoding="utf-8")
    assert files.read_text(path) == files.read_text(str(path)) == files.read_text(path, 7) == "größe"
    with pytest.raises(ValueError, match="larger than 6 B"):
        files.read_text(path, 6)


def test_what_may_have_no_end_is_refused_at_once(tmp_path):
    """A pipe that nobody writes to would be waited for, a device read for ever."""
    pipe = tmp_path / "pipe.toml"
    os.mkfifo(pipe)
    for path in (pipe, "/dev/zero", "/dev/null"):
        with pytest.raises(ValueError, match="no regular file"):
            files.read_text(path)
    with pytest.raises(IsADirectoryError):
        files.read_text(tmp_path)


@pytest.mark.parametrize("path", ["x" * 5000, "a\0b", "/nothing/there", ""], ids=["long", "zero byte", "none", "empty"])
def test_a_path_that_leads_nowhere_leads_nowhere(path):
    """A name of 5000 characters is no traceback: it is no file."""
    assert not files.is_file(path)
    assert files.is_folder(path) == (path == "")
    with pytest.raises((OSError, ValueError)):
        files.read_text(path)


def test_a_reason_does_not_repeat_the_path():
    """The message has it already, and it may be long."""
    for path, said in (("x" * 5000, "File name too long"), ("/nothing", "No such file or directory")):
        with pytest.raises(OSError, match=r"long|No such") as caught:
            files.read_text(path)
        assert files.reason(caught.value) == said
    assert files.reason(UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")) == "it is no UTF-8"


DEEP = ".".join(["a"] * 100)


@pytest.mark.parametrize(
    "text",
    [f"{DEEP} = 1", f"[{DEEP}]", f"[[{DEEP}]]", f"x = {{{DEEP} = 1}}", f"x = [{{a = 1, {DEEP} = 1}}]",
     f"a = 1\n  {DEEP}  = 2", f"a = '=' \n{DEEP} = 2", f"\t [ {DEEP} ]"],
)  # fmt: skip
def test_a_key_of_very_many_parts_is_refused_before_it_is_parsed(text):
    """40 kB of them took 20 s and 1.5 GiB: TOML's reader takes time and memory with their square."""
    with pytest.raises(ValueError, match="a key has more than 32 parts"):
        files.parsed_toml(text)


WORDS = st.text("abc", min_size=1, max_size=3)
TABLES = st.dictionaries(WORDS, st.integers() | st.floats(allow_nan=False) | st.lists(st.floats(0, 1), max_size=60))


@given(TABLES, st.lists(WORDS, min_size=1, max_size=20))
def test_ordinary_toml_is_read_as_pythons_own_reader_reads_it(table, header):
    """Numbers with points, lists of many of them on a line, and tables some levels deep are no such keys."""
    lines = [f"{key} = {value}" for key, value in table.items()]
    text = "\n".join([*lines, f"[z.{'.'.join(header)}]", 'name = "a.b = c.d"', *lines])
    text = text.replace("inf", "1.0")
    assert files.parsed_toml(text) == tomllib.loads(text)
