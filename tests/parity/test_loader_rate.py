"""A data loader is timed by itself: its rate, without start-up, at the size of the loop."""

from __future__ import annotations

import gc
import itertools
import random
import time

import pytest

torch = pytest.importorskip("torch")

import cubatch as cb  # noqa: E402
from cubatch.errors import InvalidArgument  # noqa: E402
from cubatch.frameworks import loader_rate  # noqa: E402
from cubatch.frameworks.loader_rate import LoaderRate, measure, run_loops  # noqa: E402
from cubatch.frameworks.module_runner import ModuleRunner  # noqa: E402
from cubatch.hardware.memory_limit import MemoryLimit  # noqa: E402
from cubatch.measure.goal import Goal  # noqa: E402
from cubatch.measure.records import Candidate, Measured, Outcome, Timing  # noqa: E402
from cubatch.tuning.answer import answer  # noqa: E402
from cubatch.tuning.request import Request  # noqa: E402
from cubatch.tuning.subjects.module_subject import PresentModuleSubject  # noqa: E402


class Clock:
    """Seconds that pass only while samples are read."""

    def __init__(self):
        self.seconds = 0.0

    def __call__(self):
        return self.seconds


class Slow(torch.utils.data.Dataset):
    """Each sample takes some time of the clock; the very first takes start-up time too."""

    def __init__(self, clock, each, length=1000, first=100.0):
        self.clock, self.each, self.length, self.first = clock, each, length, first

    def __len__(self):
        return self.length

    def __getitem__(self, place):
        self.clock.seconds += self.each + self.first
        self.first = 0.0
        return torch.tensor(float(place))


class Stream(torch.utils.data.IterableDataset):
    """Samples without a known number."""

    def __init__(self, clock, each):
        self.clock, self.each = clock, each

    def __iter__(self):
        for place in range(10**6):
            self.clock.seconds += self.each
            yield torch.tensor(float(place))


def loader(data, **more):
    return torch.utils.data.DataLoader(data, **{"batch_size": 4} | more)


@pytest.mark.parametrize(("size", "timed"), [(1, 1), (16, 16), (64, 64), (512, 16)])
def test_the_rate_is_that_of_the_data_set_without_start_up(size, timed):
    """4 ms a sample are 250 samples/s at any size; a batch that takes too long is not tried."""
    clock = Clock()
    found = measure(loader(Slow(clock, 0.004), shuffle=True), size, seconds=2.0, now=clock)
    assert found.samples_per_second == pytest.approx(250.0)
    assert (found.batch_size, found.num_workers, found.num_samples) == (timed, 0, 1000)
    assert clock.seconds < 100.0 + 2 * 2.0


def test_each_size_has_its_rate():
    """10 ms for each batch and 4 ms for each sample; between two sizes, the rate lies between theirs."""
    clock = Clock()

    def joined(samples):
        clock.seconds += 0.01
        return torch.utils.data.default_collate(samples)

    found = measure(loader(Slow(clock, 0.004), collate_fn=joined), 16, seconds=2.0, others=(1, 64), now=clock)
    assert found.rates == {n: pytest.approx(n / (0.01 + 0.004 * n)) for n in (1, 16, 64)}
    assert found.samples_per_second == found.rate_at(16) == found.rates[16]
    assert found.rates[16] < found.rate_at(32) < found.rates[64] == found.rate_at(1000)


@pytest.mark.parametrize("length", [3, 5, 40])
def test_a_small_data_set_is_read_in_several_epochs(length):
    """Smaller batches than the size leave some that count."""
    clock = Clock()
    found = measure(loader(Slow(clock, 0.004, length)), 32, seconds=1.0, now=clock)
    assert found.samples_per_second == pytest.approx(250.0)


def test_an_iterable_of_unknown_length_has_a_rate():
    """Steps of an epoch are then unknown."""
    clock = Clock()
    found = measure(loader(Stream(clock, 0.001)), 8, seconds=1.0, now=clock)
    assert found.samples_per_second == pytest.approx(1000.0)
    assert found.steps(8) is None


def in_twos(samples):
    assert len(samples) % 2 == 0
    return torch.stack(samples)


def test_sizes_that_a_loader_does_not_make_are_left_out():
    """braindecode#1122: a collate_fn takes pairs; of 400 samples the largest size that can be timed, 133, is odd."""
    clock = Clock()
    given = loader(Slow(clock, 0.004, length=400), collate_fn=in_twos)
    found = measure(given, 400, others=(1, 64), seconds=20.0, now=clock)
    assert found.rates == pytest.approx({16: 250.0, 64: 250.0})
    with pytest.raises(AssertionError):
        measure(loader(Slow(clock, 0.004), collate_fn=lambda _: in_twos([0])), 8, seconds=1.0, now=clock)


class Once(torch.utils.data.IterableDataset):
    """Continues where it was, and ends."""

    def __init__(self):
        self.rows = iter(torch.rand(6))

    def __iter__(self):
        yield from self.rows


def test_an_iterable_that_has_ended_is_named_as_such():
    """More samples or fewer workers do not help."""
    once = Once()
    assert len(list(once)) == 6
    with pytest.raises(InvalidArgument, match="has to start over with each iteration"):
        measure(loader(once), 4, seconds=0.1)


def test_workers_are_those_of_the_loader_and_batches_are_copied():
    """Two processes read; each batch is handed to the copy, in the sizes timed."""
    copied = []
    data = torch.utils.data.TensorDataset(torch.arange(4096.0))
    found = measure(loader(data, num_workers=2), 32, seconds=0.2, copy=lambda batch: copied.append(len(batch[0])))
    assert found.num_workers == 2
    assert set(copied) <= {16, 32}
    assert found.samples_per_second > 0


@pytest.mark.parametrize("given", [None, 3, [torch.zeros(2)], torch.utils.data.DataLoader])
def test_what_is_no_loader_is_rejected(given):
    """So is one whose batches have no size of their own."""
    with pytest.raises(InvalidArgument) as caught:
        loader_rate.check_loader(given)
    assert caught.value.field == "loader"


class Pairs(torch.utils.data.Sampler):
    """Batches of two, drawn in a way of their own."""

    def __iter__(self):
        return iter([[0, 1], [2, 3]])


def test_batches_of_a_sampler_and_an_empty_epoch_are_rejected():
    """Batches of a user's own sampler cannot be resized; one sample makes no batch that counts."""
    data = torch.utils.data.TensorDataset(torch.arange(8.0))
    fixed = torch.utils.data.DataLoader(data, batch_sampler=Pairs())
    single = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.arange(1.0)), batch_size=1)
    for given in (fixed, single):
        with pytest.raises(InvalidArgument, match="loader"):
            measure(given, 4, seconds=0.1)
    assert loader_rate.measurable(fixed) is None


def test_a_plain_batch_sampler_is_resized():
    """As accelerate makes the loaders of a Trainer."""
    clock = Clock()
    data = Slow(clock, 0.004)
    batches = torch.utils.data.BatchSampler(torch.utils.data.SequentialSampler(data), 2, drop_last=True)
    found = measure(torch.utils.data.DataLoader(data, batch_sampler=batches), 16, seconds=1.0, now=clock)
    assert found.samples_per_second == pytest.approx(250.0)
    assert (found.batch_size, found.drop_last) == (16, True)


def test_an_epoch_has_the_samples_that_the_sampler_draws():
    """Fifty of 50 000: one small epoch after another is timed, with a batch that leaves some to count."""
    clock = Clock()
    data = Slow(clock, 0.004, length=50_000)
    some = torch.utils.data.SubsetRandomSampler(range(50))
    found = measure(torch.utils.data.DataLoader(data, batch_size=8, sampler=some), 64, seconds=1.0, now=clock)
    assert found.samples_per_second == pytest.approx(250.0)
    assert found.num_samples == 50
    assert found.batch_size == 16
    assert found.steps(8) == (7, 2)


def test_random_states_are_as_before():
    """The shuffling of the user's own loop, and what it draws, do not change."""
    generator = torch.Generator().manual_seed(7)
    data = torch.utils.data.TensorDataset(torch.arange(64.0))
    given = loader(data, shuffle=True, generator=generator)
    states = generator.get_state(), torch.get_rng_state(), random.getstate()
    measure(given, 8, seconds=0.05)
    assert torch.equal(generator.get_state(), states[0])
    assert torch.equal(torch.get_rng_state(), states[1])
    assert random.getstate() == states[2]


def test_a_loop_overlaps_workers_and_takes_turns_without_them():
    """By the arithmetic of two stages in parallel or in a row."""
    with_workers = LoaderRate(batch_size=8, num_workers=2, samples_per_second=100.0, num_samples=100)
    assert with_workers.loop_rate(50.0, 8) == 50.0
    assert with_workers.loop_rate(400.0, 8) == 100.0
    without = LoaderRate(batch_size=8, num_workers=0, samples_per_second=100.0, num_samples=100, drop_last=True)
    assert without.loop_rate(100.0, 8) == pytest.approx(50.0)
    assert (with_workers.steps(32), without.steps(32), without.steps(25)) == ((4, 4), (3, 0), (4, 0))


class Busy(torch.utils.data.Dataset):
    """Each sample takes 2 ms of CPU time."""

    def __len__(self):
        return 4000

    def __getitem__(self, place):
        end = time.process_time() + 0.002
        while time.process_time() < end:
            pass
        return torch.tensor(float(place))


def test_workers_that_compute_delay_a_step_on_the_same_cpus(monkeypatch):
    """Two milliseconds of one CPU in four are half a millisecond of a step that uses them all."""
    monkeypatch.setattr(loader_rate.os, "sched_getaffinity", lambda _: set(range(4)))
    on_cpu = measure(loader(Busy(), num_workers=1), 8, seconds=1.0, shares_cpus=True)
    assert on_cpu.delay_seconds == pytest.approx(0.0005, rel=0.3)
    assert on_cpu.loop_rate(10.0, 8) == pytest.approx(1 / (1 / 10 + on_cpu.delay_seconds))
    assert measure(loader(Busy(), num_workers=1), 8, seconds=0.1).delay_seconds == 0.0
    asleep = measure(loader(Sleepy(), num_workers=1), 8, seconds=0.5, shares_cpus=True)
    assert asleep.delay_seconds < 0.0002
    assert measure(loader(Busy()), 8, seconds=0.1, shares_cpus=True).delay_seconds == 0.0


@pytest.mark.parametrize(
    ("samples", "accumulate", "expected"),
    [(1000, 1, 4 / 0.012), (1000, 2, 8 / 0.016), (9, 1, 4 / 0.012), (3, 1, None)],
    ids=["a batch, a step", "two batches, a step", "epochs of two batches", "less than a batch"],
)
def test_a_loop_that_is_run_takes_its_turns(samples, accumulate, expected):
    """Four samples of 1 ms and a step of 8 ms; also where the data set has to be read again and again."""
    clock = Clock()

    def step(_batch):
        clock.seconds += 0.008

    data = Slow(clock, 0.001, length=samples, first=0.0)
    rates = run_loops(loader(data), [4], lambda _: step, seconds=1.0, accumulate=accumulate, now=clock)
    assert rates == ({} if expected is None else {4: pytest.approx([expected] * 3, rel=1e-6)})


def test_the_loops_of_two_sizes_take_turns_forth_back_and_forth():
    """Each turn finds the host 20 % slower than the one before: the middle turns of both sizes are one turn apart."""
    clock, slowdown, turns = Clock(), 1.0, []

    def step_of(n):
        nonlocal slowdown
        slowdown *= 1.2
        turns.append(n)

        def step(_batch):
            clock.seconds += 0.001 * n * slowdown

        return step

    rates = run_loops(loader(Slow(clock, 0.0, first=0.0)), [4, 8], step_of, seconds=1.0, now=clock)
    assert turns == [4, 8, 8, 4, 4, 8]
    assert {n: pytest.approx(values) for n, values in rates.items()} == {
        4: [1000 / 1.2**turn for turn in (1, 4, 5)],
        8: [1000 / 1.2**turn for turn in (2, 3, 6)],
    }


def test_a_loop_that_does_not_start_in_time_is_not_run():
    """The first sample takes 100 s, where the rounds have three."""
    clock = Clock()
    assert run_loops(loader(Slow(clock, 0.001)), [4], lambda _: lambda _: None, seconds=1.0, now=clock) == {}


def test_a_loop_is_no_faster_than_its_workers():
    """Two workers take at least 4 ms for a sample: at most 500 samples/s, in step with each other or not."""
    rates = run_loops(loader(Sleepy(), num_workers=2), [4], lambda _: lambda _: None, seconds=0.5)[4]
    assert 0.0 < max(rates) <= 1.05 * 500.0


class Sleepy(torch.utils.data.Dataset):
    """At most 250 samples/s: reading one sleeps for 4 ms."""

    def __len__(self):
        return 400

    def __getitem__(self, place):
        time.sleep(0.004)
        return torch.full((8,), float(place))


class Broken(Sleepy):
    """Has samples for the search, and none for the loader."""

    def __init__(self):
        self.left = 300

    def __getitem__(self, place):
        self.left -= 1
        if self.left < 0:
            raise OSError("the disk is gone")
        return torch.full((8,), float(place))


def test_a_slow_loader_is_the_bottleneck_of_the_loop():
    """The rate is that of the loader, which sleeping bounds; larger batches of a fast step gain nothing."""
    result = cb.autotune_module(torch.nn.Linear(8, 2), loader(Sleepy()), max_batch_size=256, budget=10.0)
    assert result.loader.num_samples == 400
    assert max(result.samples_per_second, result.loader_samples_per_second) <= 250.0
    assert result.step_samples_per_second > 250.0
    endings = ("larger batches gain nothing", "the data loader is the bottleneck")
    assert (result.decided_by == "loader") == any(ending in result.reasons[0] for ending in endings)
    assert any("The data loader by itself delivers" in reason for reason in result.reasons)
    assert cb.TuningResult.from_json(result.to_json()) == result


def test_a_loader_given_by_name_is_measured(tmp_path, monkeypatch):
    """As batches of a module of this process, and as the loader of a named one."""
    (tmp_path / "my_loop.py").write_text(
        "import torch\nfrom torch.utils.data import DataLoader, TensorDataset\n"
        "def build(): return torch.nn.Linear(8, 2)\n"
        "def loader(): return DataLoader(TensorDataset(torch.zeros(400, 8)), batch_size=4)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    present = cb.autotune_module(torch.nn.Linear(8, 2), "my_loop:loader", batch_sizes=[2, 4], budget=60.0)
    named = cb.autotune_module(
        "my_loop:build", "my_loop:loader", loader="my_loop:loader", batch_sizes=[2, 4], budget=60.0, store=False
    )
    assert present.loader.num_samples == named.loader.num_samples == 400


def test_the_loader_is_measured_although_a_single_size_gives_no_recommendation():
    """The budget ended before the second one; what the loader delivers does not depend on that."""
    timing = Timing(batch_size=8, round=0, seconds=0.01)
    timed = Measured(timings=(timing,), outcomes=(Outcome(8, "ok"), Outcome(16, "not_run")))

    def answered(**setting):
        return answer([Candidate(8), Candidate(16)], timed, goal=Goal(), setting=setting)

    subject = PresentModuleSubject(
        name="module", library="torch", device=cb.device("cpu"), memory=MemoryLimit(2**30, 2**30, ""),
        mode="inference", seed=0, make=ModuleRunner, loader=loader(Sleepy()),
    )  # fmt: skip
    found = answered(loader=subject.measure_loader(answered(), Request(budget=5.0)))
    assert (found.batch_size, found.loader.num_samples) == (None, 400)
    assert any("The data loader by itself delivers" in reason for reason in found.reasons)


def test_a_loader_that_fails_loses_no_timing():
    """A note has its error; the recommendation is that of the step."""
    options = {"max_batch_size": 8, "budget": 5.0, "loader": loader(Broken())}
    result = cb.autotune_module(torch.nn.Linear(8, 2), (8,), **options)
    assert result.loader is None
    assert result.batch_size is not None
    assert any("the disk is gone" in reason for reason in result.reasons)


@pytest.mark.parametrize("workers", [0, 1])
def test_the_reported_rate_is_that_of_the_loop_that_was_run(monkeypatch, workers):
    """At the recommended size and at the ends of those that may be as fast, each with its own steps, once."""
    model, sizes, steps, runs = torch.nn.Linear(8, 2), [], [], []
    model.register_forward_hook(lambda _, inputs, __: sizes.append(len(inputs[0])))

    def looped(given, batch_sizes, step_of, **_):
        for n in batch_sizes:
            step_of(n)(given.collate_fn([given.dataset[place] for place in range(n)]))
            steps.append(sizes[-1])
        runs.append(tuple(batch_sizes))
        assert given.num_workers == workers
        return {n: [100.0 + n] * 3 for n in batch_sizes}

    monkeypatch.setattr(loader_rate, "run_loops", looped)
    data = torch.utils.data.TensorDataset(torch.zeros(400, 8))
    result = cb.autotune_module(model, loader(data, num_workers=workers), batch_sizes=[8, 16, 32, 64], budget=5.0)
    assert [tuple(steps)] == runs
    assert set(result.loader.loop_ratios) == set(steps)
    assert result.batch_size == max(steps)
    assert result.samples_per_second == pytest.approx(100.0 + max(steps))
    assert min(result.step_samples_per_second, result.loader_samples_per_second) > 200.0
    assert cb.TuningResult.from_json(result.to_json()) == result


def test_each_step_of_a_loop_reads_another_batch(monkeypatch):
    """Rows of a table that were read in the step before are still in the caches, which makes a step faster."""
    data = torch.utils.data.TensorDataset(torch.arange(400), torch.zeros(400))
    model, rows = torch.nn.Embedding(400, 8), []
    model.register_forward_hook(lambda _, inputs, __: rows.append(inputs[0].tolist()))

    def looped(given, batch_sizes, step_of, **_):
        step = step_of(2)
        rows.clear()
        for batch in itertools.islice(given, 3):
            step(batch)
        return {n: [100.0] * 3 for n in batch_sizes}

    monkeypatch.setattr(loader_rate, "run_loops", looped)
    batches = torch.utils.data.DataLoader(data, batch_size=2)
    cb.autotune_module(model, batches, batch_sizes=[1, 2], budget=3.0, mode="training", loss=lambda y, _: y.sum())
    assert rows == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize("optimizer", ["adam", None], ids=["training", "inference"])
def test_a_loop_over_texts_of_unequal_length_steps_each_batch(monkeypatch, optimizer):
    """One text in twenty is 16 times as long: the rate of a batch without one was 8 times that of the loop."""
    texts = [torch.ones(64 if place % 20 == 0 else 4) for place in range(400)]
    batches = torch.utils.data.DataLoader(texts, batch_size=2, collate_fn=torch.nn.utils.rnn.pad_sequence)
    model, lengths, states = torch.nn.Sequential(torch.nn.PReLU()), [], set()
    model.register_forward_hook(lambda _, inputs, __: lengths.append(len(inputs[0])))

    def looped(given, batch_sizes, step_of, **_):
        step = step_of(2)
        lengths.clear()
        for batch in itertools.islice(given, 20):
            step(batch)
            states.update(id(each) for each in gc.get_objects() if isinstance(each, torch.optim.Adam))
        return {n: [100.0] * 3 for n in batch_sizes}

    monkeypatch.setattr(loader_rate, "run_loops", looped)
    options = {"mode": "training", "optimizer": optimizer} if optimizer else {}
    result = cb.autotune_module(model, batches, batch_sizes=[1, 2], budget=3.0, **options)
    assert any(reason.startswith("Samples are of unequal length") for reason in result.reasons)
    assert lengths == [64, *[4] * 9] * 2
    assert len(states) <= 2  # of the prepared batch and of the loop: not one for each step


def test_a_loop_that_fails_loses_no_rate(monkeypatch):
    """A note has its error; the rate is computed from those of loader and step."""

    def failing(*_, **__):
        raise OSError("the disk is gone")

    monkeypatch.setattr(loader_rate, "run_loops", failing)
    data = torch.utils.data.TensorDataset(torch.zeros(400, 8))
    result = cb.autotune_module(torch.nn.Linear(8, 2), loader(data), max_batch_size=16, budget=5.0)
    assert result.samples_per_second == pytest.approx(
        1 / (1 / result.step_samples_per_second + 1 / result.loader_samples_per_second)
    )
    assert any("the disk is gone" in reason for reason in result.reasons)
