"""Cases of whole steps: what is listed is what the engine calls, and as often as the networks' papers say."""

from __future__ import annotations

import inspect
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import cubatch
from cubatch.bench import cases, target
from cubatch.bench.implementations import Way
from cubatch.engine import functional, layers
from cubatch.engine.place import Place
from cubatch.errors import UnknownName
from cubatch.hardware import catalogue
from cubatch.hardware.facts import BYTES_PER_ELEMENT
from cubatch.hardware.waves import busiest_sm_blocks
from cubatch.kernels.launch import may_come_early
from cubatch.kernels.resources import resident_blocks
from cubatch.memory.plan import schedule_of
from cubatch.network import models
from tests.engine.every_kind import EVERY_KIND

SUMS = {"batch_norm_statistics", "batch_norm_backward_sums", "layer_norm_backward", "layer_norm_backward_add"}
"""Kernels that sum over the rows of a norm."""

NETWORKS = (
    "resnet50", "convnext-tiny", "efficientnet-b0", "mobilenet-v3-large", "vit-base", "deit-tiny", "vgg16", "lenet5"
)  # fmt: skip


def counted(name, mode, dtype="float16", **options):
    """How often each kind of operation occurs in a step."""
    found = Counter()
    for case in cases.of_step(models.build(name), mode, 4, dtype, **options):
        assert case.multiplicity == len(case.layers)
        found[case.kind] += case.multiplicity
    return found


# --- against the numbers of the papers -----------------------------------------------------------------------------


def test_resnet50_has_the_operations_of_its_paper():
    """He et al. 2015, table 1: a stem, 16 blocks of three convolutions, 4 shortcuts that are projections: 53."""
    training = counted("resnet50", "training")
    assert (training["conv2d"], training["conv2d dgrad"], training["conv2d wgrad"]) == (53, 52, 53)
    assert (training["batch norm train"], training["batch norm backward"]) == (53, 53)
    assert (training["linear"], training["linear dgrad"], training["linear wgrad"]) == (1, 1, 1)
    assert (training["max pool2d"], training["global avg pool"], training["momentum"]) == (1, 1, 1)
    assert (training["update loss scale"], training["softmax cross entropy"]) == (1, 1)
    inference = counted("resnet50", "inference")
    assert inference == {
        "conv2d": 53, "linear": 1, "max pool2d": 1, "global avg pool": 1, "fold batch norms": 1
    }  # fmt: skip


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("mode", ["training", "inference"])
def test_a_step_has_the_flops_of_its_network(name, mode):
    """The network's own count, of its layers, twice: a multiply-add is two."""
    network = models.build(name)
    found = cases.of_step(network, mode, 4)
    assert sum(case.multiplicity * case.flops for case in found) == 4 * network.flops(mode)
    assert len({case.name for case in found}) == len(found)


# --- against the engine --------------------------------------------------------------------------------------------

IGNORED = {
    "workspace", "count", "reduce", "running_mean", "running_var", "momentum", "seed", "step", "eps", "epsilons", "lr",
    "weight_decay", "factor",
}  # fmt: skip
"""Arguments that change nothing of what is launched, or belong to state that a step alone has."""


class Recorder:
    """Operations that note how they are called and do nothing."""

    def __init__(self):
        self.calls = Counter()

    def __getattr__(self, name):
        def call(*args, **kwargs):
            given = inspect.signature(getattr(functional, name)).bind(*args, **kwargs).arguments
            shown = {key: self.shown(key, value) for key, value in given.items() if key not in IGNORED}
            self.calls[name, tuple(sorted((key, value) for key, value in shown.items() if value))] += 1

        return call

    def shown(self, key, value):
        """Bytes of an array, a list element by element; shapes and numbers as they are."""
        if isinstance(value, np.ndarray):
            return f"{value.nbytes}"
        if isinstance(value, list | tuple) and key != "x_shape":
            return ", ".join(self.shown(key, each) for each in value)
        return "" if value is None or value is False else str(value)


def engine_calls(network, mode, samples, dtype):
    """What the engine calls for the operations of its schedule that belong to layers, and the folding."""
    program, recorder = schedule_of(network, mode, recompute=False, library="cubatch"), Recorder()

    def array(shape, itemsize):
        return np.empty(shape, {1: np.uint8, 2: np.float16, 4: np.float32}[itemsize])

    class Arena:
        """Arrays of the schedule's buffers; nothing touches their memory."""

        def __init__(self):
            self.samples, self.arrays = samples, {}

        def __getitem__(self, number):
            buffer = program.buffers[number]
            shape = (samples, *buffer.shape) if buffer.batched else buffer.shape
            made = array(shape, buffer.itemsize or BYTES_PER_ELEMENT[dtype])
            return self.arrays.setdefault(number, made)

        def workspace(self, _):
            return None

    def of_layers(shapes_of, itemsize):
        return {
            node.name: {name: array(shape, itemsize) for name, shape in shapes_of(node.layer).items()}
            for node in network.nodes
        }

    parameters = of_layers(lambda layer: layer.parameter_shapes, BYTES_PER_ELEMENT[dtype])
    states = of_layers(
        lambda layer: dict.fromkeys(("mean", "var"), layer.input_shape[2:]) if layer.has_statistics else {}, 4
    )
    place = Place(
        operations=recorder, arena=Arena(), parameters=parameters, gradients=parameters, states=states,
        team=SimpleNamespace(sum=print), rank=0, batch_size=samples, begin=0, first=0, clock=[0], numbers=None, seed=0,
    )  # fmt: skip
    for op in program.ops:
        if op.kind not in {"loss", "update"}:
            work = layers.bind(op, place, training=mode == "training")
            if layers.TABLE[type(op.node.layer)].draws if op.node and op.kind == "forward" else False:
                work()  # a step that draws random numbers is called each time
    return recorder.calls


@pytest.mark.parametrize("mode", ["training", "inference"])
@pytest.mark.parametrize(
    ("network", "dtype"),
    [
        (EVERY_KIND, "float16"),
        (EVERY_KIND, "float32"),
        *((models.build(name), "float16") for name in NETWORKS),
        *(pytest.param(models.build(name), "float32", marks=pytest.mark.thorough) for name in NETWORKS),
    ],
    ids=lambda one: getattr(one, "name", one),
)
def test_the_cases_of_a_step_are_what_the_engine_calls(network, mode, dtype):
    """The same functions, on arrays of the same sizes, with the same options and epilogues, as often."""
    recorder = Recorder()
    for case in cases.of_step(network, mode, 2, dtype):
        if not {"loss", "update"}.intersection(case.layers):
            for _ in range(case.multiplicity):
                case.call(recorder, target.reserve(case))
    assert recorder.calls == engine_calls(network, mode, 2, dtype)


# --- what belongs to no layer --------------------------------------------------------------------------------------


def test_the_optimizer_is_the_one_that_is_asked_for():
    """Over all parameters at once; a float16 gradient is looked through first."""
    network = models.build("lenet5")
    for dtype, scaled in (("float32", []), ("float16", ["update loss scale"]), ("bfloat16", [])):
        found = cases.of_step(network, "training", 4, dtype, optimizer="adam")
        last = [case for case in found if case.layers == ("update",)]
        assert [case.kind for case in last] == [*scaled, "adam"]
        assert last[-1].operands["parameters"].shape == (network.parameters,)
    with pytest.raises(UnknownName, match="lion"):
        cases.of_step(network, "training", 4, optimizer="lion")


@pytest.mark.parametrize(
    ("name", "batch_size", "launches", "sums", "crowding"),
    [("resnet50", 256, 318, 106, 0), ("resnet50", 32, 318, 106, 56), ("vit-base", 128, 75, 25, 0),
     ("convnext-tiny", 128, 69, 23, 1)],
)  # fmt: skip
def test_all_launches_of_norms_start_early_and_few_sums_leave_sms_emptier_than_others(
    name, batch_size, launches, sums, crowding
):
    """On an H200, as docs/method/kernels.md lists: sums crowd if an SM holds more blocks than its even share."""
    device, found = catalogue.find("h200-sxm"), Counter()
    for case in cases.of_step(models.build(name), "training", batch_size, "float16"):
        for launch in Way(case, device).launches if "norm" in case.operation else ():
            held = resident_blocks(launch.kernel, device.compute_capability)
            is_sum = launch.kernel.entry in SUMS
            found["launches"] += case.multiplicity
            found["early"] += case.multiplicity * may_come_early(launch.kernel, held, launch.blocks, device)
            found["sums"] += case.multiplicity * is_sum
            found["crowding"] += case.multiplicity * (is_sum and busiest_sm_blocks(launch.blocks, 132) < held)
    assert found == {"launches": launches, "early": launches, "sums": sums, "crowding": crowding}
    page = (Path(cubatch.__file__).parents[1] / "docs/method/kernels.md").read_text(encoding="utf-8")
    assert f"| `{name}`, {batch_size} | {launches} | {launches} | {sums} | {crowding} |" in page
