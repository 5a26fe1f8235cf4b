"""Copies of a trainer's optimizer: the same groups of other parameters, a rate of 0, and nothing shared."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from cubatch.integrations.optimizers import like  # noqa: E402


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
