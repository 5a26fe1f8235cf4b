"""What becomes of a module's own tensors when it is imported."""

from __future__ import annotations

import pytest

from cubatch import from_torch
from tests.parity import torchvision_models as zoo

torch, nn = zoo.torch, zoo.torch.nn


class Changing(nn.Module):
    """A module that changes in place what it holds, each time that it is called."""

    def __init__(self, change):
        super().__init__()
        self.conv, self.change = nn.Conv2d(3, 4, 3), change
        self.register_buffer("buffer", torch.ones(4, 1, 1))
        self.constant = torch.ones(4, 1, 1)

    def forward(self, x):
        with torch.no_grad():
            self.change(self)
        return self.conv(x) * self.buffer * self.constant


def through_a_view(self):
    """Clamp a view of the weights."""
    self.conv.weight.detach().view(-1).clamp_(-0.05, 0.05)


CHANGES = {
    "a parameter": lambda self: self.conv.weight.clamp_(-0.05, 0.05),
    "a parameter through a view": through_a_view,
    "a buffer": lambda self: self.buffer.mul_(2),
    # Changed otherwise, torch.export itself changes it.
    "a constant through a view": lambda self: self.constant.view(-1).mul_(2),
}


@pytest.mark.parametrize("case", CHANGES)
def test_what_a_module_changes_in_place_is_changed_in_a_copy(case):
    """Bit for bit the tensors are what they were, and the outputs are those of the module's next call."""
    torch.manual_seed(0)
    module = Changing(CHANGES[case])
    held = [*module.state_dict().values(), module.constant]
    before = [tensor.clone() for tensor in held]
    network = from_torch(module, (3, 8, 7))
    assert all(map(torch.equal, held, before))
    x = zoo.images((3, 8, 7))
    with torch.no_grad():
        want = module(torch.tensor(x, dtype=torch.float32)).numpy().transpose(0, 2, 3, 1)
    assert abs(zoo.outputs(network, x) - want).max() < 27 * 2**-22  # float32 beside float64


class Tied(nn.Module):
    """One convolution called twice, a norm without scale and shift, and a buffer as a factor."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3, affine=False)
        self.register_buffer("factor", torch.ones(3, 1, 1))

    def forward(self, x):
        return self.conv(self.norm(self.conv(x)) * self.factor)


def test_each_layer_has_parameters_of_its_own():
    """As the table of what can be imported says: 12 in each convolution, 6 in the norm, 3 factors."""
    network = from_torch(Tied(), (3, 8, 7))
    assert [layer.parameters for layer in (node.layer for node in network.nodes)] == [12, 6, 3, 12]
