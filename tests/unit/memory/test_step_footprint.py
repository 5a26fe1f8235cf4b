"""What fits: textbook counts, parts that add up, the largest batch by brute force, and the rules people go by."""

from __future__ import annotations

import functools
import math
import pickle

import pytest
from hypothesis import given, settings, strategies as st

from cubatch import errors
from cubatch.checks import MAX_BATCH_SIZE
from cubatch.hardware import arithmetic, host, probe
from cubatch.hardware.facts import Device
from cubatch.memory import fit
from cubatch.memory.plan import plan
from cubatch.memory.thumb_rules import rules_of_thumb
from cubatch.network import models
from cubatch.network.graph import Network
from cubatch.network.layers import BatchNorm2d, Concat, Conv2d, Flatten, Linear, MaxPool2d, ReLU
from cubatch.report.tables import footprint as tables
from cubatch.tuning.step_memory import footprint, max_batch_size
from tests.building import workload
from tests.thorough import examples

ONE = Device(name="one thread", kind="cpu", threads=1)
TWO = Device(name="two threads", kind="cpu", threads=2)
V100 = probe.resolve("v100-sxm2-16gb", live=False)
DEVICES = (ONE, TWO, V100)

MLP_PARAMETERS = 1000 * 100 + 100 + 3 * (100 * 100 + 100) + 100 * 10 + 10

BRANCHED = Network(
    input_shape=(8, 8, 3),
    layers=[
        Conv2d(name="a", k=8, r=3, s=3, pad=1),
        BatchNorm2d(),
        ReLU(name="b"),
        Conv2d(name="c", k=4, r=3, s=3, pad=1),
        Concat(inputs=["b", "c"]),
        MaxPool2d(r=2, s=2),
        Flatten(),
        Linear(k=10),
    ],
)


# --- case: mlp-memory ----------------------------------------------------------------------------------------


@pytest.mark.case("mlp-memory")
@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_the_textbook_counts_of_the_mlp(device):
    """case: mlp-memory. 1410 elements forward, 1820 with gradients, 465 920 at batch 256, on any device."""
    forward = footprint("mlp", batch_size=256, device=device, mode="inference")
    training = footprint("mlp", batch_size=256, mode="training", device=device)
    assert forward.elements_per_sample == 1000 + 4 * 100 + 10 == 1410
    assert training.elements_per_sample == 1410 + 4 * 100 + 10 == 1820
    assert training.elements_per_sample * 256 == 465_920


@pytest.mark.case("mlp-memory")
def test_the_buffers_of_the_mlp_are_the_textbooks():
    """Forward 1410 and backward 410 float32 values a sample, and the labels: nothing is kept twice."""
    training = footprint("mlp", batch_size=256, mode="training", optimizer="momentum", device=ONE)
    assert training.activations == 256 * 4 * 1410 + 256 * 4
    assert training.activation_gradients == 256 * 4 * 410
    assert training.weights == training.gradients == training.optimizer == math.ceil(MLP_PARAMETERS * 4 / 256) * 256
    inference = footprint("mlp", batch_size=256, device=ONE, mode="inference")
    assert inference.activations == 256 * 4 * 1410
    assert (inference.gradients, inference.optimizer, inference.activation_gradients) == (0, 0, 0)


# --- parts ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", models.names())
@pytest.mark.parametrize("device", [TWO, V100], ids=str)
def test_parts_cover_the_peak_and_layers_add_up(name, device):
    """The peak is at most the sum of all parts; the layers' rows sum to the parts, and to all parameters."""
    whole = footprint(name, batch_size=3, mode="training", device=device)
    parts = ("activations", "activation_gradients", "workspace")
    fixed = whole.weights + whole.gradients + whole.optimizer
    assert fixed < whole.total <= fixed + sum(getattr(whole, part) for part in parts)
    for part in parts:
        assert sum(layer[part] for layer in whole.layers) == getattr(whole, part)
    assert sum(layer["parameters"] for layer in whole.layers) == models.build(name).parameters
    assert whole.peak_layer in {layer["name"] for layer in whole.layers}
    assert name in models.names()
    work = workload(models.build(name), device, mode="training", library=arithmetic.resolve_library("auto", device))
    assert whole.total == plan(work, 3).total


@pytest.mark.parametrize(
    ("layer", "elements"),
    [
        (Flatten(h=2, w=3, c=4), 24),
        (ReLU(h=2, w=3, c=4), 24),
        (Linear(c=24, k=6), 30),
        (BatchNorm2d(h=2, w=3, c=4), 48),
    ],
    ids=lambda value: getattr(value, "type", value),
)
def test_layers_on_their_own_are_counted(layer, elements):
    """Views and in-place layers are not counted twice, also where they are all there is."""
    for mode in ("inference", "training"):
        whole = footprint(layer, batch_size=2, mode=mode, device=ONE)
        assert whole.total >= 2 * 4 * math.prod(layer.input_shape)
    assert footprint(layer, batch_size=2, device=ONE, mode="inference").elements_per_sample == elements


def test_more_of_anything_takes_more():
    """Momentum above SGD, Adam above both, training above inference, a larger batch above a smaller one."""
    total = functools.partial(footprint, "resnet18", device=V100)
    inference = total(batch_size=8, mode="inference").total
    by_optimizer = [total(batch_size=8, mode="training", optimizer=o).total for o in ("sgd", "momentum", "adam")]
    assert inference < by_optimizer[0] < by_optimizer[1] < by_optimizer[2]
    assert total(batch_size=16, mode="inference").total > inference
    parameters = models.build("resnet18").parameters
    assert by_optimizer[2] - by_optimizer[0] == pytest.approx(2 * 4 * parameters, abs=512)


@pytest.mark.case("memory-rules")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_halves_activations_and_keeps_master_weights(dtype):
    """case: memory-rules. Training in 16 bits holds 2 + 2 bytes a parameter, and 4 more for the master weights."""
    full = footprint("resnet50", batch_size=16, mode="training", dtype="float32", device=V100)
    half = footprint("resnet50", batch_size=16, mode="training", dtype=dtype, device=V100)
    parameters = models.build("resnet50").parameters
    assert full.optimizer == 0
    assert half.optimizer == pytest.approx(4 * parameters, abs=512)
    assert half.gradients == pytest.approx(2 * parameters, abs=256)
    assert 0.5 * full.activations <= half.activations < 0.52 * full.activations


def test_the_largest_batch_in_16_bits_is_nearly_twice_that_of_float32():
    """It is read off the same plan: it fits, the next does not, and activations have half the bytes."""
    options = {"mode": "training", "device": V100}
    most = {
        dtype: max_batch_size("resnet50", memory="12GiB", dtype=dtype, **options) for dtype in ("float32", "float16")
    }
    assert 1.9 * most["float32"] < most["float16"] < 2.1 * most["float32"]
    fits, beyond = (
        footprint("resnet50", batch_size=n, dtype="float16", **options).total
        for n in (most["float16"], most["float16"] + 1)
    )
    assert fits <= 12 * 2**30 < beyond


def test_recompute_lowers_the_plan():
    """Forgetting activations takes less than 0.6 of the memory of a deep network, and changes no textbook count."""
    options = {"batch_size": 64, "mode": "training", "device": V100}
    kept, again = footprint("resnet50", **options), footprint("resnet50", recompute=True, **options)
    assert again.total < 0.6 * kept.total
    assert again.elements_per_sample == kept.elements_per_sample
    most = {
        r: max_batch_size("resnet50", memory="8GiB", mode="training", device=V100, recompute=r) for r in (False, True)
    }
    assert most[True] > 1.5 * most[False]


def test_a_footprint_prints_the_tables_of_the_command():
    """By part and by layer, an empty line between, as `cubatch memory` lays them out."""
    whole = footprint("mlp", batch_size=8, device="cpu")
    parts, layers = tables.footprint(whole, title="batch 8: memory of a step")
    assert str(whole) == whole.table() == f"{parts.text()}\n\n{layers.text()}"
    assert whole.to_mapping()["layers"] == list(whole.layers)


# --- the largest batch ---------------------------------------------------------------------------------------


@functools.lru_cache
def totals(spec, number, mode, recompute):
    """Peaks of the batch sizes from 1 to 120 on a device of DEVICES."""
    device = DEVICES[number]
    library = arithmetic.resolve_library("auto", device)
    work = workload(spec, device, mode=mode, optimizer="momentum", library=library, recompute=recompute)
    return [plan(work, n).total for n in range(1, 121)]


@pytest.mark.case("titan-x-test-batch")
@given(
    spec=st.sampled_from([BRANCHED, models.build("mnist-cnn"), Linear(c=40, k=70), models.build("lenet5")]),
    number=st.sampled_from(range(len(DEVICES))),
    mode=st.sampled_from(["inference", "training"]),
    recompute=st.booleans(),
    share=st.floats(0, 1),
)
@settings(max_examples=examples(80), deadline=None)
def test_the_largest_batch_is_the_largest(spec, number, mode, recompute, share):
    """It fits, and none of the next sizes does, by trying them one by one."""
    planned = totals(spec, number, mode, recompute)
    limit = int(planned[0] + share * (max(planned[:100]) - planned[0]))
    optimizer = "momentum" if mode == "training" else "sgd"
    options = {"mode": mode, "optimizer": optimizer, "recompute": recompute, "device": DEVICES[number]}
    most = max_batch_size(spec, memory=limit, **options)
    assert planned[most - 1] <= limit
    assert all(total > limit for total in planned[most : most + 16])


def test_a_size_that_fits_beyond_one_that_does_not_is_found():
    """Plans are not quite monotone: of 1 to 40, all up to 20 and then 24, 25, 33 fit; 41 and more never do."""
    fits = {*range(1, 21), 24, 25, 33}
    assert fit._climb(lambda size: size in fits, 3) == 33


@pytest.mark.parametrize("period", [2, 16, 19, 1000])
def test_sizes_far_above_are_reached_in_few_plans_whatever_lies_between(period):
    """Up to 100 000 every size fits but each so-manieth: the last is found, and fewer than 1000 are tried."""
    tried = []

    def fits(size):
        tried.append(size)
        return size <= 100_000 and size % period != 0

    assert fit._climb(fits, 1) == max(size for size in range(99_990, 100_001) if size % period)
    assert len(tried) < 1000


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_the_sum_of_gradients_is_counted_where_batches_are_smaller_than_the_step(device):
    """Four bytes a parameter, rounded up, once and not for each thread; a batch that is the whole step needs none."""
    options = {"batch_size": 8, "mode": "training", "device": device}
    alone, cut_up, whole = (footprint("mlp", target_batch_size=n, **options) for n in (None, 32, 8))
    assert cut_up.gradients - alone.gradients == -(-4 * MLP_PARAMETERS // 256) * 256 == cut_up.total - alone.total
    assert whole == alone


@pytest.mark.parametrize("library", ["im2col", "cubatch"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_largest_batch_of_a_step_divides_it_and_fits_beside_the_sum(dtype, library):
    """By trying each: of 60 samples' divisors the largest whose footprint is within the limit, for every limit."""
    if (dtype, library) == ("float16", "im2col"):
        pytest.skip("a BLAS takes float32 only")
    options = {"mode": "training", "optimizer": "adam", "device": V100, "dtype": dtype, "library": library}
    sizes = [n for n in range(1, 61) if 60 % n == 0]
    totals = {n: footprint(BRANCHED, batch_size=n, target_batch_size=60, **options).total for n in sizes}
    for limit in sorted(totals.values()):
        want = max(n for n in sizes if totals[n] <= limit)
        assert max_batch_size(BRANCHED, memory=limit, target_batch_size=60, **options) == want
    with pytest.raises(errors.DoesNotFit):
        max_batch_size(BRANCHED, memory=min(totals.values()) - 1, target_batch_size=60, **options)
    rules = rules_of_thumb(BRANCHED, batch_size=6, memory=totals[6], target_batch_size=60, **options)
    assert {rule.computed for rule in rules if rule.unit == "bytes"} == {totals[6]}


@pytest.mark.parametrize(
    ("spec", "options"),
    [
        ("mlp", {"mode": "inference", "target_batch_size": 8}),
        ("mlp", {"target_batch_size": 0}),
        ("mlp", {"target_batch_size": 2.0}),
        (Linear(c=3, k=4), {"target_batch_size": 8}),
    ],
)
def test_a_target_that_makes_no_sense_is_refused(spec, options):
    """It is the size of a step of a network that is trained."""
    options = {"mode": "training", "device": "cpu"} | options
    for ask in (
        functools.partial(footprint, spec, batch_size=1),
        functools.partial(max_batch_size, spec, memory="1GiB"),
    ):
        with pytest.raises(errors.InvalidArgument, match="target_batch_size"):
            ask(**options)


def test_a_target_that_batches_do_not_make_says_what_would_do():
    """A target that is a multiple, and a batch that divides this one."""
    with pytest.raises(
        errors.InvalidArgument, match=r"multiple of the batch size, 48, got 100.*96 is one.*batches of 50"
    ):
        footprint("mlp", batch_size=48, target_batch_size=100, mode="training", device="cpu")


def test_no_memory_is_too_large():
    """A memory that holds every batch gives the largest number a batch can have."""
    assert max_batch_size("lenet5", memory=2**62, device=V100, mode="inference") == MAX_BATCH_SIZE == 2**31 - 1


def test_sizes_and_percentages(monkeypatch):
    """Text and bytes mean the same; a percentage is one of what is free, also where a run would be given less."""
    monkeypatch.setattr(host, "available_memory_bytes", lambda: 4 * 2**30)
    monkeypatch.setattr(host, "cgroup_left_bytes", lambda: 2 * 2**30)
    most = lambda memory: max_batch_size("mnist-cnn", memory=memory, mode="training", device="cpu")  # noqa: E731
    assert most("1GiB") == most(2**30) == most("50%") == most(" 50 % ")
    assert most("100%") == most(2 * 2**30) > most("80%") == most(int(0.8 * 2 * 2**30))


def test_all_of_a_gpu_is_its_own_memory():
    """100 % of a V100 that is not here are the 16 GiB of its data sheet, with what CUDA itself would take of them."""
    options = {"mode": "training", "device": V100}
    most = lambda memory: max_batch_size("mnist-cnn", memory=memory, **options)  # noqa: E731
    assert max_batch_size("mnist-cnn", **options) == most("100%") == most("16GiB") > most("80%")


def test_a_limit_in_place_of_batches_is_rejected_by_name():
    with pytest.raises(errors.InvalidArgument, match="left out for the network 'mlp'"):
        max_batch_size("mlp", "12GiB")


def test_one_sample_too_many():
    """Where not even one sample fits, the error holds what is needed and what there is, and pickles."""
    one = footprint("resnet18", batch_size=1, device=V100, mode="inference").total
    assert max_batch_size("resnet18", memory=one, device=V100, mode="inference") == 1
    with pytest.raises(errors.DoesNotFit) as caught:
        max_batch_size("resnet18", memory=one - 1, device=V100, mode="inference")
    error = caught.value
    assert isinstance(error, MemoryError)
    assert (error.needed_bytes, error.available_bytes) == (one, one - 1)
    assert "resnet18" in str(error)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


# --- bad input -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0, -1, 1.5, math.nan, "8", None, True, 2**31, 10**12])
def test_a_batch_size_that_makes_no_sense_is_refused(value):
    """Zero, negative, huge, fractional, NaN or text: refused with field and value."""
    with pytest.raises(errors.InvalidArgument) as caught:
        footprint("mlp", batch_size=value, device=ONE, mode="inference")
    assert caught.value.field == "batch_size"
    assert caught.value.value is value


@pytest.mark.parametrize("value", [0, -1, 1.5, math.nan, "", "12XB", "-3GiB", "0%", "101%", None, True])
def test_a_memory_that_is_no_size_is_refused(value):
    """The same for sizes, by max_batch_size and by the rules of thumb."""
    calls = [functools.partial(max_batch_size, "mlp", memory=value, device="cpu")]
    if value is not None:  # which leaves the rule out
        calls.append(functools.partial(rules_of_thumb, "mlp", memory=value, device="cpu"))
    for call in calls:
        with pytest.raises(errors.InvalidArgument) as caught:
            call()
        assert caught.value.field == "memory"


def test_kernels_that_cannot_be_planned_say_what_is_missing():
    """16 bits need our kernels, which need the number of SMs: the error names it, and no library that nobody chose."""
    unknown = Device(name="prototype", compute_capability=(9, 0), memory_bytes=1 << 34)

    with pytest.raises(errors.InvalidArgument, match="num_sms"):
        footprint("mlp", batch_size=1, device=unknown, dtype="float16", mode="inference")


# --- rules of thumb ------------------------------------------------------------------------------------------


@pytest.mark.case("max-batch-formula")
@pytest.mark.case("memory-rules")
def test_the_rules_of_thumb_by_hand():
    """case: max-batch-formula, memory-rules. Each rule's number from the mlp's 131 410 parameters."""
    rules = {
        rule.name: rule for rule in rules_of_thumb("mlp", batch_size=256, mode="training", memory="12GiB", device=ONE)
    }
    assert MLP_PARAMETERS == 131_410
    assert rules["textbook count"].value == 465_920
    assert rules["2x the file"].value == 1_051_280
    assert rules["3x the file"].value == 1_576_920
    assert rules["4.5x the file"].value == 2_365_380
    assert rules["max batch formula"].value == 12 * 2**30 // 4 // (1820 + 131_410) == 24_177
    planned = footprint("mlp", batch_size=256, mode="training", device=ONE).total
    most = max_batch_size("mlp", memory="12GiB", mode="training", device=ONE)
    assert {rules[f"{factor}x the file"].computed for factor in ("2", "3", "4.5")} == {planned}
    assert rules["max batch formula"].computed == most
    assert rules["textbook count"].computed == 465_920 + 256  # the labels
    for rule in rules.values():
        assert rule.error == pytest.approx((rule.value - rule.computed) / rule.computed)
        assert rule.to_mapping()["error"] == rule.error
    assert rules["max batch formula"].error < -0.9  # it counts the parameters once for every sample
    assert "samples" not in {rule.unit for rule in rules_of_thumb("mlp", device=ONE)}  # no memory, no such rule
