"""`autotune_module` by name: the module lives in a worker, which may die, and its timings are kept."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import cubatch as cb

torch = pytest.importorskip("torch")

from cubatch.frameworks import heap, module_source, module_worker  # noqa: E402
from cubatch.frameworks.remote_bounded_runner import RemoteBoundedRunner  # noqa: E402
from cubatch.report.tables import common, store as tables  # noqa: E402
from cubatch.tuning import store as results  # noqa: E402
from tests.parity import named_modules  # noqa: E402
from tests.virtual_time import step_seconds  # noqa: E402

HERE = "tests.parity.named_modules"
ASKED = {"device": "cpu", "batch_sizes": [2, 4], "budget": 120.0}  # a start of PyTorch may take ten seconds
SHAPE = (3, 8, 8)


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Where steps leave word."""
    monkeypatch.setenv(named_modules.PLACE, str(tmp_path))
    return tmp_path


@pytest.fixture
def nothing_runs(monkeypatch):
    """Runs are begun in the store and end where a worker would be started."""

    def runner(self):
        raise KeyboardInterrupt

    monkeypatch.setattr("cubatch.tuning.subjects.module_subject.NamedModuleSubject.make_runner", runner)


def calls(place):
    """Give (process, batch size) of every real step."""
    file = place / "calls"
    return [tuple(map(int, line.split())) for line in file.read_text().splitlines()] if file.exists() else []


def statuses(result):
    return {m.batch_size: m.status for m in result.measurements}


def test_a_named_module_runs_in_another_process_and_a_rerun_runs_nothing(place, malloc_is_not_chosen):
    """One worker takes all timings; the second answer is of the store, and the same."""
    asked = ASKED | {"store": place / "store.sqlite3", "mode": "training", "loss": f"{HERE}:scalar"}
    first = cb.autotune_module(f"{HERE}:small", SHAPE, **asked)
    processes = {process for process, _ in calls(place)}
    assert len(processes) == 1
    assert os.getpid() not in processes
    assert {size for _, size in calls(place)} == {2, 4}
    assert (first.spec["name"], first.library, first.dtype) == (f"{HERE}:small", "torch", "float32")
    for m in first.measurements:
        assert m.timings_seconds == pytest.approx([step_seconds(m.batch_size)] * len(m.timings_seconds))
    before = calls(place)
    again = cb.autotune_module(f"{HERE}:small", SHAPE, **asked)
    assert calls(place) == before
    assert [m.timings_seconds for m in again.measurements] == [m.timings_seconds for m in first.measurements]
    assert (again.batch_size, again.dtype) == (first.batch_size, "float32")
    assert any("Answered from the store" in reason for reason in again.reasons)
    for result in (first, again):
        assert any(heap.format_variables(heap.RAISED) in reason for reason in result.reasons) == heap.is_movable()


def test_the_worker_of_a_named_module_calls_mallopt(place, malloc_is_not_chosen):
    """Only the process that runs the steps sets glibc's thresholds."""
    if not heap.is_movable():
        pytest.skip("no glibc")
    cb.autotune_module(f"{HERE}:notes_mallopt", SHAPE, store=False, **ASKED)
    workers = {process for process, _ in calls(place)}
    assert {int(line) for line in (place / "mallopt").read_text().split()} == workers
    assert os.getpid() not in workers


@pytest.mark.parametrize(
    "other",
    [
        {"mode": "training"}, {"loss": f"{HERE}:scalar"}, {"optimizer": f"{HERE}:sgd"}, {"autocast": "bfloat16"},
        {"channels_last": True}, {"seed": 1}, {"example_inputs": (3, 8, 9)}, {"memory_limit": "1GiB"},
        {"example_inputs": torch.zeros(1, 3, 8, 8)}, {"tolerance": 0.02},
    ],
    ids=lambda other: next(iter(other)),
)  # fmt: skip
def test_another_question_is_not_answered_from_the_store(place, nothing_runs, other):
    """Whatever is asked otherwise is another run."""
    asked = {"module": f"{HERE}:small", "example_inputs": SHAPE, "store": place / "store.sqlite3"} | ASKED
    asked |= {"mode": "training"} if other.keys() & {"loss", "optimizer"} else {}
    for each in (asked, asked | other):
        with pytest.raises(KeyboardInterrupt):
            cb.autotune_module(**each)
    assert len(results.list_runs(place / "store.sqlite3")) == 2


def test_the_list_of_what_is_kept_tells_the_shape_that_was_given(place, nothing_runs):
    """Two shapes of one module are two lines that can be told apart; tensors have no extents there."""
    for inputs in (SHAPE, (3, 8, 9), torch.zeros(1, 3, 8, 8)):
        with pytest.raises(KeyboardInterrupt):
            cb.autotune_module(f"{HERE}:small", inputs, store=place / "store.sqlite3", **ASKED)
    kept = [common.plain(run) for run in results.list_runs(place / "store.sqlite3")]
    grid = tables.runs(kept, "store.sqlite3")
    assert sorted(str(row[grid.columns.index("input")]) for row in grid.rows) == ["3x8x8", "3x8x9", "None"]


def test_timings_of_another_allocator_are_refused(place, nothing_runs, monkeypatch, malloc_is_not_chosen):
    """How freed memory is kept decides the speed on a CPU as much as the batch size does."""
    for kept in ("0", "65536"):
        monkeypatch.setenv("MALLOC_MMAP_MAX_", kept)
        with pytest.raises(KeyboardInterrupt):
            cb.autotune_module(f"{HERE}:small", SHAPE, store=place / "store.sqlite3", **ASKED)
    before, after = (run.conditions["malloc"] for run in results.list_runs(place / "store.sqlite3"))
    assert {before, after} == {"MALLOC_MMAP_MAX_=0", "MALLOC_MMAP_MAX_=65536"}


IMAGE = torch.randn(2, 3, 8, 8)
EQUAL = {
    "whole numbers": (
        "of_words", 2,
        [{"ids": ids} for ids in (torch.tensor([[1, 2]]), torch.arange(1, 3).reshape(1, 2), torch.tensor([[1, 3]]))],
    ),
    "random floats": (
        "small", 4, [(x,) for x in (IMAGE, -IMAGE, IMAGE[:1], IMAGE.double(), IMAGE.clone().requires_grad_())],
    ),
    "floats of every batch": ("small", 2, [(IMAGE, torch.tensor(limit)) for limit in (0.5, 0.7, 0.5)]),
}  # fmt: skip


@pytest.mark.parametrize("case", EQUAL)
def test_the_store_finds_equal_inputs_again(place, nothing_runs, case):
    """What every batch holds asks by its values; what is drawn for each batch by its shape, dtype and gradient."""
    build, num_runs, examples = EQUAL[case]
    for inputs in examples:
        with pytest.raises(KeyboardInterrupt):
            cb.autotune_module(f"{HERE}:{build}", inputs, store=place / "store.sqlite3", **ASKED)
    assert len(results.list_runs(place / "store.sqlite3")) == num_runs


def test_dicts_and_functions_by_name_reach_the_worker(place):
    """Keyword arguments with labels, a loss of the output's own, an optimiser of the user's."""
    inputs = {"ids": torch.tensor([[1, 49], [0, 7]]), "labels": torch.tensor([0, 1])}
    result = cb.autotune_module(
        f"{HERE}:of_words", inputs, mode="training", optimizer=f"{HERE}:sgd", store=False, **ASKED
    )
    assert set(statuses(result).values()) <= {"ok", "dropped"}


def test_a_worker_that_dies_is_replaced(place):
    """The size at which it died is tried once more, in a new one, and the others are measured."""
    result = cb.autotune_module(f"{HERE}:dies", SHAPE, store=False, **ASKED)
    assert (place / "died").exists()
    assert set(statuses(result).values()) <= {"ok", "dropped"}
    assert len({process for process, _ in calls(place)}) == 2


def test_sizes_below_one_that_ends_the_process_are_tuned(place):
    """pytorch-beginner#22: neither the trace of larger sizes nor a step of one ends the run."""
    asked = {"device": "cpu", "max_batch_size": 32, "budget": 60.0}
    result = cb.autotune_module(f"{HERE}:exits_above_four", SHAPE, store=False, **asked)
    assert result.batch_size in {1, 2, 3, 4}
    assert {1, 4} <= {m.batch_size for m in result.measurements if m.timings_seconds}
    failed = [m.batch_size for m in result.measurements if m.status == "error"]
    assert failed
    assert str(min(failed)) in result.reasons[0]
    assert max(size for _, size in calls(place)) == 4


def test_what_cannot_be_built_is_told_with_its_place():
    """The line that raised it is the user's to mend; no other process would help."""
    with pytest.raises(
        cb.InvalidArgument, match=r"broken'\. It raised RuntimeError: no weights, at .*modules\.py:\d+\.$"
    ):
        cb.autotune_module(f"{HERE}:broken", SHAPE, store=False, **ASKED)


def test_a_script_that_ends_the_process_is_named():
    """textgen#3016: "it ended with exit status 2" did not say that importing a script parsed arguments."""
    with pytest.raises(cb.InvalidArgument, match=r"It raised SystemExit: 2, at .*modules\.py:\d+\. Move what a script"):
        cb.autotune_module(f"{HERE}:exits", SHAPE, store=False, **ASKED)


def test_a_name_may_be_of_a_module_itself():
    """It was called without inputs: "forward() missing 1 required positional argument"."""
    ready, built = (cb.footprint(f"{HERE}:{name}", SHAPE, batch_size=4) for name in ("ready", "small"))
    assert ready.total == built.total
    assert isinstance(module_source.make(f"{HERE}:Small"), named_modules.Small)


def test_where_the_process_ends_another_way_is_named():
    """The module itself is what `autotune_module` takes beside a name; an argument of `autotune` would not help."""
    with pytest.raises(
        cb.WorkerFailed, match=r"exit status 3 at the start\. In Python, autotune_module runs it in your"
    ):
        cb.autotune_module(f"{HERE}:ends", SHAPE, store=False, **ASKED)


def test_page_faults_are_told_from_the_store_too(place, monkeypatch, malloc_is_not_chosen):
    """The worker remarks on them; a rerun, which runs no step, says so."""
    values = {"batch_size": 2, "cpu_share": 0.2, "faults": "1000", "variables": "A=1"}
    remark = {"code": "page_faults", "values": values}
    report = RemoteBoundedRunner.report
    monkeypatch.setattr(RemoteBoundedRunner, "report", lambda self: report(self) | {"remarks": [remark]})
    for _ in range(2):
        result = cb.autotune_module(f"{HERE}:small", SHAPE, store=place / "store.sqlite3", **ASKED)
        (note,) = (reason for reason in result.reasons if "page faults" in reason)
        assert note.startswith("At batch size 2 the system took 20 % of the CPU time")
    assert any("Answered from the store" in reason for reason in result.reasons)


def source(folder, text=""):
    """Write a module that a worker can import from a folder, and a file of its own that it imports."""
    (folder / "parts.py").write_text(f"SIZE = 4{text}\n")
    (folder / "mine.py").write_text(
        "import torch\nimport parts\ndef build():\n    return torch.nn.Sequential(torch.nn.Linear(3, parts.SIZE))\n"
    )


def test_a_changed_source_is_refused_by_name_and_measured_anew(place, monkeypatch):
    """Also one that is only imported by the module's own."""
    monkeypatch.syspath_prepend(place)
    source(place)
    asked = ASKED | {"store": place / "store.sqlite3"}
    cb.autotune_module("mine:build", (3,), **asked)
    source(place, " + 1")
    result = cb.autotune_module("mine:build", (3,), **asked)
    assert any("source_sha256 was" in reason for reason in result.reasons)
    assert not any("Answered from the store" in reason for reason in result.reasons)


SCRIPT = """
import sys, cubatch as cb
from pathlib import Path
def progress(event):
    if event.kind == "timing":
        print("timing", flush=True)
cb.autotune_module("{here}:small", (3, 8, 8), device="cpu", batch_sizes=[2, 4, 8], budget=60.0, store=sys.argv[1],
                   progress=progress)
print("done", flush=True)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT], ids=lambda how: how.name)
def test_an_interrupted_run_goes_on_where_it_was(place, how):
    """After a kill, or Ctrl-C, what was timed is there, and sizes whose timings are whole are not timed again."""
    store = place / "store.sqlite3"
    root = Path(cb.__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), *sys.path])}
    command = [sys.executable, "-c", SCRIPT.format(here=HERE), str(store)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    ) as run:
        lines = [run.stdout.readline() for _ in range(3)]
        run.send_signal(how)
        rest = run.communicate()[0]
    assert lines == ["timing\n"] * 3
    assert "done" not in rest
    (kept,) = results.list_runs(store)
    assert kept.num_timings >= 3
    before = results.show(store, kept.id)[1].timings
    worker = calls(place)[0][0]
    asked = {"device": "cpu", "batch_sizes": [2, 4, 8], "budget": 60.0}
    result = cb.autotune_module(f"{HERE}:small", SHAPE, store=store, **asked)
    after = results.show(store, kept.id)[1].timings
    assert after[: len(before)] == before
    assert set(statuses(result).values()) <= {"ok", "dropped"}
    deadline = time.monotonic() + 10
    while Path(f"/proc/{worker}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{worker}").exists()


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"module": "named_modules"}, "package.module:build"),
        ({"module": "nowhere:build"}, "sys.path"),
        ({"module": f"{HERE}:missing"}, "a function of"),
        ({"module": f"{HERE}:smal"}, "Did you mean 'small'"),
        ({"module": f"{HERE}:no_module"}, "returns dict"),
        ({"loss": lambda output: output.sum()}, "the name of a function too"),
        ({"example_inputs": lambda: 3}, "torch.save"),
        ({"store": 3}, "store"),
    ],
)
def test_bad_arguments_are_named(wrong, match):
    """Before anything is run, or from the worker as they are."""
    given = {"module": f"{HERE}:small", "example_inputs": SHAPE, "store": False} | ASKED | wrong
    with pytest.raises(cb.InvalidArgument, match=match):
        cb.autotune_module(**given)


def test_a_module_without_a_name_is_not_kept(place):
    """A store that is named for it is refused; True, which is the default, keeps nothing."""
    with pytest.raises(cb.InvalidArgument, match=r"'package\.module:build'"):
        cb.autotune_module(named_modules.small(), SHAPE, store=place / "store.sqlite3", **ASKED)


def test_the_module_is_moved_to_the_number_that_its_gpu_has_in_the_worker(monkeypatch):
    """The worker is told a uuid, which PyTorch does not take."""
    places = []

    class Moved(torch.nn.Linear):
        def to(self, place):
            places.append(place)
            return self  # there is no such GPU here

    monkeypatch.setattr(module_worker.garbage, "freeze_objects", list)  # which a worker does for good
    monkeypatch.setattr(module_worker, "place_of", {"GPU-7": "cuda:1"}.get)
    monkeypatch.setattr(module_worker.module_source, "load", lambda name: lambda: Moved(3, 1))
    module_worker.runner(
        build="package:build", inputs=[3], device="GPU-7", mode="inference", loss=None, optimizer="sgd", autocast=None,
        channels_last=False, compiled=False, constant_inputs=(), sizes=(4, 8), memory_limit=2**30, seed=0,
    )  # fmt: skip
    assert places == ["cuda:1"]
