"""FLOP and parameters of operators without a layer, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from cubatch import from_torch, load_onnx
from tests.parity import torchvision_models as zoo

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


def of_a_file(path, nodes, constants, shape, opset=23):
    """Read a file of some nodes from x to y."""
    graph = helper.make_graph(
        nodes, "hand", [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)],
        [onnx.numpy_helper.from_array(array, name) for name, array in constants.items()],
    )  # fmt: skip
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)]), path)
    return load_onnx(path, opaque=True)


def test_attention_in_one_node_of_a_file_has_its_flop(tmp_path):
    """Each of 5 queries of 4 channels meets 5 keys, and mixes 5 values of 4 channels."""
    node = helper.make_node("Attention", ["x", "x", "x"], ["y"], q_num_heads=2, kv_num_heads=2)
    assert of_a_file(tmp_path / "a.onnx", [node], {}, ("n", 5, 4)).flops() == 2 * (2 * 5 * 5 * 4)


def test_an_einstein_sum_with_dots_in_a_file_has_its_flop(tmp_path):
    """Each of 5 rows of 4 columns meets 7 others."""
    node = helper.make_node("Einsum", ["x", "w"], ["y"], equation="...ij,jk->...ik")
    network = of_a_file(tmp_path / "e.onnx", [node], {"w": np.ones((4, 7), np.float32)}, ("n", 5, 4))
    assert network.flops() == 2 * 5 * 4 * 7
