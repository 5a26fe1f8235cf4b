"""Files in 16-bit floating point, whose constants are rounded to it."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from cubatch import load_onnx
from cubatch.network.importers.refusal import UnsupportedOperator
from tests.parity import torchvision_models as zoo

onnx = pytest.importorskip("onnx")
torch, nn = zoo.torch, zoo.torch.nn
helper = onnx.helper


class Block(nn.Module):
    """Attention of two heads of 5 channels, of which no root is a number of 16 bits, and GELU."""

    def __init__(self):
        super().__init__()
        self.all, self.out, self.gelu = nn.Linear(10, 30), nn.Linear(10, 10), nn.GELU()

    def forward(self, x):
        q, k, v = (part.unflatten(2, (2, 5)).transpose(1, 2) for part in self.all(x).chunk(3, -1))
        return self.gelu(self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("is_traced", [True, False])
def test_attention_and_gelu_are_known_by_rounded_constants(dtype, is_traced, tmp_path):
    """By either exporter: the outputs are those of the module with the same weights, in float64."""
    torch.manual_seed(2)
    module, path = Block().to(dtype).eval(), tmp_path / "block.onnx"
    with warnings.catch_warnings(action="ignore"):  # the exporters' own
        torch.onnx.export(module, (torch.zeros(2, 7, 10, dtype=dtype),), path, dynamo=not is_traced, verbose=False)
    network, x = load_onnx(path), zoo.images((7, 10))
    assert [layer.type for layer in network.layers] == ["attention", "gelu"]
    with torch.no_grad():
        want = module.double()(torch.tensor(x)).numpy().reshape(2, 7, 1, 10)
    np.testing.assert_allclose(zoo.outputs(network, x), want, rtol=0, atol=1e-9 * np.abs(want).max())


LARGEST = {"FLOAT16": 65504.0, "BFLOAT16": 3.3895313892515355e38, "FLOAT": 3.4028234663852886e38}


def clipped(path, dtype, bound):
    """Read a file that clips its input of a type at 0 and a bound."""
    number = getattr(onnx.TensorProto, dtype)
    graph = helper.make_graph(
        [helper.make_node("Clip", ["x", "low", "high"], ["y"])], "hand",
        [helper.make_tensor_value_info("x", number, ("n", 3, 8, 7))],
        [helper.make_tensor_value_info("y", number, None)],
        [helper.make_tensor("low", number, [], [0.0]), helper.make_tensor("high", number, [], [bound])],
    )  # fmt: skip
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)]), path)
    return load_onnx(path)


@pytest.mark.parametrize("dtype", LARGEST)
def test_a_clip_at_the_largest_number_of_its_type_is_relu(dtype, tmp_path):
    """2^16 (1 - 2^-11), 2^128 (1 - 2^-8) and 2^128 (1 - 2^-24); at half of it it is a bound."""
    assert [layer.type for layer in clipped(tmp_path / "x.onnx", dtype, LARGEST[dtype]).layers] == ["relu"]
    with pytest.raises(UnsupportedOperator, match="bounds"):
        clipped(tmp_path / "x.onnx", dtype, LARGEST[dtype] / 2)
