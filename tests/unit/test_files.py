"""Questions about paths that a user gave."""

from __future__ import annotations

from pathlib import Path

import pytest

from cubatch import files


@pytest.mark.parametrize("path", ["x" * 5000, "a\0b", "/nothing/there", ""], ids=["long", "zero byte", "none", "empty"])
def test_a_path_that_leads_nowhere_is_no_file(path):
    """A name of 5000 characters or with a zero byte is no traceback."""
    assert not files.is_file(path)
    assert files.is_folder(path) == (path == "")
    assert bool(files.trouble(path)) == (len(path) > 1000 or "\0" in path)


def test_a_reason_does_not_repeat_the_path():
    """The message has it already, and it may be long."""
    for path, words in (("x" * 5000, "File name too long"), ("/nothing", "No such file or directory")):
        with pytest.raises(OSError, match=r"long|No such") as caught:
            Path(path).read_text(encoding="utf-8")
        assert files.reason(caught.value) == words
    assert files.reason(UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")) == "it is no UTF-8"
