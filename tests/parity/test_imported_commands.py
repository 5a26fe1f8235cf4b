"""The commands on what users have: an ONNX file, a function that builds a PyTorch module."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

import pytest

import cubatch
from cubatch.errors import InvalidArgument
from cubatch.network.importers import factories
from tests.parity import torchvision_models as zoo
from tests.unit.commands import in_process

onnx = pytest.importorskip("onnx")
torch = zoo.torch

SOURCE = """
import torch
from torch import nn

def build():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)
    )

def scanned():
    return nn.Sequential(nn.Conv2d(3, 8, 3), Scan(), nn.Conv2d(8, 4, 1))

def fixed():
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 5))

class Scan(nn.Module):
    def forward(self, x):
        return x.cumsum(1)

class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(50, 8)

    def forward(self, ids, mask):
        return (self.table(ids) * mask[..., None]).mean(1)

def words():
    return Words()

def sentence():
    return {"ids": torch.randint(0, 50, (2, 6)), "mask": torch.ones(2, 6)}

class Weighted(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, weights):
        return self.linear(x) @ weights

def weighted():
    return Weighted()

def sample():
    return {"x": torch.rand(2, 4), "weights": torch.rand(4, 4)}

def unsaid():
    raise KeyError("no sentence")

class Upright(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(12, 2)

    def forward(self, x):
        return self.linear(x)

def upright():
    return Upright()

def network():
    import cubatch
    return cubatch.models.resolve("mlp")
"""
GPU = ["--device", "v100-sxm2-16gb"]


@pytest.fixture
def model(tmp_path, monkeypatch, request):
    """Stand where small.onnx and the module `of_users` are; give how the network is named there."""
    (tmp_path / "of_users.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    if request.param == "small.onnx":
        import of_users

        options = {"dynamo": False, "input_names": ["x"], "dynamic_axes": {"x": {0: "n"}}}
        with warnings.catch_warnings(action="ignore"):  # the exporter's own
            module = of_users.build().eval()
            torch.onnx.export(module, (torch.zeros(2, 3, 16, 12),), request.param, training=zoo.PRESERVE, **options)
    yield request.param
    sys.modules.pop("of_users", None)


@pytest.fixture
def run(monkeypatch, capfd):
    """Run the command line in this process and give (exit code, stdout, stderr)."""
    return in_process(monkeypatch, capfd)


BOTH = pytest.mark.parametrize("model", ["small.onnx", "of_users:build"], indirect=True)
SHAPE = ["--input-shape", "16,12,3"]


@BOTH
def test_memory_predict_and_candidates_are_those_of_the_network(run, model):
    """Each command's JSON says what the library says of the imported network."""
    network = cubatch.models.resolve(model, input_shape=(16, 12, 3))
    assert ":" not in model or network.name == model
    assert network.parameters == 3 * 8 * 9 + 8 + 16 + 8 * 5 + 5
    code, out, err = run("memory", model, *SHAPE, "--mode", "training", "--batch-size", "4", *GPU, "--json", "-")
    assert code == 0, err
    want = cubatch.footprint(network, batch_size=4, mode="training", device="v100-sxm2-16gb").total
    assert json.loads(out)["modes"]["training"]["footprint"]["total"] == want
    code, out, err = run("predict", model, *SHAPE, "--batch-sizes", "8,64", *GPU, "--json", "-")
    assert code == 0, err
    assert json.loads(out)["spec"]["layers"] == json.loads(json.dumps(network.to_mapping()))["layers"]
    code, out, err = run("candidates", model, *SHAPE, "--explain", *GPU, "--json", "-")
    assert code == 0, err
    found = json.loads(out)
    assert found["candidates"]
    assert any(row["layer"] in network.weights for row in found["explain"])


@BOTH
def test_tune_runs_it(run, model):
    """On the CPU, in a worker too, which is told the layers and not the weights."""
    options = ["--device", "cpu", "--batch-sizes", "1,2", "--budget", "1", "--no-store", "--isolate", "--json", "-"]
    code, out, err = run("tune", model, *SHAPE, *options)
    assert code == 0, err
    assert json.loads(out)["batch_size"] in {1, 2}


TORCH = ["--library", "torch", "--device", "cpu", "--batch-sizes", "2,4", "--budget", "10", "--no-store"]


@pytest.mark.parametrize("model", ["of_users:scanned"], indirect=True)
def test_pytorch_itself_runs_a_module_whatever_is_in_it(run, model, monkeypatch):
    """`--library torch` trains one that our engine has no layer for; what is named need not be on Python's path."""
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry != str(Path.cwd())])
    code, out, err = run("tune", model, *SHAPE, *TORCH, "--mode", "training", "--budget", "20", "--json", "-")
    assert code == 0, err
    found = json.loads(out)
    assert (found["library"], found["mode"], found["spec"]["name"]) == ("torch", "training", model)
    assert {row["batch_size"] for row in found["measurements"] if row["timings_seconds"]} == {2, 4}


@pytest.mark.parametrize("model", ["of_users:upright"], indirect=True)
def test_an_image_is_as_high_as_wide_as_it_was_said(run, model):
    """A linear layer over 12 columns takes 16 x 12, and no 12 x 16; 16 bits are those of autocast."""
    code, out, err = run("tune", model, *SHAPE, *TORCH, "--dtype", "bfloat16", "--json", "-")
    assert code == 0, err
    assert json.loads(out)["dtype"] == "bfloat16"
    assert run("tune", model, "--input-shape", "12,16,3", *TORCH)[0] == 1


@pytest.mark.parametrize("model", ["of_users:words"], indirect=True)
def test_random_inputs_of_a_function_are_one_question(run, model, tmp_path):
    """Drawn alike each time: the second command answers from the store."""
    asked = [*TORCH[:-1], "--store", str(tmp_path / "store.sqlite3"), "--example-inputs", "of_users:sentence"]
    code, out, err = run("tune", model, *asked, "--json", "-")
    assert code == 0, err
    assert {row["batch_size"] for row in json.loads(out)["measurements"] if row["timings_seconds"]} == {2, 4}
    torch.rand(7)
    assert "Answered from the store" in " ".join(run("tune", model, *asked)[1].split())


@pytest.mark.parametrize("model", ["of_users:build"], indirect=True)
def test_accumulated_batches_are_a_step_of_a_named_module(run, model):
    """The worker's steps have so many batches, which the rates count."""
    code, out, err = run("tune", model, *SHAPE, *TORCH, "--mode", "training", "--accumulate", "3", "--json", "-")
    assert code == 0, err
    result = json.loads(out)
    assert result["accumulate"] == 3
    for row in result["measurements"]:
        assert row["samples_per_second"] * row["latency_seconds"] == pytest.approx(3 * row["batch_size"])


@pytest.mark.parametrize("model", ["of_users:weighted"], indirect=True)
@pytest.mark.parametrize("given", [[], ["--constant-inputs", "weights"]], ids=["unknown", "named"])
def test_a_constant_input_is_named_by_an_option(run, model, given):
    """Without it there is no recommendation."""
    code, out, err = run("tune", model, "--example-inputs", "of_users:sample", *given, *TORCH, "--json", "-")
    assert code == 0, err
    assert (json.loads(out)["batch_size"] is not None) == bool(given)


@pytest.mark.parametrize("model", ["of_users:build"], indirect=True)
@pytest.mark.parametrize(
    ("options", "named"),
    [
        (TORCH, "--input-shape H,W,C"),
        ([*TORCH, *SHAPE, "--example-inputs", "of_users:sentence"], "needs exactly one of these options"),
        ([*TORCH, *SHAPE, "--recompute"], "--recompute"),
        ([*TORCH, *SHAPE, "--no-isolate"], "--isolate/--no-isolate"),
        ([*TORCH, *SHAPE, "--dtype", "tf32"], "not tf32"),
        ([*TORCH, "--example-inputs", "of_users:none"], "--example-inputs must be a function of"),
        ([*TORCH, "--example-inputs", "of_users:unsaid"], "KeyError: 'no sentence'"),
        ([*TORCH, "--input-shape", "0,12,3"], "--input-shape must be from 1 to 2147483647, got 0"),
        ([*TORCH, "--input-shape", "64"], "got '64'; --example-inputs"),
        ([*SHAPE, "--example-inputs", "of_users:sentence"], "--example-inputs is for --library torch, not auto"),
        ([*SHAPE, "--constant-inputs", "0"], "--constant-inputs is for --library torch, not auto"),
        ([*SHAPE, "--accumulate", "2"], "--accumulate is for --library torch, not auto"),
    ],
)
def test_an_option_that_is_not_for_pytorch_is_refused(run, model, options, named):
    """Before anything is measured, by its name."""
    code, out, err = run("tune", model, *options)
    assert (code, out) == (2, "")
    assert named in " ".join(err.split())


@pytest.mark.parametrize("model", ["of_users:build"], indirect=True)
@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (["--input-shape", "3,16,12"], "--input-shape 3,16,12 means H,W,C: height 3, width 16, 12 channels"),
        (["--example-inputs", "of_users:sentence"], "--example-inputs takes a function"),
    ],
)
@pytest.mark.parametrize("asked", [[*TORCH[:4], "--no-store"], TORCH], ids=["memory", "sizes"])
def test_inputs_that_do_not_fit_are_told_by_the_option(run, model, asked, wrong, told):
    """Who has a channels-first shape from Python's recipe reads how it was taken; arguments are not known here."""
    code, _, err = run("tune", model, *asked, *wrong, "--mode", "training")
    err = " ".join(err.split())
    assert code != 0
    assert told in err
    assert "batches is a function" not in err
    assert "loss is called" not in err


@pytest.mark.parametrize("model", ["of_users:build"], indirect=True)
@pytest.mark.parametrize("command", ["memory", "predict"])
def test_a_shape_of_other_axes_is_told_where_a_step_is_traced(run, model, command):
    """No step runs: a convolution of the trace names the channels, and the message how the option was read."""
    code, _, err = run(command, model, "--library", "torch", "--input-shape", "3,16,12", "--device", "t4")
    assert code == 2
    assert "--input-shape 3,16,12 means H,W,C: height 3, width 16, 12 channels" in " ".join(err.split())


@pytest.mark.parametrize(
    ("named", "told"),
    [("resnet18", "package.module:name of a function, got resnet18"), ("a.onnx", "use --library onnx")],
)
def test_a_model_that_is_no_module_is_refused_before_its_inputs(run, named, told):
    """Shapes would not help: a network by name is no module, and PyTorch runs no ONNX file."""
    code, _, err = run("tune", named, *TORCH)
    assert (code, told in " ".join(err.split())) == (2, True)


@pytest.mark.parametrize(("model", "told"), [("of_users:build", True), ("of_users:network", False)], indirect=["model"])
def test_pytorchs_own_steps_are_advised_for_a_module_alone(run, model, told):
    """Who names a PyTorch module may want them; a file with a network of cubatch's only imports PyTorch."""
    shape = SHAPE if told else ()
    code, _, err = run("tune", model, *shape, "--device", "cpu", "--batch-sizes", "1,2", "--budget", "1", "--no-store")
    assert (code, "--library torch" in err) == (0, told)


@pytest.mark.parametrize("model", ["of_users:unsaid"], indirect=True)
def test_what_building_a_module_raised_is_told_with_its_line(run, model):
    """And without advice for whoever writes Python."""
    code, _, err = run("tune", model, *SHAPE, *TORCH)
    line = 1 + SOURCE.splitlines().index('    raise KeyError("no sentence")')
    err = "".join(err.split())  # however it is wrapped
    assert code == 2
    assert f"MODELmustbeafunctionthatcanbeimportedandcalledwithoutarguments,got'{model}'" in err
    assert f"ItraisedKeyError:'nosentence',at{Path.cwd()}/of_users.py:{line}." in err
    assert "autotune_module" not in err


@pytest.mark.parametrize("model", ["of_users:scanned"], indirect=True)
def test_an_operator_without_a_layer_is_one_message_and_exit_code_1(run, model):
    """Which operator, where, and what helps."""
    code, out, err = run("tune", model, *SHAPE)
    assert (code, out) == (1, "")
    assert "aten.cumsum at '1' cannot be imported" in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("model", ["of_users:fixed"], indirect=True)
def test_an_input_of_another_shape_is_one_message_that_names_the_option(run, model):
    """224 x 224 x 3 is a guess; PyTorch's log of what it raised stays away."""
    code, out, err = run("memory", model)
    assert (code, out) == (2, "")
    assert "2 samples of shape (3, 224, 224)" in err
    assert "One sample is assumed to be 224,224,3 (height, width, channels" in err
    assert "--input-shape H,W,C" in err
    assert len(err.splitlines()) == 1
    assert run("memory", model, "--input-shape", "8,8,3")[0] == 0


@pytest.mark.parametrize("model", ["of_users:build"], indirect=True)
def test_a_shape_that_was_guessed_is_told(model):
    """Also where the module takes it: an answer for 224 x 224 is none for 32 x 32.  One that was given is not told."""
    with pytest.warns(UserWarning, match=r"assumed to be 224,224,3 .* --input-shape H,W,C"):
        cubatch.models.resolve(model)
    cubatch.models.resolve(model, input_shape=(16, 12, 3))


@pytest.mark.parametrize("model", ["of_users:upright"], indirect=True)
def test_one_column_is_tokens_where_a_module_takes_no_images_of_it(model):
    """(h, 1, c) as of an ONNX file: a linear layer of 12 channels on 7 tokens; of 11 channels the image is told."""
    network = cubatch.models.resolve(model, input_shape=(7, 1, 12))
    assert (network.input_shape, network.output_shape) == ((7, 1, 12), (7, 1, 2))
    with pytest.raises(InvalidArgument, match=r"shape \(11, 7, 1\).* One sample was given as 7,1,11"):
        cubatch.models.resolve(model, input_shape=(7, 1, 11))


@pytest.mark.parametrize("opaque", [False, True])
def test_tokens_with_positions_are_no_image_that_happens_to_fit(opaque):
    """7 positions of 12 channels can be added to an image of 12 x 7 x 1 as well, of which no layer is made."""

    class Placed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.places, self.linear = torch.nn.Parameter(torch.zeros(1, 7, 12)), torch.nn.Linear(12, 2)

        def forward(self, x):
            return self.linear(x + self.places) if not opaque else self.linear((x + self.places).cumsum(1))

    network = factories._trace(Placed(), (7, 1, 12), opaque=opaque)
    assert (network.input_shape, network.output_shape) == ((7, 1, 12), (7, 1, 2))


def test_a_network_and_a_file_are_read_wherever_a_spec_goes(tmp_path, monkeypatch):
    """`footprint("model.onnx")` and its path as a Path."""
    path = tmp_path / "one.onnx"
    with warnings.catch_warnings(action="ignore"):
        torch.onnx.export(torch.nn.Linear(3, 2), (torch.zeros(2, 3),), path, dynamo=False)
    assert cubatch.footprint(str(path), batch_size=2) == cubatch.footprint(path, batch_size=2)
    assert cubatch.models.resolve(path).parameters == 8
