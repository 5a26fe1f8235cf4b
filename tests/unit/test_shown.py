"""What an error shows of a value, and which characters reach a terminal: whatever the value is."""

from __future__ import annotations

import inspect
import unicodedata

import numpy as np
import pytest
from hypothesis import given, strategies as st

from cubatch import errors
from cubatch.units import is_visible, message_of, parse_bytes, shown, visible

MOST = 300
TURNS = {"LRE", "RLE", "PDF", "LRO", "RLO", "LRI", "RLI", "FSI", "PDI"}  # bidirectional classes of UAX 9
MARKS = "\u061c\u200e\u200f\u2028\u2029"  # marks of direction, ends of lines and paragraphs


class Mute:
    """Cannot be written at all."""

    def __repr__(self):
        raise RuntimeError("no")


class Rude(Exception):
    """Cannot say what it is."""

    def __str__(self):
        raise RuntimeError("no")


class Raw:
    """Writes what a terminal obeys."""

    def __repr__(self):
        return "\x1b[2J" * 1000


def nested(depth):
    """Give lists in each other."""
    found = []
    for _ in range(depth):
        found = [found] * 20
    return found


CIRCLE: list[object] = []
CIRCLE.append(CIRCLE)
HOSTILE = [
    16**5000, -(16**5000), [16**5000], {16**5000: 16**5000}, [1] * 10**6, "x" * 10**6, b"x" * 10**6, bytearray(10**6),
    {n: n for n in range(10**5)}, set(range(10**5)), nested(40), CIRCLE, Mute(), [Mute()], Raw(), Rude(), "\ud800",
    "\x1b[2J\u202e", np.zeros((1000, 1000)), object, None, 1e308, complex(1, 2), range(10**9), (n for n in "ab"),
]  # fmt: skip


def obeyed(text):
    """List what in a text a terminal would obey, by the Unicode database."""
    return [
        sign
        for sign in text
        if unicodedata.category(sign) in {"Cc", "Cs"} or unicodedata.bidirectional(sign) in TURNS or sign in MARKS
    ]


@pytest.mark.parametrize("value", HOSTILE, ids=lambda value: type(value).__name__)
def test_any_value_is_shown_in_a_line(value):
    """Never raising, never long, nothing in it that a terminal obeys."""
    text = shown(value)
    assert 0 < len(text) <= MOST
    assert obeyed(text) == []


@given(st.recursive(st.integers() | st.text() | st.floats() | st.binary(), lambda of: st.lists(of) | st.tuples(of, of)))
def test_what_is_short_is_shown_as_repr_writes_it(value):
    """Nothing is lost of values as people write them: a few items, a few levels, no very long text."""
    text = shown(value)
    assert len(text) <= MOST
    assert obeyed(text) == []
    if len(repr(value)) < 12 and not repr(value).count("[[[["):  # at most so many items, and fewer levels than are cut
        assert text == repr(value)


def arguments(kind, value):
    """Give a value for each argument that an error must be given."""
    needed = [one for one in inspect.signature(kind).parameters.values() if one.default is inspect.Parameter.empty]
    numbers = {"needed_bytes": 1, "available_bytes": 1, "seconds": 1.0}
    lists = {"known": ("a", "b"), "supported": ("a",), "options": ("a",)}
    return [value if one.name == "value" else {**numbers, **lists}.get(one.name, "text") for one in needed]


KINDS = [
    kind for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, errors.CubatchError) and "__init__" in vars(kind)
]  # fmt: skip


@pytest.mark.parametrize("value", [16**5000, "x" * 10**7, "\x1b[2J", Mute()], ids=["giant", "long", "escape", "mute"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_no_error_raises_or_runs_on_when_it_is_printed(kind, value):
    """`str(error)` of a giant integer raised, one of a long list had 30 MB."""
    text = str(kind(*arguments(kind, value)))
    assert len(text) < 1500
    assert obeyed(text.replace("\n", "")) == []


@given(st.text(st.characters(codec=None)))
def test_visible_text_holds_nothing_that_a_terminal_obeys(text):
    """By the Unicode database; all else is as it was, and what is visible stays the same."""
    found = visible(text, keep="")
    assert obeyed(found) == []
    assert is_visible(found)
    assert is_visible(text) == (obeyed(text) == [])
    if is_visible(text):
        assert found == text


def test_every_control_character_is_known():
    """All of Unicode, one by one."""
    signs = map(chr, range(0x110000))
    assert [hex(ord(sign)) for sign in signs if is_visible(sign) == bool(obeyed(sign))] == []


def test_what_an_exception_says_is_taken_from_anybody():
    """One whose text raises is called by its type."""
    assert message_of(Rude()) == "<Rude without a message>"
    assert message_of(ValueError("\x1b]0;title\x07")) == r"\x1b]0;title\x07"


@pytest.mark.parametrize("size", [2**63, 16**5000, "9" * 200, "1e400", 0, -1, "99999999999TiB"], ids=shown)
def test_no_size_is_beyond_all_memory(size):
    """A size is kept, printed and divided by: it has to be one."""
    with pytest.raises(ValueError, match=r"size|positive"):
        parse_bytes(size)
