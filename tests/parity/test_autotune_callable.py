"""`autotune_callable` with steps of PyTorch."""

from __future__ import annotations

import pytest

from cubatch.errors import InvalidArgument
from cubatch.tuning.tune import autotune_callable
from cubatch.tuning.tune_module import autotune_module

torch = pytest.importorskip("torch")


def test_pytorch_on_the_cpu_is_tuned():
    """A training step of PyTorch, as in the docstring but on the CPU: steps are taken, the host tells their time."""
    model = torch.nn.Linear(16, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def make_step(n):
        x, y = torch.randn(n, 16), torch.randint(4, (n,))

        def step():
            optimizer.zero_grad(set_to_none=True)
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()

        return step

    weights = model.weight.detach().clone()
    result = autotune_callable(make_step, max_batch_size=256, device="cpu", batch_sizes=[1, 256], budget=30.0)
    assert result.batch_size == 256
    assert not torch.equal(model.weight, weights)


def test_modules_and_functions_are_sent_to_the_call_that_takes_them():
    """Each is callable, so that the error of the other call was about its arguments or about missing batches."""
    with pytest.raises(InvalidArgument, match=r"make_step must be .*Hand a module to autotune_module\(\)\.$"):
        autotune_callable(torch.nn.Linear(2, 2), max_batch_size=8, device="cpu")
    with pytest.raises(InvalidArgument, match=r"module must be .*Hand other steps to autotune_callable\(\)\.$"):
        autotune_module(lambda n: lambda: None, max_batch_size=8)
    with pytest.raises(InvalidArgument, match=r"module must be .*Make an instance: Linear\(\.\.\.\)\.$"):
        autotune_module(torch.nn.Linear, (2,))
