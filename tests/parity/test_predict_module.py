"""Predicted time of PyTorch modules: against arithmetic by hand and the catalogue, and of many kinds."""

from __future__ import annotations

import itertools
import json
import math
import sys

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

import cubatch as cb  # noqa: E402
from benchmarks import torch_network  # noqa: E402
from cubatch.errors import DoesNotFit, InvalidArgument  # noqa: E402
from cubatch.estimate.operators import predict_operators  # noqa: E402
from cubatch.estimate.step import predict_step  # noqa: E402
from cubatch.frameworks.torch_module import TorchModule  # noqa: E402
from cubatch.hardware.catalogue import find  # noqa: E402
from tests.parity.traced_modules import MODULES, Reading  # noqa: E402
from tests.unit.commands import in_process  # noqa: E402

V100 = find("v100-sxm2-16gb")
LAUNCH, SHARE, HOST = 3e-6, 0.75, 40e-6  # as the documentation states them


def operators(module, batches, batch_size, **kind):
    """The operators of a step of one batch size."""
    settings = {"mode": "inference", "loss": None, "optimizer": "sgd", "autocast": None, **kind}
    return TorchModule(module, batches, records=True, **settings).walk(batch_size).operators


def test_linear_layers_have_the_flop_and_bytes_of_arithmetic():
    """Forward, backward and the step of SGD of two layers without bias, in float64 by hand."""
    n, a, b, c = 48, 512, 1024, 256
    module = nn.Sequential(nn.Linear(a, b, bias=False), nn.Linear(b, c, bias=False))
    products = [each for each in operators(module, (a,), n, mode="training") if each.kind == "product"]
    # The input needs no gradient, so that the first layer has two products and the second three.
    assert sum(each.flops for each in products) == 2.0 * n * (2 * a * b + 3 * b * c)
    wanted = [(n, a, b), (n, b, c), (n, b, c), (n, b, c), (n, a, b)]
    assert sum(each.read_bytes + each.written_bytes for each in products) == sum(
        4 * (rows * i + i * o + rows * o) for rows, i, o in wanted
    )
    updates = [each for each in operators(module, (a,), n, mode="training") if each.phase == "optimizer"]
    weights = 4 * (a * b + b * c)
    assert sum(each.read_bytes for each in updates) == 2 * weights  # each weight and its gradient
    assert sum(each.written_bytes for each in updates) == weights
    assert sum(each.launches for each in updates) == 1  # for all weights together


def test_a_recurrent_layer_has_the_flop_of_arithmetic():
    """Four gates of an LSTM, forward and backward, for each step of a sequence and each sample; by hand."""
    n, steps, inputs, hidden = 8, 16, 32, 64
    traced = operators(nn.LSTM(inputs, hidden, batch_first=True), (steps, inputs), n, mode="training")
    products = dict.fromkeys(("forward", "backward"), 0)
    for each in traced:
        products[each.phase] = products.get(each.phase, 0) + each.repeats * each.flops
    forward = 2 * n * steps * 4 * hidden * (inputs + hidden)
    assert products["forward"] == forward
    assert products["backward"] == 2 * forward  # oneDNN computes the gradient of the input too


class Experts(nn.Module):
    """A matrix for each of four groups of rows."""

    def __init__(self):
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(4, 64, 128))

    def forward(self, x):
        ends = torch.arange(1, 5, dtype=torch.int32) * (len(x) // 4)
        return nn.functional.grouped_mm(x, self.weights, offs=ends)


@pytest.mark.skipif(not hasattr(nn.functional, "grouped_mm"), reason="PyTorch has no product of groups yet")
def test_products_of_groups_have_the_flop_of_arithmetic():
    """Each row is multiplied with the matrix of one group, forward and for the gradient of the matrices; by hand."""
    n = 48
    products = [each for each in operators(Experts(), (64,), n, mode="training") if each.kind == "product"]
    assert [each.phase for each in products] == ["forward", "backward"]
    assert [each.flops for each in products] == [2 * n * 64 * 128] * 2


@pytest.mark.parametrize("groups", [1, 4, 16])
def test_gradients_of_a_grouped_convolution_have_the_flop_of_its_forward_pass(groups):
    """PyTorch's own formula counts the channels of all groups for each of them."""
    n, c, size = 4, 16, 9
    module = nn.Sequential(nn.Conv2d(c, c, 3, groups=groups), nn.Conv2d(c, c, 3, groups=groups))
    traced = operators(module, (c, size, size), n, mode="training")
    products = [each for each in traced if each.kind == "convolution"]
    outputs = [n * c * (size - 2) ** 2, n * c * (size - 4) ** 2, n * c * (size - 4) ** 2, n * c * (size - 4) ** 2]
    outputs.append(outputs[0])  # the input needs no gradient
    assert [each.flops for each in products] == [2 * 9 * (c // groups) * each for each in outputs]


@pytest.mark.parametrize(
    ("dtype", "autocast", "size", "in_training"),
    [("float32", None, 4, 4), ("float32", "float16", 2, 2), ("float16", None, 2, 4), ("bfloat16", None, 2, 4)],
)
def test_a_batch_norm_reads_its_input_twice_in_training(dtype, autocast, size, in_training):
    """
    Once for mean and variance; its gradient reads input and gradient twice.  Inference knows both.

    cuDNN takes no weights of 16 bits.  PyTorch's own kernels for training take as long for them as in float32.
    """
    n, c, extent = 4, 16, 32
    module = nn.Sequential(nn.Conv2d(c, c, 1), nn.BatchNorm2d(c)).to(getattr(torch, dtype))
    batches = lambda n: (torch.empty(n, c, extent, extent, dtype=getattr(torch, dtype)),)  # noqa: E731
    elements = n * c * extent**2
    for mode, reads in (("inference", [size]), ("training", [2 * in_training, 4 * in_training])):
        norms = [each for each in operators(module, batches, n, mode=mode, autocast=autocast) if "norm" in each.name]
        # 2 % for parameters and statistics of 16 channels
        assert [each.read_bytes / elements for each in norms] == [pytest.approx(each, rel=0.02) for each in reads]


def test_dropout_of_inference_is_no_operator():
    """PyTorch returns its input then, without a copy."""
    assert [each.name for each in operators(nn.Sequential(nn.Tanh(), nn.Dropout()), (8,), 4)] == ["tanh"]


def test_the_time_of_linear_layers_is_that_of_the_catalogue():
    """Each product takes what `predict_step` gives to a layer of the same extents, in each pass."""
    n, c, k = 256, 1024, 512
    traced = operators(nn.Linear(c, k, bias=False), (c,), n)
    found = predict_operators({n: traced}, [n], V100)
    own = predict_step(cb.Linear(h=1, w=1, c=c, k=k, bias=False), [n], V100)
    assert found.step.passes[0].seconds[0] == pytest.approx(own.seconds[0], rel=1e-9)
    bound = max(
        2.0 * n * c * k / V100.peak_flops_per_second["float32"],
        4.0 * (n * c + c * k + n * k) / V100.peak_bytes_per_second,
    )
    assert found.roofline_seconds[0] == pytest.approx(bound, rel=1e-9)


def test_what_moves_bytes_takes_them_at_a_share_of_the_bandwidth():
    """A chain of three activations over 64 MB: each reads and writes its tensor once, and the host launches each."""
    found = cb.predict(nn.Sequential(nn.ReLU(), nn.Tanh(), nn.GELU()), (1 << 20,), device=V100, batch_sizes=[16])
    moved = 2 * 4 * 16 * (1 << 20) / (V100.peak_bytes_per_second * SHARE)
    assert found.seconds[16] == pytest.approx(3 * math.hypot(moved + LAUNCH, HOST), rel=1e-9)
    assert [share.pass_ for share in found.passes] == ["forward"] * 3


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
@pytest.mark.parametrize("mode", ["inference", "training"])
def test_a_module_of_the_catalogue_takes_as_long_as_the_network(name, mode):
    """Within 5 % in inference; in training within 15 %, since only the module has loss, biases and optimizer."""
    network = cb.models.build(name)
    module, n = torch_network.module(network), 64
    height, width, channels = network.input_shape
    found = cb.predict(module, (channels, height, width), device=V100, mode=mode, batch_sizes=[n])
    own = cb.predict(network, device=V100, mode=mode, batch_sizes=[n])
    assert found.seconds[n] == pytest.approx(own.seconds[n], rel=0.05 if mode == "inference" else 0.15)


@pytest.mark.parametrize("mode", ["inference", "training"])
@pytest.mark.parametrize("name", MODULES)
def test_the_time_of_any_module_grows_with_the_batch(name, mode):
    """Twice the batch takes twice as long if the GPU is busy, and four times if all pairs of a batch are compared."""
    make, batches = MODULES[name]
    traced = {n: operators(make(), batches, n, mode=mode) for n in (2, 16, 64)}
    sizes = [1, 8, 1 << 16, 1 << 17]
    found = predict_operators(traced, sizes, V100)
    tiny, small, large, twice = found.step.seconds
    assert 0 < tiny <= 1.02 * small < large  # the learned correction is not monotone
    assert 1.8 < twice / large < (4.2 if name == "two towers" else 2.2)
    assert (found.step.low < found.step.seconds).all()
    assert (found.step.seconds < found.step.high).all()
    assert (found.roofline_seconds < found.step.seconds).all()


@pytest.mark.parametrize("name", ["lstm", "text encoder", "U-Net", "T5", "two towers"])
def test_modules_that_cannot_be_imported_have_a_forecast(name):
    """The record that networks have, with a table and JSON."""
    make, batches = MODULES[name]
    found = cb.predict(make(), batches, device="t4", mode="training", optimizer="adam", memory_limit="32MiB")
    assert found.batch_size in found.seconds
    assert found.largest_batch_size >= max(found.seconds)
    assert all(low < found.seconds[n] < high for n, (low, high) in found.interval.items())
    assert sum(share.share for share in found.passes) == pytest.approx(1)
    assert {"backward", "optimizer"} <= {share.pass_ for share in found.passes}
    mapping = json.loads(found.to_json())
    assert (mapping["library"], mapping["predicted"]) == ("torch", True)
    assert str(found.batch_size) in found.table()


def test_the_largest_batch_is_that_of_the_footprint():
    """And no candidate above it is predicted."""
    make, batches = MODULES["U-Net"]
    module, options = make(), {"mode": "training", "optimizer": "adam"}
    found = cb.predict(module, batches, device="t4", memory_limit="64MiB", **options)
    assert found.largest_batch_size == cb.max_batch_size(module, memory="64MiB", batches=batches, **options)
    assert max(found.seconds) == found.largest_batch_size
    with pytest.raises(DoesNotFit):
        cb.predict(module, batches, device="t4", memory_limit="64KiB", **options)


def test_accumulated_batches_take_as_long_as_their_steps():
    """Four batches to a step: three times the time of a batch more than one, and four times the samples."""
    module, options = nn.Sequential(nn.Linear(4096, 4096), nn.Linear(4096, 4096)), {"device": V100, "mode": "training"}
    times = {k: cb.predict(module, (4096,), batch_sizes=[4096], accumulate=k, **options) for k in (1, 2, 3, 4)}
    seconds = [each.seconds[4096] for each in times.values()]
    steps = [b - a for a, b in itertools.pairwise(seconds)]
    assert steps[1] == pytest.approx(steps[2], rel=1e-3)
    assert steps[0] == pytest.approx(steps[1], rel=0.05)
    assert times[4].samples_per_second[4096] == pytest.approx(4 * 4096 / seconds[3])


def test_sizes_between_traces_take_what_a_trace_of_them_gives():
    """Extents are linear in the batch size, also those of a similarity of all pairs of a batch."""

    class Pairs(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Linear(64, 32)

        def forward(self, x):
            y = self.body(x)
            return y @ y.T

    traced = {n: operators(Pairs(), (64,), n) for n in (2, 64, 4096)}
    exact = predict_operators({1000: operators(Pairs(), (64,), 1000)}, [1000], V100)
    products = [each.kind for each in traced[64]].count("product")
    found = predict_operators(traced, [1000], V100)
    assert products == 2
    assert found.step.passes[0].seconds[0] == pytest.approx(exact.step.passes[0].seconds[0], rel=1e-9)
    assert exact.step.seconds[0] <= found.step.seconds[0]


def test_a_loop_over_samples_is_interpolated():
    """A module with as many operators as samples takes twice as long for twice the batch."""

    class Loop(nn.Module):
        def forward(self, x):
            return torch.stack([each.tanh() for each in x])

    found = cb.predict(Loop(), (1000,), device=V100, batch_sizes=[16, 32, 48], memory_limit="1MiB")
    assert found.seconds[32] / found.seconds[16] == pytest.approx(2, rel=0.1)
    assert found.seconds[48] / found.seconds[32] == pytest.approx(1.5, rel=0.1)


def test_half_precision_is_faster():
    """With autocast, on a GPU with Tensor Cores."""
    module, options = nn.Sequential(*[nn.Linear(4096, 4096) for _ in range(4)]), {"device": V100, "mode": "training"}
    whole = cb.predict(module, (4096,), batch_sizes=[4096], **options)
    half = cb.predict(module, (4096,), batch_sizes=[4096], autocast="float16", **options)
    assert (whole.dtype, half.dtype) == ("float32", "float16")
    assert 2 < whole.seconds[4096] / half.seconds[4096] < 8


@pytest.mark.parametrize(
    ("arguments", "options", "field"),
    [
        ((nn.Linear(8, 2),), {}, "batches"),
        ((nn.Linear(8, 2), (8,)), {"dtype": "float16"}, "dtype"),
        ((nn.Linear(8, 2), (8,)), {"library": "cubatch"}, "library"),
        ((nn.Linear(8, 2), (8,)), {"anchors": []}, "anchors"),
        ((nn.Linear(8, 2), (8,)), {"device": "cpu"}, "device"),
        ((nn.Linear(8, 2), (8,)), {"objective": "energy"}, "objective"),
        ((nn.Linear(8, 2).double(), (8,)), {}, "device"),
        ((nn.Linear(8, 2), (8,)), {"accumulate": 2}, "accumulate"),
        ((nn.Linear(8, 2), (8,)), {"optimizer": "adam"}, "optimizer"),
        ((nn.Identity(), (8,)), {}, "module"),
        (("mlp",), {"autocast": "float16"}, "autocast"),
        ((Reading(), (8,)), {}, "module"),
        ((nn.Linear(8, 2), (8,)), {"opaque": {"nowhere": 1}}, "opaque"),
        (("mlp",), {"opaque": {"fc1": 1}}, "opaque"),
    ],
)
def test_what_does_not_apply_is_rejected(arguments, options, field):
    """With the name of the argument."""
    with pytest.raises(InvalidArgument) as caught:
        cb.predict(*arguments, **{"device": "t4", **options})
    assert caught.value.field == field


def test_a_part_that_cannot_be_traced_takes_the_time_of_the_function_in_its_place():
    """A submodule, and an operator, whose own bytes do not count next to those of the function."""
    sizes = {"device": "t4", "batch_sizes": [64, 256], "memory_limit": "64MiB"}
    plain = cb.predict(nn.Sequential(nn.Linear(512, 512), nn.Tanh()), (512,), **sizes)
    reading = nn.Sequential(nn.Linear(512, 512), Reading())
    assert cb.predict(reading, (512,), opaque={"1": torch.tanh}, **sizes).seconds == plain.seconds
    sigmoid = nn.Sequential(nn.Linear(512, 512), nn.Sigmoid())
    assert cb.predict(sigmoid, (512,), opaque={"aten::sigmoid": torch.tanh}, **sizes).seconds == plain.seconds


def test_the_command_predicts_a_module(tmp_path, monkeypatch, capfd):
    """For one GPU and several, as the function does; options of networks are refused."""
    (tmp_path / "my_tower.py").write_text(
        "import torch\ndef build(): return torch.nn.LSTM(8, 8)\ndef batches(n): return (torch.zeros(4, n, 8),)\n"
    )
    monkeypatch.chdir(tmp_path)
    run = in_process(monkeypatch, capfd)
    asked = [
        "predict",
        "my_tower:build",
        "--library",
        "torch",
        "--batches",
        "my_tower:batches",
        "--batch-sizes",
        "8,64",
    ]
    asked += ["--memory-limit", "1MiB", "--json", "-"]
    code, text, _ = run(*asked, "--device", "t4")
    alone = json.loads(text)
    module = nn.LSTM(8, 8)
    found = cb.predict(module, lambda n: (torch.zeros(4, n, 8),), device="t4", batch_sizes=[8, 64], memory_limit="1MiB")
    assert code == 0
    assert alone["measurements"] == found.to_mapping()["measurements"]
    code, text, _ = run(*asked, "--devices", "t4,v100-sxm2-16gb")
    compared = json.loads(text)["forecasts"]
    assert (code, len(compared)) == (0, 2)
    assert alone["measurements"] in [each["measurements"] for each in compared]
    assert run(*asked, "--device", "t4", "--recompute")[0] != 0
    sys.modules.pop("my_tower", None)


def test_no_experimental_kernels_are_named_for_a_module():
    """An empty list has no effect on a network either."""
    asked = {"device": V100, "batch_sizes": [8]}
    assert cb.predict(nn.Linear(8, 8), (8,), experimental=[], **asked).seconds
    with pytest.raises(InvalidArgument, match="experimental"):
        cb.predict(nn.Linear(8, 8), (8,), experimental=["norm_sums"], **asked)
