"""The command line: options through to the library, results out, exit codes."""

from __future__ import annotations

import errno
import io
import json
import math
import os
import pty
import select
import signal
import subprocess
import sys
import textwrap
import types
from functools import partial
from pathlib import Path

import attrs
import pytest

import cubatch
import cubatch.engine
import cubatch.tuning
from cubatch.cli import console
from cubatch.errors import NothingMeasured
from cubatch.measure.kernel_choice import Winners
from cubatch.search.walk import Event
from cubatch.tuning.results import TuningResult
from cubatch.tuning.store import open_run
from tests.unit.commands import in_process
from tests.unit.tuned import tuned

ROOT = Path(cubatch.__file__).parent.parent


class Recorded:
    """An autotune that answers at once and remembers what it was asked."""

    def __init__(self, error=None):
        self.spec, self.options, self.error = None, None, error

    def __call__(self, layer_spec, **options):
        """Answer, or raise."""
        self.spec, self.options = layer_spec, options
        if self.error is not None:
            raise self.error
        return TuningResult.from_json(json.dumps(tuned()))


@attrs.frozen
class Epoch:
    """An epoch as the engine records it."""

    number: int
    loss: float = 0.1
    test_accuracy: float = 0.98
    seconds: float = 2.0
    samples_per_second: float = 30_000.0


@attrs.frozen
class Trained:
    """A training run as the engine records it, as far as the command reads it."""

    epochs: tuple[Epoch, ...]
    diverged: bool = False


@pytest.fixture
def autotune(monkeypatch):
    """Put a recorded autotune in the place of the real one."""
    recorded = Recorded()
    module = types.ModuleType("cubatch.tuning.tune")
    module.autotune = recorded
    monkeypatch.setitem(sys.modules, "cubatch.tuning.tune", module)
    monkeypatch.setattr(cubatch.tuning, "tune", module, raising=False)
    return recorded


@pytest.fixture
def run(monkeypatch, capfd):
    """Run the command line in this process and give (exit code, stdout, stderr)."""
    return in_process(monkeypatch, capfd)


def test_tune_passes_every_option_on_under_the_name_that_autotune_knows(run, autotune):
    """The options mirror the keyword arguments of the contract, one to one."""
    code, _, err = run(
        "tune", "lenet5", "--device", "cpu", "--mode", "training", "--dtype", "float16", "--objective", "latency",
        "--tolerance", "0.05", "--batch-sizes", "32,64", "--max-batch-size", "512", "--memory-limit", "8GiB",
        "--latency-limit", "0.5", "--optimizer", "adam", "--library", "im2col", "--recompute", "--budget", "7",
        "--no-isolate", "--no-store", "--seed", "3",
    )  # fmt: skip

    assert (code, err) == (0, "")
    assert autotune.spec.name == "lenet5"
    assert callable(autotune.options.pop("progress"))
    assert autotune.options == {
        "device": "cpu", "mode": "training", "dtype": "float16", "objective": "latency", "tolerance": 0.05,
        "batch_sizes": [32, 64], "max_batch_size": 512, "memory_limit": "8GiB", "latency_limit": 0.5,
        "optimizer": "adam", "library": "im2col", "recompute": True, "budget": 7.0, "isolate": False, "store": False,
        "seed": 3,
    }  # fmt: skip


def test_tune_without_options_asks_for_the_defaults_of_the_contract(run, autotune):
    """The table of defaults is that of autotune's signature in the contract."""
    code, _, _ = run("tune", "mlp")

    assert code == 0
    assert callable(autotune.options.pop("progress"))
    assert autotune.options == {
        "device": None, "mode": "inference", "dtype": "float32", "objective": "throughput", "tolerance": 0.01,
        "batch_sizes": None, "max_batch_size": None, "memory_limit": None, "latency_limit": None, "optimizer": "sgd",
        "library": "auto", "recompute": False, "budget": 60.0, "isolate": "auto", "store": True, "seed": 0,
    }  # fmt: skip


def test_quick_is_a_budget_of_ten_seconds(run, autotune):
    """A name for what people ask for first; --help says what it stands for."""
    assert run("tune", "mlp", "--quick")[0] == 0
    assert autotune.options["budget"] == 10.0
    assert "--budget 10" in " ".join(run("tune", "--help")[1].split())


@pytest.mark.parametrize("budget", ["20", "10", "60"])
def test_quick_and_a_budget_are_refused_by_name(run, autotune, budget):
    """Which of two was meant is not guessed, not even where they agree or the budget is the usual one."""
    code, out, err = run("tune", "mlp", "--quick", "--budget", budget)

    assert (code, out) == (2, "")
    assert "--quick and --budget exclude each other" in " ".join(err.split())
    assert autotune.options is None


@pytest.mark.parametrize(
    ("options", "store"),
    [(["--fresh"], "refresh"), (["--store", "here.db"], "here.db"), (["--no-store"], False), ([], True)],
)
def test_the_store_options_become_the_one_store_argument(run, autotune, options, store):
    """--fresh is store="refresh", a path is a path."""
    run("tune", "mlp", *options)

    assert autotune.options["store"] == store


@pytest.mark.usefixtures("autotune")
def test_tune_prints_the_table_and_the_answer(run):
    """Without --json a person reads it."""
    code, out, err = run("tune", "mlp")

    assert (code, err) == (0, "")
    assert "Use batch size 64 on Test GPU" in out
    assert "3 000" in out


@pytest.mark.usefixtures("autotune")
def test_json_on_stdout_is_the_whole_of_stdout_and_reads_back(run):
    """A pipe into a JSON reader must not stumble over a table."""
    code, out, err = run("tune", "mlp", "--json", "-")

    assert (code, err) == (0, "")
    assert json.loads(out)["schema"] == 1
    assert TuningResult.from_json(out).batch_size == 64


@pytest.mark.usefixtures("autotune")
def test_json_plot_and_report_go_to_their_files_and_the_table_stays(run, tmp_path):
    """All three can be had from one run."""
    pytest.importorskip("matplotlib")
    files = [tmp_path / name for name in ("r.json", "c.png", "p.html")]

    code, out, err = run("tune", "mlp", "--json", files[0], "--plot", files[1], "--report", files[2])

    assert code == 0
    assert "Use batch size 64" in out
    assert json.loads(files[0].read_text())["batch_size"] == 64
    assert files[1].read_bytes().startswith(b"\x89PNG")
    assert "Use batch size 64" in files[2].read_text()
    assert all(f"wrote {path}" in err for path in files[1:])


@pytest.mark.parametrize("option", ["--json", "--plot", "--report"])
def test_a_file_that_cannot_be_written_is_refused_before_measuring(run, autotune, tmp_path, option):
    """A minute of measuring must not be lost to a typing error in a path."""
    code, out, err = run("tune", "mlp", option, tmp_path / "nowhere" / "f.png")

    assert (code, out) == (1, "")
    assert option in err
    assert "nowhere" in err
    assert autotune.options is None


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
    ("arguments", "words"),
    [
        (["tune", "resnet5"], "resnet50"),
        (["tune", "missing.toml"], "missing.toml"),
        (["memory", "mlp", "--batch-size", "0"], "batch_size"),
        (["memory", "mlp", "--memory", "a lot"], "a lot"),
        (["memory", "mlp", "--device", "titan x"], "titan-x-pascal"),
        (["store", "show", "7", "--store", "no-such.db"], "7"),
    ],
    ids=" ".join,
)
def test_an_error_of_ours_is_one_clear_message_and_exit_code_one(run, arguments, words):
    """What was asked, on stderr, without a traceback and with nothing on stdout."""
    code, out, err = run(*arguments, "--json", "-")

    assert (code, out) == (1, "")
    assert words in err
    assert "Traceback" not in err
    assert err.count("\n") == 1


def test_an_error_while_tuning_exits_with_one(run, autotune):
    """Errors from the depths take the same way out."""
    autotune.error = NothingMeasured("every size ran out of memory", "Free some.")

    code, out, err = run("tune", "mlp")

    assert (code, out) == (1, "")
    assert err == "cubatch: no batch size could be measured: every size ran out of memory. Free some.\n"


def test_interrupted_tuning_shows_what_there_is_and_exits_with_130(run, autotune):
    """The partial result travels on the KeyboardInterrupt."""
    stop = KeyboardInterrupt()
    stop.partial = TuningResult.from_json(json.dumps(tuned(batch_size=None, fastest_batch_size=None, decided_by=None)))
    autotune.error = stop

    code, out, err = run("tune", "mlp")

    assert code == 130
    assert "3 000" in out
    assert "There is no answer yet" in out
    assert "kept" in err


def test_interrupted_before_anything_was_measured_exits_with_130(run, autotune):
    """No partial result, nothing on stdout."""
    autotune.error = KeyboardInterrupt()

    assert run("tune", "mlp")[:2] == (130, "")


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
    commands = [[], ["store"], *([name] for name in ("tune", "candidates", "memory", "devices", "train", "kernels"))]
    commands += [["store", name] for name in ("list", "show", "clear")]

    for command in commands:
        code, out, _ = run(*command, "--help")
        assert code == 0
        assert "Example: cubatch" in " ".join(out.split()), command
        assert command in ([], ["store"]) or "--json" in out


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


@pytest.mark.case("mlp-memory")
def test_memory_shows_the_textbook_numbers_of_the_mlp(run):
    """1410 elements per sample forward, 1820 with gradients, 465 920 at batch 256: the figures of the question."""
    code, out, _ = run("memory", "mlp", "--batch-size", "256", "--device", "cpu", "--memory", "12GiB")

    assert code == 0
    assert "1 410 elements per sample forward, 1 820 with gradients; times 256 is 465 920 elements" in " ".join(
        out.split()
    )


@pytest.mark.parametrize("options", [["--recompute"], ["--library", "im2col"]])
def test_memory_gives_one_plan_whatever_is_asked(run, options):
    """The rules of thumb stand beside the very plan and the largest batch that are shown above them."""
    _, out, _ = run(
        "memory", "vgg16", "--batch-size", "8", "--device", "t4", "--memory", "8GiB", *options, "--json", "-"
    )
    found = json.loads(out)
    computed = {rule["unit"]: rule["computed"] for rule in found["rules_of_thumb"]}
    assert (computed["bytes"], computed["samples"]) == (found["footprint"]["total"], found["max_batch_size"])


def test_a_report_is_html(run, tmp_path):
    """Another suffix would promise another format; it is refused before anything is measured."""
    code, _, err = run("tune", "mlp", "--report", str(tmp_path / "a.pdf"))
    assert (code, list(tmp_path.iterdir())) == (2, [])
    assert ".html" in err


def test_memory_json_agrees_with_the_library(run):
    """A program gets the same numbers."""
    code, out, _ = run("memory", "mlp", "--batch-size", "8", "--device", "cpu", "--memory", "1GiB", "--json", "-")
    found = json.loads(out)

    assert code == 0
    assert found["footprint"] == json.loads(
        json.dumps(cubatch.footprint("mlp", batch_size=8, mode="training", device="cpu").to_mapping())
    )
    assert found["max_batch_size"] == cubatch.max_batch_size("mlp", "1GiB", mode="training", device="cpu")


def test_devices_lists_the_machine_and_the_catalogue(run):
    """The CPU is always here, a V100 is always known."""
    code, out, _ = run("devices")
    _, text, _ = run("devices", "--json", "-")
    found = json.loads(text)

    assert code == 0
    assert "v100-sxm2-16gb" in out
    assert found["devices"][-1]["kind"] == "cpu"
    assert "v100-sxm2-16gb" in [device["slug"] for device in found["catalogue"]]


def test_candidates_lists_each_size_with_its_reasons(run):
    """For a GPU that is not here, with the rows of --explain in the JSON."""
    arguments = ["candidates", "lenet5", "--device", "v100-sxm2-16gb", "--max-batch-size", "64", "--dtype", "float16"]
    code, out, _ = run(*arguments, "--explain")
    _, text, _ = run(*arguments, "--explain", "--json", "-")
    found = json.loads(text)

    assert code == 0
    sizes = [candidate["batch_size"] for candidate in found["candidates"]]
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == 64
    assert all(candidate["reasons"] for candidate in found["candidates"])
    assert found["explain"]
    assert all(str(size) in out for size in sizes)
    assert "power of two" in out


@pytest.fixture
def train(monkeypatch):
    """Put a training of two epochs in the place of the real one; `stop` ends it after the first."""

    def fake(network, *, progress, epochs, **options):
        fake.network, fake.options = network, options
        for number in range(1, epochs + 1):
            progress(Epoch(number))
            if fake.stop:
                raise KeyboardInterrupt
        return Trained(tuple(Epoch(number) for number in range(1, epochs + 1)))

    fake.stop = False
    module = types.ModuleType("cubatch.engine.train")
    module.train, module.Epoch, module.check = fake, Epoch, lambda *_, **__: None
    monkeypatch.setitem(sys.modules, "cubatch.engine.train", module)
    monkeypatch.setattr(cubatch.engine, "train", module, raising=False)
    return fake


@pytest.mark.usefixtures("autotune")
def test_train_with_a_number_trains_with_it_and_shows_every_epoch(run, train):
    """No tuning where the size is given."""
    code, out, err = run(
        "train", "mnist-cnn", "--data", "here", "--batch-size", "32", "--epochs", "2", "--device", "cpu", "--lr", "0.1"
    )

    assert (code, err) == (0, "")
    assert train.network.name == "mnist-cnn"
    assert train.options.pop("device").kind == "cpu"
    assert train.options == {
        "data": "here", "batch_size": 32, "learning_rate": 0.1, "optimizer": "momentum", "recompute": False, "seed": 0,
        "context": None, "dtype": "float32",
    }  # fmt: skip
    assert out.count("98.00 %") == 2


def test_train_auto_tunes_for_training_and_takes_the_answer(run, autotune, train):
    """The answer of the recorded tuning is 64."""
    sample = ROOT / "tests" / "data" / "mnist-sample"
    code, out, err = run("train", "mnist-cnn", "--data", sample, "--epochs", "1", "--optimizer", "adam", "--json", "-")

    assert code == 0
    assert "batch size 64" in err
    assert (autotune.options["mode"], autotune.options["optimizer"]) == ("training", "adam")
    assert autotune.options["max_batch_size"] == 800  # images in the sample
    assert train.options["batch_size"] == 64
    assert json.loads(out)["epochs"][0]["test_accuracy"] == 0.98


def test_training_on_a_cpu_in_16_bits_is_refused_before_anything_is_done(run, autotune, train):
    """A CPU takes float32 only; the error names the dtype and what would do."""
    code, _, err = run("train", "mnist-cnn", "--data", "here", "--device", "cpu", "--dtype", "bfloat16")

    assert code == 1
    assert "bfloat16" in err
    assert "float32" in err
    assert not hasattr(train, "options")


@pytest.mark.usefixtures("autotune")
def test_interrupted_training_shows_the_epochs_that_are_done(run, train):
    """Ctrl-C loses the model, not what was learnt about it."""
    train.stop = True

    code, out, err = run("train", "mnist-cnn", "--data", "here", "--batch-size", "32")

    assert code == 130
    assert out.count("98.00 %") == 1
    assert "interrupted" in err


def test_an_empty_store_lists_nothing_and_clears_nothing(run, tmp_path):
    """Looking does not make a file."""
    path = tmp_path / "store.db"

    assert "No runs are kept." in run("store", "list", "--store", path)[1]
    found = json.loads(run("store", "clear", "--all", "--store", path, "--json", "-")[1])
    assert (found["cleared"], found["winners"]) == (0, 0)
    assert not list(tmp_path.iterdir())


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


def test_a_bar_is_drawn_on_a_terminal_and_nowhere_else(monkeypatch):
    """Progress is for a person: on a terminal it shows, in a pipe there is none."""
    with console.progress_bar("tuning") as show:
        assert show is None

    def work():
        with console.progress_bar("tuning mlp") as show:
            show(3, 10, "batch 64")

    assert "tuning mlp" in on_a_terminal(monkeypatch, work)


def on_a_terminal(monkeypatch, work):
    """Call with stderr a terminal, and give what it shows."""
    main, other = pty.openpty()
    with os.fdopen(other, "w") as terminal:
        monkeypatch.setenv("COLUMNS", "160")
        monkeypatch.setattr(sys, "stderr", terminal)
        work()
        terminal.flush()
        shown = ""
        while select.select([main], [], [], 0)[0]:  # a terminal hands out what was written in pieces
            shown += os.read(main, 10_000).decode()
    os.close(main)
    return shown


def test_a_bar_takes_no_text_for_its_own_markup(monkeypatch):
    """Errors of somebody's code and names of files may hold brackets; what is between them is shown, not obeyed."""

    def work():
        with console.progress_bar("tuning [/b].toml") as show:
            show(3, 10, "batch size 64: error; ValueError: [/nothing]")

    shown = on_a_terminal(monkeypatch, work)
    assert "[/b].toml" in shown
    assert "[/nothing]" in shown


# --- how far tuning is ---------------------------------------------------------------------------------------


def event(message="", kind="timing", **best):
    """Give one event of a run."""
    return Event(kind=kind, round=0, batch_size=8, done=1, total=9, seconds_left=50.0, message=message, **best)


def telling(monkeypatch, *events):
    """Put an autotune in place that tells of events, each at its second on the clock of the lines."""
    clock = [100.0]
    monkeypatch.setattr(console, "progress_lines", partial(console.progress_lines, now=lambda: clock[0]))

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
        (90.0, event("batch size 64: 7.44 ms", best_batch_size=64, could_gain=0.034)),
        (99.0, event("measuring is done", kind="end", **BEST)),
    )

    code, out, err = run("tune", "mlp", "--json", "-")

    assert (code, json.loads(out)["batch_size"]) == (0, 64)
    assert err.splitlines() == [
        "cubatch: 5 s, batch size 2: 1.50 ms",
        "cubatch: 12 s, 64 best so far (8 606 samples/s), at most 3 % more to gain",
        "cubatch: 18 s, 64 best so far (8 606 samples/s)",
        "cubatch: 90 s, 64 best so far, at most 4 % more to gain",
    ]


@pytest.mark.usefixtures("autotune")
def test_a_short_run_writes_no_line(run, monkeypatch):
    """What is over before anybody wonders needs no progress."""
    telling(monkeypatch, *((second / 10, event("batch size 8: 1.00 ms", **BEST)) for second in range(50)))

    assert run("tune", "mlp")[::2] == (0, "")


@pytest.mark.usefixtures("autotune")
def test_on_a_terminal_the_bar_tells_the_same(run, monkeypatch):
    """The best so far beside the bar, and no lines that would push it down."""
    telling(monkeypatch, (20.0, event("batch size 32: 4.00 ms", **BEST, could_gain=0.03)))

    shown = on_a_terminal(monkeypatch, lambda: run("tune", "mlp"))

    assert "64 best so far (8 606 samples/s), at most 3 % more to gain" in shown
    assert "20 s" not in shown


@pytest.mark.parametrize("gain", [None, math.inf, math.nan])
def test_what_could_be_gained_is_told_where_it_is_known(run, autotune, monkeypatch, gain):
    """Before a bound is known there is no number in its place."""
    telling(monkeypatch, (6.0, event(**BEST, could_gain=gain)))

    assert run("tune", "mlp")[2] == "cubatch: 6 s, 64 best so far (8 606 samples/s)\n"


class Full(io.StringIO):
    """A log on a full disk."""

    def write(self, text):
        """Fail."""
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("stream", [None, Full()], ids=["closed", "full"])
def test_a_log_that_cannot_be_written_stops_nothing(monkeypatch, stream):
    """stderr may have been closed before we began, or its disk be full: measuring goes on."""
    moments = iter([0.0, 6.0, 12.0])
    line = console.progress_lines(now=lambda: next(moments))
    monkeypatch.setattr(sys, "stderr", stream)
    with console.progress_bar("tuning") as show:
        assert show is None
    line("batch size 8: 1.00 ms")
    line("batch size 8: 1.00 ms")
    assert list(moments) == []


def test_everything_is_forgotten_only_when_asked_for(run, tmp_path):
    """`store clear` alone forgets nothing: it asks for a number or --all."""
    code, _, err = run("store", "clear", "--store", tmp_path / "store.db")
    assert code == 2
    assert "--all" in err


def test_forgetting_everything_forgets_which_kernels_won(run, tmp_path):
    """`store clear --all` says what of both files it removed; one run's number leaves the winners, which are of all."""
    path, beside = tmp_path / "store.db", tmp_path / "store-kernels.sqlite3"
    for number in range(2):
        with open_run(path, identity={"number": number}, conditions={}, budget=1.0):
            pass
    for problem in ("one", "two"):
        Winners(beside, gpu="card", sources="abc").put(problem, "first", {})

    assert "kernel choice" not in run("store", "clear", "1", "--store", path)[1]
    assert Winners(beside, gpu="card", sources="abc").get("one") == "first"
    code, out, _ = run("store", "clear", "--all", "--store", path)

    assert code == 0
    assert f"Forgot 1 run of {path} and 2 kernel choices beside it." in " ".join(out.split())
    assert Winners(beside, gpu="card", sources="abc").get("one") is None


def test_train_checks_its_arguments_before_it_tunes(run, monkeypatch, tmp_path):
    """A folder without data, or no epochs, is an error at once, not after a minute of tuning."""
    monkeypatch.setattr("cubatch.tuning.tune.autotune", lambda *_, **__: pytest.fail("it tuned first"))
    sample = ROOT / "tests" / "data" / "mnist-sample"
    for arguments in (["--data", tmp_path], ["--data", sample, "--epochs", "0"], ["--data", sample, "--lr", "-1"]):
        assert run("train", "mnist-cnn", *arguments)[0] == 1


def test_the_version_is_told(run):
    """--version prints the package's version and nothing else."""
    assert run("--version")[1].strip() == cubatch.__version__


def test_candidates_of_a_gpu_whose_sms_are_not_known_say_what_is_missing(run):
    """Sources disagree about an L4: no crests, no rule, nothing explained, and the reason on stderr."""
    code, out, err = run("candidates", "go-net", "--device", "l4", "--max-batch-size", "64", "--explain")
    assert code == 0
    assert "coulom" not in out
    assert "Nothing to explain" in out
    assert "how many SMs NVIDIA L4 has is not known" in err


def test_candidates_are_explained_where_no_time_is_known(run):
    """A card whose rates were never printed gets the blocks of every pass all the same."""
    code, out, err = run("candidates", "mlp", "--device", "rtx-2080-super", "--explain")
    assert (code, err) == (0, "")
    assert "fprop" in out
