"""Weights of networks in files, and state dicts of modules with our layers' names: what is refused, and how."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from cubatch import array_file
from cubatch.errors import InvalidArgument, InvalidData
from cubatch.network import models
from cubatch.network.graph import Network
from cubatch.network.layers import BatchNorm2d, Conv2d, Dropout, Flatten, Linear, Opaque, ReLU
from cubatch.network.weight_files import from_state_dict, load_weights, save_weights, to_state_dict

LAYERS = [
    Conv2d(name="a.conv", k=2, r=2, s=1),
    BatchNorm2d(name="norm"),
    ReLU(),
    Flatten(),
    Dropout(),
    Linear(name="fc", k=2),
]
NETWORK = Network(input_shape=(3, 2, 3), layers=LAYERS, name="small")
SHAPES = {
    "a.conv.w": (2, 2, 1, 3), "a.conv.b": (2,), "norm.gamma": (2,), "norm.beta": (2,), "norm.mean": (2,),
    "norm.var": (2,), "fc.w": (2, 8), "fc.b": (2,),
}  # fmt: skip


def arrays():
    """Numbers for every array of the network, each once, by the names of the file."""
    numbers = iter(range(1000))
    return {
        key: np.array([next(numbers) for _ in range(int(np.prod(shape)))], np.float32).reshape(shape)
        for key, shape in SHAPES.items()
    }


def file(tmp_path, found):
    """A file of ours with these arrays."""
    path = tmp_path / "w.safetensors"
    told = {"version": 1, "network": "small", "dtype": "float32"}
    array_file.write(path, found, {"cubatch weights": json.dumps(told)})
    return path


@pytest.mark.parametrize("ending", array_file.ENDINGS)
def test_weights_are_kept_with_what_they_are(tmp_path, ending):
    """The file's tensors by layer and array, its network, version and dtype."""
    network = load_weights(NETWORK, file(tmp_path, arrays()))
    save_weights(network, tmp_path / f"again{ending}")
    found, notes = array_file.read(tmp_path / f"again{ending}")
    told = json.loads(notes.pop("cubatch weights"))
    assert (told, notes) == ({"version": 1, "network": "small", "dtype": "float32"}, {})
    first = (tmp_path / f"again{ending}").read_bytes()
    save_weights(network, tmp_path / f"again{ending}")
    assert (tmp_path / f"again{ending}").read_bytes() == first
    assert found.keys() == SHAPES.keys()
    assert all(np.array_equal(found[key], array) for key, array in arrays().items())


def test_a_state_dict_has_channels_before_pixels():
    """Each number of a filter and of the linear layer behind the flatten is at the place that PyTorch reads it from."""
    found = arrays()
    network = NETWORK.__class__(
        input_shape=NETWORK.input_shape, layers=LAYERS, name="small",
        weights={"a.conv": {"w": found["a.conv.w"], "b": found["a.conv.b"]},
                 "norm": {name: found[f"norm.{name}"] for name in ("gamma", "beta", "mean", "var")},
                 "fc": {"w": found["fc.w"], "b": found["fc.b"]}},
    )  # fmt: skip
    state = to_state_dict(network)
    assert state.keys() == {
        "a.conv.weight", "a.conv.bias", "norm.weight", "norm.bias", "norm.running_mean", "norm.running_var",
        "norm.num_batches_tracked", "fc.weight", "fc.bias",
    }  # fmt: skip
    for k, r, s, c in np.ndindex(2, 2, 1, 3):
        assert state["a.conv.weight"][k, c, r, s] == found["a.conv.w"][k, r, s, c]
    for k, h, w, c in np.ndindex(2, 2, 2, 2):
        assert state["fc.weight"][k, (c * 2 + h) * 2 + w] == found["fc.w"][k, (h * 2 + w) * 2 + c]
    back = from_state_dict(NETWORK, state)
    for key, array in found.items():
        layer, _, name = key.rpartition(".")
        np.testing.assert_array_equal(back.weights[layer][name], array)
        assert back.weights[layer][name].dtype == np.float32
        assert back.weights[layer][name].flags.owndata or back.weights[layer][name].base.flags.owndata


REFUSED = [
    (lambda a: a.pop("fc.b"), r"lacks fc\.b \(2,\) of small"),
    (lambda a: a.update({"fd.b": a["fc.b"]}), r"holds fd\.b, which small does not have \(fc\.b is the nearest name\)"),
    (lambda a: a.update({"fc.w": a["fc.w"].T.copy()}), r"holds fc\.w of shape \(8, 2\), small needs \(2, 8\)"),
    (lambda a: a.update({"fc.b": np.ones(2, np.int64)}), r"fc\.b: holds elements of type int64"),
]


@pytest.mark.parametrize(("change", "told"), REFUSED)
def test_a_tensor_that_does_not_fit_is_named(tmp_path, change, told):
    """Missing, unknown, of another shape, or no floating-point numbers; the nearest name and both shapes are said."""
    found = arrays()
    change(found)
    with pytest.raises(InvalidData, match=told):
        load_weights(NETWORK, file(tmp_path, found))


def test_of_many_tensors_that_do_not_fit_the_first_are_named(tmp_path):
    """And the network that the file was saved from."""
    with pytest.raises(
        InvalidData, match=r"lacks .* and 3 more of lenet5, and holds .*\. It was saved from small: load it"
    ) as e:
        load_weights(models.build("lenet5"), file(tmp_path, {"x": np.ones(2, np.float32), **{
            key: np.ones(2, np.float32) for key in ("conv1.w", "conv1.b", "conv2.w", "conv2.b")}}))  # fmt: skip
    assert len(re.findall(r"\(\d", str(e.value))) == 3


@pytest.mark.parametrize(
    ("kind", "note", "told"),
    [
        (array_file.WEIGHTS, '{"version": 2, "network": "small", "dtype": "float32"}', "version 2"),
        *((array_file.WEIGHTS, note, r"w\.safetensors: is damaged")
          for note in ("x", "{}", "[]", "3", '{"version": 1}', "[" * 10**5)),
        (array_file.CHECKPOINT, "{}", r"is a checkpoint, and not only weights\. `cubatch train --checkpoint`"),
    ],
    ids=lambda value: value[:15],
)  # fmt: skip
def test_a_file_of_another_kind_is_refused(tmp_path, kind, note, told):
    """A later version, a note that names no weights, and a checkpoint, with the command that reads it."""
    array_file.write(tmp_path / "w.safetensors", arrays(), {kind: note})
    with pytest.raises(InvalidData, match=told):
        load_weights(NETWORK, tmp_path / "w.safetensors")


def test_a_network_without_all_weights_cannot_be_saved(tmp_path):
    """Drawn weights are of no one; what lacks is named."""
    for function in (to_state_dict, lambda network: save_weights(network, tmp_path / "w.npz")):
        with pytest.raises(InvalidArgument, match=r"a\.conv\.w, a\.conv\.b, .* and 5 more"):
            function(NETWORK)


@pytest.mark.parametrize("given", ["resnet18", None, {"layers": []}])
def test_weights_are_of_a_network(given, tmp_path):
    """The name of a network is none: each function rejects it by the name of its argument, before it reads a file."""
    calls = (
        lambda: save_weights(given, tmp_path / "w.npz"), lambda: load_weights(given, tmp_path / "w.npz"),
        lambda: from_state_dict(given, {}), lambda: to_state_dict(given),
    )  # fmt: skip
    for call in calls:
        with pytest.raises(InvalidArgument) as caught:
            call()
        assert caught.value.field == "network"
    with pytest.raises(InvalidArgument) as caught:
        Network(input_shape=(1, 1, 4), layers=[Linear(k=2)], weights=given if isinstance(given, str) else [given])
    assert caught.value.field == "weights"


def test_a_layer_without_a_rule_is_named():
    """An operator that was imported as bytes and FLOP alone has weights that no one knows the order of."""
    network = Network(input_shape=(1, 1, 4), layers=[Opaque(name="odd", weights=7), Linear(k=2)], name="imported")
    with pytest.raises(InvalidArgument, match=r"without opaque \(odd\)"):
        to_state_dict(network)


@pytest.mark.parametrize("names", [("aux1", "aux2"), ("AuxLogits.conv", "fc")])
def test_a_part_that_is_called_as_an_auxiliary_classifier_keeps_its_weights(names):
    """What a network's own layers are called is read, though GoogLeNet's classifiers of that name are not."""
    layers = [Linear(name=name, k=3) for name in names]
    found = {name: {"w": np.eye(3, dtype=np.float32) * 2, "b": np.ones(3, np.float32)} for name in names}
    network = Network(input_shape=(1, 1, 3), layers=layers, weights=found)
    back = from_state_dict(Network(input_shape=(1, 1, 3), layers=layers), to_state_dict(network))
    for name in names:
        np.testing.assert_array_equal(back.weights[name]["w"], found[name]["w"])
        np.testing.assert_array_equal(back.weights[name]["b"], found[name]["b"])


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"model": {"fc.bias": np.ones(2)}, "epoch": 3}, r"state_dict\['model'\] must be a tensor.*only the entry"),
        ({"fc.bias": [1.0, 2.0]}, r"state_dict\['fc\.bias'\] must be a tensor.*got \[1\.0, 2\.0\]"),
        ({3: np.ones(2)}, r"state_dict\[3\] must be a tensor, by a name that is text"),
        ([("fc.bias", np.ones(2))], r"state_dict must be tensors by name.*module\.state_dict\(\) returns them"),
        (object(), r"state_dict must be tensors by name"),
    ],
    ids=["of a run", "a list", "a number", "pairs", "a module"],
)  # fmt: skip
def test_what_is_no_state_dict_is_refused_with_the_way_to_one(given, told):
    """A whole file of a run, lists for tensors, names that are none, and a module itself, each by its entry."""
    with pytest.raises(InvalidArgument, match=told):
        from_state_dict(NETWORK, given)
