"""The GPU pass where there is no GPU: what it would do, how it survives hangs and crashes, what its results become."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import subprocess
import sys
import textwrap
import time
from types import SimpleNamespace

import attrs
import numpy as np
import pytest

from benchmarks import gpu_pass, render
from benchmarks.gpu import cases as gpu_cases
from benchmarks.gpu import conformance, plan, probes, sweep
from benchmarks.gpu import items as gpu_items
from benchmarks.gpu import stages as gpu_stages
from benchmarks.gpu.stages import Item, Stage
from benchmarks.gpu_pass import Position, Run
from benchmarks.pages import gpu
from cubatch.bench import cases, measure, target
from cubatch.bench.contest import Contest
from cubatch.errors import CompileError, DeviceFailed, InvalidArgument
from cubatch.hardware import catalogue
from cubatch.network import layers as kinds
from cubatch.network.passes import Pass
from tests.unit.bench_fakes import DEVICE, World, enter

H200 = catalogue.find("h200-sxm")


@pytest.fixture
def world(monkeypatch):
    """A world of NumPy kernels in the place of ours."""
    return enter(World(), monkeypatch)


def tell(script, skipped):
    """A command that runs a script which tells its lines by say()."""
    head = """
    import json, os, sys, time
    start, seconds, skipped = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]
    def say(**facts): print(json.dumps(facts), flush=True)
    def do(index, **facts):
        say(begins=index, name=f"item {index}", limit=0.4)
        say(ends=index, item={"name": f"item {index}", "status": "ok", **facts})
    """
    text = textwrap.dedent(head) + textwrap.dedent(script)
    return lambda start, seconds: [sys.executable, "-c", text, str(start), str(seconds), *skipped]


def ran(script, seconds=30.0, skipped=None):
    """What became of a stage, and how often it was saved; kernels that are left out go into `skipped`."""
    run, saved, skipped = Run("stage", seconds), [], {} if skipped is None else skipped
    gpu_pass.run_stage(tell(script, skipped), run, lambda: saved.append(len(run.items)), skipped)
    return run, saved


# --- processes that hang, crash and run out of time ----------------------------------------------------------------


def test_a_stage_that_goes_well_has_all_its_items():
    """Each is kept as it comes."""
    run, saved = ran("for index in range(start, 3): do(index, value=index)")
    assert (run.status, run.message, run.skipped) == ("ok", "", [])
    assert [item["value"] for item in run.items] == [0, 1, 2]
    assert saved[:3] == [1, 2, 3]


def test_an_item_that_hangs_is_noted_and_the_next_goes_on():
    """After its own limit the process is killed, and a new one begins behind it."""
    run, _ = ran(
        """
        for index in range(start, 4):
            if index == 1:
                say(begins=1, name="item 1", limit=0.3)
                time.sleep(60)
            do(index)
        """
    )
    assert [item["status"] for item in run.items] == ["ok", "hung", "ok", "ok"]
    assert run.status == "ok"
    assert "1 processes ended early" in run.message
    assert "item 1 took longer than 0.3 s" in run.message
    assert run.seconds < 10


def test_an_item_that_kills_its_process_is_noted_with_what_it_said():
    """A sticky CUDA error or a segmentation fault leaves the rest."""
    run, _ = ran(
        """
        for index in range(start, 3):
            if index == 1:
                say(begins=1, name="item 1", limit=5)
                sys.exit("an illegal address")
            do(index)
        """
    )
    assert [item["status"] for item in run.items] == ["ok", "crashed", "ok"]
    assert "an illegal address" in run.items[1]["message"]


def test_a_stage_that_only_crashes_is_given_up():
    """A GPU that fell off the bus is not asked a thousand times."""
    run, _ = ran("say(begins=start, name=f'item {start}', limit=5); sys.exit('gone')")
    assert run.status == "failed"
    assert len(run.items) == gpu_pass.MAX_RESTARTS + 1


@pytest.mark.parametrize(
    ("falls", "reason"),
    [
        ("sys.exit('Traceback\\nCUDARuntimeError: an illegal address')", "CUDARuntimeError: an illegal address"),
        ("time.sleep(60)", "item 1 took longer than 0.3 s"),
    ],
)
def test_a_kernel_that_ends_its_process_is_left_out_of_the_same_item(falls, reason):
    """The item's other variants are checked and timed all the same, and the file says which kernel it was and why."""
    skipped = {}
    run, _ = ran(
        f"""
        for index in range(start, 3):
            say(begins=index, name=f"item {{index}}", limit=0.3)
            for kernel in ("good", "bad"):
                if kernel not in skipped:
                    say(tries=kernel)
                    if kernel == "bad" and index == 1:
                        {falls}
                    say(tries="")
            say(ends=index, item={{"name": f"item {{index}}", "status": "ok", "without": skipped}})
        """,
        skipped=skipped,
    )
    assert [(item["status"], item["without"]) for item in run.items] == [("ok", []), ("ok", ["bad"]), ("ok", ["bad"])]
    assert skipped == {"bad": f"stage, item 1: {reason}"}
    assert run.status == "ok"
    assert reason in run.message


def test_a_stage_in_which_many_kernels_fall_goes_on():
    """Each ends one process and no more, so that they are all found; a stage is given up for what has no name."""
    skipped, count = {}, gpu_pass.MAX_RESTARTS + 3
    run, _ = ran(
        f"""
        say(begins=0, name="item 0", limit=5)
        for kernel in map(str, range({count})):
            if kernel not in skipped:
                say(tries=kernel)
                sys.exit("an illegal address")
        do(0)
        """,
        skipped=skipped,
    )
    assert (run.status, [item["status"] for item in run.items]) == ("ok", ["ok"])
    assert list(skipped) == [str(number) for number in range(count)]


@pytest.mark.parametrize("tried", ["say(tries='good'); say(tries='')", "say(tries='named before')"])
def test_a_fall_that_is_no_new_kernels_is_the_items(tried):
    """What was through is not blamed, and what is left out already is not left out again and again."""
    skipped = {"named before": "why"}
    run, _ = ran(
        f"""
        if start == 0:
            say(begins=0, name="item 0", limit=5)
            {tried}
            sys.exit("torn")
        do(1)
        """,
        skipped=skipped,
    )
    assert [item["status"] for item in run.items] == ["crashed", "ok"]
    assert skipped == {"named before": "why"}


def test_an_item_whose_kernel_takes_the_stages_last_time_is_noted():
    """There is no time to do it again."""
    run, _ = ran("say(begins=0, name='item 0', limit=0.3); say(tries='slow'); time.sleep(60)", seconds=0.2)
    assert (run.status, [item["status"] for item in run.items]) == ("timeout", ["hung"])


class Stream:
    """CuPy's stream, which reports what a kernel did when it is waited for."""

    def __init__(self, said, error):
        self.said, self.error = said, error

    def synchronize(self):
        self.said.append("waited")
        if self.error:
            raise self.error


def session_that(said, error=None, **options):
    """A session whose kernels end in an error, or well."""
    session = gpu_items.Session(H200, 0.0, lambda **facts: said.append(facts), **options)
    stream = Stream(said, error)
    module = SimpleNamespace(cuda=SimpleNamespace(get_current_stream=lambda: stream))
    session.target = SimpleNamespace(module=module, trying=session.trying)
    return session


def test_a_session_says_which_kernel_it_tries_until_it_is_through():
    """A launch returns before its kernel ran, so what it did to the GPU shows when it is waited for."""
    found, said = gpu_items.units(90)[0], []
    with session_that(said).trying(found):
        said.append("launched")
    assert said == [{"tries": found.name}, "launched", "waited", {"tries": ""}]
    said.clear()
    with pytest.raises(InvalidArgument), session_that(said).trying(found):
        raise InvalidArgument("tile", 1, "at least 2")
    assert said[-1] == {"tries": ""}
    said.clear()
    with (
        pytest.raises(RuntimeError, match="illegal"),
        session_that(said, RuntimeError("an illegal address")).trying(found),
    ):
        said.append("launched")
    assert said == [{"tries": found.name}, "launched", "waited"]


def test_a_kernel_that_is_left_out_is_not_launched():
    """It is an error of that variant or probe, and nothing is told of it."""
    said, probe = [], probes.probes(90)[0]
    session = session_that(said, skipped={probe.kernel.name})
    with pytest.raises(
        DeviceFailed, match=f"kernel {probe.kernel.name} failed with the end of an earlier process"
    ) as no:
        conformance.conforms(probe, session)
    assert not no.value.is_fatal
    assert said == []


def test_a_process_that_does_not_even_begin_fails_the_stage():
    """Such as for want of CuPy."""
    run, _ = ran("sys.exit('no module named cupy')")
    assert (run.status, run.items) == ("failed", [])
    assert "no module named cupy" in run.message


def test_getting_ready_takes_nothing_of_the_stages_time():
    """From a cold disk PyTorch's import takes longer than a stage; only the first process of each is let off."""
    run, _ = ran(
        """
        time.sleep(0.5)
        say(count=5)
        do(start, left=seconds)
        if start < 4:
            say(begins=start + 1, name="gone", limit=5)
            sys.exit("gone")
        """,
        seconds=1.2,
    )
    first, second, third = (item["left"] for item in run.items if item["status"] == "ok")
    assert run.ready_seconds >= 0.5
    assert first == 1.2
    assert 0.8 < second < 1.2
    assert third < second - 0.5


def test_a_sessions_time_begins_when_its_libraries_have_answered(monkeypatch):
    """What the imports, the context and a first kernel take is charged to no item."""
    now, done = [0.0], []

    def passing(what, seconds):
        def pass_time(*_):
            now[0] += seconds
            done.append(what)

        return pass_time

    module = SimpleNamespace(
        cuda=SimpleNamespace(get_current_stream=lambda: SimpleNamespace(synchronize=passing("waited", 1.0)))
    )

    def on_gpu(device):
        passing("CuPy and a context", 30.0)()
        return target.Target(device, None, module, None)

    monkeypatch.setattr(gpu_items.probe, "resolve", lambda _: H200)
    monkeypatch.setattr(gpu_items, "on_gpu", on_gpu)
    monkeypatch.setattr(gpu_items.rivals, "torch_of", passing("PyTorch", 60.0))
    monkeypatch.setattr(gpu_items, "fill", passing("a kernel", 5.0))
    monkeypatch.setattr(gpu_items.time, "monotonic", lambda: now[0])
    session = gpu_items.session_here(12.0, (), (), print)
    assert done == ["CuPy and a context", "PyTorch", "a kernel", "waited"]
    assert session.seconds_left() == 12.0


def test_a_start_that_takes_long_is_no_hang_and_one_without_end_is(monkeypatch):
    """It has minutes, not the seconds between items."""
    assert gpu_pass.Position().limit_seconds == gpu_pass.READY_SECONDS > 4 * gpu_pass.NEXT_SECONDS
    script = "time.sleep(0.6); say(count=1); do(0)"
    monkeypatch.setattr(gpu_pass, "NEXT_SECONDS", 0.3)
    assert ran(script)[0].status == "ok"
    monkeypatch.setattr(gpu_pass, "Position", lambda: attrs.evolve(Position(), limit_seconds=0.3))
    run, _ = ran(script)
    assert (run.status, run.message) == ("failed", "the start of the process took longer than 0.3 s")


def test_what_did_not_fit_the_time_is_listed():
    """The stage keeps what it had."""
    run, _ = ran("do(0); say(skipped=['item 1', 'item 2'])")
    assert run.status == "timeout"
    assert run.skipped == ["item 1", "item 2"]
    assert len(run.items) == 1


class Here:
    """A session without a GPU, whose time is over after so many questions."""

    device = H200

    def __init__(self, questions):
        self.questions = questions

    def seconds_left(self):
        """Count down."""
        self.questions -= 1
        return max(0.0, self.questions)


def stage_of(*items):
    """A stage of functions."""
    return Stage("stage", "shows", 1.0, lambda _: [Item(f"item {n}", run) for n, run in enumerate(items)])


def lines_of(stage, monkeypatch, tmp_path, *, start=0, only="", questions=100):
    """What a child says."""
    monkeypatch.setattr(gpu_items, "session_here", lambda *_: Here(questions))
    path = tmp_path / "lines"
    with path.open("w") as lines:
        gpu_pass.child(stage, start=start, seconds=1.0, only=only, lines=lines)
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_child_says_what_begins_and_what_came_of_it(monkeypatch, tmp_path):
    """An error of an item is its result, and the next item runs."""

    def fail(_):
        raise InvalidArgument("tile", 1, "at least 2")

    said = lines_of(stage_of(lambda _: {"value": 7}, fail, lambda _: {"status": "wrong"}), monkeypatch, tmp_path)
    ends = [line["item"] for line in said if "ends" in line]
    assert said[0] == {"count": 3}
    assert [line["begins"] for line in said if "begins" in line] == [0, 1, 2]
    assert [item["status"] for item in ends] == ["ok", "error", "wrong"]
    assert ends[0]["value"] == 7
    assert "tile must be at least 2" in ends[1]["message"]
    assert all(item["took_seconds"] >= 0 for item in ends)


def test_a_child_lives_on_where_the_driver_refuses_a_call(monkeypatch, tmp_path):
    """Only an error that breaks the context ends it: a new process takes seconds that others have work for."""

    def failed(status):
        def run(_):
            raise DeviceFailed.by_driver("encoding a tensor map", status)

        return run

    said = lines_of(stage_of(failed(1), lambda _: {}), monkeypatch, tmp_path)
    assert [line["item"]["status"] for line in said if "ends" in line] == ["error", "ok"]
    with pytest.raises(DeviceFailed):
        lines_of(stage_of(failed(719)), monkeypatch, tmp_path)


def test_a_child_begins_where_it_is_told_and_ends_with_its_time(monkeypatch, tmp_path):
    """What is left is named."""
    stage = stage_of(*[lambda _: {}] * 5)
    said = lines_of(stage, monkeypatch, tmp_path, start=1, questions=3)
    assert [line["begins"] for line in said if "begins" in line] == [1, 2]
    assert said[-1] == {"skipped": ["item 3", "item 4"]}


def test_only_chooses_items_by_name(monkeypatch, tmp_path):
    """By any part of it that an expression finds."""
    said = lines_of(stage_of(*[lambda _: {}] * 12), monkeypatch, tmp_path, only="item 1")
    assert [line["name"] for line in said if "begins" in line] == ["item 1", "item 10", "item 11"]


# --- the file ------------------------------------------------------------------------------------------------------


FACTS = {"device": {"name": "Test GPU"}, "environment": {"cupy": "14"}, "monitor": None}


def run_all(monkeypatch, tmp_path, stages, runs, seconds=100.0, facts=FACTS):
    """Run stages whose results are given, on a clock that passes 10 s in each."""
    now, limits = [0.0], []

    def stand_in(_, run, save, __):
        now[0] += 10
        limits.append(run.limit_seconds)
        run.items.extend(runs.get(run.name, ()))
        save()
        kept.append(json.loads(out.read_text()))

    kept, out = [], tmp_path / "pass.json"
    monkeypatch.setattr(gpu_pass, "run_stage", stand_in)
    monkeypatch.setattr(gpu_pass.time, "monotonic", lambda: now[0])
    found = gpu_pass.run_all(stages, out, seconds=seconds, only="", facts=facts)
    return found, out, limits, kept


def test_the_file_is_whole_after_every_stage_and_holds_what_the_stages_gave(monkeypatch, tmp_path):
    """The versions of libraries come from the stage of facts; nothing partial is left beside it."""
    stages = [attrs.evolve(stage_of(), name=name) for name in ("facts", "gemm")]
    libraries = {"name": "libraries", "status": "ok", "torch": "2", "cudnn": "9"}
    found, out, _, kept = run_all(monkeypatch, tmp_path, stages, {"facts": [libraries]})
    assert json.loads(out.read_text()) == found
    assert found["schema"] == 1
    assert found["device"] == {"name": "Test GPU"}
    assert found["environment"] == {"cupy": "14", "torch": "2", "cudnn": "9"}
    assert [run["name"] for run in found["stages"]] == ["facts", "gemm"]
    assert [len(each["stages"]) for each in kept] == [1, 2]
    assert [path.name for path in tmp_path.iterdir()] == ["pass.json"]


def test_the_file_says_what_it_is_of_though_no_stage_could_begin(monkeypatch, tmp_path):
    """Driver, NVML and packages are asked without a context, and without a library that may not come up."""
    for name in ("cupy", "torch"):
        monkeypatch.setitem(sys.modules, name, None)  # importing it is an error
    facts = gpu_items.device_facts(attrs.evolve(H200, uuid="GPU-0"))
    found, *_ = run_all(monkeypatch, tmp_path, [], {}, facts=facts)
    assert found["device"]["name"] == "NVIDIA H200"
    assert found["environment"]["numpy"] == np.__version__
    assert (found["environment"]["torch"], found["monitor"]) == (None, None)


def test_the_file_names_the_commit_that_it_is_told(tmp_path):
    """A machine with a GPU may have a copy of the tree and no repository."""
    assert (
        gpu_pass.run_all([], tmp_path / "pass.json", seconds=1.0, only="", commit="1234567", facts=FACTS)["commit"]
        == "1234567"
    )


def test_time_that_a_stage_leaves_goes_to_the_later_ones(monkeypatch, tmp_path):
    """Of 100 s the first of three equal shares is 33; it takes 10, so the next has half of 90, the last 80."""
    stages = [attrs.evolve(stage_of(), name=name) for name in "abc"]
    _, _, limits, _ = run_all(monkeypatch, tmp_path, stages, {})
    assert limits == pytest.approx([100 / 3, 45, 80])


def test_a_stage_without_time_does_not_begin(monkeypatch, tmp_path):
    """And says so."""
    stages = [attrs.evolve(stage_of(), name=name) for name in "abc"]
    found, *_ = run_all(monkeypatch, tmp_path, stages, {}, seconds=15.0)
    assert [run["status"] for run in found["stages"]] == ["ok", "ok", "timeout"]


def test_sweeps_go_into_a_table_beside_the_file(monkeypatch, tmp_path):
    """One line for each layer, pass and batch size."""
    row = dict.fromkeys(sweep.COLUMNS) | {"batch": 3, "ours_ms": 0.5}
    stages = [attrs.evolve(stage_of(), name="sweep")]
    run_all(monkeypatch, tmp_path, stages, {"sweep": [{"name": "x", "status": "ok", "rows": [row, row]}]})
    with (tmp_path / "pass.csv").open() as file:
        read = list(csv.DictReader(file))
    assert [line["batch"] for line in read] == ["3", "3"]
    assert set(read[0]) == set(sweep.COLUMNS)


@pytest.mark.parametrize(
    "arguments",
    [
        [], ["--out", "nowhere/f.json"], ["--stage", "dreams", "--out", "f.json"], ["--dry-run", "--device", "titan"],
        ["--dry-run", "--only", "("], ["--dry-run", "--seconds", "-5"],
    ],
)  # fmt: skip
def test_wrong_arguments_exit_with_two(arguments, capsys):
    """Before anything is run."""
    with pytest.raises(SystemExit) as ended:
        gpu_pass.main(arguments)
    assert ended.value.code == 2
    assert capsys.readouterr().err


def test_the_readme_names_all_that_the_pass_imports():
    """Where there is no package index, what it forgets is found out after the machine was started."""
    script = """
    import sys
    before = set(sys.modules)
    import benchmarks.gpu_pass, cubatch.measure.network_runner, cubatch.worker
    import pynvml  # as cubatch.hardware.nvml does where there is a GPU
    from importlib import metadata
    known = metadata.packages_distributions()
    print(*{name for module in set(sys.modules) - before for name in known.get(module, ())})
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], cwd=render.ROOT, check=True, capture_output=True, text=True
    )
    said = (render.ROOT / "benchmarks/README.md").read_text().partition("## The GPU pass")[2].lower()
    imported = set(done.stdout.split()) - {"cubatch"}
    assert "platformdirs" in imported
    assert [name for name in sorted(imported) if name not in said] == []


def test_another_package_named_tests_does_not_hide_ours(tmp_path):
    """Among hundreds of packages on a machine one may bring its own, and the twins are taken from ours."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "__init__.py").touch()
    command = [sys.executable, "-c", "import benchmarks.gpu_pass"]
    subprocess.run(command, cwd=render.ROOT, check=True, env=os.environ | {"PYTHONPATH": str(tmp_path)})


# --- what it would do ----------------------------------------------------------------------------------------------


def test_stages_come_in_the_order_of_their_worth_and_fit_eight_minutes():
    """The device first, correctness before speed; the shares are within the default time, which is under 480 s."""
    names = [stage.name for stage in gpu_stages.STAGES]
    assert names.index("facts") < names.index("correctness") < names.index("gemm") < names.index("sweep")
    assert sum(stage.seconds for stage in gpu_stages.STAGES) <= gpu_pass.SECONDS + 20 < 480


def test_a_dry_run_lists_what_would_run(capsys):
    """With counts and guesses, and no problem where there is none."""
    arguments = ["--dry-run", "--no-compile", "--stage", "gemm", "--stage", "sweep", "--only", "gemm|14x14x256"]
    assert gpu_pass.main(arguments) == 0
    out = capsys.readouterr().out
    assert "Planned for NVIDIA H200" in out
    assert "matrix products beside cuBLAS" in out


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (InvalidArgument("w", 1, "a filter"), "problem: gemm: gemm nt 1024 x 1024 x 1024: w must be a filter"),
        (CompileError("k", "sm_90", (), "line 3"), "problem: gemm: gemm nt 1024 x 1024 x 1024: "),
    ],
)
def test_a_dry_run_fails_with_what_cannot_be_planned(error, said, monkeypatch, capsys):
    """So that CI sees it."""

    def refuse(*_, **__):
        raise error

    monkeypatch.setattr(measure, "plan", refuse)
    assert gpu_pass.main(["--dry-run", "--no-compile", "--stage", "gemm", "--only", "gemm nt 1024"]) == 1
    assert said in capsys.readouterr().out


def test_a_dry_run_fails_with_a_kernel_that_does_not_compile(monkeypatch, capsys):
    """Whatever stage it is for."""
    broken = gpu_items.units(90)[0]
    monkeypatch.setattr(gpu_items, "compile_all", lambda *_: [(broken, "line 7: error")])
    assert gpu_pass.main(["--dry-run", "--stage", "facts"]) == 1
    assert f"problem: {broken.name}: line 7: error" in capsys.readouterr().out


def test_a_dry_run_fails_with_a_case_that_does_not_fit(monkeypatch, capsys):
    """The largest layers at batch 256 take more than a card of 4 GiB has."""
    small = attrs.evolve(plan.room.memory_limit(H200), bytes=4 << 30)
    monkeypatch.setattr(plan.room, "memory_limit", lambda _: small)
    only = "224x224x64 to 64.*n=256, fprop"
    assert gpu_pass.main(["--dry-run", "--no-compile", "--stage", "layers", "--only", only]) == 1
    assert "4.00 GiB are there" in capsys.readouterr().out


@pytest.mark.parametrize("stage", gpu_stages.STAGES, ids=lambda stage: stage.name)
def test_items_have_names_of_their_own_and_limits(stage):
    """A process that begins behind an item must find the same list."""
    items = stage.items(H200)
    assert len({item.name for item in items}) == len(items) > 0
    assert [item.name for item in items] == [item.name for item in stage.items(H200)]
    assert all(item.seconds > 0 and item.limit_seconds > 0 for item in items)


def test_odd_shapes_are_odd_and_always_the_same():
    """Every storage type, extents that differ and leave residues, strides, dilation, one-sided pads, groups."""
    found = gpu_cases.odd_shapes()
    assert [case.name for case in found] == [case.name for case in gpu_cases.odd_shapes()]
    assert {case.name for case in found} != {case.name for case in gpu_cases.odd_shapes(seed=1)}
    convolutions = [case.layer for case in found if isinstance(case.layer, kinds.Conv2d)]
    assert {3, 2, 1} <= {layer.stride[0] for layer in convolutions}
    assert any(layer.dilation[0] == 2 for layer in convolutions)
    assert any(1 < layer.groups < layer.c for layer in convolutions)
    assert any(layer.h != layer.w and layer.pad[0] != layer.pad[1] for layer in convolutions)
    assert {case.dtype for case in found} == {"float32", "float16", "bfloat16"}
    assert max(case.num_bytes for case in found) < 16 * 2**20


def test_an_uncovered_kernel_is_a_problem():
    """A kernel that no case of the correctness stage runs is named."""
    assert plan._unchecked(set(), H200)
    every = {found.name for found in plan.variant.kernels()}
    assert plan._unchecked(every, H200) == []
    lost = next(name for name in sorted(every) if name.startswith("conv2d_fprop_implicit"))
    assert plan._unchecked(every - {lost}, H200) == [f"no case runs {lost}"]


# --- sweeps --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("largest", [1, 2, 7, 256])
def test_sweeps_go_from_coarse_to_fine(largest):
    """Every size once; after any half of them the widest gap is at most twice the narrowest possible."""
    order = list(sweep.coarse_to_fine(largest))
    assert sorted(order) == list(range(1, largest + 1))
    half = sorted(order[: max(1, largest // 2)])
    assert max(b - a for a, b in zip([0, *half], [*half, largest + 1], strict=True)) <= 4 or largest < 4


def test_a_sweep_times_every_size_on_parts_of_one_set_of_buffers(world):
    """Its rows are ascending and tell what was run; the buffers of the largest batch are all there is."""
    layer = kinds.Linear(c=6, k=4)
    world.seconds = {"gemm_nt_a": 1e-3, "vendor": 2e-3}
    found = sweep.sweep(
        layer, Pass.FPROP, world.target(), Contest(world), until=time.monotonic() + 60, largest=9
    )  # fmt: skip
    rows = found["rows"]
    assert [row["batch"] for row in rows] == list(range(1, 10))
    assert found["missing"] == []
    assert all(set(row) == set(sweep.COLUMNS) for row in rows)
    assert rows[4] | {"ours_kernel": "gemm_nt_a", "ours_blocks": 30, "ours_busiest_sm_blocks": 3} == rows[4]
    assert rows[4]["ours_ms"] == pytest.approx(1.0)
    assert rows[4]["vendor_ms"] == pytest.approx(2.0)
    assert rows[4]["gflop"] == pytest.approx(2 * 5 * 6 * 4 / 1e9)
    assert (rows[4]["vendor"], rows[4]["gpu"], rows[4]["num_sms"]) == ("numpy.matmul", "Test GPU", 10)


def test_a_sweep_that_is_cut_off_says_what_is_missing(world):
    """Nothing is made up for it."""
    found = sweep.sweep(kinds.Linear(c=6, k=4), Pass.WGRAD, world.target(), Contest(world), until=0.0, largest=4)
    assert (found["rows"], found["missing"]) == ([], [1, 2, 3, 4])


def test_a_sweep_goes_on_without_a_kernel_that_is_left_out(world):
    """The sizes that would have run on it are missing."""

    def refuse_small(found):
        nonlocal asked
        asked += 1
        if asked % 2:
            raise DeviceFailed(f"kernel {found.name}", "the end of an earlier process")
        return contextlib.nullcontext()

    asked = 0
    here = attrs.evolve(world.target(), trying=refuse_small)
    found = sweep.sweep(
        kinds.Linear(c=6, k=4), Pass.FPROP, here, Contest(world), until=time.monotonic() + 60, largest=4
    )
    assert ([row["batch"] for row in found["rows"]], found["missing"]) == ([2, 3], [1, 4])


def test_parts_are_disjoint_along_the_batch_and_share_the_filter():
    """Three samples at a time out of eight: two parts, each with its own samples."""
    whole = cases.of_layer(kinds.Linear(c=2, k=3), Pass.FPROP, 8)
    arrays = {name: _numbered(operand.shape) for name, operand in whole.operands.items()}
    parts = sweep._parts(cases.of_layer(kinds.Linear(c=2, k=3), Pass.FPROP, 3), arrays)
    assert [part["x"][0, 0] for part in parts] == [0, 6]
    assert [part["x"].shape for part in parts] == [(3, 2), (3, 2)]
    assert parts[0]["w"] is parts[1]["w"] is arrays["w"]


def _numbered(shape):
    return np.arange(np.prod(shape)).reshape(shape)


# --- what is made of the results -----------------------------------------------------------------------------------


def entry(seconds, *, side="ours", status="ok", ratio=None, copy=None, fill=1.0):
    """An entry as the JSON has it."""
    launch = {
        "kernel": "k", "grid": [10, 1, 1], "threads": 256, "spill_bytes": 0, "occupancy": 0.25, "fill": fill,
        "busiest_sm_blocks": 1,
    }  # fmt: skip
    return {
        "name": "k", "label": "simt 128x128x8", "side": side, "status": status, "seconds": seconds, "ratio": ratio,
        "ratio_interval": None if ratio is None else [ratio - 0.01, ratio + 0.01], "launches": [launch],
        "flops_per_second": 1e12, "bytes_per_second": 1e11, "roofline_fraction": 0.5, "copy_fraction": copy,
    }  # fmt: skip


def item_of(case, entries, bound="compute"):
    """An item as the JSON has it."""
    return {
        "name": case.name,
        "status": "ok",
        "result": {"case": case.to_mapping(), "bound": bound, "entries": entries},
    }


def result_of(**stages):
    """A pass of a device that there is not."""
    return {
        "schema": 1, "date": "2000-01-01", "commit": "0000000", "device": {"name": "Imaginary GPU"},
        "environment": {"cupy": "cupy 0", "torch": "0.0", "cudnn": "1"},
        "stages": [
            {"name": name, "status": "ok", "items": items, "skipped": ["left"] * skipped}
            for name, (items, skipped) in stages.items()
        ],
    }  # fmt: skip


def conv_case(r, stride=1, layers=("resnet50/a",)):
    """A convolution of a network."""
    layer = kinds.Conv2d(h=8, w=8, c=4, k=4, r=r, s=r, stride=stride, pad=r // 2)
    return attrs.evolve(cases.of_layer(layer, Pass.FPROP, 32), layers=layers)


SYNTHETIC = result_of(
    gemm=(
        [
            item_of(cases.gemm(64, 64, 64), [entry(2e-3, ratio=0.5), entry(1e-3, side="vendor")]),
            item_of(cases.gemm(32, 64, 64), [entry(1e-3, ratio=2.0), entry(2e-3, side="vendor")]),
            item_of(cases.gemm(16, 64, 64), [entry(1e-9, status="wrong", ratio=99.0)]),
        ],
        3,
    ),
    layers=(
        [
            item_of(conv_case(1), [entry(1e-3, ratio=0.8, fill=0.3), entry(8e-4, side="vendor")]),
            item_of(conv_case(3), [entry(1e-3, ratio=0.4), entry(4e-4, side="vendor")]),
            item_of(conv_case(3, stride=2), [entry(1e-3, ratio=1.25), entry(1.25e-3, side="vendor")]),
            item_of(conv_case(5, layers=("other/a",)), [entry(1e-3, ratio=5.0), entry(5e-3, side="vendor")]),
        ],
        0,
    ),
    misc=(
        [
            item_of(cases.of_layer(kinds.ReLU(h=8, w=8, c=4), Pass.FPROP, 2), [entry(1e-3, copy=0.9)], "memory"),
            item_of(cases.of_layer(kinds.Add(h=8, w=8, c=4), Pass.FPROP, 2), [entry(1e-3, copy=0.7)], "memory"),
        ],
        0,
    ),
)


def test_goals_are_judged_by_the_geometric_mean_and_the_least():
    """Products of 0.5 and 2 are at 1, convolutions of 0.8 and 1.25 too (not 3x3, stride 1); misc goes by its worst."""
    text = gpu.goals(SYNTHETIC)
    assert "| matrix products, float32: geometric mean of the ratio to cuBLAS | 0.95 | 1.000 | 2 | yes |" in text
    assert "| 1x1 and strided convolutions of resnet50, float32: ... to cuDNN | 1.00 | 1.000 | 2 | yes |" in text
    assert "| other operations: least share of a copy's bandwidth | 0.85 | 0.700 | 2 | **no** |" in text
    assert "depthwise" not in text


def test_the_table_of_products_leaves_out_what_was_wrong():
    """And the caption counts what was skipped."""
    text = gpu.gemm(SYNTHETIC)
    assert "gemm nt 64 x 64 x 64" in text
    assert "0.50 (0.49 to 0.51)" in text
    assert "16 x 64" not in text
    assert "3 skipped for want of time" in text
    assert "Imaginary GPU, 2000-01-01, commit 0000000" in text


def test_convolutions_are_averaged_by_network_and_pass():
    """1x1 and strided apart from 3x3 at stride 1."""
    assert "| resnet50 | float32 | 32 | fprop | 3 | 1.000 | 0.400 | 0.737 |" in gpu.convolutions(SYNTHETIC)


def test_bandwidth_is_a_share_of_a_copy():
    """For what only moves bytes."""
    assert "| relu 8x8x4, n=2, fprop | 1.00 ms | 100 GB/s | 90.0 % |  |" in gpu.bandwidth(SYNTHETIC)


def test_the_slow_are_listed_with_what_limits_them():
    """Empty SMs, the vendor's other algorithm, bandwidth; what meets its goal is not there."""
    text = gpu.slow(SYNTHETIC)
    lines = [line for line in text.splitlines() if line.startswith("| ")][2:]
    assert len(lines) == 4
    assert "gemm nt 64 x 64 x 64" in lines[0]
    assert "50.0 % of the peak rate" in lines[0]
    assert "30.0 % of the SMs at work" in lines[1]
    assert "the vendor may use Winograd" in lines[2]
    assert "70.0 % of a copy's bandwidth" in lines[3]


def test_sections_of_a_page_are_written_from_a_pass(monkeypatch, tmp_path):
    """Every kind has its marker; a page without markers stays as it is."""
    (tmp_path / "pass.json").write_text(json.dumps(SYNTHETIC))
    monkeypatch.setattr(render, "ROOT", tmp_path)
    page = "".join(f"<!-- results: {kind} pass.json -->\nold\n<!-- end -->\n" for kind in gpu.KINDS)
    written = render.rendered(page)
    assert "old" not in written
    assert written.count("Imaginary GPU") == len(gpu.KINDS)
    assert render.rendered("no markers") == "no markers"


def test_a_real_result_is_what_the_tables_read(world):
    """The JSON that measuring gives has every key that they look up."""
    result = measure.time_case(cases.gemm(70, 50, 30), world.target(), Contest(world), seconds=10.0)
    facts = {"name": "x", "status": "ok", "result": json.loads(json.dumps(result.to_mapping()))}
    passed = result_of(gemm=([facts], 0))
    assert "gemm nt 70 x 50 x 30" in gpu.gemm(passed)
    assert "| gemm | float32 | fake | 1 |" in gpu.families(passed)
    assert gpu.limit_of(gpu.rows_of(passed, "gemm")[0])
    assert DEVICE.num_sms == 10
