"""ONNX files: small networks that PyTorch exports, and graphs written node by node."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
torch = pytest.importorskip("torch")
nn = torch.nn
SHAPE = (3, 16, 16)


class Small(nn.Module):
    """A convolution, a mean and a linear layer."""

    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(SHAPE[0], 64, 3)
        self.head = nn.Linear(64, 5)

    def forward(self, x):
        return self.head(self.convolution(x).relu().mean((2, 3)))


class Flattened(Small):
    """Its flattening is a Reshape, to the batch that it was exported with."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(64 * 14 * 14, 5)

    def forward(self, x):
        return self.head(self.convolution(x).relu().flatten(1))


class OfWords(nn.Module):
    """Token ids, of a table of 50."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(50, 8)

    def forward(self, ids):
        return self.table(ids).sum(1)


def export(module, path, example, *, is_open=True):
    """Write a file, with the batch open or as the example has it."""
    sizes = ({0: torch.export.Dim("batch")},) if is_open else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(module.eval(), (example,), str(path), dynamic_shapes=sizes, verbose=False)
    return path


def written(path, nodes, inputs, outputs="y", *, opset=17, domain="com.microsoft", **arrays):
    """Write a file of nodes, with inputs as {name: (type, shape)}, outputs of floats and arrays; return its path."""
    make, types = onnx.helper, onnx.TensorProto
    values = [make.make_tensor_value_info(name, getattr(types, kind), shape) for name, (kind, shape) in inputs.items()]
    results = [make.make_tensor_value_info(name, types.FLOAT, None) for name in outputs.split()]
    constants = [onnx.numpy_helper.from_array(np.asarray(array), name) for name, array in arrays.items()]
    graph = make.make_graph(nodes, "made", values, results, constants)
    opsets = [make.make_opsetid("", opset), make.make_opsetid(domain, 1)]
    onnx.save(make.make_model(graph, opset_imports=opsets), path)
    return path
