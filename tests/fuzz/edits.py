"""Inputs that nobody means well with: values, and edits of documents that were right."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path

from hypothesis import strategies as st

CORPUS = Path(__file__).parents[1] / "data" / "corpus"

WORDS = [
    "", "x", "0", "1", "-1", "1e308", "8GiB", "80%", "nan", "input", "layer1", "relu", "conv2d", "add", "float16",
    "training", "mlp", "t4", "cpu", "cuda:0", "\x1b[2J", "\u202e", "\ud800", "a\nb", "a\0b", "größe", "$x^{2$", "<b>",
    "x" * 5000, "[/b]", "../..", "/dev/null", "/dev/zero", "-", "--", "=", ",", "1,2", "9" * 5000,
]  # fmt: skip
NUMBERS = [
    0, 1, 2, 3, 7, 16, 28, 224, -1, -(2**31), 2**31 - 1, 2**31, 2**53, 2**63, 10**400, -(10**400), 0.0, -0.0, 0.5, 1.0,
    1e-9, 1e-300, 1e300, -1.5, math.inf, -math.inf, math.nan,
]  # fmt: skip
SCALARS = st.sampled_from([*WORDS, *NUMBERS, None, True, False]) | st.integers(-3, 300) | st.text(max_size=8)
VALUES = st.recursive(
    SCALARS, lambda of: st.lists(of, max_size=4) | st.dictionaries(st.sampled_from(WORDS), of, max_size=3), max_leaves=6
)


def documents(name):
    """Read the corpus of a target: JSON documents, in the order of their names."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted((CORPUS / name).glob("*.json"))]


def places(value, found=None):
    """List (container, key) of all that a document holds."""
    found = [] if found is None else found
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            found.append((value, key))
            places(value[key], found)
    return found


@st.composite
def edited(draw, wholes):
    """Take a document and change it in a few places: another value, one of another place, one less, one more."""
    whole = [copy.deepcopy(draw(st.sampled_from(wholes)))]
    for _ in range(draw(st.integers(0, 4))):
        known = places(whole)
        container, key = known[draw(st.integers(0, len(known) - 1))]
        match draw(st.sampled_from(["value", "value", "other", "less", "more", "key"])):
            case "value":
                container[key] = draw(VALUES)
            case "other":
                other, its = known[draw(st.integers(0, len(known) - 1))]
                container[key] = copy.deepcopy(other[its])
            case "less" if container is not whole:
                del container[key]
            case "more" if isinstance(container, list) and container is not whole:
                container.insert(key, copy.deepcopy(container[key]))
            case "key" if isinstance(container, dict):
                container[draw(st.sampled_from(WORDS))] = container[key]
    return whole[0]


@st.composite
def bitten(draw, wholes):
    """Take bytes and change a few of them: others in their place, a piece cut out, a piece twice."""
    whole = bytearray(draw(st.sampled_from(wholes)))
    for _ in range(draw(st.integers(0, 4))):
        begin = draw(st.integers(0, len(whole)))
        end = min(len(whole), begin + draw(st.sampled_from([0, 1, 1, 4, 16, 10_000])))
        piece = draw(st.binary(max_size=4) | st.sampled_from([bytes(whole[begin:end]) * 2, b"\xff" * 4, b""]))
        whole[begin:end] = piece
    return bytes(whole)
