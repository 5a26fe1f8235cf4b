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


@pytest.mark.usefixtures("autotune")
@pytest.mark.parametrize(
    "arguments",
    [
        ["tune"], ["tune", "mlp", "--mode", "sleeping"], ["tune", "mlp", "--batch-sizes", "32;64"],
        ["tune", "mlp", "--batch-sizes", ""], ["tune", "mlp", "--budget", "long"],
        ["tune", "mlp", "--fresh", "--no-store"], ["tune", "mlp", "--fresh", "--store", "x.db"],
        ["tune", "mlp", "--input-shape", "28,28"], ["tune", "net.toml", "--classes", "3"], ["nothing"],
        ["store", "nothing"], ["memory", "mlp", "--batch-size", "1.5"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_wrong_arguments_exit_with_two(run, arguments):
    """A script can tell its own mistakes from failures."""
    code, out, err = run(*arguments)

    assert (code, out) == (2, "")
    assert err
    assert "Traceback" not in err


@pytest.mark.usefixtures("autotune")
@pytest.mark.parametrize(
    ("arguments", "words", "exits"),
    [
        (["tune", "resnet5"], "resnet50", 2),
        (["tune", "missing.toml"], "missing.toml", 2),
        (["memory", "mlp", "--batch-size", "0"], "--batch-size must be", 2),
        (["memory", "mlp", "--memory", "a lot"], "a lot", 2),
        (["memory", "mlp", "--device", "titan x"], "titan-x-pascal", 2),
        (["occupancy", "--threads", "2000", "--registers", "32", "--device", "t4"], "--threads must be", 2),
        (["candidates", "resnet50", "--memory-limit", "1MiB", "--device", "t4"], "does not fit", 1),
        (["store", "show", "7", "--store", "no-such.db"], "7", 1),
        (["memory", "mlp", "--device", "nonsense"], "`cubatch devices` lists", 2),
        (["occupancy", "nonsense", "--device", "t4"], "`cubatch kernels` lists", 2),
    ],
    ids=str,
)
def test_an_error_of_ours_is_one_clear_message_in_the_options_words(run, arguments, words, exits):
    """On stderr, without a traceback and with nothing on stdout; 2 if the request makes no sense, else 1."""
    code, out, err = run(*arguments, "--json", "-")

    assert (code, out) == (exits, "")
    assert words in err
    assert "Traceback" not in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["memory", "mlp", "--device", "t4", "--memory", ""],
        ["study", "memory-rules", "", "--device", "t4"],
        ["bench", "gemm", "--m", "8", "--n", "8", "--k", "8", "--dry-run", "--device", ""],
    ],
    ids=lambda arguments: arguments[0],
)
def test_what_is_empty_is_not_what_was_left_out(run, tmp_path, monkeypatch, arguments):
    """As of a variable of a script that is not set: a default in its place would answer another question."""
    monkeypatch.chdir(tmp_path)
    code, out, err = run(*arguments)
    assert (code, out, list(tmp_path.iterdir())) == (2, "", [])
    assert "''" in err


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


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["memory", "mlp", "--batch-size", "x"], "'--batch-size': a whole number is needed"),
        (["tune", "mlp", "--tolerance", "x"], "'--tolerance': a number is needed"),
        (["tune", "mlp", "--seed", "-1"], "'--seed': at least 0 is needed"),
        (["tune", "mlp", "--mode", "train"], "'--mode': 'train' is not one of"),
        (["tune"], "Missing argument 'MODEL'"),
    ],
)
def test_a_bad_value_is_answered_in_plain_words(run, arguments, says):
    """Not in those of the library that reads the command line."""
    code, _, err = run(*arguments)
    assert code == 2
    assert says in err
    assert "Input should" not in err
    assert "Value error" not in err


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


@pytest.mark.parametrize(
    "arguments", [["devices", "--json", "-"], ["store", "list", "--store", "none.db"]], ids=" ".join
)
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
