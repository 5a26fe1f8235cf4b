"""Gradient accumulation: a timed step is k batches and one optimizer step, and rates count all their samples."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

import cubatch as cb  # noqa: E402
from cubatch.errors import InvalidArgument  # noqa: E402
from cubatch.frameworks.torch_inputs import Call  # noqa: E402
from cubatch.frameworks.torch_step import StepKind  # noqa: E402
from cubatch.tuning.accumulation import cut  # noqa: E402
from tests.virtual_time import step_seconds  # noqa: E402

BATCHES = 4


class Counts(torch.nn.Module):
    """A linear layer that counts its forward passes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.passes = torch.nn.Linear(8, 3).double(), 0

    def forward(self, x):
        self.passes += 1
        return self.layer(x)


def mean_square(output):
    return output.square().mean()


class Steps(torch.optim.SGD):
    """Plain SGD that counts its steps and keeps the gradients that it saw."""

    made: list = []  # noqa: RUF012 - filled by the test

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.0)
        self.steps = 0
        Steps.made.append(self)

    def step(self, closure=None):
        self.steps += 1
        self.seen = [p.grad.clone() for group in self.param_groups for p in group["params"]]
        return super().step(closure)


@pytest.fixture(autouse=True)
def _nothing_made():
    Steps.made = []


def test_a_step_is_so_many_batches_and_one_optimizer_step_on_their_mean_gradient():
    """After each step the optimizer has seen the gradient of one batch, since all batches are equal."""
    module, x = Counts(), torch.randn(5, 8, dtype=torch.float64)
    kind = StepKind(training=True, loss=mean_square, optimizer=Steps, autocast=None, accumulate=BATCHES)
    step = kind.step(module, list(module.parameters()), "cpu", Call((x,), {}))
    for count in (1, 2):
        step()
        assert (module.passes, Steps.made[0].steps) == (count * BATCHES, count)
    weight = module.layer.weight.detach()
    output = x @ weight.T + module.layer.bias.detach()
    expected = 2 / output.numel() * output.T @ x  # of the mean of squares
    rounding = 16 * BATCHES * torch.finfo(torch.float64).eps * float(expected.abs().max())
    assert torch.allclose(Steps.made[0].seen[0], expected, rtol=0.0, atol=rounding)


def test_rates_count_the_samples_of_all_batches():
    """The rate is 4 n over the time of a step, and a cut of an effective batch counts the time of one batch."""
    result = cb.autotune_module(
        Counts(), torch.randn(2, 8, dtype=torch.float64), mode="training", accumulate=BATCHES, batch_sizes=[8, 32],
        budget=2.0,
    )  # fmt: skip
    assert result.accumulate == BATCHES
    for m in result.measurements:
        assert m.timings_seconds == pytest.approx([step_seconds(m.batch_size)] * len(m.timings_seconds))
        assert math.isclose(m.samples_per_second * m.latency_seconds, BATCHES * m.batch_size, rel_tol=1e-12)
    assert any(f"{BATCHES} batches" in reason for reason in result.reasons)
    found = cut(result, 64)
    fastest = min(m.latency_seconds / BATCHES for m in result.measurements if m.batch_size == found.batch_size)
    assert math.isclose(found.seconds, fastest, rel_tol=1e-12)
    assert cb.TuningResult.from_json(result.to_json()) == result


@pytest.mark.parametrize(
    ("accumulate", "mode"), [(0, "training"), (1.5, "training"), (True, "training"), (2, "inference")]
)
def test_a_number_of_batches_is_checked(accumulate, mode):
    """It is a whole number of at least 1, and 1 where no optimizer steps."""
    with pytest.raises(InvalidArgument) as caught:
        cb.autotune_module(Counts(), (8,), mode=mode, accumulate=accumulate)
    assert caught.value.field == "accumulate"
