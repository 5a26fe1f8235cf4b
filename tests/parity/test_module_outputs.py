"""What `autotune_module` trains where a module's output has no loss of its own, and what it refuses at once."""

from __future__ import annotations

import dataclasses

import pytest

import cubatch as cb

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

ASKED = {"device": "cpu", "batch_sizes": [2, 4], "budget": 60.0}


@dataclasses.dataclass
class Logits:
    note: str | None
    parts: list[torch.Tensor]


class Head(nn.Module):
    """A linear layer, that gives its output, `logits`, in whatever `wrap` puts it, and counts its calls."""

    def __init__(self, wrap):
        super().__init__()
        self.linear, self.wrap, self.calls = nn.Linear(3, 5), wrap, 0

    def forward(self, x):
        self.calls += 1
        return self.wrap(self.linear(x))


@pytest.mark.parametrize(
    "wrap",
    [lambda t: Logits("a note", [t]), lambda t: (3, t), lambda t: {"none": None, "empty": [], "logits": (t,)}],
    ids=["a dataclass", "a tuple", "a dict"],
)
def test_the_first_tensor_of_an_output_is_trained_by_its_squares(wrap):
    """Wherever it is in it: no loss need be given to time a step."""
    found = cb.autotune_module(Head(wrap), (3,), mode="training", **ASKED)
    assert {m.status for m in found.measurements} <= {"ok", "dropped"}


def test_an_output_without_a_tensor_asks_for_a_loss():
    """Only a function of the user's can make a scalar of a string: said before anything runs."""
    with pytest.raises(cb.InvalidArgument, match="loss must be a function that makes a scalar of the str that the"):
        cb.autotune_module(Head(lambda _: "logits"), (3,), mode="training", **ASKED)


def test_energy_is_refused_on_a_cpu_before_anything_runs():
    """As by `autotune`: nothing reads it there, so that no step is made to find out."""
    module = Head(lambda t: t)
    with pytest.raises(cb.EnergyNotAvailable):
        cb.autotune_module(module, (3,), objective="energy", **ASKED)
    assert module.calls == 0


def test_a_loss_that_does_not_fit_is_told_what_it_is_called_with():
    """PyTorch's own losses take a target too, which a batch without one does not have."""
    with pytest.raises(cb.InvalidArgument, match=r"loss must be .*as \(images, labels\)"):
        cb.autotune_module(Head(lambda t: t), (3,), mode="training", loss=nn.CrossEntropyLoss(), **ASKED)
    with pytest.raises(cb.NothingMeasured) as refused:
        cb.autotune_module(Head(lambda t: t), (4,), **ASKED)
    assert "loss" not in str(refused.value)


def test_an_optimiser_that_asks_for_a_closure_is_refused_by_its_name():
    """LBFGS takes several forward passes in a step: what one of its batches costs, its user's own loop says."""
    match = "optimizer must be one that steps without a closure, got 'LBFGS'"
    with pytest.raises(cb.InvalidArgument, match=match):
        cb.autotune_module(Head(lambda t: t), (3,), mode="training", optimizer=torch.optim.LBFGS, **ASKED)


def test_an_exported_module_is_tuned_and_one_of_a_fixed_batch_is_refused():
    """Its mode cannot be set; one that holds the batch of the export runs at no other, and the error has the remedy."""
    x, module = torch.rand(4, 3), nn.Linear(3, 2).eval()
    sizes = ({0: torch.export.Dim("batch", min=1, max=64)},)
    exported = torch.export.export(module, (x,), dynamic_shapes=sizes).module()
    assert cb.autotune_module(exported, x, device="cpu", batch_sizes=[2, 4], budget=20.0).recommended
    with pytest.raises(cb.InvalidArgument, match=r"its module\(\)"):
        cb.autotune_module(torch.export.export(module, (x,)), x)
    fixed = torch.export.export(module, (x,)).module()
    with pytest.raises(cb.InvalidArgument) as caught:
        cb.autotune_module(fixed, x, device="cpu", batch_sizes=[2, 4, 8], budget=20.0)
    assert caught.value.field == "module"
    arguments = caught.value.remedy.partition("dynamic_shapes=")[2].removesuffix(".").removesuffix(")")
    again = torch.export.export(module, (x,), dynamic_shapes=eval(arguments, {"torch": torch})).module()  # noqa: S307
    assert again(torch.rand(7, 3)).shape == (7, 2)


def test_volumes_have_their_channels_last_too():
    """PyTorch's own conversion raises for filters of five dimensions; PyTorch's names of devices and dtypes do."""
    module = nn.Sequential(nn.Conv3d(1, 2, 3), nn.Flatten(), nn.Linear(16, 2))
    before = module[0].weight.detach().clone()
    result = cb.autotune_module(
        module, (1, 4, 4, 4), channels_last=True, autocast=torch.bfloat16, device=torch.device("cpu"), mode="training",
        optimizer="adamw", batch_sizes=[2, 4], budget=20.0,
    )  # fmt: skip
    assert {m.status for m in result.measurements} <= {"ok", "dropped"}
    assert torch.equal(module[0].weight, before)
    assert module[0].weight.is_contiguous()


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.jagged])
def test_a_tensor_that_is_not_dense_is_refused_by_its_name(layout):
    """All sizes failed in the drawing of cubatch itself; a function makes such batches."""
    if layout is torch.jagged:
        x = torch.nested.nested_tensor([torch.rand(2, 3), torch.rand(1, 3)], layout=layout)
    else:
        x = torch.eye(3).to_sparse(layout=layout)
    with pytest.raises(cb.InvalidArgument, match=r"dense tensors.*a function from a batch size"):
        cb.autotune_module(nn.Linear(3, 2), x, device="cpu", batch_sizes=[2, 4], budget=5.0)


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(30, 4))

    def forward(self, x):
        return torch.sparse.mm(x, self.weight)


def test_a_function_makes_sparse_batches():
    """Its memory is not traced."""
    batches = lambda n: (torch.rand(n, 30) > 0.5).float().to_sparse_coo()  # noqa: E731
    result = cb.autotune_module(Sparse(), batches, device="cpu", batch_sizes=[2, 4], budget=20.0)
    assert {m.status for m in result.measurements} <= {"ok", "dropped"}
