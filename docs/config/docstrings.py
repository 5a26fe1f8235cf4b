"""A Griffe extension: read the docstrings of cubatch, whose sections differ from Griffe's in two details."""

from __future__ import annotations

import re
from typing import Any

import griffe


class Docstrings(griffe.Extension):
    """Make sections that Griffe reads: doctests as examples, and names that share a description on one line."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite a docstring; Griffe calls it for each object that it has loaded."""
        if obj.docstring is not None:
            text = re.sub(r"^( *)Example:$", r"\1Examples:", obj.docstring.value, flags=re.MULTILINE)
            obj.docstring.value = re.sub(r"^( +(?:\w+, )*\w+,)\n +(?=[\w, ]+: )", r"\1 ", text, flags=re.MULTILINE)
