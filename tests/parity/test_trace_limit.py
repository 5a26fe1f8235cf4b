"""A trace on tensors without data ends in time, and covers no size above the requested ones."""

from __future__ import annotations

import time

import pytest

import cubatch as cb

torch = pytest.importorskip("torch")

from cubatch.frameworks import torch_memory  # noqa: E402
from cubatch.frameworks.torch_module import TorchModule  # noqa: E402

nn = torch.nn


class Recurrent(nn.Module):
    """Goes over time in a loop in Python."""

    def __init__(self):
        super().__init__()
        self.mix, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, x):
        state = 0
        for step in range(x.shape[1]):
            state = torch.tanh(self.norm(self.mix(x[:, step])) + state)
        return state


def module(mode, length=1000):
    return TorchModule(Recurrent(), (length, 8), mode=mode, optimizer="adam" if mode == "training" else "sgd")


@pytest.mark.parametrize("mode", ["inference", "training"])
@pytest.mark.parametrize("seconds", [0.3, 0.9])
def test_a_trace_ends_soon_after_its_limit(mode, seconds):
    """Forward and backward pass; the module is restored, and can be traced again."""
    with module(mode, 5000) as made, pytest.raises(torch_memory.TraceTooLong):
        made.peaks(2**40, 64, seconds)
    with module(mode, 2) as made:
        assert made.peaks(2**40, 64).at(64) > 0


def test_two_traces_that_end_in_time_suffice(monkeypatch):
    """The third takes too long: what is known of two sizes bounds the others."""

    def walk(_module, _inputs, _kind, _device, size, deadline):
        if size > 16:
            raise torch_memory.TraceTooLong
        assert deadline > time.process_time()
        return torch_memory.Walk(1000 + 10 * size, 100, ())

    monkeypatch.setattr(torch_memory, "walked", walk)
    found = torch_memory.peaks(None, None, None, None, 11_000, top=None, seconds=60.0)
    assert found.known == {2: 1020, 16: 1160}
    assert found.largest(11_000) == 1000


def test_a_module_whose_trace_is_too_long_is_bounded_by_measured_steps(monkeypatch):
    """A note says so; no size above the limit is said to fit."""
    monkeypatch.setattr("cubatch.tuning.subjects.bounded_subject._LEAST_TRACE_SECONDS", 0.1)
    monkeypatch.setattr("cubatch.tuning.subjects.bounded_subject._TRACE_SHARE", 0.0)
    result = cb.autotune_module(Recurrent(), (300, 8), mode="training", memory_limit="512MiB", budget=2.0)
    largest = result.largest_batch_size  # None: too little was measured
    assert largest is None or 2 <= largest < 2**29 // (300 * 8 * 4)
    assert any("from measured steps alone: a trace of its operations did not end" in note for note in result.reasons)


def test_no_size_above_the_listed_ones_is_traced(monkeypatch):
    """Nor any that no list, maximum or limit allows."""
    sizes, walk = [], torch_memory.walked

    def walked(*arguments, **limit):
        sizes.append(arguments[-1])
        return walk(*arguments, **limit)

    monkeypatch.setattr(torch_memory, "walked", walked)
    cb.autotune_module(nn.Linear(4, 4), (4,), batch_sizes=[1, 3], budget=0.3)
    assert sizes == [2, 3]


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_an_operation_without_a_trace_is_run_on_little_data_alone():
    """PyTorch runs a quantized product on zeros where it has no kernel without data: here on a terabyte of them."""
    linear = torch.ao.nn.quantized.dynamic.Linear(1024, 4)
    with TorchModule(nn.Sequential(linear), (1024,), mode="inference") as made:
        traced = made.peaks(2**40, None)
    assert max(traced.known) < 2**26 // 1024
    assert traced.at(64) == 64 * (1024 + 4) * 4 + (1024 + 4) * 4  # of the weights a byte for each, of biases 4
