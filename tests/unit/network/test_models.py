"""The named networks against their published counts."""

from __future__ import annotations

import json
import pickle
import sys
import types
import warnings
from pathlib import Path
from typing import Any

import pytest

from cubatch.errors import InvalidArgument, UnknownName
from cubatch.network import models
from cubatch.network.layers import Conv2d, Softmax
from cubatch.network.specfile import from_mapping

pytestmark = pytest.mark.case("mobilenet-v100")

# Parameters and giga multiply-adds as torchvision prints them with its weights (num_params and _ops of the
# IMAGENET1K_V1 entries in torchvision/models/*.py, v0.15 on); deit-tiny from timm's model card
# (huggingface.co/timm/deit_tiny_patch16_224.fb_in1k: 1.3 GMACs) and its parameters from the ONNX export of the same
# model (onnxmodelzoo/deit_tiny_patch16_224_Opset16); vit-small is deit_small_patch16_224 (its card: 22.1 M, 4.6 GMACs),
# with 384 x 768 + 384 + 198 x 384 parameters of tokens, 12 x (12 x 384^2 + 13 x 384) of blocks, 2 x 384 of the last
# norm and 1000 x 385 of the head.
PUBLISHED = {
    "alexnet": (61_100_840, 0.714, 0.0005),
    "vgg11": (132_863_336, 7.609, 0.0005),
    "vgg13": (133_047_848, 11.308, 0.0005),
    "vgg16": (138_357_544, 15.47, 0.005),
    "vgg19": (143_667_240, 19.632, 0.0005),
    "googlenet": (6_624_904, 1.498, 0.0005),
    "resnet18": (11_689_512, 1.814, 0.0005),
    "resnet34": (21_797_672, 3.664, 0.0005),
    "resnet50": (25_557_032, 4.089, 0.0005),
    "resnet101": (44_549_160, 7.801, 0.0005),
    "resnet152": (60_192_808, 11.514, 0.0005),
    "densenet121": (7_978_856, 2.834, 0.0005),
    "mobilenet-v3-large": (5_483_032, 0.217, 0.0005),
    "efficientnet-b0": (5_288_548, 0.386, 0.0005),
    "convnext-tiny": (28_589_128, 4.456, 0.0005),
    "deit-tiny": (5_717_416, 1.3, 0.05),
    "vit-small": (22_050_664, 4.6, 0.05),
    "vit-base": (86_567_656, 17.564, 0.0005),
}

# Counted by hand from the layers' extents, as textbooks do.
COUNTED = {
    "mlp": 1000 * 100 + 100 + 3 * (100 * 100 + 100) + 100 * 10 + 10,
    "mnist-cnn": (9 * 32 + 32) + (9 * 32 * 64 + 64) + (7 * 7 * 64 * 128 + 128) + (128 * 10 + 10),
    "lenet5": 61_706,  # d2l.ai, section 7.6, and LeCun et al. 1998 with all maps connected
    "go-net": 80 * (9 * 128 * 128 + 128),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_and_multiply_adds_are_those_published(name: str) -> None:
    """A network is the one of that name only if both of its published counts come out."""
    parameters, giga, rounding = PUBLISHED[name]
    net = models.build(name)
    assert net.parameters == parameters
    assert abs(net.flops() / 2e9 - giga) <= rounding


@pytest.mark.parametrize("name", COUNTED)
def test_parameters_of_small_networks_are_those_counted_by_hand(name: str) -> None:
    """The networks without a published table have the sum of their layers' weights and biases."""
    assert models.build(name).parameters == COUNTED[name]


def test_training_lenet5_counts_the_multiply_adds_of_its_layers() -> None:
    """By hand: 28x28 and 10x10 outputs of 5x5 filters, three linear layers, and no gradient of the image."""
    first, second = 28 * 28 * 6 * 25, 10 * 10 * 16 * 25 * 6
    linear = 400 * 120 + 120 * 84 + 84 * 10
    net = models.build("lenet5")
    assert net.flops() == 2 * (first + second + linear)
    assert net.flops("training") == 2 * (2 * first + 3 * (second + linear))


def test_every_network_is_checked() -> None:
    """A network that is added needs a figure of its own here."""
    assert set(models.names()) == {*PUBLISHED, *COUNTED}


@pytest.mark.parametrize("name", models.names())
def test_networks_end_in_logits(name: str) -> None:
    """Softmax belongs to the loss, so no network ends in it, and the output has one number per class."""
    net = models.build(name)
    assert not any(isinstance(layer, Softmax) for layer in net.layers)
    classes = {"go-net": (19, 19, 128)}.get(name, (1, 1, 10 if name in COUNTED else 1000))
    assert net.output_shape == classes


@pytest.mark.parametrize("name", models.names())
def test_networks_survive_mapping_and_pickle(name: str) -> None:
    """What a spec file or a worker's pipe carries is the same network, and equal networks hash alike."""
    net = models.build(name)
    for again in (from_mapping(net.to_mapping()), pickle.loads(pickle.dumps(net))):
        assert again == net
        assert hash(again) == hash(net)
        assert again.nodes == net.nodes


@pytest.mark.parametrize("name", sorted(set(models.names()) - {"go-net"}))
def test_classes_change_the_last_layer_only(name: str) -> None:
    """Asking for 7 classes gives 7 logits and leaves every other layer as it was."""
    usual, net = models.build(name), models.build(name, classes=7)
    assert net.output_shape == (1, 1, 7)
    assert net.layers[:-1] == usual.layers[:-1]


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("mlp", (28, 28, 1)),
        ("mnist-cnn", (32, 32, 3)),
        ("lenet5", (32, 32, 3)),
        ("alexnet", (416, 416, 3)),
        ("vgg16", (448, 224, 3)),
        ("googlenet", (96, 96, 3)),
        ("resnet18", (32, 32, 3)),
        ("resnet50", (160, 192, 4)),
        ("mobilenet-v3-large", (32, 32, 1)),
        ("densenet121", (64, 96, 3)),
        ("efficientnet-b0", (64, 64, 3)),
        ("convnext-tiny", (64, 64, 3)),
        ("deit-tiny", (64, 64, 3)),
        ("go-net", (9, 9, 17)),
    ],
)
def test_other_input_shapes_work(name: str, shape: tuple[int, int, int]) -> None:
    """A network that pools over all positions, or to equal windows, takes other sizes."""
    net = models.build(name, input_shape=shape)
    assert net.input_shape == shape
    assert net.nodes[0].layer.input_shapes == (shape,)


def test_first_convolution_of_resnet_is_the_stem() -> None:
    """Extents of a well-known layer, from the paper: 7 x 7, 64, stride 2 gives 112 x 112."""
    stem = models.build("resnet50").nodes[0].layer
    assert isinstance(stem, Conv2d)
    assert stem.output_shape == (112, 112, 64)


@pytest.mark.parametrize(
    ("name", "options", "field", "says"),
    [
        ("vgg16", {"input_shape": (100, 100, 3)}, "input_shape", "multiples of 7"),
        ("alexnet", {"input_shape": (16, 16, 3)}, "input_shape", "(224, 224, 3)"),
        ("resnet18", {"input_shape": (224, 224)}, "input_shape", "three whole numbers"),
        ("resnet18", {"input_shape": (224, 0, 3)}, "input_shape", "from 1"),
        ("resnet18", {"classes": 0}, "classes", "got 0"),
        ("go-net", {"classes": 10}, "classes", "no classifier"),
    ],
)
def test_bad_arguments_name_field_and_remedy(name: str, options: dict[str, Any], field: str, says: str) -> None:
    """A shape or number of classes that cannot be is refused by field, value and what would do."""
    with pytest.raises(InvalidArgument) as caught:
        models.build(name, **options)
    assert caught.value.field == field
    assert repr(caught.value.value) in str(caught.value)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("spelled", "name"),
    [
        ("ResNet50", "resnet50"), ("resnet-50", "resnet50"), ("VGG-16", "vgg16"), ("MNIST CNN", "mnist-cnn"),
        ("mobilenet_v3_large", "mobilenet-v3-large"), ("EfficientNet-B0", "efficientnet-b0"),
    ],
)  # fmt: skip
def test_names_are_read_in_any_case_with_or_without_hyphens(spelled: str, name: str) -> None:
    """Papers, torchvision and users spell one network in several ways, and get the one network, under its own name."""
    assert models.resolve(spelled, classes=7) == models.build(name, classes=7)
    assert models.build(spelled).name == name


def test_a_mistyped_name_lists_near_ones() -> None:
    """A typo is answered with the name that was meant."""
    with pytest.raises(UnknownName) as caught:
        models.build("resnet5O")
    assert "resnet50" in caught.value.near


def test_resolve_reads_every_form_of_a_spec(tmp_path: Path) -> None:
    """A model's name, a mapping, a file and the network itself all stand for the same network."""
    net = models.build("mlp")
    path = tmp_path / "net.json"
    path.write_text(json.dumps(net.to_mapping()), encoding="utf-8")
    assert [models.resolve(form) for form in ("mlp", net.to_mapping(), path, str(path), net)] == [net] * 5


def test_a_file_here_does_not_hide_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file or folder called as a model is, in whatever case, is not read; with a path in front it is."""
    monkeypatch.chdir(tmp_path)
    Path("MLP").touch()
    Path("lenet5").mkdir()
    assert [models.resolve(name) for name in ("MLP", "lenet5")] == [models.build(name) for name in ("mlp", "lenet5")]
    with pytest.raises(InvalidArgument, match=r"\.toml"):
        models.resolve("./MLP")


@pytest.mark.parametrize("form", [3, None, ["mlp"]])
def test_resolve_refuses_what_is_no_spec(form: object) -> None:
    """Anything else is refused, with the forms that would do."""
    with pytest.raises(InvalidArgument) as caught:
        models.resolve(form)
    assert "Network" in str(caught.value)


@pytest.mark.parametrize("name", ["model.pt", "weights.safetensors", Path("last.ckpt")])
def test_a_file_of_weights_names_the_way_in(name: str | Path) -> None:
    """A PyTorch user's first try: it says what the file lacks, and the three things that do work."""
    with pytest.raises(InvalidArgument, match=r"package\.module:build.*\.onnx.*autotune_module"):
        models.resolve(name)


def test_what_is_no_spec_names_the_function_that_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of PyTorch and a callable each have one; PyTorch is not loaded to find out."""

    class Module:
        pass

    monkeypatch.setitem(sys.modules, "torch.nn", types.SimpleNamespace(Module=Module))
    with pytest.raises(InvalidArgument, match=r"autotune_module\(module"):
        models.resolve(Module())  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match=r"autotune_callable\(make_step\)"):
        models.resolve(lambda n: n)  # type: ignore[arg-type, misc]


def test_channels_first_shapes_draw_a_warning() -> None:
    """(3, 224, 224) is legal, and nearly always channels put first by mistake."""
    with pytest.warns(UserWarning, match=r"write \(224, 224, 3\)"):
        models.build("go-net", input_shape=(3, 224, 224))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        models.build("go-net", input_shape=(3, 224, 3))
