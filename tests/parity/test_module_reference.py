"""The reference step of a PyTorch module on a CPU."""

from __future__ import annotations

import contextlib
from collections import UserList
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from cubatch.frameworks import bounded_runner, torch_module  # noqa: E402
from cubatch.frameworks.memory_meter import HostMeter  # noqa: E402
from cubatch.frameworks.ranks import _COMMANDS, RankedRunner, Ranks  # noqa: E402


class Recorder(nn.Module):
    """A small network that keeps the sizes that it was called with."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(3 * 8 * 8, 5)
        self.sizes = UserList()

    def forward(self, x):
        self.sizes.append(len(x))
        return self.head(x.flatten(1))


def test_a_held_reference_is_stepped_around_each_timing():
    """Both blocks step the held batch, the candidate's steps lie between, and training leaves no optimizer behind."""
    for mode in ("inference", "training"):
        module = Recorder()
        subject = torch_module.TorchModule(
            module, (3, 8, 8), mode=mode, optimizer="adam" if mode == "training" else "sgd"
        )
        runner = subject.ready().runner(2**34, 0)
        runner.prepare(4)
        assert runner.clock.time(runner.step, 1).reference_before_seconds is None
        assert runner.hold_reference(2)
        runner.prepare(16)
        del module.sizes[:]
        reading = runner.clock.time(runner.step, 3)
        assert module.sizes == [4, 4, 16, 16, 16, 16, 4, 4, 4]  # the first after another size is not timed
        assert 0 < reading.reference_before_seconds < 1
        assert 0 < reading.reference_after_seconds < 1
        runner.close()


def test_the_first_call_of_a_size_is_timed_once(monkeypatch):
    """A second preparation of the size does not replace its time; the next size has a first call of its own."""
    seconds, seen = 0.0, set()

    class SlowFirst(nn.Module):
        """A layer whose first call of each batch size takes 0.1 s, as where a library prepares for a shape."""

        def forward(self, x):
            nonlocal seconds
            if type(x) is torch.Tensor and len(x) not in seen:  # not in a trace without data
                seen.add(len(x))
                seconds += 0.1
            return x + 1

    monkeypatch.setattr(bounded_runner, "time", SimpleNamespace(perf_counter=lambda: seconds))
    runner = torch_module.TorchModule(SlowFirst(), (8,), mode="inference").ready().runner(2**34, 0)
    runner.prepare(4)  # the process loads its code with a step of this size, before the one that counts
    assert [runner.prepare(n) for n in (16, 4, 16)] == pytest.approx([0.1, 0.0, 0.1])
    runner.close()


def test_a_reference_that_takes_much_of_the_limit_is_not_held():
    """A twentieth of the limit is what a batch may hold beside the candidates."""
    subject = torch_module.TorchModule(Recorder(), (3, 8, 8), mode="inference")
    batch_bytes = 4 * 3 * 8 * 8 * 4
    runner = subject.ready().runner(2**34, 0)
    runner.prepare(4)
    runner._memory_limit = 20 * batch_bytes - 1
    assert not runner.hold_reference(1)
    runner._memory_limit = 20 * batch_bytes
    assert runner.hold_reference(1)
    runner.close()


@pytest.mark.parametrize("is_ranked", [False, True], ids=["one process", "ranks"])
def test_the_peak_of_a_size_below_the_reference_is_unknown(is_ranked, monkeypatch):
    """Steps of 16 run between those of 4: their peak is not that of 4, and 32 is predicted by 16 and 32 alone."""
    monkeypatch.setattr(HostMeter, "peak", lambda self: 2**24)
    runner = torch_module.TorchModule(Recorder(), (3, 8, 8), mode="inference").ready().runner(2**34, 0)
    with contextlib.ExitStack() as job:
        if is_ranked:
            torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
            job.callback(torch.distributed.destroy_process_group)
            runner = RankedRunner(Ranks(), runner, 2**34)
        runner.prepare(16)
        assert runner.hold_reference(1)
        peaks = []
        for size in (4, 32):
            runner.prepare(size)
            runner.clock.time(runner.step, 2)
            peaks.append(runner.peak_bytes)
        runner.release()
        assert [peak is None for peak in peaks] == [True, False]
        assert [row["batch_size"] for row in runner.history] == [16, 32]


@pytest.mark.parametrize("second", ["refuses", "fails"])
def test_ranks_hold_a_reference_only_together(second, monkeypatch):
    """
    If one of two ranks refuses a larger reference, or fails to hold it, no rank runs reference steps from then on.

    In the reference steps of a module whose ranks exchange gradients, the others would wait for it.
    """
    modules = [Recorder(), Recorder()]
    runners = [torch_module.TorchModule(each, (3, 8, 8), mode="training").ready().runner(2**34, 0) for each in modules]

    def do(_, command, *arguments):
        answers, errors = [], []
        for each in runners:
            try:
                answers.append(_COMMANDS[command](each, *arguments))
            except ValueError as error:
                errors.append(error)
        for error in errors:
            raise error
        return answers

    ranked = RankedRunner(SimpleNamespace(do=do), runners[0], 2**34)
    ranked.prepare(2)
    limit = runners[0]._memory_limit
    assert ranked.hold_reference(1)
    ranked.prepare(4)
    if second == "refuses":
        runners[1]._memory_limit = 1
    else:
        monkeypatch.setattr(runners[1], "_reference_step", lambda _: int("x"))
    with contextlib.suppress(ValueError):
        assert not ranked.hold_reference(1)
    ranked.prepare(16)
    for module in modules:
        del module.sizes[:]
    assert ranked.clock.time(ranked.step, 2).reference_before_seconds is None
    assert [module.sizes for module in modules] == [[16, 16], [16, 16]]
    assert runners[0]._memory_limit == limit
    ranked.close()


def test_a_held_reference_does_not_lower_the_largest_size_that_fits(monkeypatch):
    """Whether one is held depends on how fast steps are; what fits after the search does not."""
    monkeypatch.setattr(HostMeter, "peak", lambda self: None)
    subject = torch_module.TorchModule(Recorder(), (3, 8, 8), mode="inference")
    runner = subject.ready().runner(subject.peaks(1 << 20).at(37), 0)
    runner.look(seconds=0.0, top=None, trace_seconds=60.0)
    assert runner.forecast["largest"] == 37
    runner.prepare(1)
    assert runner.hold_reference(1)
    assert runner.forecast["largest"] == 37
    runner.close()
