"""`waves`: where crests are on GPUs and CPUs, what is said of readings whose truth is known, and a short run."""

from __future__ import annotations

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cubatch.errors import InvalidArgument
from cubatch.hardware import probe
from cubatch.measure.records import PER_VISIT
from cubatch.studies import run, waves
from cubatch.studies.asked import Asked
from cubatch.tuning.results import Measurement
from cubatch.workload import Workload

CONVOLUTION = {
    "name": "board", "input_shape": [19, 19, 64],
    "layers": [{"type": "conv2d", "k": 64, "r": 3, "s": 3, "pad": 1}],
}  # fmt: skip


def work(spec="go-net", device="v100-sxm2-16gb", library="im2col", **more):
    return Workload.of(spec, device, mode="inference", dtype="float32", library=library, **more)


def on_threads(count, spec=CONVOLUTION):
    return work(spec, attrs.evolve(probe.device("cpu"), threads=count))


def measured(size, seconds_per_sample, sweeps=7):
    """One reading a sweep, each a thousandth slower than the one before."""
    rounds = [sweep * PER_VISIT for sweep in range(sweeps)]
    seconds = [size * seconds_per_sample * (1 + k / 1000) for k in range(sweeps)]
    rate = 1 / seconds_per_sample
    return Measurement(
        batch_size=size, status="ok", timings_rounds=rounds, timings_seconds=seconds, samples_per_second=rate,
        throughput_interval=(rate, rate),
    )  # fmt: skip


@pytest.mark.case("coulom-rule")
@pytest.mark.parametrize(("device", "num_sms"), [("v100-sxm2-16gb", 80), ("rtx-2080-ti", 68)])
def test_crests_of_the_founding_example_are_coulombs(device, num_sms):
    """
    Go boards of 19 x 19 with 128 channels: 128 filters are one tile wide, so 16384 outputs are a block.

    int(n * 16384 * SM / (19 * 19 * 128)) for the first two n, with the published numbers of SMs.
    """
    found = waves.dealt_out(work(device=device), 1000)
    by_rule = [n * (1 << 14) * num_sms // (19 * 19 * 128) for n in (1, 2)]
    assert list(found.crests) == by_rule == [found.coulom[n] for n in (1, 2)]
    assert found.count == num_sms


@given(st.integers(2, 64))
def test_on_a_cpu_crests_are_multiples_of_the_threads(threads):
    """All threads have as many samples there, and one of them has one more past it."""
    found = waves.dealt_out(on_threads(threads), 10_000)
    assert found.crests == (2 * threads, 4 * threads)
    for crest in found.crests:
        assert found.busiest(crest) == crest // threads
        assert found.busiest(crest + 1) == crest // threads + 1
        assert found.rate(crest) == threads
    assert found.coulom == {}


def test_a_cpu_that_deals_nothing_out_is_refused():
    """One thread, or steps so short that one thread does them; the network is named."""
    for device in (on_threads(1), on_threads(2, "mlp")):
        with pytest.raises(InvalidArgument) as caught:
            waves.dealt_out(device, 64)
        assert caught.value.field == "model"


def test_a_gpu_without_a_crest_that_fits_is_refused():
    """Up to batch 4 of go-net no SM of a V100 has a second block."""
    with pytest.raises(InvalidArgument) as caught:
        waves.dealt_out(work(), 4)
    assert caught.value.field == "model"


@given(st.integers(4, 3000), st.integers(1, 16))
def test_windows_have_both_sides(crest, around):
    """The crest, what lies just past it, and sizes of at least half of it."""
    found = waves.window(crest, around, 5000)
    assert {crest - 1, crest, crest + 1} <= set(found)
    assert found[0] >= crest / 2
    assert len(found) <= 2 * around + 1
    assert max(waves.window(crest, around, crest + 1)) == crest + 1


def test_marks_say_what_a_size_is():
    """64 is a power of two and so a multiple of 8, which is not said twice; 28 and 29 lie on either side of a cliff."""
    found = waves.dealt_out(work(), 1000)
    assert waves.marks(28, found) == ["crest", "Coulom n=1"]
    assert waves.marks(29, found) == ["past crest"]
    assert waves.marks(64, found) == ["power of two"]
    assert waves.marks(24, found) == ["multiple of 8"]
    assert waves.marks(85, found) == ["Coulom n=3"]
    assert waves.marks(30, found) == []


@pytest.mark.parametrize(("past", "word", "says"), [(1.4, "Yes", "more"), (1.0, "No", "as fast"), (0.9, "No", "less")])
def test_a_crest_holds_where_what_lies_past_it_takes_longer(past, word, says):
    """A sample takes so many times as long at 29 as at 28; readings scatter by less than a hundredth."""
    found = waves.dealt_out(work(), 1000)
    by_size = {n: measured(n, 1e-3 * (past if n > 28 else 1.0)) for n in range(20, 37)}
    top = waves._crest(by_size, found, range(20, 37), 28)
    text = waves.answer([top])
    assert text.startswith(word)
    assert says in text
    assert top["comparison"]["ratio"] == pytest.approx(past, rel=0.01)
    assert top["rule_ratio"] == pytest.approx(2 * 28 / 29)
    assert (top["fastest"] <= 28) == (past >= 1)


@pytest.mark.parametrize(
    ("ends", "word"),
    [((0.99, 1.01), "No:"), ((0.8, 1.1), "No:"), ((0.7, 2.0), "Not known well:"), ((0.9, 1.95), "Not known well:")],
)
def test_noise_that_hides_a_wave_is_no_answer(ends, word):
    """Both no difference and that of the rule, 1.93, lie within the interval: nothing is made of it."""
    found = {"verdict": "same", "ratio": 1.0, "interval": list(ends)}
    top = {"batch_size": 28, "past": 29, "comparison": found, "rule_ratio": 2 * 28 / 29}
    assert waves.answer([top]).startswith(word)
    holds = top | {"comparison": {"verdict": "faster", "ratio": 1.5, "interval": [1.4, 1.6]}}
    assert waves.answer([top, holds]).startswith("It depends:")


def test_the_rule_is_drawn_through_the_first_crest():
    """At the crest itself it is what was measured; just past it, where the busiest SM has two blocks, about half."""
    found = waves.dealt_out(work(), 1000)
    crest = measured(28, 1e-3)
    assert waves._row(crest, found, crest)["rule"] == pytest.approx(1000)
    assert waves._row(measured(29, 1e-3), found, crest)["rule"] == pytest.approx(1000 * 29 / 28 / 2)


def test_too_few_visits_are_no_answer():
    """Two sweeps tell nothing, and the page says so."""
    found = waves.dealt_out(work(), 1000)
    by_size = {n: measured(n, 1e-3, sweeps=2) for n in range(20, 37)}
    top = waves._crest(by_size, found, range(20, 37), 28)
    assert waves.answer([top]).startswith("Not known")
    assert waves.marked(by_size, found) == {}


@pytest.mark.case("coulom-rule")
@pytest.mark.skipif((probe.device("cpu").threads or 1) < 2, reason="one thread has no crest")
def test_a_short_run_measures_every_batch_around_two_crests(tmp_path):
    """Each size of both windows three times, and the page says that a CPU has no SMs."""
    asked = Asked(spec=CONVOLUTION, model="board", folder=tmp_path, device="cpu", quick=True, budget=60.0)
    found = run.run("waves", asked, command="cubatch study waves board.toml")
    threads = probe.device("cpu").threads
    windows = [waves.window(crest, 3, 10**6) for crest in (2 * threads, 4 * threads)]
    assert [row["batch_size"] for row in found["sizes"]] == sorted({n for those in windows for n in those})
    assert [top["batch_size"] for top in found["crests"]] == [2 * threads, 4 * threads]
    assert [top["comparison"]["visits"] for top in found["crests"]] == [[3, 3], [3, 3]]
    assert any("no SMs" in text for text in found["question"])
    assert found["mode"] == "inference"
    assert (tmp_path / "figure.svg") in run.write(found, tmp_path)
