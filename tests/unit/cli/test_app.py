"""The command line: its help, its exit codes, and how it ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import cubatch
import cubatch.engine
import cubatch.tuning
from cubatch.cli import app
from tests.unit import golden

ROOT = Path(cubatch.__file__).parent.parent


def test_messages_name_options_instead_of_python_arguments(run, tmp_path):
    """Also in remedies; the key of a file keeps its name, although an option has the same."""
    code, _, err = run("tune", "none.onnx", "--library", "onnxruntime", "--device", "cpu")
    assert (code, err.startswith("cubatch: MODEL must be")) == (2, True)
    code, _, err = run("tune", "mlp", "--dtype", "float16", "--device", "cpu")
    assert (code, "Use --dtype float32" in err, "=" in err) == (2, True, False)
    spec = tmp_path / "net.json"
    spec.write_text('{"input_shape": [0, 1, 4], "layers": [{"type": "relu"}]}')
    code, _, err = run("memory", spec, "--device", "t4")
    assert (code, "input_shape must be" in err, "--input-shape" in err) == (2, True, False)
    code, _, err = run("memory", "mnist-cnn", "--input-shape", "0,28,1", "--device", "t4")
    assert (code, "--input-shape must be" in err) == (2, True)


SLEEPER = """
import signal, sys, time, types
import cubatch.tuning
module = types.ModuleType("cubatch.tuning.tune")
def autotune(spec, **options):
    sys.stderr.write("measuring\\n")
    sys.stderr.flush()
    time.sleep(60)
module.autotune = autotune
sys.modules["cubatch.tuning.tune"] = cubatch.tuning.tune = module
sys.argv = ["cubatch", "tune", "mlp"]
from cubatch.cli.app import main
main()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
def test_signals_exit_with_130_and_no_traceback(number):
    """Ctrl-C, and the SIGTERM of a batch system at the end of its time, end alike."""
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(SLEEPER)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr.readline() == "measuring\n"

    process.send_signal(number)
    out, err = process.communicate(timeout=30)

    assert (process.returncode, out) == (130, "")
    assert "interrupted" in err
    assert "Traceback" not in err


def test_every_command_has_help_with_an_example(run):
    """--help is where people start."""
    groups = {
        name: [command.name or command.callback.__name__ for command in group.registered_commands]
        for name, group in app.GROUPS.items()
    }
    assert all(groups.values())
    commands = [[], *([command.__name__] for command in app.COMMANDS), *([name] for name in groups)]
    commands += [[name, command] for name, listed in groups.items() for command in listed]

    for command in commands:
        code, out, _ = run(*command, "--help")
        assert code == 0
        assert "Example: cubatch" in " ".join(out.split()), command
        assert not command or command[-1] in groups or "--json" in out


PARTS = {"__init__", "app", "console", "options", "refusals", "torch_module"}  # what commands share, and a part of one
ELSEWHERE = {"bench": "its tables are beside what it times, not in report/; its tests are in tests/unit/bench"}


def test_the_list_of_commands_cuts_no_sentence(run):
    """What a command does is said in a line of 80 columns."""
    _, out, _ = run("--help")
    lines = out.partition("Commands:")[2].split("\n")[1:-1]
    assert len(lines) == len(app.COMMANDS) + len(app.GROUPS)
    assert [line for line in lines if not line.endswith(".") or line.endswith("...")] == []


def test_every_command_is_registered_described_tested_and_seen_whole():
    """A module of its name, a row in the reference, a file of tests, and the page it prints in tests/data/golden."""
    commands = {command.__name__ for command in app.COMMANDS} | set(app.GROUPS)
    assert {path.stem for path in Path(app.__file__).parent.glob("*.py")} - PARTS == commands
    page = (ROOT / "docs/reference/commands.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^\| `cubatch (\w+)", page, re.MULTILINE)) == sorted(commands)
    assert commands - {path.stem for path in golden.FOLDER.iterdir()} == set(ELSEWHERE)
    assert commands - {path.stem.removeprefix("test_") for path in Path(__file__).parent.glob("*.py")} == set(ELSEWHERE)


def test_help_loads_nothing_heavy():
    """What --help imports decides how long it takes: no NumPy, GPU, plotting or rich."""
    code = (
        "import sys\nfrom cubatch.cli.app import app\n"
        "try:\n    app(['tune', '--help'], prog_name='cubatch')\nexcept SystemExit:\n    pass\n"
        "heavy = {'numpy', 'cupy', 'matplotlib', 'pynvml', 'torch', 'rich', 'sqlite3'} & set(sys.modules)\n"
        "sys.exit(','.join(sorted(heavy)) or 0)"
    )

    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)

    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("arguments", [["devices", "--json", "-"], ["models"]], ids=" ".join)
def test_a_reader_that_goes_away_ends_the_command_quietly(arguments):
    """`cubatch devices | head -1` is no error of anybody, whether the output is larger than a buffer or not."""
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    process = subprocess.Popen(
        [sys.executable, "-m", "cubatch", *arguments],
        cwd=ROOT,
        env=buffered,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    process.stdout.close()
    err = process.stderr.read()
    process.stderr.close()
    process.wait(timeout=30)

    assert err == b""


def test_the_version_is_told(run):
    """--version prints the package's version and nothing else."""
    assert run("--version")[1].strip() == cubatch.__version__
