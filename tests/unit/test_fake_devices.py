"""The devices of the search benchmark follow the wave law, and its figures mean what its header says."""

from __future__ import annotations

import json
import math
from pathlib import Path

import attrs
import pytest

import cubatch as cb
from benchmarks import bench_search
from benchmarks.bench_search import Trial, regret_beyond_tolerance, summarise
from benchmarks.fake_devices import KINDS, Case, convolution_seconds, make
from cubatch import catalogue
from tests.fakes import FakeRunner

V100 = catalogue.find("v100-sxm2-16gb")


def same_padded(extent: int, channels: int) -> cb.Conv2d:
    """Give a 3x3 convolution that keeps the extent."""
    return cb.Conv2d(h=extent, w=extent, c=channels, k=channels, r=3, s=3, pad=1)


@pytest.mark.parametrize(
    ("num_sms", "extent", "channels", "tile", "crests"),
    [
        (80, 19, 128, (128, 128), (28, 56, 85, 113)),  # V100: identical to the Coulom rule's numbers
        (80, 19, 128, (256, 128), (56, 113, 170, 226)),  # the kernel that V100 really used
        (24, 19, 256, (128, 128), (4, 8, 12, 17, 21)),  # Titan X (Maxwell)
        (28, 19, 256, (128, 128), (4, 9, 14, 19, 24)),  # Titan X (Pascal)
        (48, 8, 128, (128, 128), (96, 192)),  # 2080 Super: the published cliffs at 97 and 193
        (48, 8, 320, (128, 128), (32, 64, 96)),  # its 320 filters are three columns of tiles, the third half empty
    ],
)
def test_the_truth_has_its_cliffs_where_they_were_published(
    num_sms: int, extent: int, channels: int, tile: tuple[int, int], crests: tuple[int, ...]
) -> None:
    """The i-th crest takes i full waves and one sample more takes another whole one, where tails cost a wave."""
    gpu = attrs.evolve(V100, num_sms=num_sms)
    seconds = convolution_seconds(same_padded(extent, channels), gpu, tile=tile, tail=1.0)
    wave = seconds(1)
    for i, crest in enumerate(crests, start=1):
        assert seconds(crest) == pytest.approx(i * wave)
        assert seconds(crest + 1) == pytest.approx((i + 1) * wave)


def test_a_nearly_empty_wave_costs_its_tail() -> None:
    """With a tail of 0.55 the 49th block on 48 SMs adds 0.55 of a wave and 0.45 of a forty-eighth."""
    seconds = convolution_seconds(same_padded(8, 128), attrs.evolve(V100, num_sms=48), tile=(128, 128), tail=0.55)
    assert seconds(97) / seconds(96) == pytest.approx(1 + 0.55 + 0.45 / 48)


def test_the_tile_time_is_its_flops_at_the_share_of_peak() -> None:
    """A full wave of 128x128 tiles over 1152 taps does 80 * 2 * 128**2 * 1152 FLOP at 70 % of the peak."""
    seconds = convolution_seconds(same_padded(19, 128), V100, tile=(128, 128), tail=1.0)
    peak = V100.peak_flops_per_second["float32"]
    assert seconds(28) == pytest.approx(80 * 2 * 128**2 * 9 * 128 / (0.7 * peak))


def test_devices_come_from_the_seed_and_cover_every_class() -> None:
    """The same seed and index make the same device, another seed another one, and the classes take turns."""
    first = [make(3, index) for index in range(len(KINDS))]
    again = [make(3, index) for index in range(len(KINDS))]
    other = [make(4, index) for index in range(len(KINDS))]
    assert [case.kind for case in first] == list(KINDS)
    truths = [[case.best_throughput for case in cases] for cases in (first, again, other)]
    assert truths[0] == truths[1]
    assert truths[0] != truths[2]


def test_memory_is_what_its_class_says() -> None:
    """The true limit fits and one more does not; the plan is right except where the class says it is too large."""
    for index in range(4 * len(KINDS)):
        case = make(0, index)
        fits = case.device.fits
        true_limit = max(n for n in range(1, 3 * case.task.max_batch_size + 9) if fits(n))
        assert not fits(true_limit + 1)
        if case.kind == "memory plan wrong":
            assert case.planned_limit > true_limit
        else:
            assert case.planned_limit == true_limit
        assert (case.kind == "memory not monotone") == (not all(fits(n) for n in range(1, true_limit)))


def test_the_best_is_the_best_over_all_integers() -> None:
    """No size that fits and is allowed is faster than the best, and none below the knee is within 1 % of it."""
    for index in range(len(KINDS)):
        case = make(1, index)
        rates = {n: n / case.device.curve(n) for n in range(1, case.task.max_batch_size + 1) if case.device.fits(n)}
        assert rates[case.best_batch_size] == case.best_throughput == max(rates.values())
        assert rates[case.knee] >= 0.99 * case.best_throughput
        assert all(rate < 0.99 * case.best_throughput for n, rate in rates.items() if n < case.knee)


def test_regret_is_what_is_lost_beyond_the_tolerance() -> None:
    """The best has none; a size x times slower has 0.99 x - 1, and never less than 0."""
    case = make(0, 0)
    slower = case.best_throughput / case.device.throughput(1)
    assert regret_beyond_tolerance(case, case.best_batch_size) == 0.0
    assert regret_beyond_tolerance(case, 1) == pytest.approx(0.99 * slower - 1)
    assert regret_beyond_tolerance(case, 1, tolerance=1.0) == 0.0


@pytest.mark.parametrize(
    ("batch_size", "usable", "over_maximum", "never_ran"),
    [
        (2, True, False, False),
        (3, True, False, True),  # a fair answer that was never tried
        (3001, True, True, True),  # above the maximum of 3000, below the limit of memory
        (10**6, False, True, True),
        (None, False, False, False),
    ],
)
def test_a_trial_says_what_is_wrong_with_an_answer(
    monkeypatch: pytest.MonkeyPatch, batch_size: int | None, *, usable: bool, over_maximum: bool, never_ran: bool
) -> None:
    """What does not fit has no regret; what is above the maximum or was never run is marked; trials are counted."""

    def finder(runner: FakeRunner, _: Case) -> int | None:
        for size in (1, 2):
            runner.prepare(size)
            runner.step()
        return batch_size

    monkeypatch.setitem(bench_search.FINDERS, "test", finder)
    trial = bench_search.try_finder("test", make(0, 0), 0)
    assert (trial.regret is not None) == usable
    assert (trial.over_maximum, trial.never_ran) == (over_maximum, never_ran)
    assert (trial.batch_size, trial.trials) == (batch_size, 2)
    assert trial.seconds > 0


@pytest.mark.parametrize("index", range(len(KINDS)))
def test_our_search_keeps_to_the_maximum_and_the_plan(index: int) -> None:
    """It tries nothing above the user's maximum or above what fits by the plan, and its answer ran."""
    case = make(0, index)
    runner = case.device()
    answer = bench_search.cubatch_search(runner, case)
    assert max(runner.prepared) <= min(case.task.max_batch_size, case.planned_limit)
    assert answer in runner.ran


def test_an_answer_that_cannot_be_used_counts_as_infinite_regret() -> None:
    """Of twenty devices two without a usable answer make the 95th percentile fail (null), and leave the median."""
    usable = Trial(
        kind="plateau", device=0, finder="ludwig", batch_size=8, best_batch_size=8, knee=4, regret=0.5,
        over_maximum=False, never_ran=False, trials=3, seconds=1.0,
    )  # fmt: skip
    (row,) = summarise([usable] * 18 + [attrs.evolve(usable, regret=None)] * 2)
    assert row["regret"] == {"median": 0.5, "p95": None}
    assert row["size"] == {"median": 2.0, "p95": 2.0}
    assert math.isclose(row["unusable"], 0.1)
    assert row["devices"] == 20


def test_the_command_writes_every_trial_and_the_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run over one device of each class gives a table per class and JSON with a trial per finder and device."""
    path = tmp_path / "search.json"
    bench_search.main(["--devices", str(len(KINDS)), "--seed", "0", "--json", str(path)])
    content = json.loads(path.read_text(), parse_constant=pytest.fail)
    trials = [dict(zip(content["columns"], row, strict=True)) for row in content["trials"]]
    assert {(trial["device"], trial["finder"]) for trial in trials} == {
        (device, finder) for device in range(len(KINDS)) for finder in bench_search.FINDERS
    }
    assert {row["kind"] for row in content["summary"]} == set(KINDS)
    shown = capsys.readouterr().out
    assert all(f"{kind} (1 devices)" in shown for kind in KINDS)
