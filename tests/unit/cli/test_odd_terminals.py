"""Terminals that are full, closed or know few letters, and what must not reach any: one line at most, no traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import cubatch
from cubatch.cli import app, console
from cubatch.network.layers import ReLU
from cubatch.report.grid import Grid
from tests.unit.commands import on_a_terminal

ROOT = Path(cubatch.__file__).parent.parent
SIGNS = "\x1b]0;mine\x07\x1b[2J\x9b\u202e\r"


def cubatch_says(line):
    """Run `cubatch LINE` in a shell, where stdout may be anything, and give (exit code, stdout, stderr)."""
    plain = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(
        ["bash", "-c", f'exec "{sys.executable}" -m cubatch {line}'],
        cwd=ROOT, env=plain, capture_output=True, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr.decode()


@pytest.mark.parametrize("line", ["devices", "memory --help"])
def test_a_full_disk_behind_stdout_is_one_line(line):
    """`cubatch devices > /dev/full` ended in 30 lines of traceback."""
    code, out, err = cubatch_says(f"{line} > /dev/full")
    assert (code, out) == (1, b"")
    assert err == "cubatch: stdout cannot be written: No space left on device\n"


def test_a_full_disk_behind_json_is_one_line_and_no_mistake_of_the_user():
    """With the table on stdout, and 1 as for whatever makes sense and could not be done."""
    code, out, err = cubatch_says("devices --json /dev/full")
    assert (code, b"V100" in out) == (1, True)
    assert err == "cubatch: /dev/full: --json cannot be written: No space left on device\n"


def test_a_file_that_cannot_be_replaced_is_left_as_it_was(tmp_path):
    """No file may grow here: the old content and its permissions stay, and no partial file is left."""
    kept = tmp_path / "a.json"
    kept.write_text("before")
    kept.chmod(0o600)
    command = f'exec "{sys.executable}" -m cubatch devices --json "{kept}"'
    limited = ["bash", "-c", f"ulimit -f 0; {command}"]
    done = subprocess.run(limited, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, kept.read_text(), list(tmp_path.iterdir())) == (1, "before", [kept])
    assert "a.json: --json cannot be written: File too large" in done.stderr
    subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, check=True)
    assert json.loads(kept.read_text())["devices"]
    assert kept.stat().st_mode & 0o777 == 0o600


def test_an_error_of_a_connection_is_none_of_stdout(monkeypatch):
    """An OSError without a file, as of a scheduler that ended, is raised as it is."""

    def fail(**_):
        raise OSError("stream is closed")

    monkeypatch.setattr(app.typer.main, "get_command", lambda _: fail)
    with pytest.raises(OSError, match="stream is closed"):
        app.main()


@pytest.mark.parametrize("line", ["devices --json - >&-", "devices >&- 2>&-"])
def test_a_stdout_that_was_closed_is_written_to_by_nobody(line):
    """It was an AttributeError, after minutes of measuring."""
    code, out, err = cubatch_says(line)
    assert (code, out, err) == (0, b"", "")


def test_a_log_that_is_full_or_closed_changes_nothing():
    """What is said on stderr is lost, and the result is there."""
    code, out, _ = cubatch_says("devices 2> /dev/full")
    assert (code, b"V100" in out) == (0, True)
    assert cubatch_says("memory nonsense 2>&-")[0] == 2


@pytest.mark.parametrize(
    "line",
    ["memory mlp --json {0}", "train mlp --data {0}", "memory {0}.toml", "memory mlp --device {0}.toml",
     "tune {0}.onnx --library onnxruntime", "store list --store {0}"],
)  # fmt: skip
def test_a_path_that_no_file_can_have_is_rejected(run, line):
    """Names over 255 bytes were OSError, with a traceback."""
    code, out, err = run(*line.format("x" * 4500).split())
    assert code in {1, 2}
    assert (out, "Traceback" in err) == ("", False)


def test_what_others_wrote_is_written_out(capsys, monkeypatch):
    """In tables, notes, warnings and errors a control character is shown and not obeyed."""
    grid = Grid(
        title=SIGNS, columns=[SIGNS, "b"], rows=[[SIGNS, (SIGNS,)], [1, "two\nlines"]], beneath=[SIGNS],
        notes=[SIGNS, [SIGNS]], marked=[0],
    )  # fmt: skip
    console.emit([grid], {}, None)
    console.say(SIGNS)
    for text in capsys.readouterr():
        assert r"\x1b]0;mine\x07\x1b[2J\x9b\u202e\r" in text
        assert [sign for sign in text if not sign.isprintable()] == ["\n"] * text.count("\n")

    def work():
        with console.progress_bar(SIGNS) as show:
            show(1, 2, SIGNS)

    assert "\x1b]0;mine" not in on_a_terminal(monkeypatch, work)


def test_json_of_anything_can_be_written_and_read(capsys, tmp_path):
    """Also what no encoding has, as half a pair of UTF-16, and what a terminal would obey."""
    for text in ("größe", SIGNS, "\ud800"):
        console.emit([], {"name": text}, "-")
        console.emit([], {"name": text}, str(tmp_path / "a.json"))
        said = capsys.readouterr().out
        assert json.loads(said)["name"] == json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))["name"] == text
        assert said.replace("\n", "").isprintable()


@pytest.mark.parametrize("line", ["memory {0}", "candidates {0} --device t4 --explain"])
def test_control_characters_of_a_spec_do_not_reach_the_terminal(run, tmp_path, line):
    """Names with control characters are rejected, and those in the name of a file are escaped."""
    for place, spec in {
        "network": {"name": SIGNS, "input_shape": [1, 1, 4], "layers": [ReLU().to_mapping()]},
        "layer": {"input_shape": [1, 1, 4], "layers": [{"type": "linear", "k": 4, "name": SIGNS}]},
        f"file{SIGNS}": {"input_shape": [1, 1, 4], "layers": [{"type": "linear", "k": 4}]},
    }.items():
        path = tmp_path / f"{place}.json"
        path.write_text(json.dumps(spec), encoding="utf-8")
        code, out, err = run(*(word.format(path) for word in line.split()))
        assert code == (0 if place.startswith("file") else 2)
        for text in (out, err):
            assert [sign for sign in text if not sign.isprintable() and sign != "\n"] == []


EARLY = """
import os, signal, sys
class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == "cubatch.cli.app":
            os.kill(os.getpid(), signal.{0})
sys.meta_path.insert(0, Slow())
from cubatch.__main__ import main
main()
"""
LATE = """
import atexit, os, signal, sys
for number in (signal.SIGTERM, signal.SIGINT):
    atexit.register(os.kill, os.getpid(), number)
sys.argv = ["cubatch", "--version"]
from cubatch.__main__ import main
main()
"""


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_ctrl_c_while_it_starts_is_a_line(name):
    """In the first 0.4 s, while modules are imported, it was a traceback and death by the signal."""
    done = subprocess.run(
        [sys.executable, "-c", EARLY.format(name)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "cubatch: interrupted\n")


def test_a_signal_while_it_ends_changes_nothing():
    """A second SIGTERM while the interpreter shut down was a traceback."""
    done = subprocess.run([sys.executable, "-c", LATE], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{cubatch.__version__}\n", "")


def test_a_signal_that_a_shell_ignores_stays_ignored():
    """As of a job in the background of a script: Ctrl-C is not meant for it."""
    code = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n" + EARLY.format("SIGINT").replace(
        "main()\n", "sys.argv = ['cubatch', '--version']\nmain()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"{cubatch.__version__}\n")
