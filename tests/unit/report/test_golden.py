"""Every page as a whole; see tests/unit/golden.py for how the files are renewed."""

from __future__ import annotations

import math
import re

import attrs
import pytest

from cubatch.engine.training_run import Epoch
from cubatch.estimate import occupancy_sweep
from cubatch.estimate.batch_sweep import spread
from cubatch.fleet.fleet_result import FleetDevice, FleetResult
from cubatch.hardware import architectures
from cubatch.hardware.facts import Device
from cubatch.hardware.waves import occupancy
from cubatch.kernels.resources import Figures, Needs
from cubatch.kernels.survey import Row
from cubatch.kernels.variant import Kernel
from cubatch.measure.records import Candidate
from cubatch.memory.step_footprint import Footprint
from cubatch.memory.thumb_rules import Rule
from cubatch.report.page import html
from cubatch.report.tables import (
    candidates,
    devices,
    fleet,
    footprint,
    forecast,
    kernels,
    layers,
    lengths,
    models,
    occupancy as occupancy_table,
    profile,
    result,
    serving,
    store,
    study,
    threads,
    training,
    watch,
)
from cubatch.serving.batching_queue import Load
from cubatch.serving.serving_plan import ServingOption, ServingPlan
from cubatch.tuning.device_memory import ModeMemory
from cubatch.tuning.extents_result import ExtentsResult
from cubatch.tuning.length_plan import Batching, LengthPlan
from cubatch.tuning.threads_result import ThreadsResult
from tests.unit import golden
from tests.unit.predictions import fastest_first, one_pass, predicted
from tests.unit.studies import payloads
from tests.unit.tuned import measurement, result_of, tuned
from tests.unit.tuning import explained

V100 = Device(
    name="Tesla V100-SXM2-16GB", slug="v100-sxm2-16gb", compute_capability=(7, 0), num_sms=80,
    memory_bytes=16 * 2**30, peak_bytes_per_second=900e9, peak_flops_per_second={"float32": 15.7e12},
)  # fmt: skip
CPU = Device(name="A CPU", kind="cpu", threads=8, memory_bytes=2**35)


def everything():
    """A result in which all that a table can show happens."""
    ruled_out = [measurement(n, status="dropped", stop_reason="by 16 and 64") for n in (1, 2, 3)]
    untried = [measurement(n, status="not_run", stop_reason="too long") for n in (1024, 2048, 4096, 8192)]
    more = [
        measurement(
            48,
            48 / 2990,
            peak_bytes=50 * 2**20,
            roofline_fraction=0.31,
            reasons=["asked for"],
            temperature_celsius=61.0,
            power_watts=412.0,
            utilization_percent=97.0,
            used_bytes=9 * 2**30,
        ),
        measurement(
            96,
            96 / 1500,
            temperature_celsius=71.0,
            throughput_interval=[900, 2300],
            reasons=["crest 3 of conv3_2", "coulom n=2"],
        ),
        measurement(512, status="error", stop_reason="RuntimeError: a kernel failed"),
        measurement(600, status="over_limit"),
    ]
    measurements = [*ruled_out, *tuned()["measurements"], *more, *untried]
    return result_of(measurements=measurements, tied_with=[48, 96])


def grids(*found):
    """Grids one beneath the other, as `cubatch` prints them."""
    return "\n\n".join(grid.text() for grid in found)


def memory_page():
    parts = {"weights": 4000, "activations": 2**21, "activation_gradients": 2**20, "workspace": 0}
    fc = {"name": "fc", "type": "linear", "output_shape": (10,), "parameters": 1000, **parts}
    start = {"name": "input", "type": "input", "output_shape": (28, 28, 1), **dict.fromkeys(("parameters", *parts), 0)}
    plan = Footprint(
        **parts, gradients=4000, optimizer=8000, total=3 * 2**20, elements_per_sample=1820, peak_layer="fc",
        batch_size=256, layers=(start, fc),
    )  # fmt: skip
    rules = [
        Rule(
            name="4x the parameters",
            formula="weights, gradients, Adam's two",
            value=16_000,
            computed=2**20,
            unit="bytes",
        ),
        Rule(name="room / sample", formula="free memory over one sample's", value=1000.0, computed=0, unit="samples"),
    ]
    none = dict.fromkeys(("gradients", "optimizer", "activation_gradients"), 0)
    inference = attrs.evolve(plan, **none, total=2**21, elements_per_sample=1410, peak_layer="input")
    both = {
        mode: ModeMemory(footprint=one, fits=True, max_batch_size=largest, rules=rules)
        for mode, one, largest in (("inference", inference, 4096), ("training", plan, 1024))
    }
    title, why = "mlp, float32, batch 256: memory of a step", "12.50 GiB less 0.50 GiB"
    return grids(*footprint.modes(both, title=title, limit=12 * 2**30, why=why))


def candidates_page():
    found = [
        Candidate(8, ("power of two", "coulom n=1"), 2**20, 0.002),
        Candidate(96, ("crest 1 of conv1, pass fprop",), 12 * 2**20, 0.02),
        Candidate(512, ("asked for",), 2**34, None, over_limit=True),
    ]
    row = {
        "batch_size": 8, "layer": "conv1", "layers": 4, "pass": "fprop", "tile": "128x128", "slices": 1, "blocks": 98,
        "waves": 1, "last_wave": 0.61, "busiest_sm_blocks": 2, "fill": 0.61, "predicted_seconds": 2.15e-6,
        "padding": {"c": 8},
    }  # fmt: skip
    rows = [row, row | {"layer": "fc", "layers": 1, "pass": "wgrad", "slices": 4, "padding": {}, "last_wave": None}]
    title = "lenet5, training, float16: batch sizes worth measuring"
    return grids(candidates.candidates(found, title=title), candidates.explained(rows))


def predict_page():
    kernel = one_pass("fc", 0.0005, 0.03125, algorithm="conv2d_fprop_implicit_gemm_f32_simt_128x128x8_v4")
    limits = {"max_batch_size": None, "memory_bytes": 2**30, "latency_seconds": 0.03}
    result = predicted(fastest_batch_size=32, limits=limits)  # 64 is over the latency limit
    result = attrs.evolve(result, passes=(*result.passes[:2], kernel))
    return grids(forecast.prediction(result), forecast.layers(result))


def compare_page():
    found = [
        predicted("Test GPU", rates=((32, 2000),)),
        predicted("Nearly As Fast", rates=((32, 1500),), notes=["No measurement of Nearly As Fast."]),
        predicted("Slow", rates=((32, 500),), passes=[one_pass("fc", 1.0, 1.0, bound="memory")]),
    ]
    return grids(
        forecast.compared(fastest_first(found), {"old-gpu": "its bandwidth is not known"}, costs={"slow": 0.25})
    )


def occupancy_page():
    needs, capability = Needs(threads=256, registers=96, shared_bytes=16384), (7, 0)
    held = needs.on(capability)
    answer = occupancy_table.Answer(None, needs, held, spread=spread(82, 80, blocks_per_sm=held.blocks_per_sm))
    title = f"{occupancy_table.subject(needs)} on {V100}"
    shown = occupancy_table.answers([answer], V100, architectures.of(capability), title=title)
    several = [attrs.evolve(answer, name="a_f32_hopper_1", needs=attrs.evolve(needs, nvrtc="12.9.86")), answer]
    listed = occupancy_table.answers(several, V100, architectures.of(capability), title="Several")
    return grids(shown, listed, occupancy_table.sweep(occupancy_sweep.sweep(needs, capability, "registers")))


def kernels_page():
    def row(name, arch, registers, **more):
        kernel = Kernel(name, "small", "small/small.cu", "sums", "sums", "float32", 256, ())
        capability = (int(arch[3:]) // 10, int(arch[3:]) % 10)
        held = occupancy(compute_capability=capability, threads_per_block=256, registers_per_thread=registers)
        return Row(kernel, arch, "ok", "12.9.86", Figures(registers, 1024), held, **more)

    rows = [row("sums_f32", "sm_70", 20), row("sums_f32", "sm_80", 33), row("wide_f32", "sm_70", 255)]
    wrong = [*rows, row("bad_f32", "sm_80", 40, problems=("8 bytes of registers spilled per thread",))]
    return grids(*kernels.table(rows), *kernels.problems(wrong))


def devices_page():
    unknown = Device(name="RTX 2080 SUPER", slug="rtx-2080-super", compute_capability=(7, 5), num_sms=48)
    return grids(devices.devices([CPU], title="In this machine"), devices.devices([V100, unknown], title="Catalogue"))


def models_page():
    net = {"name": "mlp", "input_shape": [1, 1, 1000], "output_shape": [1, 1, 10], "parameters": 131_410,
           "flop_per_sample": 262_000, "runs": True}  # fmt: skip
    board = {"name": "go-net", "input_shape": [19, 19, 128], "output_shape": [19, 19, 128], "runs": False}
    return grids(models.models([net, net | board]))


def layers_page():
    stride = {"name": "stride", "default": "1", "meaning": "Step of the filter."}
    conv = {"type": "conv2d", "does": "A convolution.", "keys": [stride | {"name": "k", "default": None}, stride],
            "example": '[[layers]]\ntype = "conv2d"\nk = 64', "runs": True}  # fmt: skip
    relu = {"type": "relu", "does": "max(x, 0).", "keys": [], "example": '[[layers]]\ntype = "relu"', "runs": False}
    return grids(layers.layers([conv, relu]), *layers.layer(conv), *layers.layer(relu))


def store_page():
    kept = {
        "id": 3, "state": "open", "updated": "2026-11-20T08:00:00Z", "num_timings": 2, "seconds_spent": 1.5,
        "identity": {"spec": {"name": "mlp", "input_shape": [28, 28, 1]}, "mode": "training", "dtype": "float32"},
        "conditions": {"numpy": "2.0"},
        "notes": ["The clock fell during round 2."], "disturbed": ["Other processes kept 1.3 of 2 CPUs busy."],
    }  # fmt: skip
    quiet = kept | {"id": 4, "disturbed": []}
    measured = {
        "timings": [{"batch_size": 8, "seconds": 0.002}, {"batch_size": 8, "seconds": 0.001}],
        "outcomes": [{"batch_size": 64, "status": "out_of_memory", "stop_reason": "needs 2 GiB"}],
    }
    return grids(store.runs([kept, quiet], "store.db"), *store.run(kept, measured), store.runs([], "empty.db"))


def profile_page():
    causes = {"products": 6e-3, "copies": 2e-3, "elementwise": 1e-3, "overhead": 1e-3, "waiting": 0.0}
    row = {
        "layer": "conv1", "type": "conv2d", "then": ["conv1.relu"], "pass": "fprop", "seconds": 1e-2, "causes": causes,
        "share": 0.5, "calls": 42, "flops": 2_000_000_000, "bytes": 30_000_000, "bound_by": "compute",
    }  # fmt: skip
    pool = {"layer": "pool1", "type": "max_pool2d", "then": [], "flops": 0, "bound_by": "memory"}
    step = {"layer": "step", "type": "", "then": [], "pass": "meeting", "flops": 0, "bytes": 0, "calls": 0,
            "bound_by": "waiting", "seconds": 1e-3, "share": 0.05}  # fmt: skip
    update = {"layer": "", "type": "", "then": [], "pass": "update", "flops": 0, "bytes": 0, "calls": 1,
              "bound_by": "memory", "seconds": 9e-3, "share": 0.45}  # fmt: skip
    rows = [row, row | pool | {"seconds": 1e-7, "share": 5e-6}, row | update, row | step]
    one = {"batch_size": 64, "step_seconds": 0.021, "samples_per_second": 64 / 0.021, "traced_seconds": 0.02,
           "steps": 7, "threads": 2, "causes": causes, "layers": rows}  # fmt: skip
    small = one | {"batch_size": 1, "step_seconds": 0.002, "samples_per_second": 500.0, "threads": 1,
                   "causes": dict.fromkeys(causes, 4e-4) | {"overhead": 8e-4}}  # fmt: skip
    payload = {"model": "mnist-cnn", "mode": "training", "dtype": "float32", "device": "a CPU"}
    return grids(profile.layers(one, title=profile.title(payload, one)), profile.sizes([small, one]))


def train_page():
    done = Epoch(number=1, loss=0.5, test_accuracy=0.98, seconds=2.0, samples_per_second=30_000.0)
    second = attrs.evolve(done, number=2, loss=math.nan)
    return grids(
        training.epochs([done, second], title="mnist-cnn, batch 64", diverged=True),
        training.epochs([done], title="mnist-cnn, batch 1024 of 64 at a time", stopped_early=True),
    )


def watch_page():
    facts = ("used_bytes", "total_bytes", "sm_clock_mhz", "throttle_reasons", "power_watts", "power_limit_watts")
    nothing = dict.fromkeys((*facts, "temperature_celsius", "utilization_percent"))
    board = {
        "gpu": {"index": 0, "name": "NVIDIA H200", "uuid": "GPU-1"}, "problem": "",
        "holders": "python (pid 7) holds 30.00 GiB", "joules": 812.0,
        "now": {"used_bytes": 40 * 2**30, "total_bytes": 140 * 2**30, "sm_clock_mhz": 1755.0, "power_watts": 412.5,
                "throttle_reasons": ("HW slowdown",), "power_limit_watts": 700.0, "temperature_celsius": 61.0,
                "utilization_percent": 97.0},
        "peaks": {"used_bytes": 84 * 2**30, "power_watts": 690.0, "temperature_celsius": 70.0,
                  "utilization_percent": 100.0},
    }  # fmt: skip
    part = board | {
        "gpu": {"index": 0, "name": "NVIDIA H200 MIG 1g.18gb", "uuid": "MIG-1"}, "holders": "", "joules": None,
        "now": nothing | {"used_bytes": 2**30, "total_bytes": 16 * 2**30}, "peaks": {"used_bytes": 2**30},
    }  # fmt: skip
    lost = {"gpu": {"index": 1, "name": "GPU 1", "uuid": None}, "problem": "NVML status 15. See nvidia-smi.",
            "holders": "", "joules": None, "now": nothing, "peaks": {}}  # fmt: skip
    return watch.watched([board, part, lost], title="GPUs of this machine, 3 looks in 2 s").text(width=180)


def fleet_page():
    """A measured kind, a slower one with a price, a predicted one, and one that failed."""
    fast, slow = (
        result_of(batch_size=n, measurements=[measurement(n, n / rate, peak_bytes=gib * 2**30)], disturbed=n == 112)
        for n, rate, gib in ((256, 2510.4, 9), (112, 1117.0, 5))
    )
    devices = (
        FleetDevice(name="NVIDIA H100 PCIe, MIG 3g.40gb", workers=("a", "b"), result=fast),
        FleetDevice(name="Tesla V100-SXM2-16GB", workers=("c",), result=slow, price_per_hour=2.45),
        FleetDevice(name="t4", forecast=predicted(rates=((64, 301),), batch_size=64)),
        FleetDevice(name="AMD EPYC, 2 threads", workers=("d",), error="no worker that is left could measure"),
    )
    return grids(
        fleet.compared(FleetResult(devices=devices)),
        fleet.shared({"tcp://10.0.0.1:40331": 176, "tcp://10.0.0.2:40847": 80}),
    )


def serving_page():
    """A batch that is too small for the rate, the planned one, and a larger one that gains nothing."""
    loads = (
        None,
        Load(p50=0.0081, p95=0.0142, p99=0.0203, worst_p99=0.021, mean_batch_size=3.21, utilization=0.93),
        Load(p50=0.0081, p95=0.0142, p99=0.0203, worst_p99=0.021, mean_batch_size=3.21, utilization=0.93),
    )
    options = tuple(
        ServingOption(max_batch_size=n, queue_delay=delay, load=load, highest_rate=rate)
        for n, delay, load, rate in zip((1, 8, 16), (0.0, 0.0025, 0.0), loads, (180.0, 912.5, 920.0), strict=True)
    )
    plan = ServingPlan(
        name="resnet50", device="NVIDIA T4", predicted=True, arrival_rate=500.0, p99_limit=0.05, overhead=0.0,
        instances=2, options=options, max_batch_size=8, price_per_hour=0.35, on_busy_machine=True,
        first_calls={1: 0.02, 8: 0.12},
    )  # fmt: skip
    return grids(serving.plan(plan))


def extents_page():
    """Two lengths, one that failed, and ways to form batches."""
    results = {
        length: result_of(batch_size=n, measurements=[measurement(n, n * length / 1e6)], disturbed=length == 512)
        for length, n in ((128, 64), (512, 8))
    }
    tuned_extents = ExtentsResult(axis="sequence", results=results, failed={2048: "out of memory"})
    plan = LengthPlan(
        axis="sequence", num_samples=1200,
        ways=(
            Batching(name="buckets", batch_sizes={128: 64, 512: 8}, padding_share=0.11, tokens_per_second=890_000.0),
            Batching(name="random", batch_sizes={512: 16}, padding_share=0.48, tokens_per_second=520_000.0),
            Batching(
                name="token budget", batch_sizes={512: 7}, token_budget=4000, padding_share=0.02,
                tokens_per_second=510_000.0,
            ),
        ),
    )  # fmt: skip
    return grids(lengths.by_extent(tuned_extents), lengths.ways(plan))


def threads_page():
    """Two instances of one thread that need no batch, one of two threads that does, and one that failed."""
    results = {
        threads: result_of(
            batch_size=best, environment={"instances": 2 // threads}, mode="inference",
            measurements=[measurement(n, n / rate) for n, rate in rates.items()], disturbed=threads == 2,
        )
        for threads, best, rates in ((1, 1, {1: 240.0, 8: 241.0}), (2, 8, {1: 300.0, 8: 410.0}))
    }  # fmt: skip
    return grids(threads.by_threads(ThreadsResult(results=results, failed={4: "4 instances do not fit"})))


PAGES = {
    "tune.txt": lambda: result.tuning_grid(everything()).text(),
    "tune.html": lambda: re.sub('base64,[^"]*', "base64,...", html(everything())),
    "reasons.txt": explained.page,
    "memory.txt": memory_page,
    "candidates.txt": candidates_page,
    "predict.txt": predict_page,
    "compare.txt": compare_page,
    "occupancy.txt": occupancy_page,
    "fleet.txt": fleet_page,
    "serving.txt": serving_page,
    "extents.txt": extents_page,
    "threads.txt": threads_page,
    "kernels.txt": kernels_page,
    "models.txt": models_page,
    "layers.txt": layers_page,
    "devices.txt": devices_page,
    "profile.txt": profile_page,
    "store.txt": store_page,
    "study.txt": lambda: grids(*(grid for payload in payloads.ALL.values() for grid in study.grids(payload))),
    "train.txt": train_page,
    "watch.txt": watch_page,
}


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_as_it_was(name):
    """Whoever changes it sees the whole of it."""
    golden.check(name, PAGES[name]())


def test_there_is_no_file_without_a_page():
    """One left behind would look as if it held something."""
    assert {path.name for path in golden.FOLDER.iterdir()} == set(PAGES)


def test_a_difference_fails_with_a_diff_and_the_way_out(tmp_path, monkeypatch):
    """The lines that differ, and the variable that writes the file anew; then it holds."""
    monkeypatch.delenv(golden.RENEW, raising=False)
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    with pytest.raises(pytest.fail.Exception) as failed:
        golden.check("a.txt", "one\nthree", folder=tmp_path)
    assert "-two\n+three\n" in str(failed.value)
    assert golden.RENEW in str(failed.value)
    with pytest.raises(pytest.fail.Exception):
        golden.check("new.txt", "one", folder=tmp_path)
    monkeypatch.setenv(golden.RENEW, "1")
    golden.check("a.txt", "one\nthree", folder=tmp_path)
    assert (tmp_path / "a.txt").read_text() == "one\nthree\n"
