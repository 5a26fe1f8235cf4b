"""Progress: a bar on a terminal, a line now and then elsewhere; results, on stdout and in files."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import pytest

from cubatch.cli import console
from cubatch.errors import InvalidArgument, InvalidData
from cubatch.report.grid import Grid
from cubatch.search.events import Event
from cubatch.tuning.results import TuningResult
from tests.unit.commands import as_nobody, on_a_terminal
from tests.unit.tuned import tuned


def test_a_bar_is_drawn_on_a_terminal_and_nowhere_else(monkeypatch):
    """Progress is for a person: on a terminal it shows, in a pipe there is none."""
    with console.progress_bar("tuning") as show:
        assert show is None

    def work():
        with console.progress_bar("tuning mlp") as show:
            show(3, 10, "batch 64")

    assert "tuning mlp" in on_a_terminal(monkeypatch, work)


def test_a_bar_takes_no_text_for_its_own_markup(monkeypatch):
    """Errors of somebody's code and names of files may hold brackets; what is between them is shown, not obeyed."""

    def work():
        with console.progress_bar("tuning [/b].toml") as show:
            show(3, 10, "batch size 64: error; ValueError: [/nothing]")

    shown = on_a_terminal(monkeypatch, work)
    assert "[/b].toml" in shown
    assert "[/nothing]" in shown


def event(message="", kind="timing", **best):
    """Give one event of a run."""
    return Event(kind=kind, round=0, batch_size=8, done=1, total=9, seconds_left=50.0, message=message, **best)


def telling(monkeypatch, *events):
    """Put an autotune in place that tells of events, each at its second on the clock of the lines."""
    clock = [100.0]
    monkeypatch.setattr(console, "progress", partial(console.progress, now=lambda: clock[0]))

    def autotune(spec, *, progress, **options):
        for second, told in events:
            clock[0] = 100.0 + second
            progress(told)
        return TuningResult.from_json(json.dumps(tuned()))

    monkeypatch.setattr(sys.modules["cubatch.tuning.tune"], "autotune", autotune)


BEST = {"best_batch_size": 64, "best_rate": 8606.4}


@pytest.mark.usefixtures("autotune")
def test_without_a_terminal_a_line_tells_now_and_then(run, monkeypatch):
    """In a log: none before 5 s, then one each 5 s at most, the latest state in each, and none beside the answer."""
    telling(
        monkeypatch,
        (0.1, event("round 1, 9 batch sizes", kind="round")),
        (4.9, event("batch size 1: 1.00 ms")),
        (5.2, event("batch size 2: 1.50 ms")),
        (7.0, event("batch size 4: 2.00 ms", **BEST)),
        (10.1, event("batch size 8: 2.00 ms", **BEST)),
        (12.4, event("batch size 16: 3.00 ms", **BEST, could_gain=0.03)),
        (17.5, event("batch size 32: 4.00 ms", **BEST)),
        (90.0, event("batch size 64: 7.44 ms", **BEST, could_gain=0.034)),
        (99.0, event("measuring is done", kind="end", **BEST)),
    )

    code, out, err = run("tune", "mlp", "--json", "-")

    assert (code, json.loads(out)["batch_size"]) == (0, 64)
    assert err.splitlines() == [
        "cubatch: 5 s, batch size 2: 1.50 ms",
        "cubatch: 12 s, 64 best so far (8 606 samples/s), up to 3 % more possible",
        "cubatch: 18 s, 64 best so far (8 606 samples/s)",
        "cubatch: 90 s, 64 best so far (8 606 samples/s), up to 4 % more possible",
    ]


@pytest.mark.usefixtures("autotune")
def test_on_a_terminal_the_bar_tells_the_same(run, monkeypatch):
    """The best so far beside the bar, and no lines that would push it down."""
    telling(monkeypatch, (20.0, event("batch size 32: 4.00 ms", **BEST, could_gain=0.03)))

    shown = on_a_terminal(monkeypatch, lambda: run("tune", "mlp"))

    assert "64 best so far (8 606 samples/s), up to 3 % more possible" in shown
    assert "20 s" not in shown


def test_a_job_of_known_length_says_how_much_is_left(capfd):
    """2 of 10 were done before; 3 more took 6 s, so that the 5 that are left take about 10."""
    moments = iter([0.0, 0.0, 0.0, 6.0, 6.0])  # the lines begin; then each call looks, and its line as well
    with console.progress("study", is_counted=True, now=lambda: next(moments)) as show:
        show(2, 10, "batch 7")
        next_line = capfd.readouterr().err
        show(5, 10, "batch 9")
    assert next_line == ""
    assert capfd.readouterr().err == "cubatch: 6 s, 5 of 10: batch 9, about 10 s left\n"


@pytest.mark.parametrize("arguments", [[], ["--json", "-"]])
def test_a_pipe_that_knows_ascii_only_gets_ascii(run, arguments):
    """As under LC_ALL=C: no UnicodeEncodeError after the work is done, and the JSON says the same."""
    command = ["memory", "mlp", "--device", "t4", *arguments]
    ascii_, utf8 = subprocess.run(
        [sys.executable, "-m", "cubatch", *command], capture_output=True, check=True,
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
    ).stdout, run(*command)[1]  # fmt: skip
    assert ascii_.isascii()
    if arguments:
        assert json.loads(ascii_) == json.loads(utf8)
    else:
        assert "–" in utf8  # noqa: RUF001 - the dash of an empty cell


# --- narrow terminals ----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize(
    "command",
    [
        ("memory", "lenet5", "--device", "t4"),
        ("devices",),
        ("bench", "model", "lenet5", "--dry-run", "--device", "t4"),
        ("bench", "gemm", "--m", 8, "--n", 8, "--k", 8, "--dry-run", "--device", "t4"),
    ],
    ids=lambda command: " ".join(command[:2]),
)
def test_no_line_of_a_table_is_wider_than_the_terminal(run, monkeypatch, command):
    """A terminal folds what is wider in the middle of a row: then each row stands by itself."""
    grids = []
    monkeypatch.setattr(console, "_as_text", lambda shown: grids.extend(shown) or "")
    assert run(*command)[0] == 0
    assert grids
    for width in (24, 25, 40, 63, 80, 110):
        for grid in grids:
            assert max(map(len, grid.text(width).split("\n"))) <= width


@pytest.mark.parametrize(("columns", "is_folded"), [(60, True), (119, True), (120, False)])
def test_a_wide_terminal_shows_a_wide_table(monkeypatch, capsys, columns, is_folded):
    """Cells are folded where a row does not fit the terminal, and not in a pipe."""
    grid = Grid(columns=["first", "last"], rows=[["x" * 102, "y" * 15 + "µ"]])
    console.emit([grid], {}, None)
    assert "x" * 102 in capsys.readouterr().out
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(console, "is_terminal", lambda: True)
    console.emit([grid], {}, None)
    out = capsys.readouterr().out
    assert max(map(len, out.split("\n"))) <= columns
    assert ("x" * 102 not in out) == is_folded
    assert out.count("x") == 102


# --- files ---------------------------------------------------------------------------------------------------

GRID = Grid(title="what was measured", columns=("batch",), rows=[("64",)])


def test_files_that_this_user_may_not_write_are_refused_before_measuring():
    """One that is there and may only be read, and a new one in such a folder; a device in /dev may be written."""
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "there.json"
        file.touch()
        file.chmod(0o444)
        Path(place).chmod(0o555)
        with as_nobody():
            for path in (file, Path(place) / "new.json"):
                with pytest.raises(InvalidArgument, match="may write") as caught:
                    console.check_writable(json=str(path))
                assert (caught.value.field, caught.value.value) == ("--json", str(path))
            console.check_writable(json=os.devnull)
        Path(place).chmod(0o755)


@pytest.mark.parametrize("same", ["a.svg", "./a.svg", "link.svg"])
def test_two_options_do_not_write_one_file(run, tmp_path, monkeypatch, same):
    """The second would overwrite the first, by whatever path; both may go where nothing is kept."""
    monkeypatch.chdir(tmp_path)
    Path("link.svg").symlink_to("a.svg")
    code, out, err = run("profile", "mlp", "--device", "cpu", "--json", "a.svg", "--plot", same)
    assert (code, out) == (2, "")
    assert "--plot must be another file than that of --json" in err
    assert [path.name for path in tmp_path.iterdir()] == ["link.svg"]
    console.check_writable(json=os.devnull, trace=os.devnull)


def test_only_json_is_written_to_stdout(run, tmp_path, monkeypatch):
    """Of any other option "-" would be a file of that name, which nobody asked for."""
    monkeypatch.chdir(tmp_path)
    code, out, err = run("profile", "mlp", "--device", "cpu", "--trace", "-")
    assert (code, out, list(tmp_path.iterdir())) == (2, "", [])
    assert "--trace must be a file, got '-'. Only --json writes to stdout." in err


def test_a_table_is_shown_where_its_file_cannot_be_written(capfd, tmp_path):
    """The folder went away while it was measured: the numbers are not lost, and the error names the option."""
    with pytest.raises(InvalidData, match="--json cannot be written: No such file"):
        console.emit([GRID], {"batch": 64}, str(tmp_path / "gone" / "a.json"))
    assert "what was measured" in capfd.readouterr().out


def test_a_file_is_written_where_nobody_reads_the_table(monkeypatch, tmp_path):
    """As behind `head`, which has seen enough."""

    def closed(_):
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

    monkeypatch.setattr(console, "_write", closed)
    file = tmp_path / "a.json"
    with pytest.raises(BrokenPipeError):
        console.emit([GRID], {"batch": 64}, str(file))
    assert json.loads(file.read_text()) == {"batch": 64}
