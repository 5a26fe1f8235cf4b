"""The snippets of README.md, and how they are run: the very text, in a folder and a cache of their own, on the CPU."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import attrs

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
ELSEWHERE = {"tune", "tests"}  # what these comments mark makes virtual environments: .ci/run runs them
_FENCE = re.compile(r"(?:<!-- (\w+) -->\n)?^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_AT_HAND = {"cubatch", "numpy", "my_project"}  # the last is written where the snippet is run
_COMMAND = f"""#!{sys.executable}
import sys
from cubatch.cli import app
from cubatch.engine import data
data._is_there = lambda *_: True  # the sample of MNIST that lies in `mnist` is not fetched again
sys.exit(app.main())
"""


@attrs.frozen
class Snippet:
    """A block of code; what comment marks it, in which language."""

    marker: str
    language: str
    text: str

    @property
    def needs(self) -> frozenset[str]:
        """What must be installed beside cubatch: what is imported, and for an ONNX file what reads it."""
        if self.language == "sh":
            return frozenset({"onnx", "onnxruntime", "torch"} if "model.onnx" in self.text else ())
        tree = ast.parse(self.text)
        imports = [name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names]
        imports += [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        return frozenset(name.partition(".")[0] for name in imports) - _AT_HAND

    def __str__(self) -> str:
        return self.text.strip().splitlines()[0]


def snippets(page: Path = README) -> tuple[Snippet, ...]:
    """Give all blocks of code of a page."""
    return tuple(Snippet(*match.groups("")) for match in _FENCE.finditer(page.read_text(encoding="utf-8")))


def run(snippet: Snippet, folder: Path) -> str:
    """Run a snippet in a folder, where `cubatch` is the one under test, and give what it prints; it has to succeed."""
    command = folder / "bin" / "cubatch"
    command.parent.mkdir()
    command.write_text(_COMMAND, encoding="utf-8")
    command.chmod(0o755)
    environment = os.environ | {
        "PATH": f"{command.parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "XDG_CACHE_HOME": str(folder / "cache"),
    }
    program = ["bash", "-euc"] if snippet.language == "sh" else [sys.executable, "-c"]
    done = subprocess.run(
        [*program, snippet.text], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{snippet.text}\n{done.stdout}\n{done.stderr}"
    return done.stdout
