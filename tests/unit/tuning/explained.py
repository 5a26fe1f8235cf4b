"""Results and forecasts whose reasons, together, are all that can be said: `reasons.txt` of the golden files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cubatch.hardware.facts import Device
from cubatch.measure.goal import Goal
from cubatch.measure.records import Candidate, Measured, Outcome, Timing
from cubatch.tuning import answer as answers
from cubatch.tuning.forecast_record import Forecast
from cubatch.tuning.notes import note
from cubatch.tuning.prediction import predict
from cubatch.tuning.results import BatchSizeResult, TuningResult
from cubatch.tuning.subject import SubjectFacts
from tests.unit.tuning.ends import (
    DROPPED,
    NO_MEMORY,
    NOT_RUN,
    PLANNED,
    Ended,
    answer_of,
    decide,
    rate,
    rounds,
    steady,
    too_slow,
)

LATENCY = Goal(objective="latency", tolerance=0.3)
GPU = {"device": {"name": "Test GPU", "kind": "cuda"}}
BUSY = [1.0, 1.6, 1.0, 1.6, 1.3, 1.3]
SWING, SIGN = [1.0, 1.5, 1.1, 1.4, 1.2, 1.3, 1.05], [1, -1, 1, -1, 1, -1, 1]
UNKNOWN = Device(
    name="Next GPU", slug="next-gpu", compute_capability=(13, 0), num_sms=100, memory_bytes=16 * 2**30,
    peak_bytes_per_second=900e9, peak_flops_per_second={"float32": 15.7e12},
)  # fmt: skip


def measured(seconds: Mapping[int, Sequence[float]], *ends: Outcome, **more: Any) -> TuningResult:
    """Choose among sizes with these seconds by round; `timing` are facts of each, `ends` of sizes that did not run."""
    facts = more.pop("timing", {})
    timings = tuple(timing for n, taken in seconds.items() for timing in rounds(n, taken, **facts))
    outcomes = (*(Outcome(n, "ok") for n in seconds), *ends)
    ladder = [Candidate(outcome.batch_size) for outcome in outcomes]
    goal, setting = more.pop("goal", Goal()), more.pop("setting", {})
    return answers.answer(ladder, Measured(timings=timings, outcomes=outcomes), goal=goal, setting=setting, **more)


def throttled() -> TuningResult:
    """Size 16 has none but throttled timings."""
    clear = Timing(batch_size=8, round=9, seconds=1.0)
    timings = (*rounds(8, [2.0] * 9, throttled=True), clear, *rounds(16, [4.0] * 5, throttled=True))
    outcomes = (Outcome(8, "ok"), Outcome(16, "ok"))
    return answers.answer(
        [Candidate(8), Candidate(16)], Measured(timings=timings, outcomes=outcomes), goal=Goal(), setting=GPU
    )


def paired_plateau() -> TuningResult:
    """Five sizes on a CPU that differ by less than the noise, timed with a reference step."""
    noise = [1.0, 1.03, 0.98, 1.01, 0.99]
    return measured(
        {n: [n / 4000 * noise[(i + k) % 5] for i in range(5)] for k, n in enumerate((64, 96, 128, 256, 512))},
        setting={"device": {"name": "CPU", "kind": "cpu"}},
        timing={"reference_batch_size": 4, "reference_before_seconds": 0.001, "reference_after_seconds": 0.001},
    )


LATE = {"limit": "budget", "could_gain": 2.3, "needed_seconds": 34.1, "left_seconds": 3.5}
LAYERS = {8: [{"occupancy": 0.5, "fill": 0.6, "predicted_seconds": 3.0},
              {"occupancy": 1.0, "fill": 1.0, "predicted_seconds": 1.0}]}  # fmt: skip

CASES: dict[str, Callable[[], BatchSizeResult]] = {
    "a plateau that the noise leaves open": paired_plateau,
    "the smallest within the tolerance, beside powers of two": lambda: answer_of(
        {1: [1.0] * 5, 16: [1.0] * 5, 32: [1.0] * 5, 33: [1.2] * 5, 64: [1.99] * 5},
        notes=[note("memory_held", message="A note.")],
    ),
    "a peak": lambda: answer_of(steady((8, 2.0), (16, 2.0), (32, 5.0), (64, 12.0)), largest_batch_size=200),
    "a peak below a larger tie": lambda: answer_of(
        {
            384: [3.84 * one for one in SWING],
            1024: [10.24 * 1.02 * one * (1 + 0.05 * s) for one, s in zip(SWING, SIGN, strict=True)],
            4096: [40.96 * 3 * one for one in SWING],
        }
    ),
    "a peak at the smallest size": lambda: answer_of(steady((1, 1.0), (2, 2.5), (4, 6.0))),
    "a plateau under noise": lambda: answer_of({8: BUSY, 16: [2.4 * one for one in BUSY]}),
    "a plateau by the timings of neighbors": lambda: decide(
        {64: rate(80, 64), 128: rate(100, 128), 256: DROPPED, 512: DROPPED}, largest_batch_size=10_000
    ),
    "a tie that is only noise": lambda: answer_of(
        {64: [0.64] * 7, 96: [0.96 * 1.1] * 7, 128: [1.28 * one for one in (1.0, 3.0, 1.0, 3.0, 1.3, 1.4, 1.0)]}
    ),
    "by latency": lambda: answer_of(steady((8, 1.0), (16, 1.25), (32, 2.0)), goal=LATENCY),
    "by latency, with a tie": lambda: answer_of(
        {1: [1.0] * 7, 2: [1.5, 0.8, 1.5, 0.8, 1.1, 1.1, 1.1]}, goal=Goal(objective="latency")
    ),
    "by energy": lambda: measured({8: [1.0] * 5, 16: [1.0] * 5}, goal=Goal(objective="energy"), timing={"joules": 8.0}),
    "memory met": lambda: answer_of({**steady((300, 1.0)), 306: []}, {306: "out_of_memory"}, largest_batch_size=400),
    "memory planned": lambda: answer_of(steady((8, 1.0), (32, 2.0)), largest_batch_size=32),
    "the latency limit met": lambda: decide({35: rate(35, 35), 36: too_slow(1.2)}, Goal(latency_limit=1.1)),
    "max_batch_size": lambda: decide({4: rate(50, 4), 8: rate(100, 8), 12: DROPPED}),
    "the list": lambda: decide({8: rate(50, 8), 16: rate(100, 16)}, is_listed=True),
    "the list, with a gap": lambda: decide({16: rate(100, 16), 1000: PLANNED}, is_listed=True, largest_batch_size=900),
    "the budget": lambda: measured(steady((8, 1.0), (16, 1.0)), Outcome(24, "not_run", "", LATE)),
    "the budget, with gains": lambda: decide(
        {
            1: Ended(1.0),
            2: Ended(1.0),
            8: Ended(status="not_run", could_gain=0.08),
            16: Ended(status="not_run", could_gain=0.034),
            32: NOT_RUN,
        }
    ),
    "one size measured": lambda: decide({1: Ended(11.5, times=1), 2: NOT_RUN, 4: NOT_RUN}),
    "one size asked for": lambda: decide({8: Ended(1.0)}, is_listed=True),
    "one size that fits": lambda: decide({1: Ended(1.0), 2: NO_MEMORY}),
    "a failure": lambda: answer_of(
        {**steady((8, 1.0)), 16: [], 32: [], 64: []}, {16: "error", 32: "timeout", 64: "dropped"}
    ),
    "a gap below a limit": lambda: decide({50: rate(50, 50), 100: rate(100, 100), 103: NO_MEMORY}),
    "two limits": lambda: decide(
        {1: Ended(0.01), 64: too_slow(0.0605, 3), 96: too_slow(0.09, 3), 4096: PLANNED},
        Goal(latency_limit=0.05),
        largest_batch_size=4000,
    ),
    "many failures": lambda: answer_of(
        {1: [1.0] * 5, **{n: [] for n in range(2, 10)}}, dict.fromkeys(range(2, 10), "timeout")
    ),
    "a GPU": lambda: measured(
        {8: [1.0] * 5, 16: [4.0] * 5},
        setting=GPU | {"l2": "warm"},
        facts=SubjectFacts(layers=LAYERS),
        timing={"sm_clock_mhz": 1417.0},
    ),
    "a cold cache": lambda: measured({8: [1.0] * 5}, setting=GPU | {"l2": "cold"}),
    "a CPU without a reference step": lambda: measured(
        steady((8, 1.0), (16, 1.5)),
        setting={"device": {"kind": "cpu"}, "l2": "warm", "disturbed": True},
        notes=[note("interference", message="Other processes kept 1.3 of 2 CPUs busy.")],
    ),
    "a throttled clock": throttled,
    "an interruption with a recommendation": lambda: answer_of(
        {8: [1.0] * 5, 12: [1.6] * 5, 14: [1.9] * 5}, {8: "ok", 12: "interrupted", 14: "ok"}, partial=True
    ),
    "an interruption without one": lambda: answer_of(
        {8: [1.0], 16: [], 32: []}, dict.fromkeys((8, 16, 32), "interrupted"), partial=True
    ),
    "an interruption before the first timing": lambda: answer_of({8: []}, {8: "interrupted"}, partial=True),
    "a forecast of a list": lambda: predict("go-net", device="v100-sxm2-16gb", batch_sizes=[28, 56, 64]),
    "a forecast at the memory limit": lambda: predict("mlp", device="t4", memory_limit="3MiB", tolerance=0.0),
    "a forecast of latency": lambda: predict("mlp", device="t4", objective="latency", max_batch_size=256),
    "a forecast under a latency limit": lambda: predict(
        "go-net", device="v100-sxm2-16gb", batch_sizes=[28, 56, 128], latency_limit=0.03
    ),
    "a forecast of one size": lambda: predict("lenet5", device=UNKNOWN, batch_sizes=[8]),
}


def page() -> str:
    """Every case with its reasons, and of a forecast its notes."""
    shown = []
    for name, make in CASES.items():
        result = make()
        notes = result.notes if isinstance(result, Forecast) else ()
        shown.append(f"# {name}\n" + "".join(f"- {text}\n" for text in (*result.reasons, *notes)))
    return "\n".join(shown)
