"""Weights of torchvision's modules in the networks of the catalogue, and back: names, outputs, gradients, files."""

from __future__ import annotations

import copy
import math

import attrs
import numpy as np
import pytest

import cubatch as cb
from cubatch.engine.network import Model
from cubatch.errors import InvalidArgument, InvalidData
from cubatch.hardware import probe
from cubatch.network import models
from cubatch.network.graph import Network
from cubatch.network.importers.refusal import UnsupportedOperator
from cubatch.network.layers import Add, BatchNorm2d, Concat, Conv2d, Flatten, Linear, ReLU, Slice
from cubatch.network.passes import Pass
from cubatch.network.state_dict import tensors
from tests.checks import UNIT_ROUNDOFF, assert_within
from tests.parity import catalogue, torchvision_models as zoo

torch = zoo.torch
safetensors_torch = pytest.importorskip("safetensors.torch")
NAMES = (
    "alexnet", "vgg11", "vgg13", "vgg16", "vgg19", "googlenet", "resnet18", "resnet34", "resnet50", "resnet101",
    "resnet152", "densenet121", "mobilenet-v3-large", "efficientnet-b0", "convnext-tiny",
)  # fmt: skip
SAMPLES = 4
DISTURBED = 2.0**-40  # so far above float64's roundings that they do not count, and so small that no edge is crossed


@pytest.mark.parametrize("name", NAMES)
def test_names_and_shapes_are_torchvisions(name):
    """Every tensor of the module but the counters of batch norms is one of ours, and none of ours is left over."""
    with torch.device("meta"):
        state = getattr(zoo.models, name.replace("-", "_"))(weights=None, **zoo.MORE.get(name, {})).state_dict()
    theirs = {key: tuple(tensor.shape) for key, tensor in state.items() if not key.endswith("num_batches_tracked")}
    assert {tensor.key: tensor.torch_shape for tensor in tensors(models.build(name))} == theirs


def longest_sum(network):
    """The most terms that any sum of a training step has."""
    depths = [
        gemm.k
        for node in network.nodes
        for pass_ in (Pass.FPROP, Pass.DGRAD, Pass.WGRAD)
        for gemm in (node.layer.gemms(pass_, SAMPLES) if pass_ is not Pass.WGRAD or node.layer.parameters else ())
    ]
    norms = [SAMPLES * math.prod(n.layer.input_shape[:2]) for n in network.nodes if isinstance(n.layer, BatchNorm2d)]
    return max([*depths, *norms])


class Disturbed(torch.autograd.Function):
    """Numbers times random ones from 1 - DISTURBED to 1 + DISTURBED, and so are their gradients on the way back."""

    @staticmethod
    def forward(ctx, x):
        return x * (1 + DISTURBED * (2 * torch.rand_like(x) - 1))

    @staticmethod
    def backward(ctx, dy):
        return dy * (1 + DISTURBED * (2 * torch.rand_like(dy) - 1))


def step(module, x, labels, *, disturb=False):
    """
    Output in eval mode, then, with labels, loss and gradients by name of a training step, in float64.

    With `disturb` the outputs of layers and their gradients are disturbed.
    """
    module, x = copy.deepcopy(module).double(), torch.tensor(x)
    for layer in module.modules():
        if disturb and not list(layer.children()):
            layer.register_forward_hook(lambda _layer, _inputs, output: Disturbed.apply(output))
    with torch.no_grad():
        output = module.eval()(x).numpy()
    if labels is None:
        return {"output": output}
    loss = torch.nn.functional.cross_entropy(module.train()(x), torch.tensor(labels))
    loss.backward()
    gradients = {key: parameter.grad.numpy() for key, parameter in module.named_parameters()}
    return {"output": output, "loss": np.array(loss.item())} | gradients


@pytest.mark.parametrize(
    ("name", "extent", "learns"),
    [
        ("alexnet", 224, True), ("vgg16", 64, False), ("googlenet", 64, True), ("resnet18", 64, True),
        ("resnet50", 64, False), ("mobilenet-v3-large", 64, True), ("resnet34", 32, False), ("resnet101", 32, False),
        ("densenet121", 32, False), ("efficientnet-b0", 64, False), ("convnext-tiny", 64, False),
    ],
)  # fmt: skip
def test_a_network_with_torchvisions_weights_computes_and_learns_what_torchvisions_does(name, extent, learns):
    """
    Outputs, the loss and the gradient of every parameter in float64, on the same float32 weights and images.

    Networks that would take the most time have no gradients here: others have their kinds of layers.

    Bound: a sum of k terms errs by about sqrt(k) u in the mean and by k u at worst, in whatever order, u the unit
    roundoff: sqrt(k), of the longest sum, lies between two orders. What errors of DISTURBED in the outputs of layers
    and their gradients come to in this network, on these images, two steps of PyTorch's show: the largest distance E
    in each tensor. Hence E sqrt(k) u / DISTURBED, and twice that as both sides err. Roundings of float32 would not show
    it: by them some of so many units come to lie on the other side of a ReLU's or a maximum's edge.
    """
    module, network = catalogue.module(name), catalogue.network(name, extent)
    known = cb.from_state_dict(network, module.state_dict())
    x = np.float32(zoo.images((3, extent, extent), SAMPLES)).astype(np.float64)
    labels = np.arange(SAMPLES) % 10 if learns else None
    want = step(module, x, labels)
    torch.manual_seed(0)
    others = [step(module, x, labels, disturb=True) for _ in range(2)]
    found = {"output": zoo.outputs(known, x).reshape(SAMPLES, -1)}
    options = {"device": probe.device("cpu"), "mode": "training", "dtype": "float64", "learning_rate": 0.0}
    if learns:
        with Model(known, **options) as model:
            model.prepare(SAMPLES)
            model.load(x.transpose(0, 2, 3, 1), labels)
            model.step()
            found["loss"] = np.array(model.loss())
            gradients = model.gradients
            for tensor in tensors(known):
                if tensor.name in gradients[tensor.layer]:
                    found[tensor.key] = tensor.to_torch(gradients[tensor.layer][tensor.name])
    assert found.keys() == want.keys()
    growth = 2 * math.sqrt(longest_sum(network)) * UNIT_ROUNDOFF["float64"] / DISTURBED
    largest = max(np.abs(values).max() for values in want.values())
    for key, values in want.items():
        distance = max(np.abs(other[key] - values).max() for other in others)
        assert distance < 1e-6 * largest  # no edge was crossed: in float32 that came to 1 % in googlenet
        assert_within(found[key], values, growth * distance, label=f"{name} {key}")


class Block(torch.nn.Module):
    """A transformer's block with timm's names."""

    def __init__(self, width, heads):
        super().__init__()
        nn, self.heads = torch.nn, heads
        self.norm1, self.norm2 = (nn.LayerNorm(width, eps=1e-6) for _ in range(2))
        self.attn = nn.ModuleDict({"qkv": nn.Linear(width, 3 * width), "proj": nn.Linear(width, width)})
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(width, 4 * width), "fc2": nn.Linear(4 * width, width)})

    def forward(self, x):
        n, tokens, c = x.shape
        parts = (
            self.attn["qkv"](self.norm1(x)).reshape(n, tokens, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        )
        mixed = torch.nn.functional.scaled_dot_product_attention(*parts).transpose(1, 2).reshape(n, tokens, c)
        x = x + self.attn["proj"](mixed)
        return x + self.mlp["fc2"](torch.nn.functional.gelu(self.mlp["fc1"](self.norm2(x))))


class VisionTransformer(torch.nn.Module):
    """A vision transformer with timm's names (Touvron et al., 2021, arXiv:2012.12877), for images of 32 x 32."""

    def __init__(self, width, heads, depth=12, tokens=5, classes=10):
        super().__init__()
        nn = torch.nn
        self.patch_embed = nn.ModuleDict({"proj": nn.Conv2d(3, width, 16, 16)})
        self.cls_token = nn.Parameter(torch.randn(1, 1, width))
        self.pos_embed = nn.Parameter(torch.randn(1, tokens, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width, eps=1e-6), nn.Linear(width, classes)

    def forward(self, x):
        x = self.patch_embed["proj"](x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1) + self.pos_embed
        return self.head(self.norm(self.blocks(x))[:, 0])


@pytest.mark.parametrize(("name", "width", "heads"), [("deit-tiny", 192, 3), ("vit-small", 384, 6)])
def test_weights_with_timms_names_are_those_of_our_vision_transformers(name, width, heads):
    """By the layers' definitions in float64 the network with a module's state dict puts out what the module does."""
    torch.manual_seed(0)
    module = VisionTransformer(width, heads)
    for parameter in module.parameters():  # no zeros and ones that hide what is left out
        torch.nn.init.normal_(parameter, std=0.1)
    network = cb.from_state_dict(models.build(name, input_shape=(32, 32, 3), classes=10), module.state_dict())
    x = zoo.images((3, 32, 32), SAMPLES)
    with torch.no_grad():
        rough, exact = (
            module.to(dtype)(torch.tensor(x, dtype=dtype)).double().numpy() for dtype in (torch.float32, torch.float64)
        )
    growth = 2 * math.sqrt(4 * width) * UNIT_ROUNDOFF["float64"] / UNIT_ROUNDOFF["float32"]  # as above
    bound = growth * np.abs(rough - exact).max()
    assert_within(zoo.outputs(network, x).reshape(SAMPLES, -1), exact, bound, label=name)
    state = cb.to_state_dict(network)
    assert state.keys() == module.state_dict().keys()
    assert all(np.array_equal(state[key], tensor.float().numpy()) for key, tensor in module.state_dict().items())


class Features(torch.nn.Module):
    """Images that are flattened, normed as features, and read by linear layers; their sum, where there are two."""

    def __init__(self, norm, two=False):
        super().__init__()
        nn = torch.nn
        self.conv, self.norm, self.fc = nn.Conv2d(3, 4, 3), norm, nn.Linear(4 * 6 * 5, 7)
        self.other = nn.BatchNorm1d(4 * 6 * 5) if two else None

    def forward(self, x):
        x = self.conv(x).flatten(1)
        y = self.norm(x).relu()
        return self.fc(y if self.other is None else y + self.other(x))


@pytest.mark.parametrize("case", ["batch norm", "layer norm", "sum"])
def test_arrays_behind_a_flatten_are_in_pytorchs_order(case):
    """A module's weights, through a network of it and back, are the module's, and so are the network's outputs."""
    torch.manual_seed(0)
    norm = torch.nn.LayerNorm(120) if case == "layer norm" else torch.nn.BatchNorm1d(120)
    module = Features(norm, case == "sum").eval()
    for tensor in module.state_dict().values():
        if tensor.is_floating_point():
            torch.nn.init.uniform_(tensor, 0.5, 1.5)
    imported, before = cb.from_torch(module, (3, 8, 7)), module.state_dict()
    state = cb.to_state_dict(imported)
    assert state.keys() == before.keys()
    assert all(np.array_equal(state[key], tensor.numpy()) for key, tensor in before.items())
    x = zoo.images((3, 8, 7))
    again = cb.from_state_dict(attrs.evolve(imported, weights={}), before)
    with torch.no_grad():
        want = module.double()(torch.tensor(x)).numpy()
    np.testing.assert_allclose(zoo.outputs(again, x).reshape(want.shape), want, rtol=1e-12)


def test_flattened_features_side_by_side_are_in_pytorchs_order():
    """A linear layer behind two flattened images that were joined, in float64 by PyTorch."""
    torch.manual_seed(0)
    conv, fc = torch.nn.Conv2d(3, 4, 3).double(), torch.nn.Linear(2 * 120, 5).double()
    network = Network(
        input_shape=(8, 7, 3),
        layers=[
            Conv2d(name="conv", k=4, r=3, s=3), Flatten(name="a"),
            ReLU(name="relu", inputs=["conv"]), Flatten(name="b"),
            Concat(inputs=["a", "b"]), Linear(name="fc", k=5),
        ],
    )  # fmt: skip
    parts = {"conv": conv, "fc": fc}
    state = {f"{name}.{key}": tensor for name, part in parts.items() for key, tensor in part.state_dict().items()}
    x = zoo.images((3, 8, 7))
    for part in parts.values():  # weights are float32
        part.load_state_dict({key: tensor.float().double() for key, tensor in part.state_dict().items()})
    with torch.no_grad():
        y = conv(torch.tensor(x))
        want = fc(torch.cat([y.flatten(1), y.relu().flatten(1)], 1)).numpy()
    found = zoo.outputs(cb.from_state_dict(network, state), x).reshape(want.shape)
    np.testing.assert_allclose(found, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("shape", "layers"),
    [
        ((8, 7, 3), [Flatten(), Slice(end=100), Linear(name="fc", k=5)]),
        ((8, 7, 3), [Conv2d(name="c", k=168, r=8, s=7), Flatten(inputs=["input"]), Add(inputs=["c", "layer2"]),
                     Linear(name="fc", k=5)]),
        ((7, 1, 3), [Flatten(), Linear(name="fc", k=5)]),
    ],
)  # fmt: skip
def test_features_whose_order_is_not_known_are_refused(shape, layers):
    """A range of flattened features, a sum with others, and tokens that could be images of one column."""
    with pytest.raises(InvalidArgument, match="features that fc reads after a flatten is known"):
        list(tensors(Network(input_shape=shape, layers=layers)))


@pytest.mark.parametrize("name", ["vgg16", "resnet18", "mobilenet-v3-large"])
def test_there_and_back_is_the_same_to_the_bit(name, tmp_path):
    """A state dict, into a network, through a file of either kind, and back: equal tensors, loaded by the module."""
    module = catalogue.module(name)
    before = {key: tensor.clone() for key, tensor in module.state_dict().items()}
    network = catalogue.network(name, 224 if name == "alexnet" else 64)
    for ending in ("safetensors", "npz"):
        cb.save_weights(cb.from_state_dict(network, before), tmp_path / f"w.{ending}")
        state = cb.to_state_dict(cb.load_weights(network, tmp_path / f"w.{ending}"))
        module.load_state_dict({key: torch.tensor(array) for key, array in state.items()})  # strict: nothing missing
        for key, tensor in module.state_dict().items():
            assert torch.equal(tensor, before[key]), key


def test_a_file_that_pytorch_wrote_is_read_by_its_names(tmp_path):
    """float16 and bfloat16 too, whose numbers float32 has exactly."""
    module, network = catalogue.module("resnet18"), catalogue.network("resnet18", 64)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        half = module.to(dtype)
        safetensors_torch.save_file(half.state_dict(), tmp_path / "theirs.safetensors", metadata={"format": "pt"})
        found = cb.to_state_dict(cb.load_weights(network, tmp_path / "theirs.safetensors"))
        for key, tensor in half.state_dict().items():
            assert key.endswith("num_batches_tracked") or np.array_equal(found[key], tensor.float().numpy()), key


def test_the_auxiliary_classifiers_of_googlenet_are_left_out():
    """torchvision's published weights have them, and no network here does."""
    with_them = zoo.models.googlenet(weights=None, num_classes=10, aux_logits=True, init_weights=False).state_dict()
    assert any(key.startswith("aux1.") for key in with_them)
    found = cb.to_state_dict(cb.from_state_dict(catalogue.network("googlenet", 64), with_them))
    assert found.keys() == {key for key in with_them if not key.startswith("aux")}


def test_what_pretrained_weights_of_googlenet_expect_is_as_the_reference_says():
    """On the inputs of docs/reference/files.md the outputs are those of the module, whose transform is not imported."""
    module = zoo.build("googlenet")
    module.transform_input = True
    with pytest.raises(UnsupportedOperator, match=r"aten.add"):
        cb.from_torch(module, (3, 32, 32))
    known = models.build("googlenet", input_shape=(32, 32, 3), classes=10)
    network, x = cb.from_state_dict(known, module.state_dict()), zoo.images((3, 32, 32))
    scale, mean = (np.reshape(each, (3, 1, 1)) for each in ([0.229, 0.224, 0.225], [0.485, 0.456, 0.406]))
    with torch.no_grad():
        want = module.double()(torch.tensor(x)).numpy().reshape(2, 1, 1, 10)
    bound = 1e-10 * np.abs(want).max()
    assert np.abs(zoo.outputs(network, x * scale / 0.5 + (mean - 0.5) / 0.5) - want).max() < bound
    assert np.abs(zoo.outputs(network, x) - want).max() > 1000 * bound


def test_weights_of_another_network_are_refused_by_name():
    """resnet34's in resnet18: the first tensors that do not belong are named."""
    with torch.device("meta"):
        state = zoo.models.resnet34(weights=None, num_classes=10).state_dict()
    with pytest.raises(InvalidData, match=r"layer1\.2\.conv1\.weight"):
        cb.from_state_dict(catalogue.network("resnet18", 64), state)
