"""ONNX files as networks: their numbers beside those of the module that was exported, and what cannot be one."""

from __future__ import annotations

import collections
import subprocess
import sys
import warnings

import numpy as np
import pytest

from cubatch import from_torch, load_onnx
from cubatch.errors import InvalidArgument, InvalidSpec
from cubatch.network import models
from cubatch.network.importers.refusal import UnsupportedOperator
from cubatch.network.layers import GELU, LayerNorm, LayerScale
from tests.parity import onnx_files, torchvision_models as zoo

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")

torch, helper = zoo.torch, onnx.helper
# A file has float32.  Batch norms as they are lose digits of eps alone; folded into convolutions, of every filter:
# 2^-24 in each of some fifty layers, amplified by as much as they amplify.
AS_THEY_ARE, FOLDED = 1e-9, 1e-5
PRESERVED = {"dynamo": False, "opset_version": 17, "training": zoo.PRESERVE}
WITH_OPEN_BATCH = {
    "dynamo": False, "opset_version": 13, "input_names": ["x"], "dynamic_axes": {"x": {0: "batch"}},
}  # fmt: skip
BY_DYNAMO = {"dynamo": True, "verbose": False}


def exported(module, path, shape, options):
    """Write a module to a file, traced with two samples."""
    with warnings.catch_warnings(action="ignore"):  # the exporters' own
        torch.onnx.export(module, (torch.zeros(2, *shape),), path, **options)
    return path


@pytest.mark.parametrize(
    ("name", "extent", "options", "bound"),
    [
        ("resnet50", 32, PRESERVED, AS_THEY_ARE), ("densenet121", 32, PRESERVED, AS_THEY_ARE),
        ("googlenet", 64, PRESERVED, AS_THEY_ARE), ("regnet_y_400mf", 32, PRESERVED, AS_THEY_ARE),
        ("mobilenet_v3_large", 32, WITH_OPEN_BATCH, FOLDED), ("efficientnet_b0", 32, WITH_OPEN_BATCH, FOLDED),
        ("vgg16", 64, WITH_OPEN_BATCH, FOLDED), ("resnet18", 32, BY_DYNAMO, FOLDED),
        ("alexnet", 224, BY_DYNAMO, FOLDED),
    ],
)  # fmt: skip
def test_an_exported_model_computes_what_it_did(name, extent, options, bound, tmp_path):
    """By either exporter, batch norms folded or not, the batch open or not: the outputs are the module's."""
    module, x = zoo.build(name), zoo.images((3, extent, extent), n=3)
    network = load_onnx(exported(module, tmp_path / f"{name}.onnx", (3, extent, extent), options))
    assert (network.name, network.input_shape) == (name, (extent, extent, 3))
    if bound == AS_THEY_ARE:
        assert network.parameters == sum(parameter.numel() for parameter in module.parameters())
    with torch.no_grad():
        want = module.double()(torch.tensor(x)).numpy()
    np.testing.assert_allclose(
        zoo.outputs(network, x).reshape(want.shape), want, rtol=0, atol=bound * np.abs(want).max()
    )


def test_convnext_has_its_layers_and_parameters(tmp_path):
    """ConvNeXt, whose file spells GELU as a product with an error function: the layers that `from_torch` gives."""
    module = zoo.build("convnext_tiny")
    found = load_onnx(exported(module, tmp_path / "convnext.onnx", (3, 32, 32), PRESERVED))
    want = from_torch(module, (3, 32, 32))
    alike = [
        collections.Counter((node.layer.type, node.layer.input_shape) for node in each.nodes) for each in (found, want)
    ]
    assert alike[0] == alike[1]
    assert found.parameters == want.parameters
    assert {type(layer) for layer in found.layers} >= {GELU, LayerNorm, LayerScale}


@pytest.mark.parametrize("options", [PRESERVED, BY_DYNAMO], ids=["by trace", "by dynamo"])
def test_a_vision_transformer_that_was_exported_has_its_numbers(options, tmp_path):
    """Attention in some thirty nodes a block, class token and positions: one layer each, and the engine runs them."""
    module, x = zoo.vision_transformer(), zoo.images((3, 32, 32))
    network = load_onnx(exported(module, tmp_path / "vit.onnx", (3, 32, 32), options))
    assert collections.Counter(layer.type for layer in network.layers) == {
        "conv2d": 1, "tokens": 1, "layer_norm": 5, "attention": 2, "add": 4, "linear": 5, "gelu": 2, "class_token": 1,
    }  # fmt: skip
    assert network.parameters == sum(parameter.numel() for parameter in module.parameters())
    with torch.no_grad():
        want = module.double()(torch.tensor(x)).numpy()
    found = zoo.outputs(network, x).reshape(want.shape)
    np.testing.assert_allclose(found, want, rtol=0, atol=AS_THEY_ARE * np.abs(want).max())


# --- files written by hand -------------------------------------------------------------------------------------

FLOAT = onnx.TensorProto.FLOAT
RANDOM = np.random.default_rng(3)


IMAGES = ("n", 3, 8, 7)


def written(path, nodes, constants, *, opset=20, shape=IMAGES, outputs="y"):
    """Write a file of some nodes whose input is x."""
    options = {"opset": opset, "domain": "com.example"}
    return onnx_files.written(path, nodes, {"x": ("FLOAT", shape)}, outputs, **options, **constants)


def node(kind, reads, result="y", **attributes):
    """A node that is called what it makes."""
    return helper.make_node(kind, reads.split(), result.split(), name=f"/block/{result}", **attributes)


def drawn(*shape):
    """Random float32 numbers."""
    return RANDOM.standard_normal(shape).astype(np.float32)


def attention(**softmax):
    """Nodes of attention of two heads on 5 tokens of 4 channels, projected, the bias apart."""
    heads = [
        each
        for name, order in {"q": [0, 2, 1, 3], "k": [0, 2, 3, 1], "v": [0, 2, 1, 3]}.items()
        for each in (
            node("MatMul", f"x w{name}", f"{name}0"), node("Reshape", f"{name}0 heads", f"{name}1"),
            node("Transpose", f"{name}1", name, perm=order),
        )
    ]  # fmt: skip
    return [
        *heads, node("MatMul", "q k", "a"), node("Mul", "a scale", "b"), node("Softmax", "b", "c", **softmax),
        node("MatMul", "c v", "d"), node("Transpose", "d", "e", perm=[0, 2, 1, 3]), node("Reshape", "e flat", "f"),
        node("MatMul", "f wo", "g"), node("Add", "bias g"),
    ]  # fmt: skip


FILTER = drawn(4, 3, 3, 2)
HEADS = {
    **{name: drawn(4, 4) for name in ("wq", "wk", "wv", "wo")},
    "heads": [0, 5, 2, 2], "flat": [0, 5, 4], "scale": np.float32(2**-0.5), "bias": drawn(4),
}  # fmt: skip
HAND = {
    "same at the end": ([node("Conv", "x w", auto_pad="SAME_UPPER", strides=[2, 2])], {"w": FILTER}),
    "same in front": ([node("Conv", "x w", auto_pad="SAME_LOWER", dilations=[1, 2])], {"w": FILTER}),
    "zeros around": (
        [node("Pad", "x pads", "a"), node("Conv", "a w b")],
        {"pads": [0, 0, 1, 0, 0, 0, 2, 1], "w": FILTER, "b": drawn(4)},
    ),
    "zeros around, by a list of one": (
        [node("Pad", "x pads value", "a"), node("Conv", "a w b")],
        {"pads": [0, 0, 1, 0, 0, 0, 2, 1], "value": np.zeros(1, np.float32), "w": FILTER, "b": drawn(4)},
    ),
    "linear layers": (
        [node("Flatten", "x", "a"), node("Gemm", "a w b", "c"), node("Relu", "c", "d"), node("MatMul", "d v", "e"),
         node("Add", "e u")],
        {"w": drawn(168, 6), "b": drawn(6), "v": drawn(6, 5), "u": drawn(5)},
    ),
    "norm": (
        [node("BatchNormalization", "x gamma beta mean var", momentum=0.8, epsilon=1e-3)],
        {"gamma": drawn(3), "beta": drawn(3), "mean": drawn(3), "var": np.abs(drawn(3))},
    ),
    "a norm whose scale is one number": (
        [node("Flatten", "x", "a"), node("LayerNormalization", "a one beta", "b"), node("Gemm", "b w")],
        {"one": np.float32([1.5]), "beta": drawn(168), "w": drawn(168, 4)},
    ),
    "pools": (
        [node("MaxPool", "x", "a", kernel_shape=[3, 2], strides=[2, 1], pads=[1, 0, 0, 1]),
         node("AveragePool", "a", kernel_shape=[2, 2], pads=[1, 1, 0, 0], count_include_pad=1)],
        {},
    ),
    "clips": ([node("Clip", "x zero six", "a"), node("Clip", "a zero")], {"zero": np.float32(0), "six": np.float32(6)}),
    "curves": (
        [node("HardSigmoid", "x", "a", alpha=1 / 6), node("Mul", "a x", "b"), node("Sigmoid", "b", "c"),
         node("Mul", "b c")],
        {},
    ),
    "excited": (
        [node("ReduceMean", "x axes", "a"), node("Mul", "x a", "b"), node("Concat", "b x", axis=-3)],
        {"axes": [2, 3]},
    ),
    "shape from the input": (
        [node("Shape", "x", "a", end=1), node("Concat", "a rest", "b", axis=0), node("Reshape", "x b", "c"),
         node("Softmax", "c", "d"), node("Gemm", "d w")],
        {"rest": [-1], "w": drawn(168, 4)},
    ),
    "in parts": (
        [node("Split", "x", "a b c", axis=1, num_outputs=3), node("Relu", "b", "d"),
         node("Slice", "x start end axis", "e"), node("Concat", "e c d", axis=1)],
        {"start": [-2], "end": [2**31], "axis": [1]},
    ),
    "a constant squeezed by an older version": (
        [node("Squeeze", "row", "a", axes=[0]), node("Mul", "x a")], {"row": drawn(1, 3, 1, 1)}, {"opset": 11},
    ),
    "flattened by an older version": (
        [node("Shape", "x", "a"), node("Gather", "a zero", "b", axis=0), node("Unsqueeze", "b", "c", axes=[0]),
         node("Concat", "c rest", "d", axis=0), node("Reshape", "x d", "e"), node("Gemm", "e w")],
        {"zero": 0, "rest": [-1], "w": drawn(168, 4)}, {"opset": 11},
    ),
    "sums of two and of one": (
        [node("Flatten", "x", "a"), node("MatMul", "a w", "b"), node("Sum", "b u", "c"), node("Sum", "c")],
        {"w": drawn(168, 4), "u": drawn(4)},
    ),
    "clipped at the largest number": (
        [node("Clip", "x zero large")], {"zero": np.float32(0), "large": np.finfo(np.float32).max},
    ),
    "a part that nobody reads": (
        [helper.make_node("Split", ["x", "sizes"], ["", "a"], axis=1), node("Relu", "a")], {"sizes": [1, 2]},
    ),
    "attention whose bias is apart": (attention(axis=-1), HEADS, {"shape": ("n", 5, 4)}),
    "squeezed": (
        [node("GlobalAveragePool", "x", "a"), node("Squeeze", "a axes", "b"), node("Unsqueeze", "b axes", "c"),
         node("Relu", "c")],
        {"axes": [2, 3]},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", HAND)
def test_a_file_by_hand_computes_what_onnx_says(case, tmp_path):
    """Beside the interpreter that defines the format, in float32: 2^-24 in sums of at most 168 terms."""
    nodes, constants, options = (*HAND[case], {})[:3]
    path = written(tmp_path / "hand.onnx", nodes, constants, **options)
    x = zoo.images(options.get("shape", IMAGES)[1:]).astype(np.float32)
    (want,) = onnx.reference.ReferenceEvaluator(str(path)).run(None, {"x": x})
    found = zoo.outputs(load_onnx(path), x)
    if want.ndim == 4:
        want = want.transpose(0, 2, 3, 1)
    assert want.std() > 0
    np.testing.assert_allclose(found.reshape(want.shape), want, rtol=0, atol=168 * 2**-24 * np.abs(want).max())


def test_an_input_that_is_turned_to_have_its_channels_first_has_them_last(tmp_path):
    """As tf2onnx writes it: (h, w, c) are ours, too; where the input is read otherwise as well, it is as any other."""
    nodes = [node("Transpose", "x", "a", perm=[0, 3, 1, 2]), node("Conv", "a w", "b"), node("Relu", "b")]
    path = written(tmp_path / "turned.onnx", nodes, {"w": FILTER}, shape=("n", 8, 7, 3))
    network, x = load_onnx(path), zoo.images((8, 7, 3)).astype(np.float32)
    assert (network.input_shape, [layer.type for layer in network.layers]) == ((8, 7, 3), ["conv2d", "relu"])
    (want,) = onnx.reference.ReferenceEvaluator(str(path)).run(None, {"x": x})
    found = zoo.outputs(network, x.transpose(0, 3, 1, 2)).transpose(0, 3, 1, 2)
    np.testing.assert_allclose(found, want, rtol=0, atol=168 * 2**-24 * np.abs(want).max())
    nodes = [nodes[0], node("Relu", "a", "b"), node("Transpose", "b", "c", perm=[0, 2, 3, 1]), node("Add", "c x")]
    path = written(tmp_path / "as_well.onnx", nodes, {}, shape=("n", 8, 7, 3))
    assert load_onnx(path, opaque=True).input_shape == (7, 3, 8)


def test_a_file_is_read_where_nothing_else_of_onnx_was_imported(tmp_path):
    """In a process of its own, a shape that is computed from constants in the file."""
    nodes, constants = HAND["shape from the input"]
    path = written(tmp_path / "hand.onnx", nodes, constants)
    code = f"import cubatch; print(cubatch.load_onnx({str(path)!r}).parameters)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(168 * 4)]


def test_statistics_are_kept_as_our_momentum_has_them(tmp_path):
    """The format's momentum is the share of the old statistics, ours that of the new."""
    network = load_onnx(written(tmp_path / "norm.onnx", *HAND["norm"]))
    assert network.layers[0].momentum == pytest.approx(0.2)
    assert set(network.weights["block/y"]) == {"gamma", "beta", "mean", "var"}
    frozen = [node("BatchNormalization", "x gamma beta mean var", momentum=1.0)]
    kept = load_onnx(written(tmp_path / "kept.onnx", frozen, HAND["norm"][1]))
    assert kept.layers[0].momentum == 0


REFUSED = {
    "unknown": ([node("CumSum", "x axis")], {"axis": 1}, ("CumSum", "block/y", "no layer")),
    "of another domain": (
        [helper.make_node("Gadget", ["x"], ["a"], domain="com.example"), node("Relu", "a")],
        {},
        ("com.example.Gadget", "a", "infer the shape"),
    ),
    "channels apart": (
        [node("Conv", "x w", "a"), node("Reshape", "a shape", "b"), node("Gather", "b index", "c", axis=2),
         node("Relu", "c")],
        {"w": FILTER[:, :, :1, :1], "shape": [-1, 2, 2, 8, 7], "index": 1},
        ("Relu", "block/y", "not a contiguous range"),
    ),
    "turned around": (
        [node("Relu", "x", "a"), node("Slice", "a start end axis step") ],
        {"start": [-1], "end": [-(2**31)], "axis": [3], "step": [-1]},
        ("Slice", "block/y", "takes steps"),
    ),
    "a bias of the input's": (
        [node("Flatten", "x", "a"), node("Gemm", "a w", "b"), node("Gemm", "a w b")],
        {"w": drawn(168, 2)},
        ("Gemm", "block/y", "2 values that depend"),
    ),
    "a row for each sample": (
        [node("Flatten", "x", "a"), node("Gemm", "a w b")],
        {"w": drawn(168, 4), "b": drawn(2, 4)},
        ("Gemm", "block/y", "another row"),
    ),
    "a number for each sample": (
        [node("Flatten", "x", "a"), node("Gemm", "a w b")],
        {"w": drawn(168, 4), "b": drawn(4, 1)},
        ("Gemm", "block/y", "another row"),
        {"shape": (4, 3, 8, 7)},
    ),
    "whole numbers": (
        [node("Cast", "x", "a", to=onnx.TensorProto.INT32), node("Cast", "a", to=onnx.TensorProto.FLOAT)],
        {},
        ("Cast", "block/a", "whole numbers"),
    ),
    "slope": ([node("HardSigmoid", "x")], {}, ("HardSigmoid", "block/y", "slope is 0.2")),
    "bound": ([node("Clip", "x one")], {"one": np.float32(1)}, ("Clip", "block/y", "bounds")),
    "scaled": (
        [node("Flatten", "x", "a"), node("Gemm", "a w", alpha=0.5)],
        {"w": drawn(168, 2)},
        ("Gemm", "block/y", "scaled"),
    ),
    "constant": ([node("Mul", "x two")], {"two": np.float32(2)}, ("Mul", "block/y", "no factor for each channel")),
    "ones around": (
        [node("Pad", "x pads value")],
        {"pads": [0, 0, 1, 1, 0, 0, 1, 1], "value": np.ones(1, np.float32)},
        ("Pad", "block/y", "else than zeros"),
    ),
    "reflected": (
        [node("Pad", "x pads", mode="reflect")],
        {"pads": [0, 0, 1, 1, 0, 0, 1, 1]},
        ("Pad", "block/y", "else than zeros"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_an_operator_without_a_layer_is_named_with_its_node(case, tmp_path):
    """Operator with its domain, node, and reason."""
    nodes, constants, (operator, place, reason), options = (*REFUSED[case], {})[:4]
    path = written(tmp_path / "hand.onnx", nodes, constants, **options)
    with pytest.raises(UnsupportedOperator) as caught:
        load_onnx(path)
    assert (caught.value.operator, caught.value.place) == (operator, place)
    assert reason in caught.value.reason
    assert f'call cubatch.autotune("{path}", library="onnxruntime")' in str(caught.value)


def test_a_constant_that_is_sparse_is_refused(tmp_path):
    """Opaque or not, by its name: no operator makes it."""
    path = written(tmp_path / "sparse.onnx", [node("Flatten", "x", "a"), node("MatMul", "a w")], {})
    model, make = onnx.load(path), onnx.numpy_helper.from_array
    sparse = helper.make_sparse_tensor(make(drawn(2), "w"), make(np.array([3, 9])), [168, 4])
    model.graph.sparse_initializer.append(sparse)
    onnx.save(model, path)
    for opaque in (False, True):
        with pytest.raises(UnsupportedOperator, match=r"MatMul at 'block/y' .* reads 'w', which no operator before it"):
            load_onnx(path, opaque=opaque)


NORM = {"gamma": drawn(3), "beta": drawn(3), "mean": drawn(3), "var": np.abs(drawn(3))}
REFUSED |= {
    "a bias for one of two readers": (
        [node("Conv", "x w", "a"), node("Identity", "a", "b"), node("Add", "b bias", "c"), node("Add", "c a")],
        {"w": FILTER, "bias": drawn(4, 1, 1)},
        ("Add", "block/c", "which nothing else reads"),
    ),
    "a norm with a scale for each token": (
        [node("LayerNormalization", "x scale beta", axis=-1)], {"scale": drawn(7, 1), "beta": drawn(7)},
        ("LayerNormalization", "block/y", "not one number for each channel"), {"shape": ("n", 7, 7)},
    ),
    "a dilated average": (
        [node("AveragePool", "x", kernel_shape=[2, 2], dilations=[2, 2])], {}, ("AveragePool", "block/y", "dilated"),
    ),
    "dropout in training": (
        [node("Dropout", "x share mode")], {"share": np.float32(0.5), "mode": True},
        ("Dropout", "block/y", "training mode"),
    ),
    "dropout in training, as it was": (
        [node("Dropout", "x")], {}, ("Dropout", "block/y", "training mode"), {"opset": 6},
    ),
    "statistics of the batch": (
        [helper.make_node("BatchNormalization", ["x", *NORM], ["y", "m", "v"])], NORM,
        ("BatchNormalization", "y", "training mode"), {"opset": 9},
    ),
    "statistics of the batch, as it was": (
        [node("BatchNormalization", f"x {' '.join(NORM)}")], NORM,
        ("BatchNormalization", "block/y", "training mode"), {"opset": 6},
    ),
    "attention over all positions": (
        attention(), HEADS, ("MatMul", "block/a", "both depend on"), {"opset": 11, "shape": ("n", 5, 4)},
    ),
    "dropout of everything": (
        [node("Dropout", "x share")], {"share": np.float32(1)}, ("Dropout", "block/y", "drops everything in training"),
    ),
    "random": (
        [node("RandomNormal", "", "a", shape=[3, 1, 1]), node("Mul", "x a")], {},
        ("RandomNormal", "block/a", "draws random numbers"),
    ),
    "a constant times a value": (
        [node("MatMul", "w x")], {"w": drawn(8, 8)}, ("MatMul", "block/y", "first input does not depend"),
    ),
    "a single number": (
        [node("ReduceMean", "x", "a", keepdims=0), node("Mul", "x a")], {},
        ("ReduceMean", "block/a", "a single number"),
    ),
}  # fmt: skip
RELU = ([node("Relu", "x")], {})


@pytest.mark.parametrize(
    ("shape", "told"), [(("n", 3, "height", "width"), "'height', 'width'"), ((-1, 3, -1, -1), "3")]
)
def test_a_shape_that_the_file_leaves_open_is_asked_for_and_given(shape, told, tmp_path):
    """By name, or as -1 of some exporters: refused without input_shape, which must be of as many axes."""
    path = written(tmp_path / "open.onnx", *RELU, shape=shape)
    with pytest.raises(InvalidSpec, match=rf"{told}.*Give input_shape"):
        load_onnx(path)
    assert load_onnx(path, input_shape=(3, 6, 5)).input_shape == (6, 5, 3)
    with pytest.raises(InvalidArgument, match="3 whole numbers"):
        load_onnx(path, input_shape=(6, 5))


def test_an_input_without_any_axes_has_those_that_are_given(tmp_path):
    """In the file's order, or as (h, w, c): an image, tokens or features."""
    path = written(tmp_path / "open.onnx", *RELU, shape=None)
    with pytest.raises(InvalidSpec, match="Give input_shape"):
        load_onnx(path)
    for shape, extents in {(3, 6, 5): (6, 5, 3), (6, 3): (6, 1, 3), (3,): (1, 1, 3)}.items():
        assert load_onnx(path, input_shape=shape).input_shape == extents
        assert models.resolve(path, input_shape=extents).input_shape == extents
    for wrong in (6, (), (3, 0, 5)):
        with pytest.raises(InvalidArgument, match="one for each axis behind the batch"):
            load_onnx(path, input_shape=wrong)


CONV, TURN = node("Conv", "x w"), [node("Transpose", "x", "a", perm=[0, 3, 1, 2]), node("Conv", "a w")]
RESHAPED = [node("Shape", "x", "s"), *TURN]
ORDERS = {
    "channels first": ([CONV], ("n", 3, "h", "w"), (6, 5, 3)),
    "nothing fixed": ([CONV], ("n", "c", "h", "w"), (6, 5, 3)),
    "channels last": (TURN, ("n", "h", "w", 3), (6, 5, 3)),
    "nothing fixed and turned": (TURN, ("n", "a", "b", "c"), (6, 5, 3)),
    "turned, and its shape read": (RESHAPED, ("n", "a", "b", "c"), (6, 5, 3)),
    "three of each": (TURN, ("n", "h", 3, 3), (6, 3, 3)),
    "all fixed": ([CONV], ("n", 3, 6, 5), (6, 5, 3)),
    "tokens": ([node("Relu", "x")], ("n", "tokens", 4), (7, 1, 4)),
    "features": ([node("Relu", "x")], ("n", "features"), (1, 1, 9)),
}


@pytest.mark.parametrize("case", ORDERS)
def test_extents_that_are_channels_last_are_put_in_the_files_order(case, tmp_path):
    """As --input-shape gives them: the network's input is (h, w, c), whichever axes the file has and leaves open."""
    nodes, shape, extents = ORDERS[case]
    path = written(tmp_path / "open.onnx", nodes, {"w": FILTER}, shape=shape)
    assert models.resolve(path, input_shape=extents).input_shape == extents


@pytest.mark.parametrize(
    ("shape", "extents"),
    [
        (("n", 3, "h", "w"), (6, 5, 4)), (("n", "tokens", 4), (7, 2, 4)), (("n", "features"), (9, 1, 1)),
        (("n",), (1, 1, 1)),
    ],
)  # fmt: skip
def test_extents_that_contradict_the_file_are_refused(shape, extents, tmp_path):
    """Another number than one that is fixed, and images where there are tokens or features: its axes are said."""
    path = written(tmp_path / "open.onnx", [node("Relu", "x")], {}, shape=shape)
    with pytest.raises(InvalidArgument, match=r"^input_shape must be \(h, w, c\) .* open\.onnx, \("):
        models.resolve(path, input_shape=extents)


def test_what_is_no_network_of_ours_says_so(tmp_path):
    """No file, no ONNX, two outputs, two inputs, an output that depends on none."""
    (tmp_path / "text.onnx").write_text("no protobuf")
    for name, needed in (("missing.onnx", "a file that exists"), ("text.onnx", "a file that onnx can read")):
        with pytest.raises(InvalidSpec, match=needed):
            load_onnx(tmp_path / name)
    two = [node("Relu", "x", "a"), node("Relu", "x", "b")]
    with pytest.raises(InvalidSpec, match=r"a single output, not a, b.* To tune the file as it is, call"):
        load_onnx(written(tmp_path / "two.onnx", two, {}, outputs="a b"))
    path = written(tmp_path / "inputs.onnx", [node("Add", "x z")], {})
    model = onnx.load(path)
    model.graph.input.append(helper.make_tensor_value_info("z", FLOAT, (1, 3, 8, 7)))
    onnx.save(model, path)
    with pytest.raises(InvalidSpec, match="a single input, not x, z"):
        load_onnx(path)
    with pytest.raises(InvalidSpec, match="output depends on its input"):
        load_onnx(written(tmp_path / "alone.onnx", [node("Identity", "w")], {"w": drawn(2, 3)}))
