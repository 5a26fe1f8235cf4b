"""`autotune` on a GPU that is said to be here: dtypes, the kernels that won, and a cold or warm cache."""

from __future__ import annotations

import functools
import math
import re
from pathlib import Path

import attrs
import pytest

from cubatch import errors, sqlite_file
from cubatch.engine.conditions import kernels_sha256
from cubatch.hardware import probe
from cubatch.kernels import choice, ranking
from cubatch.kernels.problem import problem_of
from cubatch.measure.goal import Goal
from cubatch.measure.records import Candidate, Outcome, Timing
from cubatch.network import models
from cubatch.network.layers import Conv2d, Linear
from cubatch.network.passes import Pass
from cubatch.search import loop
from cubatch.tuning import tune as tuner
from cubatch.tuning.ladder import Ladder
from cubatch.tuning.results import TuningResult
from cubatch.tuning.step_memory import footprint
from cubatch.tuning.subjects.network_subject import _l2
from cubatch.tuning.tune import autotune
from tests.building import workload
from tests.nvml import Gpu, Library
from tests.unit.launch_fakes import FakeDevice
from tests.unit.tuning.small_runs import tune

pytestmark = pytest.mark.usefixtures("quiet")

GO = Conv2d(h=19, w=19, c=128, k=128, r=3, s=3, pad=1)


# --- dtypes --------------------------------------------------------------------------------------------------


@pytest.fixture
def gpu(monkeypatch):
    """A GPU that is said to be here, on which every size takes 1 ms; what workers were asked for is kept."""
    asked = []

    def here(slug):
        found = attrs.evolve(probe.device(slug), live=True, uuid=f"GPU-{slug}")
        monkeypatch.setattr(probe, "resolve", lambda *_, **__: found)

    local = loop.Search.run

    def run(search):
        if not isinstance(search.factory, functools.partial):  # in this process, as on a CPU
            return local(search)
        asked.append(search.factory.args[0].arguments)
        for step in search.ladder:
            for number in range(2):
                search.keeper.timing(Timing(batch_size=step.batch_size, round=number, seconds=1e-3))
            search.keeper.outcome(Outcome(step.batch_size, "ok"))
        return search.keeper.measured

    monkeypatch.setattr(loop.Search, "run", run)
    here.asked = asked
    return here


@pytest.mark.parametrize(
    ("slug", "dtype", "says"),
    [
        ("v100-sxm2-16gb", "float32", False),
        ("v100-sxm2-16gb", "float16", False),
        ("v100-sxm2-16gb", "bfloat16", True),
        ("titan-x-pascal", "float16", True),
        ("a100-sxm4-80gb", "bfloat16", False),
        ("a100-sxm4-80gb", "tf32", False),
    ],
)
def test_a_gpu_takes_every_dtype_and_the_result_says_where_arithmetic_is_float32(gpu, slug, dtype, says):
    """It reaches the worker, the plan and the result; a sentence tells where 16 bits are storage only."""
    gpu(slug)
    result = autotune("mnist-cnn", dtype=dtype, mode="training", batch_sizes=[8, 64], store=False)
    (arguments,) = gpu.asked
    assert (arguments["dtype"], arguments["library"]) == (dtype, "cubatch")
    assert (result.dtype, result.library, result.batch_size) == (dtype, "cubatch", 64)
    assert result.device["slug"] == slug, "anchors find it by this, whoever shares the driver's name"
    planned = footprint("mnist-cnn", batch_size=64, mode="training", dtype=dtype, device=slug).total
    assert result.measurements[1].predicted_peak_bytes == planned
    assert any("arithmetic is float32" in reason and dtype in reason for reason in result.reasons) == says


@pytest.mark.parametrize(
    ("slug", "options"),
    [
        ("v100-sxm2-16gb", {"dtype": "tf32"}),
        ("a100-sxm4-80gb", {"dtype": "float16", "library": "im2col"}),
        ("a100-sxm4-80gb", {"dtype": "tf32", "library": "im2col"}),
    ],
)
def test_a_dtype_that_gpu_or_library_has_not_is_refused_with_what_they_have(gpu, slug, options):
    """tf32 is there from sm_80 on; cuBLAS and what is around it are in float32."""
    gpu(slug)
    with pytest.raises(errors.UnsupportedDtype) as caught:
        autotune("mlp", batch_sizes=[8], store=False, **options)
    assert caught.value.field == "dtype"
    assert "float32" in caught.value.supported
    assert options["dtype"] not in caught.value.supported
    assert caught.value.remedy
    assert not gpu.asked


def test_energy_is_refused_before_anything_runs_on_a_gpu_that_does_not_count_it(gpu, monkeypatch):
    """Boards before Volta have no counter: the GPU is named before a worker or a callable's step is asked for."""
    gpu("titan-x-maxwell")
    Library(Gpu(uuid="GPU-titan-x-maxwell", millijoules=None)).install(monkeypatch)
    asked = {"objective": "energy", "batch_sizes": [8]}
    for ask in (
        functools.partial(autotune, "mnist-cnn", store=False),
        functools.partial(tuner.autotune_callable, pytest.fail, max_batch_size=8, device="cuda:0"),
    ):
        with pytest.raises(errors.EnergyNotAvailable, match=r"TITAN X \(cuda:0\) reports no power or energy"):
            ask(**asked)
    assert not gpu.asked
    Library(Gpu(uuid="GPU-titan-x-maxwell")).install(monkeypatch)  # one that counts
    Goal(objective="energy").check_device(probe.resolve())


@pytest.mark.parametrize(("refusal", "said"), [(None, 0), ("a planted one", 1)])
def test_the_result_says_how_steps_were_launched(gpu, monkeypatch, refusal, said):
    """As the runner told before it was closed: in the environment, and in a sentence where graphs were refused."""
    gpu("a100-sxm4-80gb")
    launch = {"launches": 20, "graph": refusal is None, "refusal": refusal}
    run = loop.Search.run
    monkeypatch.setattr(loop.Search, "run", lambda search: attrs.evolve(run(search), launch=launch))
    result = autotune("mlp", batch_sizes=[8], store=False)
    assert result.environment["launch"] == launch
    assert sum("20 kernels" in reason and "a planted one" in reason for reason in result.reasons) == said
    assert TuningResult.from_json(result.to_json()) == result


def test_a_timing_holds_for_its_dtype_alone(gpu, tmp_path):
    """The same question is answered from the store; in another dtype it is another question."""
    gpu("a100-sxm4-80gb")
    tune_on = functools.partial(autotune, "mlp", batch_sizes=[8], store=tmp_path / "store.sqlite3")
    for dtype in ("float16", "bfloat16", "float16", "tf32", "float32", "tf32"):
        result = tune_on(dtype=dtype)
        assert result.dtype == dtype
    assert [arguments["dtype"] for arguments in gpu.asked] == ["float16", "bfloat16", "tf32", "float32"]


# --- kernels that won ----------------------------------------------------------------------------------------


def winners_of(path, slug):
    """What `select` keeps of a GPU, as a worker opens it."""
    return choice.Winners(path, gpu=probe.device(slug).name, sources="abc")


def test_refresh_forgets_once_which_kernels_won_on_this_gpu(gpu, tmp_path, monkeypatch):
    """Before the first worker and not before the second one; another GPU, and a run that goes on, keep theirs."""
    kept, seen = tmp_path / "store-kernels.sqlite3", []
    monkeypatch.setattr(sqlite_file, "default_path", lambda: tmp_path / "store.sqlite3")
    gpu("v100-sxm2-16gb")
    run = loop.Search.run

    def restarting(search):
        assert search.factory.args[0].arguments["winners"] == str(kept)
        for _ in range(2):  # the first worker dies after it has timed
            found = winners_of(kept, "v100-sxm2-16gb")
            seen.append(found.get("product"))
            found.put("product", "timed", {"timed": 1e-3})
        return run(search)

    monkeypatch.setattr(loop.Search, "run", restarting)
    for slug in ("v100-sxm2-16gb", "t4"):
        winners_of(kept, slug).put("product", "before", {"before": 2e-3})
    for store, mode in ((True, "inference"), ("refresh", "inference"), (True, "training"), (False, "inference")):
        if store is False:
            monkeypatch.setattr(loop.Search, "run", run)
        autotune("mlp", mode=mode, batch_sizes=[8], store=store)
    assert seen == ["before", "timed", None, "timed", "timed", "timed"]
    assert gpu.asked[-1]["winners"] is None
    assert winners_of(kept, "t4").get("product") == "before"


def test_each_measurement_says_what_its_passes_put_on_the_sms(gpu, tmp_path):
    """
    At 8 boards of 19 x 19, 5 x 5 tiles each of F(4x4), 36 products; a filter of 128 columns. The variant that won in
    this run is what runs.

    Occupancy and fill are the means of the rows by predicted time, by hand; JSON and a rerun give the same rows.
    """
    gpu("v100-sxm2-16gb")
    quick = functools.partial(autotune, GO, mode="training", batch_sizes=[8, 64], store=tmp_path / "store.sqlite3")
    result = quick()
    for m in result.measurements:
        assert [row["pass"] for row in m.layers] == ["fprop", "dgrad", "wgrad"]
        whole = math.fsum(row["predicted_seconds"] for row in m.layers)
        assert whole == pytest.approx(m.predicted_seconds)
        for name in ("occupancy", "fill"):
            mean = math.fsum(row["predicted_seconds"] * row[name] for row in m.layers) / whole
            assert getattr(m, name) == pytest.approx(mean)
            assert 0 < mean <= 1
    first = result.measurements[0].layers[0]
    rows, columns = map(int, re.search(r"_f4x4_f32_winograd_(\d+)x(\d+)x", first["kernel"]).groups())
    assert first["blocks"] == 36 * -(-200 // rows) * -(-128 // columns)
    assert TuningResult.from_json(result.to_json()) == result
    assert quick().measurements == result.measurements


def test_the_kernel_of_a_row_is_the_one_that_won(gpu, tmp_path, monkeypatch):
    """What a worker timed in this very run decides; the ranking's first where nothing was timed."""
    gpu("v100-sxm2-16gb")
    path, found, run = tmp_path / "store.sqlite3", probe.device("v100-sxm2-16gb"), loop.Search.run
    problem = problem_of(GO, Pass.FPROP, 64, "float32")
    first, second = ranking.ranked(problem, found)[:2]

    def choosing(search):
        if (winners := search.factory.args[0].arguments["winners"]) is not None:
            kept = choice.Winners(Path(winners), gpu=found.name, sources=kernels_sha256())
            device = FakeDevice({second.name: 1e-3})
            choice.TimedChoice(lambda: device.clock, kept, seconds=60.0)(problem, found, device.prepare)
        return run(search)

    monkeypatch.setattr(loop.Search, "run", choosing)
    for store, kernel in ((path, second), (False, first)):
        (m,) = autotune(GO, batch_sizes=[64], store=store).measurements
        (row,) = m.layers
        assert row["kernel"] == kernel.name


def test_where_nothing_is_known_of_blocks_there_are_no_rows(gpu):
    """A CPU has no SMs, and of the vendor's kernels nothing is known: unknown is None."""
    gpu("v100-sxm2-16gb")
    results = [autotune(GO, batch_sizes=[8], store=False, library="im2col")]
    gpu("cpu")
    results.append(tune(batch_sizes=[4]))
    for result in results:
        (m,) = result.measurements
        assert (m.layers, m.occupancy, m.fill) == ((), None, None)


def test_a_file_of_winners_that_cannot_be_used_is_said_and_the_run_goes_on(gpu, tmp_path, monkeypatch):
    """A folder in its place costs the forgetting, not the answer."""
    monkeypatch.setattr(sqlite_file, "default_path", lambda: tmp_path / "store.sqlite3")
    (tmp_path / "store-kernels.sqlite3").mkdir()
    gpu("v100-sxm2-16gb")
    result = autotune("mlp", batch_sizes=[8], store="refresh")
    assert result.batch_size == 8
    assert any("could not be discarded" in reason and "store-kernels" in reason for reason in result.reasons)


# --- cold or warm --------------------------------------------------------------------------------------------


def test_the_result_says_whether_the_cache_was_cold():
    """A small layer on a device with a known L2 rotates over buffers until it is cold; a network runs as it runs."""
    gpu = probe.resolve("v100-sxm2-16gb", live=False)
    eight = Ladder((Candidate(8),), None, None)
    large = Conv2d(h=56, w=56, c=64, k=64, r=3, s=3, pad=1)
    assert _l2(workload(large, gpu), eight) == "cold"
    assert _l2(workload(Linear(c=64, k=64), gpu), eight) == "warm"  # 64 sets of so small buffers are no L2
    assert _l2(workload(models.build("mlp"), gpu), eight) == "warm"
    unknown = attrs.evolve(probe.device("cpu"), l2_bytes=None)
    assert _l2(workload(large, unknown), eight) == "warm"
