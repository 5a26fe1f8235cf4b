"""FLOP and parameters of operators without a layer, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from cubatch import from_torch, load_onnx
from tests.parity import torchvision_models as zoo
from tests.parity.onnx_files import written

onnx = pytest.importorskip("onnx")
torch, nn = zoo.torch, zoo.torch.nn
helper = onnx.helper


class Of(nn.Module):
    """A module of a function of a part and x."""

    def __init__(self, part, forward=lambda part, x: part(x)):
        super().__init__()
        self.part, self.run = part, forward

    def forward(self, x):
        return self.run(self.part, x)


# Of one sample of 6 features; each gate of 5 meets 6 inputs and 5 states.
FLOP = {
    "GRUCell": (Of(nn.GRUCell(6, 5)), 2 * 3 * 5 * (6 + 5)),
    "LSTMCell": (Of(nn.LSTMCell(6, 5), lambda part, x: part(x)[0]), 2 * 4 * 5 * (6 + 5)),
    "RNNCell": (Of(nn.RNNCell(6, 5)), 2 * 5 * (6 + 5)),
    "Bilinear": (Of(nn.Bilinear(6, 6, 5), lambda part, x: part(x, x)), 5 * (2 * 6 * 6 + 2 * 6)),
    "einsum": (
        Of(
            nn.Linear(2, 4, bias=False),
            lambda part, x: torch.einsum("...ij,kj->...ik", x.view(-1, 3, 1, 2), part.weight),
        ),
        3 * 2 * 2 * 4,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FLOP)
def test_products_of_a_module_without_a_layer_have_their_flop(case):
    """A multiply-add is two, of every product that the operator is defined by."""
    module, flop = FLOP[case]
    network = from_torch(module, (6,), opaque=True)
    assert network.flops() == flop
    assert network.parameters == sum(parameter.numel() for parameter in module.parameters())


PARAMETERS = {
    "weight norm": Of(nn.utils.parametrizations.weight_norm(nn.ConvTranspose2d(3, 5, 2, stride=2))),
    "turned": Of(nn.Linear(5, 8, bias=False), lambda part, x: torch.matmul(part.weight.t(), x)),
    "twice in one": Of(
        nn.ConvTranspose2d(3, 5, 2),
        lambda part, x: nn.functional.conv_transpose2d(x, part.weight * part.weight.sum(), part.bias),
    ),
}


@pytest.mark.parametrize("case", PARAMETERS)
def test_what_is_computed_of_parameters_has_them(case):
    """As many as the module has, whatever becomes of them before they are read."""
    module = PARAMETERS[case]
    network = from_torch(module, (3, 8, 7), opaque=True)
    assert network.parameters == sum(parameter.numel() for parameter in module.parameters())


def test_what_is_made_of_a_parameters_shape_and_type_has_none():
    """Its shape, its type, and where it is positive."""
    positive = Of(
        nn.Linear(8, 5), lambda part, x: x.cumsum(1) * (part.weight > 0).sum() + part.weight.new_ones(3, 1, 1)
    )
    assert from_torch(positive, (3, 8, 7), opaque=True).parameters == 0
    alike = Of(nn.Linear(8, 5), lambda part, x: x.cumsum(1) / torch.ones_like(part.weight))
    assert from_torch(alike, (5, 8), opaque=True).parameters == 0


W = np.ones((4, 3, 2, 2), np.float32)
FILES = {
    "turned": (
        [helper.make_node("Transpose", ["w"], ["v"], perm=[1, 0, 2, 3]),
         helper.make_node("ConvTranspose", ["x", "v"], ["y"])],
        {"w": W}, W.size,
    ),
    "in a node": (
        [helper.make_node("Constant", [], ["w"], value=onnx.numpy_helper.from_array(W.transpose(1, 0, 2, 3))),
         helper.make_node("Identity", ["w"], ["v"]), helper.make_node("ConvTranspose", ["x", "v"], ["y"])],
        {}, W.size,
    ),
    "single numbers": (
        [helper.make_node("Div", ["x", "root"], ["a"]), helper.make_node("Erf", ["a"], ["y"])],
        {"root": np.float32(2**0.5)}, 0,
    ),
    "one number in a row": (
        [helper.make_node("Div", ["x", "root"], ["a"]), helper.make_node("Erf", ["a"], ["y"])],
        {"root": np.float32([2**0.5])}, 0,
    ),
    "how large": (
        [helper.make_node("Resize", ["x", "", "scales"], ["y"])], {"scales": np.float32([1, 1, 2, 2])}, 0,
    ),
    "its shape": (
        [helper.make_node("Shape", ["w"], ["a"]), helper.make_node("Cast", ["a"], ["b"], to=1),
         helper.make_node("ReduceMax", ["b"], ["c"]), helper.make_node("Div", ["x", "c"], ["y"])],
        {"w": W}, 0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FILES)
def test_what_a_file_computes_of_arrays_has_their_parameters(case, tmp_path):
    """Turned, in a node of their own; single numbers and factors of a size are none."""
    nodes, constants, parameters = FILES[case]
    assert of_a_file(tmp_path / "w.onnx", nodes, constants, ("n", 3, 8, 7)).parameters == parameters


def of_a_file(path, nodes, constants, shape):
    """Read a file of some nodes from x to y."""
    return load_onnx(written(path, nodes, {"x": ("FLOAT", shape)}, opset=23, **constants), opaque=True)


def test_attention_in_one_node_of_a_file_has_its_flop(tmp_path):
    """Each of 5 queries of 4 channels meets 5 keys, and mixes 5 values of 4 channels."""
    node = helper.make_node("Attention", ["x", "x", "x"], ["y"], q_num_heads=2, kv_num_heads=2)
    assert of_a_file(tmp_path / "a.onnx", [node], {}, ("n", 5, 4)).flops() == 2 * (2 * 5 * 5 * 4)


def test_an_einstein_sum_with_dots_in_a_file_has_its_flop(tmp_path):
    """Each of 5 rows of 4 columns meets 7 others."""
    node = helper.make_node("Einsum", ["x", "w"], ["y"], equation="...ij,jk->...ik")
    network = of_a_file(tmp_path / "e.onnx", [node], {"w": np.ones((4, 7), np.float32)}, ("n", 5, 4))
    assert network.flops() == 2 * 5 * 4 * 7
