"""What becomes of a module's own tensors when it is imported."""

from __future__ import annotations

import numpy as np
import pytest

from cubatch import from_torch
from cubatch.engine.network import Model
from cubatch.hardware import probe
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


@pytest.mark.parametrize("momentum", [0.0, 0.25, 1.0])
def test_running_statistics_move_as_the_modules_do(momentum):
    """After a step of training they are PyTorch's, which leaves them as they are where the momentum is 0."""
    module, x = nn.Sequential(nn.BatchNorm2d(3, momentum=momentum)), zoo.images((3, 8, 7))
    network = from_torch(module, (3, 8, 7))
    with Model(network, mode="training", device=probe.device("cpu"), dtype="float64") as model:
        model.prepare(len(x))
        model.load(x.transpose(0, 2, 3, 1), np.zeros((len(x), 8, 7), np.int32))
        model.step()
        (ours,) = model.states.values()
        theirs = module.double().train()
        theirs(torch.tensor(x))
        for name, want in (("mean", theirs[0].running_mean), ("var", theirs[0].running_var)):
            np.testing.assert_allclose(ours[name], want.numpy(), rtol=1e-12, atol=1e-12)


def test_a_norm_without_a_momentum_is_told():
    """Ours has no cumulative average: what it is trained with instead is said, and the module keeps its own."""
    module = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4, momentum=None))
    with pytest.warns(UserWarning, match=r"momentum=None \(1\) average all batches alike.* a momentum of 0\.1"):
        network = from_torch(module, (3, 8, 7))
    assert (network.layers[-1].momentum, module[1].momentum) == (0.1, None)
