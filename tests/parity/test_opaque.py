"""Operators without a layer, kept by their bytes and FLOP: FLOP beside PyTorch's own counter."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

import cubatch
from cubatch import from_torch, load_onnx
from cubatch.errors import UnsupportedLayer
from cubatch.network.importers.refusal import UnsupportedOperator
from cubatch.network.layers import Opaque
from tests.parity import torchvision_models as zoo
from tests.parity.onnx_files import written

onnx = pytest.importorskip("onnx")
torch, nn = zoo.torch, zoo.torch.nn
GPU = "v100-sxm2-16gb"


class Mixed(nn.Module):
    """Products between values, of every kind, on tokens and on images."""

    def __init__(self):
        super().__init__()
        self.conv, self.fc, self.table = nn.Conv2d(3, 6, 1), nn.Linear(6, 4), nn.Parameter(torch.ones(8, 1))

    def forward(self, x):
        y = self.conv(x)
        rows = (y * self.table).flatten(2)  # a table of rows is no layer of ours
        scores = torch.einsum("bij,bkj->bik", rows, rows) + torch.bmm(rows, rows.transpose(1, 2))
        return self.fc(torch.matmul(scores, rows).cumsum(1).transpose(1, 2))  # no channels: which axis is, is guessed


def counted(module, x):
    """FLOP by PyTorch's counter."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter, torch.no_grad():
        module.eval()(x)
    return counter.get_total_flops()


def opaque(network):
    """Layers that are opaque, by their operators."""
    return {node.layer.operator: node.layer for node in network.nodes if isinstance(node.layer, Opaque)}


def test_products_between_values_have_their_flop():
    """Einsum, bmm and matmul count as PyTorch counts them; extents, inputs and parameters are those of the operator."""
    module = Mixed()
    with pytest.raises(UnsupportedOperator, match=r"aten.mul at 'mul'"):
        from_torch(module, (3, 8, 7))
    network = from_torch(module, (3, 8, 7), opaque=True)
    assert network.flops() == counted(module, torch.zeros(1, 3, 8, 7))
    found = opaque(network)
    assert set(found) == {"aten.mul", "aten.einsum", "aten.bmm", "aten.matmul", "aten.cumsum", "aten.linear"}
    assert (found["aten.mul"].output_shape, found["aten.mul"].parameters) == ((8, 7, 6), 8)
    assert network.parameters == sum(parameter.numel() for parameter in module.parameters())
    assert found["aten.einsum"].output_shape == (6, 1, 6)
    assert len(found["aten.matmul"].input_shapes) == 2
    assert np.prod(network.output_shape) == 56 * 4


class Recurrent(nn.Module):
    """A recurrent layer of PyTorch's, of which the outputs are used, the last state, or both."""

    def __init__(self, kind, used, **options):
        super().__init__()
        self.rnn, self.used = kind(6, 5, batch_first=True, **options), used

    def forward(self, x):
        outputs, state = self.rnn(x)
        last = {"outputs": outputs[:, -1], "state": (state[0] if isinstance(state, tuple) else state)[-1]}
        return torch.cat([last[name] for name in self.used], 1)


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
@pytest.mark.parametrize("used", [("outputs",), ("state",), ("outputs", "state")])
@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True}, {"bias": False}])
def test_a_recurrent_layer_has_its_parameters_and_flop_once(kind, used, options):
    """As many FLOP as PyTorch counts in its cells, one step and sample after the other, and its parameters once."""
    module = Recurrent(getattr(nn, kind), used, **options)
    network = from_torch(module, (7, 6), opaque=True)
    assert network.parameters == sum(parameter.numel() for parameter in module.parameters())
    ways = 2 if options.get("bidirectional") else 1
    cells = [
        getattr(nn, f"{kind}Cell")(6 if layer == 0 else 5 * ways, 5)
        for layer in range(options.get("num_layers", 1))
        for _ in range(ways)
    ]
    assert network.flops() == sum(7 * counted(cell, torch.zeros(1, cell.input_size)) for cell in cells)


class Turned(nn.Module):
    """Images whose rows and columns are exchanged in the end, or that are only cut into other axes."""

    def __init__(self, end):
        super().__init__()
        self.conv, self.end = nn.Conv2d(3, 6, 1), end

    def forward(self, x):
        return self.end(self.conv(x))


def test_another_order_in_the_end_is_an_operator_of_its_own():
    """What runs a network gives its last layer's output as it is; channels last and flattened are forms of that."""
    network = from_torch(Turned(lambda y: y.transpose(2, 3)), (3, 8, 7), opaque=True)
    assert [layer.type for layer in network.layers] == ["conv2d", "opaque"]
    assert network.output_shape == (7, 8, 6)
    for end in (lambda y: y.permute(0, 2, 3, 1), lambda y: y.flatten(2), lambda y: y.flatten(2).transpose(1, 2)):
        assert [layer.type for layer in from_torch(Turned(end), (3, 8, 7), opaque=True).layers] == ["conv2d"]


class Rotated(nn.Module):
    """Rotary positions on as many channels as there are, so that an empty part is joined to them."""

    def forward(self, x):
        return torch.cat([x[..., :4].cumsum(1), x[..., 4:]], -1)


def test_a_part_of_nothing_is_nothing():
    """It has no extents that a layer could have, and is no layer."""
    network = from_torch(nn.Sequential(Rotated(), nn.ReLU()), (3, 4), opaque=True)
    assert [layer.output_shape for layer in opaque(network).values()] == [(3, 1, 4)] * len(opaque(network))
    assert set(opaque(network)) >= {"aten.cumsum", "aten.cat"}


class Scores(nn.Module):
    """Each token beside each."""

    def forward(self, x):
        return torch.matmul(x, x.transpose(1, 2)).amax(2)


def test_a_product_of_many_flop_is_kept():
    """Attention over 16 384 tokens: more FLOP of one sample than 32 bits hold, as of images of 2048 x 2048."""
    network = from_torch(Scores(), (16384, 64), opaque=True)
    assert network.flops() == 2 * 16384 * 16384 * 64 > 2**31
    assert cubatch.predict(network, device=GPU, batch_sizes=[1]).seconds[1] > 0
    assert cubatch.models.resolve(network.to_mapping()) == network


class Everyone(nn.Module):
    """What depends on the whole batch, and has no axis for it."""

    def forward(self, x):
        return x * x.cumsum(0).sum().reshape(1, 1, 1)


def test_what_could_not_be_kept_either_is_not_advised():
    """The error names the operator and the ways on that are left; asked for without opaque=True it names that."""
    with pytest.raises(UnsupportedOperator) as caught:
        from_torch(Everyone(), (3, 4), opaque=True)
    assert "aten.sum" in str(caught.value)
    assert "opaque" not in str(caught.value)
    assert "autotune_module()" in str(caught.value)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    with pytest.raises(UnsupportedOperator, match="Pass opaque=True"):
        from_torch(Everyone(), (3, 4))


def test_a_transformer_of_windows_can_be_planned_and_predicted_but_not_run():
    """Swin: windows beside the batch, rolls, masks; all its FLOP are there, and its memory grows with the batch."""
    module = zoo.build("swin_t")
    network = from_torch(module, (3, 64, 64), opaque=True)
    assert network.flops() == counted(module, torch.zeros(1, 3, 64, 64))
    small, large = (cubatch.footprint(network, batch_size=n, mode="training", device=GPU).total for n in (1, 8))
    assert large > 1.5 * small
    forecast = cubatch.predict(network, device=GPU, batch_sizes=[1, 8], mode="training")
    assert forecast.seconds[8] > forecast.seconds[1] > 0
    assert cubatch.candidates(network, device=GPU, mode="training")
    with pytest.raises(UnsupportedLayer):
        zoo.outputs(network, zoo.images((3, 64, 64)))
    assert cubatch.models.resolve(network.to_mapping()) == network


def test_a_file_keeps_what_it_has_no_layer_for(tmp_path):
    """MatMul of two values, an Einsum and a CumSum, in a file: FLOP by hand, and what follows is read on."""
    make = onnx.helper.make_node
    nodes = [
        make("Transpose", ["x"], ["t"], perm=[0, 2, 1]), make("MatMul", ["x", "t"], ["a"]),
        make("Einsum", ["a", "x"], ["b"], equation="nij,njk->nik"), make("CumSum", ["b", "axis"], ["c"]),
        make("Relu", ["c"], ["y"]),
    ]  # fmt: skip
    network = load_onnx(written(tmp_path / "t.onnx", nodes, {"x": ("FLOAT", ("n", 5, 4))}, axis=1), opaque=True)
    assert [(layer.type, layer.output_shape) for layer in (node.layer for node in network.nodes)] == [
        ("opaque", (5, 1, 5)), ("opaque", (5, 1, 4)), ("opaque", (5, 1, 4)), ("relu", (5, 1, 4)),
    ]  # fmt: skip
    assert network.flops() == 2 * 5 * 5 * 4 + 2 * 5 * 4 * 5


def in_a_file(path, nodes, shape, constants):
    """Read a file of some nodes, whose constants are ones of these sizes."""
    arrays = {name: np.ones(size, np.float32) for name, size in constants.items()}
    return load_onnx(written(path, nodes, {"x": ("FLOAT", shape)}, opset=20, **arrays), opaque=True)


@pytest.mark.parametrize(("kind", "gates"), [("LSTM", 4), ("GRU", 3), ("RNN", 1)])
def test_a_recurrent_layer_in_a_file_has_its_parameters_and_flop(kind, gates, tmp_path):
    """As many as PyTorch's own cells have in two directions, one step and sample after the other."""
    sizes = {"w": (2, 5 * gates, 6), "r": (2, 5 * gates, 5), "b": (2, 10 * gates)}
    node = onnx.helper.make_node(kind, ["x", *sizes], ["y"], hidden_size=5, direction="bidirectional")
    network = in_a_file(tmp_path / "rnn.onnx", [node], (2, 7, 6), sizes)
    cell = getattr(nn, f"{kind}Cell")(6, 5)
    assert network.parameters == 2 * sum(parameter.numel() for parameter in cell.parameters())
    assert network.flops() == 2 * 7 * counted(cell, torch.zeros(1, 6))


def test_what_several_results_cost_together_is_counted_once(tmp_path):
    """Of a recurrent layer whose outputs are read beside its last state, which are added."""
    sizes, make = {"w": (1, 20, 6), "r": (1, 20, 5)}, onnx.helper.make_node
    nodes = [make("LSTM", ["x", *sizes], ["a", "b"], hidden_size=5, layout=1), make("Mul", ["a", "b"], ["y"])]
    network = in_a_file(tmp_path / "rnn.onnx", nodes, (2, 1, 6), sizes)
    assert network.parameters == 20 * 6 + 20 * 5
    assert network.flops() == 2 * (20 * 6 + 20 * 5)


def test_a_turned_product_counts_its_own_depth(tmp_path):
    """x' w of x (4, 6): for each of 6 rows and 5 columns a sum of 4, over a batch of 4."""
    node = onnx.helper.make_node("Gemm", ["x", "w"], ["y"], transA=1)
    network = in_a_file(tmp_path / "turned.onnx", [node], (4, 16), {"w": (4, 5)})
    assert network.flops() == 2 * 16 * 5 * 4 // 4


def test_what_has_the_batch_on_no_axis_cannot_be_kept(tmp_path):
    """A product over the batch, of 3 rows and 8 columns: as many numbers as a batch of 4 could have, and no samples."""
    node = onnx.helper.make_node("Gemm", ["x", "w"], ["y"], transA=1)
    with pytest.raises(UnsupportedOperator, match=r"shape \(3, 8\) has no axis for the batch"):
        in_a_file(tmp_path / "turned.onnx", [node], (4, 3), {"w": (4, 8)})
