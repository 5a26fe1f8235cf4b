"""Copies of an optimizer: the same groups of other parameters, a rate of 0, and nothing shared."""

from __future__ import annotations

import pytest

import cubatch as cb

torch = pytest.importorskip("torch")

from cubatch.frameworks.optimizers import like, name_of  # noqa: E402
from cubatch.frameworks.torch_module import TorchModule  # noqa: E402


def parameters(count=2):
    """Parameters with a gradient of one each."""
    made = [torch.nn.Parameter(torch.ones(2)) for _ in range(count)]
    for each in made:
        each.grad = torch.ones(2)
    return made


class Lookahead(torch.optim.Optimizer):
    """Steps another optimizer and averages every second result."""

    def __init__(self, base):
        self.base, self.count = base, 0
        super().__init__(base.param_groups, {})
        self.param_groups = base.param_groups
        self.slow = [each.detach().clone() for group in self.param_groups for each in group["params"]]

    def step(self, closure=None):
        self.base.step(closure)
        self.count += 1
        for slow, group in zip(self.slow, self.param_groups, strict=True) if self.count % 2 == 0 else ():
            slow.lerp_(group["params"][0].data, 0.5)


def test_parameters_outside_the_groups_are_not_stepped():
    """Of a backbone and a head, the optimizer has the head, with options of its own; frozen ones are shared."""
    own, other, (frozen,) = parameters(), parameters(), parameters(1)
    frozen.grad = None
    optimizer = torch.optim.Adam([{"params": [own[1], frozen], "betas": (0.5, 0.6)}], lr=0.1)
    made = like(optimizer, own)(other)
    made.step()
    (group,) = made.param_groups
    assert group["params"][0] is other[1]
    assert group["params"][1] is frozen
    assert (group["betas"], group["lr"]) == ((0.5, 0.6), 0.0)
    assert list(made.state) == [other[1]]
    assert not optimizer.state
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_an_optimizer_around_another_is_copied_with_it():
    """Its class takes no parameters; both step the new ones, which share no values with the old."""
    own, other = parameters(1), parameters(1)
    made = like(Lookahead(torch.optim.SGD(own, lr=0.1, momentum=0.9)), own)(other)
    made.step()
    made.step()
    assert made.base.param_groups is made.param_groups
    assert list(made.base.state) == other
    assert torch.equal(own[0], torch.ones(2))


def test_a_copy_of_a_scheduled_optimizer_steps_itself():
    """The schedule of a learning rate replaces step in the instance by one of the original."""
    own, other = parameters(1), parameters(1)
    optimizer = torch.optim.Adam(own, lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    made = like(optimizer, own, clip_norm=0.5)(other)
    made.step()
    assert list(made.state) == other
    assert other[0].grad.norm().item() == pytest.approx(0.5, rel=1e-5)
    optimizer.step()
    assert torch.equal(own[0].grad, torch.ones(2))


ASKED = {"mode": "training", "batches": (8,)}


class Pair:
    """Steps by no class of PyTorch."""

    def zero_grad(self):
        """Do nothing."""

    def step(self):
        """Do nothing."""


@pytest.fixture
def module():
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 3))


def test_the_optimizer_of_a_loop_is_taken_as_a_function_that_makes_one(module):
    """sktime#10990: the memory is that of its class and groups, here Adam's two states of the head's parameters."""
    make = lambda given: torch.optim.Adam(list(given)[2:], 0.0)  # noqa: E731
    expected = TorchModule(module, **ASKED, optimizer=make).walk(4).parts
    optimizer = torch.optim.Adam(module[1].parameters(), 0.1)
    assert TorchModule(module, **ASKED, optimizer=optimizer).walk(4).parts == expected
    assert expected["optimizer"] >= 2 * 4 * (16 * 3 + 3)


def test_a_step_with_the_optimizer_of_a_loop_changes_neither_it_nor_the_module(module):
    """The copies step at a rate of 0 and have the states; the result names the class."""
    optimizer = torch.optim.AdamW(module.parameters(), 0.1)
    torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=4)
    before, rate = [each.detach().clone() for each in module.parameters()], optimizer.param_groups[0]["lr"]
    asked = {"device": "cpu", "batch_sizes": [2, 4], "budget": 60.0}
    result = cb.autotune_module(module, **ASKED, optimizer=optimizer, **asked)
    assert (result.recommended, result.optimizer) == (True, "AdamW")
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), before, strict=True))
    assert (len(optimizer.state), optimizer.param_groups[0]["lr"]) == (0, rate)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (
            lambda module: torch.optim.SGD([*module.parameters(), *parameters(1)], 0.1),
            "SGD of 5 parameters, of which the module lacks 1",
        ),
        (lambda module: torch.optim.LBFGS(module.parameters()), "without a closure, got 'LBFGS'"),
        (lambda module: Pair(), r"optimizer=lambda parameters: Pair\(\.\.\.\)"),
    ],
    ids=["other parameters", "closure", "no optimizer of PyTorch"],
)
def test_an_optimizer_that_cannot_be_copied_is_refused_with_what_to_pass(module, make, match):
    """Steps of other parameters would be those of another loop."""
    with pytest.raises(cb.InvalidArgument, match=match) as caught:
        cb.autotune_module(module, **ASKED, optimizer=make(module), device="cpu", batch_sizes=[2], budget=5.0)
    assert caught.value.field == "optimizer"


def test_a_named_module_takes_the_name_of_a_function_that_makes_the_optimizer(module):
    """An object of this process cannot be passed to its worker."""
    with pytest.raises(cb.InvalidArgument, match=r"package\.module:function"):
        cb.autotune_module(
            "tests.parity.named_modules:small",
            (3, 8, 8),
            mode="training",
            optimizer=torch.optim.SGD(module.parameters()),
        )


def test_an_optimizer_has_the_name_of_its_class_or_function(module):
    given = ["adam", torch.optim.Adam, torch.optim.Adam(module.parameters()), lambda _: None, None]
    assert list(map(name_of, given)) == ["adam", "Adam", "Adam", "<lambda>", None]
