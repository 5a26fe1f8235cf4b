"""Modules of PyTorch as networks: their numbers, and what cannot be one."""

from __future__ import annotations

import collections

import numpy as np
import pytest

from cubatch import from_torch
from cubatch.errors import InvalidArgument
from cubatch.network.importers.refusal import UnsupportedOperator
from cubatch.network.layers import (
    Add,
    BatchNorm2d,
    Concat,
    Conv2d,
    Flatten,
    GlobalAvgPool,
    HardSwish,
    LayerNorm,
    LayerScale,
    Linear,
    ReLU,
    Scale,
    SiLU,
    Slice,
)
from tests.parity import torchvision_models as zoo

torch, nn = zoo.torch, zoo.torch.nn
# Both compute in float64 on float32 weights: rounding of a hundred layers, each of sums of some thousand products.
BOUND = 1e-10


class Of(nn.Module):
    """A module of a function, beside modules that it calls."""

    def __init__(self, forward, **parts):
        super().__init__()
        self.run = forward
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x):
        return self.run(self, x)


def theirs(module, x):
    """A module's output in float64."""
    with torch.no_grad():
        return module.double().eval()(torch.tensor(x)).numpy()


def assert_same(network, module, x):
    """The engine's outputs on the imported network are the module's, to rounding, and not all alike."""
    ours, want = zoo.outputs(network, x), theirs(module, x)
    if want.ndim == 4:
        want = want.transpose(0, 2, 3, 1)
    assert want.std() > 0
    np.testing.assert_allclose(ours.reshape(want.shape), want, rtol=0, atol=BOUND * np.abs(want).max())


def kinds(network):
    """How many layers of each kind a network has."""
    return collections.Counter(type(layer) for layer in network.layers)


@pytest.mark.parametrize(
    ("name", "extent"),
    [
        ("alexnet", 224), ("vgg16", 64), ("googlenet", 64), ("resnet18", 64), ("resnet50", 64),
        ("mobilenet_v3_large", 64), ("densenet121", 32), ("efficientnet_b0", 64), ("regnet_y_400mf", 64),
    ],
)  # fmt: skip
def test_an_imported_model_computes_what_it_did(name, extent):
    """With the module's weights and statistics the engine's outputs are PyTorch's, and as many parameters are there."""
    module, x = zoo.build(name), zoo.images((3, extent, extent))
    network = from_torch(module, (3, extent, extent))
    assert network.parameters == sum(parameter.numel() for parameter in module.parameters())
    assert network.name == type(module).__name__
    assert_same(network, module, x)


def test_a_module_is_left_as_it_was():
    """Train flags of each part, parameters and the arrays of the network, which are copies."""
    module = zoo.build("resnet18").train()
    module.layer1.eval()
    before = {key: value.clone() for key, value in module.state_dict().items()}
    network = from_torch(module, (3, 32, 32))
    assert [part.training for part in (module, module.layer1, module.layer1[0].bn1, module.layer2)] == [
        True, False, False, True,
    ]  # fmt: skip
    assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items())
    with torch.no_grad():
        module.conv1.weight.zero_()
    assert np.abs(network.weights["conv1"]["w"]).max() > 0


def pre_activated(self, x):
    """Clamp in place what is read again: the sum is of the clamped."""
    y = self.conv(x)
    z = self.relu(y)
    return y + self.again(z)


def in_blocks(self, x):
    """Run parts under other modes: without gradients, within that a constant, and out of autocast, of two results."""
    y = self.conv(x)
    with torch.no_grad():
        z, scale = self.again(torch.relu(y)), torch.sigmoid(torch.ones(4, 1, 1))
    with torch.autocast("cpu", enabled=False):
        a, b = torch.relu(z) * scale, torch.sigmoid(y)
        a = a + y
    return torch.cat([a, b], 1) + torch.cat([b, z], 1)


def flattened_before(self, x):
    """Clamp in place, in a block of its own, what was flattened and copied before: the first sees it."""
    y = self.conv(x)
    flat, copy = y.detach().flatten(1), y.permute(0, 2, 3, 1).flatten(1)
    with torch.autocast("cpu", enabled=False):
        self.relu(y)
    return torch.cat([self.fc(flat), self.fc(copy)], 1)


def by_name(self, x):
    """Add to a product's output under another name, and read that output as well."""
    y = self.conv(x)
    return (y.clone() + self.bias) + y


def in_parts(self, x):
    """Convolve some channels and pass others on, as Res2Net and C2f do; two parts are the same, others meet."""
    y = self.conv(x)
    a, b, c = y.split((3, 3, 2), 1)
    return torch.cat([a, self.again(a + b), c.relu(), y[:, -2:], y.narrow(1, 1, 3)], 1)


def gated(y):
    """Half of the features times what the others let through."""
    a, b = y.chunk(2, -1)
    return a * torch.sigmoid(b)


torch.manual_seed(0)  # the modules below are the same in each run
SMALL = {
    "in parts": (
        Of(in_parts, conv=nn.Conv2d(3, 8, 1), again=nn.Conv2d(3, 4, 3, padding=1)),
        {Conv2d: 2, Slice: 4, Add: 1, Concat: 1, ReLU: 1},
    ),
    "a part in the end": (Of(lambda _, x: x.chunk(3, 1)[1]), {Slice: 1}),
    "one channel": (Of(lambda self, x: self.conv(x)[:, 4].relu(), conv=nn.Conv2d(3, 8, 1)), {Slice: 1, ReLU: 1}),
    "a part flattened": (
        Of(lambda self, x: self.fc(x[:, 1:].flatten(1)), fc=nn.Linear(112, 3)), {Slice: 1, Flatten: 1},
    ),
    "a part padded": (
        Of(lambda self, x: self.conv(nn.functional.pad(x[:, :2], (1, 1, 0, 2))), conv=nn.Conv2d(2, 3, 3)),
        {Slice: 1, Conv2d: 1},
    ),
    "gated features": (
        Of(lambda self, x: gated(self.fc(x.mean((2, 3)))), fc=nn.Linear(3, 8)), {Slice: 2, Scale: 1},
    ),
    "parts of features, added to 0": (
        Of(lambda self, x: sum(self.fc(x.mean((2, 3))).chunk(2, -1)), fc=nn.Linear(3, 8)), {Slice: 2, Add: 1},
    ),
    "in blocks": (
        Of(in_blocks, conv=nn.Conv2d(3, 4, 1), again=nn.Conv2d(4, 4, 3, padding=1)),
        {Conv2d: 2, ReLU: 2, LayerScale: 1, Concat: 2, Add: 2},
    ),
    "flattened, normed": (
        nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.Flatten(), nn.BatchNorm1d(4 * 6 * 5), nn.Dropout(0.3), nn.Linear(120, 7), nn.ReLU()
        ),
        {Conv2d: 1, Flatten: 1, BatchNorm2d: 1, Linear: 1, ReLU: 1},
    ),
    "in place": (
        Of(pre_activated, conv=nn.Conv2d(3, 4, 1), relu=nn.ReLU(inplace=True), again=nn.Conv2d(4, 4, 1)),
        {Add: 1, ReLU: 1},
    ),
    "in place, after it was flattened": (
        Of(flattened_before, conv=nn.Conv2d(3, 4, 1), relu=nn.ReLU(inplace=True), fc=nn.Linear(224, 5)),
        {ReLU: 1, Linear: 2},
    ),
    "a norm without shift, a part that a tensor tells": (
        Of(lambda self, x: self.norm(x.flatten(2).transpose(1, 2).narrow(2, torch.tensor(1), 2)),
           norm=nn.LayerNorm(2, bias=False)),
        {LayerNorm: 1, Slice: 1},
    ),
    "dropped constants": (
        Of(lambda self, x: x * self.drop(self.scale), scale=nn.Parameter(torch.rand(3, 1, 1)), drop=nn.Dropout()),
        {LayerScale: 1},
    ),
    "twice": (Of(lambda self, x: self.relu(self.relu(x) + x), relu=nn.ReLU()), {ReLU: 2, Add: 1}),
    "with itself": (Of(lambda _, x: torch.cat([x + x, x], 1)), {Add: 1}),
    "excited": (
        Of(lambda self, x: torch.sigmoid(self.gate(x.mean((2, 3), keepdim=True))) * x, gate=nn.Conv2d(3, 3, 1)),
        {GlobalAvgPool: 1, Scale: 1},
    ),
    "curves": (Of(lambda _, x: x * torch.sigmoid(x) + x * nn.functional.hardsigmoid(x)), {SiLU: 1, HardSwish: 1}),
    "zeros around": (
        Of(lambda self, x: self.conv(nn.functional.pad(x, (0, 1, 2, 0))), conv=nn.Conv2d(3, 4, 3, padding=1)),
        {Conv2d: 1},
    ),
    "same": (nn.Conv2d(3, 6, (2, 3), padding="same", groups=3), {Conv2d: 1}),
    "pooled apart": (
        nn.Sequential(nn.MaxPool2d((2, 3), (1, 2), ceil_mode=True), nn.AvgPool2d(2, 1, 1, count_include_pad=False)),
        {},
    ),
    "adaptive": (nn.Sequential(nn.ConstantPad2d(0, 0.0), nn.AdaptiveAvgPool2d((4, 7)), nn.Conv2d(3, 2, 1)), {}),
    "pixels as rows": (
        Of(lambda self, x: self.fc(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2), fc=nn.Linear(3, 5)),
        {Linear: 1, Flatten: 0},
    ),
    "bias apart": (
        Of(lambda self, x: self.fc(x.mean((-1, -2))) + self.bias, fc=nn.Linear(3, 4, bias=False),
           bias=nn.Parameter(torch.tensor([1.0, -2.0, 3.0, 0.5]))),
        {Linear: 1, Add: 0},
    ),
    "two axes": (Of(lambda self, x: self.fc(x.flatten(2).transpose(1, 2).flatten(1)), fc=nn.Linear(168, 3)), {}),
}  # fmt: skip


@pytest.mark.parametrize("case", SMALL)
def test_a_small_module_computes_what_it_did(case):
    """Flattened in their order, changed in place, read twice, gated, padded, permuted: the numbers are the module's."""
    module, wanted = SMALL[case]
    torch.manual_seed(1)
    for part in module.modules():
        if isinstance(part, nn.BatchNorm1d):
            for tensor in (part.running_mean, part.weight.data, part.bias.data):
                tensor.normal_()
    x = zoo.images((3, 8, 7))
    network = from_torch(module, (3, 8, 7))
    found = kinds(network)
    assert {kind: found[kind] for kind in wanted} == wanted
    assert_same(network, module, x)


def through_a_view(_, x):
    """Clamp a flattened view in place, then read what it is a view of."""
    flat = x.flatten(1).relu_()
    return x + flat.view(x.shape)


def through_one_of_two_views(_, x):
    """Clamp a view in place, then read another one."""
    flat = x.view(x.shape[0], -1)
    other = flat.view(x.shape)
    flat.relu_()
    return other.sigmoid()


def through_a_view_in_a_block(self, x):
    """Clamp a view of what is read again, in a block of its own."""
    y = self.conv(x)
    with torch.autocast("cpu", enabled=False):
        flat = torch.relu_(y.flatten(1))
    return y + flat.view(y.shape)


def set_to_zero(_, x):
    """Write to a part, then read the whole."""
    x[:, 0] = 0
    return x.relu()


def added_to(_, x):
    """Add to a part in place."""
    x[:, :2] += 1
    return x.relu()


def doubled(_, x):
    """Double it under another shape."""
    flat = x.view(x.shape[0], -1)
    flat *= 2
    return x.relu()


def after(change):
    """A convolution whose result is changed by a module of its own."""
    return Of(lambda self, x: self.changed(self.conv(x)), conv=nn.Conv2d(3, 3, 1), changed=Of(change))


REFUSED = {
    "a part set to zero": (after(set_to_zero), ("aten.fill_", "changed", "changes in place")),
    "a part added to": (after(added_to), ("aten.add_", "changed", "changes in place")),
    "doubled under another shape": (after(doubled), ("aten.mul_", "changed", "changes in place")),
    "whole numbers": (after(lambda _, x: x.to(torch.int32).float()), ("aten.to", "changed", "whole numbers")),
    "dropout that stays": (
        after(lambda _, x: nn.functional.dropout(x, 0.5)), ("aten.dropout", "changed", "in evaluation"),
    ),
    "dropout of everything": (
        Of(lambda self, x: self.dropout(x), dropout=nn.Dropout(p=1.0)), ("aten.dropout", "dropout", "drops everything"),
    ),
    "statistics of the batch": (
        Of(lambda self, x: nn.functional.batch_norm(x, self.norm.running_mean, self.norm.running_var, training=True),
           norm=nn.BatchNorm2d(3)),
        ("aten.batch_norm", "batch_norm", "training mode"),
    ),
    "noise": (after(lambda _, x: x + torch.randn(3, 1, 1)), ("aten.randn", "changed", "draws random numbers")),
    "a constant times a value": (
        after(lambda _, x: torch.ones(8, 8) @ x), ("aten.matmul", "changed", "first factor does not depend"),
    ),
    "mean of all": (after(lambda _, x: x.mean() * x), ("aten.mean", "changed", "other axes")),
    "imaginary": (after(lambda _, x: (x * 1j).real), ("aten.mul", "changed", "no real number")),
    "cumsum": (
        Of(lambda self, x: self.conv(x).cumsum(1), conv=nn.Conv2d(3, 3, 1)),
        ("aten.cumsum", "cumsum", "no layer"),
    ),
    "some rows": (after(lambda _, x: x[:, :, 2:].relu()), ("aten.slice", "changed", "another axis than channels")),
    "every other channel": (after(lambda _, x: x[:, ::2].relu()), ("aten.slice", "changed", "takes steps")),
    "channels apart": (
        Of(lambda self, x: self.conv(x).unflatten(1, (2, 3))[:, :, 1].relu(), conv=nn.Conv2d(3, 6, 1)),
        ("aten.relu", "relu", "not a contiguous range"),
    ),
    "a view": (
        Of(lambda self, x: self.changed(self.conv(x)), conv=nn.Conv2d(3, 3, 1), changed=Of(through_a_view)),
        ("aten.relu_", "changed", "changes in place"),
    ),
    "one of two views": (after(through_one_of_two_views), ("aten.relu_", "changed", "changes in place")),
    "a view in a block": (
        Of(through_a_view_in_a_block, conv=nn.Conv2d(3, 3, 1)), ("aten.relu_", "relu", "changes in place"),
    ),
    "padded in the end": (nn.ConstantPad2d(1, 0.0), ("aten.pad", "pad", "not the whole output of a layer")),
    "windows that differ": (nn.Sequential(nn.AdaptiveAvgPool2d(3)), ("aten.adaptive_avg_pool2d", "0", "8 x 7 pixels")),
    "constant": (Of(lambda _, x: x + 1), ("aten.add", "add", "a constant that is no bias")),
    "a bias for one of two readers": (
        Of(by_name, conv=nn.Conv2d(3, 4, 1, bias=False), bias=nn.Parameter(torch.ones(4, 1, 1))),
        ("aten.add", "add", "which nothing else reads"),
    ),
    "factor": (Of(lambda _, x: x * x.mean((1,), keepdim=True)), ("aten.mean", "mean", "other axes")),
    "tanh": (nn.Sequential(nn.GELU("tanh")), ("aten.gelu", "0", "tanh")),
    "no statistics": (
        nn.Sequential(nn.BatchNorm2d(3, track_running_stats=False)),
        ("aten.batch_norm", "0", "statistics"),
    ),
    "shuffled channels": (
        Of(lambda self, x: self.pool(self.conv(x).view(-1, 2, 3, 8, 7).transpose(1, 2).reshape(-1, 6, 8, 7)),
           conv=nn.Conv2d(3, 6, 1), pool=nn.AdaptiveAvgPool2d(1)),
        ("aten.adaptive_avg_pool2d", "pool", "another order before, as by a shuffle"),
    ),
    "shuffled in the end": (
        Of(lambda self, x: self.conv(x).view(-1, 2, 3, 8, 7).transpose(1, 2).reshape(-1, 6, 8, 7).relu(),
           conv=nn.Conv2d(3, 6, 1)),
        ("aten.relu", "relu", "in another order than a layer"),
    ),
    "turned in the end": (after(lambda _, x: x.transpose(2, 3)), ("aten.transpose", "changed", "in another order")),
    "pixels from channels": (
        Of(lambda self, x: self.conv(x).view(-1, 3, 2, 2, 8, 7).permute(0, 1, 4, 2, 5, 3).reshape(-1, 3, 16, 14),
           conv=nn.Conv2d(3, 12, 1)),
        ("aten.reshape", "reshape", "in another order"),
    ),
    "two maps": (after(lambda _, x: x * x.sigmoid().relu()), ("aten.mul", "changed", "neither of its inputs")),
    "shuffled": (
        Of(lambda self, x: self.conv(x.reshape(-1, 3, 4, 2, 7).permute(0, 1, 3, 2, 4).reshape(-1, 3, 8, 7)),
           conv=nn.Conv2d(3, 3, 1)),
        ("aten.conv2d", "conv", "another order before, as by a shuffle"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("last", [nn.Softmax(-1), nn.LayerNorm(168), nn.ReLU(), nn.BatchNorm1d(168)])
def test_what_is_flattened_in_the_end_comes_in_our_order(last):
    """Also where a layer stands behind it: channels are the innermost, in PyTorch the outermost."""
    module, x = nn.Sequential(nn.Conv2d(3, 3, 1), nn.Flatten(), last), zoo.images((3, 8, 7))
    want = theirs(module, x).reshape(2, 3, 8, 7).transpose(0, 2, 3, 1).reshape(2, -1)
    found = zoo.outputs(from_torch(module.float(), (3, 8, 7)), x).reshape(2, -1)
    np.testing.assert_allclose(found, want, rtol=0, atol=BOUND * np.abs(want).max())


def test_what_clamps_below_at_zero_is_relu():
    """Whichever bounds an operator has."""
    module = after(lambda _, x: x.clamp_min(0))
    assert_same(from_torch(module, (3, 8, 7)), module, zoo.images((3, 8, 7)))


def test_a_transposed_convolution_counts_what_it_multiplies():
    """Each of its 8 x 7 inputs of 3 channels meets a window of 2 x 2 for 5 channels."""
    network = from_torch(nn.Sequential(nn.ConvTranspose2d(3, 5, 2, stride=2), nn.ReLU()), (3, 8, 7), opaque=True)
    assert network.layers[0].flop == 2 * 8 * 7 * 3 * 5 * 2 * 2


@pytest.mark.parametrize("case", REFUSED)
def test_an_operator_without_a_layer_is_named_with_its_place(case):
    """Operator, path of the module, reason, and what helps."""
    module, (operator, place, reason) = REFUSED[case]
    with pytest.raises(UnsupportedOperator) as caught:
        from_torch(module, (3, 8, 7))
    assert (caught.value.operator, caught.value.place) == (operator, place)
    assert reason in caught.value.reason
    assert "opaque=True" in str(caught.value)
    assert "autotune_module" in str(caught.value)


@pytest.mark.parametrize(
    ("module", "shape", "told"),
    [
        ("resnet18", (3, 8, 8), "a torch.nn.Module"),
        (nn.ReLU(), (3, 0, 8), "at least 1"),
        (nn.ReLU(), (2, 3, 8, 8), "(channels, height, width)"),
        (nn.Linear(4, 2), (3, 8, 8), "torch.export can trace"),
        (Of(lambda _, x: (x.relu(), x.sigmoid())), (3, 8, 8), "only output is a tensor"),
        (Of(lambda _, x: x.flatten(1)), (3, 8, 8), "its output is its input"),
        (Of(lambda _, x: torch.ones(2, 3)), (3, 8, 8), "a module whose output depends on its input"),
    ],
)
def test_what_cannot_be_imported_says_so(module, shape, told):
    """No module, no shape, a trace that fails, several outputs, nothing to do, nothing that is read."""
    with pytest.raises(InvalidArgument) as caught:
        from_torch(module, shape)
    assert told in str(caught.value)
