"""
The snippets of README.md and docs/, and how they run: the very text, in a folder and a cache of its own, on the CPU.

Searches of forked scripts measure virtual time, so that a budget of seconds passes at once.

A comment right before a block says where it runs, or with what:

    <!-- tune -->, <!-- tests -->    in .ci/run, which reads these two commands from README.md
    <!-- gpu -->                     on a GPU, by people: tests parse its commands
    <!-- mpi -->                     where MPI is installed
    <!-- torchrun -->                by torchrun, as two ranks
    <!-- torchvision -->             in the process of its test, which can import torchvision next to a PyTorch for CPUs
    <!-- heap -->                    in tests/unit/measure/test_heap.py
"""

from __future__ import annotations

import ast
import doctest
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import attrs

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = (README, *sorted((ROOT / "docs").rglob("*.md")))
JUDGE = {"tune", "tests"}
# Runs a script in a folder with an environment and arguments; returns its exit code, output and errors.
RunScript = Callable[..., tuple[int, str, str]]
_FENCE = re.compile(r"(?:<!-- ([\w :]+) -->\n)?^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_AT_HAND = {"cubatch", "numpy", "my_project", *sys.stdlib_module_names}  # my_project is written where it is needed
_LENIENT = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
_HEAD = """from types import SimpleNamespace
from tests import virtual_time
virtual_time.install(SimpleNamespace(setattr=setattr))
"""
_COMMAND = """import sys
from cubatch.cli import app
from cubatch.engine import data
data._is_there = lambda *_: True  # the sample of MNIST that lies in `mnist` is not fetched again
sys.exit(app.main())
"""


@attrs.frozen
class Snippet:
    """A block of code of a page: its comment, its language, its text."""

    page: str
    marker: str
    language: str
    text: str

    @property
    def needs(self) -> frozenset[str]:
        """Names of packages beyond cubatch's own that must be installed."""
        if self.language in {"sh", "console"}:
            needed = {"onnx", "onnxruntime", "torch"} if "model.onnx" in self.text else set()
            needed |= {"torch"} if "my_models" in self.text else set()
            return frozenset(needed)
        tree = ast.parse(self.text)
        imports = [name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names]
        imports += [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        needed = {name.partition(".")[0] for name in imports}
        needed |= {"lightning", "transformers"} if "my_project" in needed else set()
        needed |= {"onnx", "torch"} if "model.onnx" in self.text else set()
        return frozenset(needed - _AT_HAND)

    @property
    def commands(self) -> list[list[str]]:
        """The words of each cubatch command of a shell block."""
        return [shlex.split(line)[1:] for line in self._lines if line.startswith("cubatch ")]

    @property
    def has_commands_only(self) -> bool:
        """Whether each line is a cubatch command, without operators of the shell."""
        return not set(self.text) & set("|&;<>$`") and all(line.startswith("cubatch ") for line in self._lines)

    @property
    def _lines(self) -> list[str]:
        return self.text.replace("\\\n", " ").splitlines()

    def __str__(self) -> str:
        return f"{self.page}: {self.text.strip().splitlines()[0]}"


def snippets(page: Path) -> tuple[Snippet, ...]:
    """Return the blocks of a page in languages that run."""
    name = str(page.relative_to(ROOT))
    found = (Snippet(name, *match.groups("")) for match in _FENCE.finditer(page.read_text(encoding="utf-8")))
    return tuple(one for one in found if one.language in {"sh", "python", "console"})


SNIPPETS = tuple(one for page in PAGES for one in snippets(page))


def run(
    snippet: Snippet, folder: Path, *, program: tuple[str, ...] = (), run_script: RunScript | None = None
) -> str:  # fmt: skip
    """
    Run a snippet in a folder, where `cubatch` is the one under test, and return its output; it must succeed.

    `run_script` runs Python, or cubatch commands alone, instead of a new interpreter.
    """
    shutil.copytree(ROOT / "tests/data/mnist-sample", folder / "mnist")
    command = folder / "bin" / "cubatch"
    command.parent.mkdir()
    head = "" if run_script is None else _HEAD
    command.write_text(f"#!{sys.executable}\n{head}{_COMMAND}", encoding="utf-8")
    command.chmod(0o755)
    environment = os.environ | {
        "PATH": f"{command.parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "XDG_CACHE_HOME": str(folder / "cache"),
        "COLUMNS": "110",
    }
    if snippet.language == "console":
        return _compare(snippet.text, folder, environment)
    if snippet.language == "python":
        (folder / "snippet.py").write_text(head + snippet.text, encoding="utf-8")
    if run_script is not None and (snippet.language == "python" or snippet.has_commands_only):
        script, calls = ("snippet.py", [[]]) if snippet.language == "python" else ("bin/cubatch", snippet.commands)
        done = [run_script(script, folder, environment, words) for words in calls]
        return "".join(_checked(snippet.text, *each) for each in done)
    default = ("bash", "-euc", snippet.text) if snippet.language == "sh" else (sys.executable, "snippet.py")
    return _output(program or default, folder, environment)


def _output(command: tuple[str, ...], folder: Path, environment: dict[str, str]) -> str:
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return _checked(command, done.returncode, done.stdout, done.stderr)


def _checked(command: object, code: int, out: str, err: str) -> str:
    assert code == 0, f"{command}\n{out}\n{err}"
    return out


def _compare(text: str, folder: Path, environment: dict[str, str]) -> str:
    """Run each line that begins with `$ `; what follows is its output: `...` is anything, and blanks count as one."""
    printed = []
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        command, _, wanted = part.partition("\n")
        found = _output(("bash", "-euc", command), folder, environment)
        assert doctest.OutputChecker().check_output(wanted, found, _LENIENT), f"{command}\n{found}"
        printed.append(found)
    return "".join(printed)


def missing(names: frozenset[str]) -> list[str]:
    """Return which packages are not installed."""
    return [name for name in sorted(names) if importlib.util.find_spec(name) is None]
