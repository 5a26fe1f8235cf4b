"""
MkDocs hooks: put the help of every command and every public name where a page asks for them.

A page asks with a line of its own: `<!-- help of commands -->`, or `<!-- names: KIND -->` with a kind of
`function`, `class`, `layer` or `error`.
"""

from __future__ import annotations

import inspect
import re
from typing import Any

import typer
from typer.main import get_command

import cubatch
from cubatch.cli.app import app


def help_of_commands() -> str:
    """Return a section for each command: its help text, as a terminal of 100 columns shows it."""
    return "\n".join(_sections(get_command(app) if isinstance(app, typer.Typer) else app, "cubatch"))


def _sections(command: Any, name: str) -> list[str]:
    text = command.get_help(command.make_context(name, [], resilient_parsing=True, terminal_width=100))
    lines = [f"### {name}", "", "```text", text.rstrip(), "```", ""]
    for child, inner in sorted(getattr(command, "commands", {}).items()):
        lines += _sections(inner, f"{name} {child}")
    return lines


def public_names(kind: str) -> list[str]:
    """Return the public names of one kind, in the order of `cubatch.__all__`."""
    return [name for name in cubatch.__all__ if _kind(name) == kind]


def _kind(name: str) -> str:
    value = getattr(cubatch, name)
    if not inspect.isclass(value):
        return "function" if inspect.isfunction(value) else "other"
    if issubclass(value, Exception):
        return "error"
    return "layer" if value.__module__.startswith("cubatch.network.layers") else "class"


def _identifier(name: str) -> str:
    """Return where a name is defined: the path that mkdocstrings finds without following the lazy imports."""
    value = getattr(cubatch, name)
    return f"{value.__module__}.{value.__qualname__}"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace what a page asks for; MkDocs calls it for each page."""
    markdown = markdown.replace("<!-- help of commands -->", help_of_commands())
    return re.sub(
        r"^<!-- names: (\w+) -->$",
        lambda match: "\n\n".join(f"::: {_identifier(name)}" for name in public_names(match[1])),
        markdown,
        flags=re.MULTILINE,
    )
