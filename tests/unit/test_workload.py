"""Workloads: what is resolved and refused at the door, and the words that others have of them."""

from __future__ import annotations

import attrs
import pytest

from cubatch.errors import InvalidArgument, UnknownName, UnsupportedDtype
from cubatch.memory.plan import STATE_COPIES
from cubatch.network.layers import Linear
from cubatch.workload import OPTIMIZERS, Workload

V100 = "v100-sxm2-16gb"


def test_a_name_a_device_and_auto_are_resolved():
    """What others are given is a network, a record of a device and the library that runs on it."""
    work = Workload.of("mlp", V100, mode="inference", dtype="float16")
    assert (work.name, work.device.slug, work.library) == ("mlp", V100, "cubatch")
    assert Workload.of("mlp", "cpu", mode="inference", dtype="float32").library == "im2col"
    assert (Workload.of(Linear(c=2, k=3), V100, mode="training", dtype="float32").input_shape) == (1, 1, 2)


def test_settings_are_what_is_said_in_words():
    """The five words that store, JSON and worker share, in their order."""
    work = Workload.of("mlp", V100, mode="training", dtype="float32", optimizer="adam", recompute=True)
    assert work.settings == {
        "mode": "training", "dtype": "float32", "optimizer": "adam", "library": "cubatch", "recompute": True
    }  # fmt: skip


@pytest.mark.parametrize(("mode", "recompute", "repeated"), [
    ("training", True, True), ("training", False, False), ("inference", True, False),
])  # fmt: skip
def test_only_a_backward_pass_computes_again(mode, recompute, repeated):
    """Whatever was asked, inference has nothing to compute again."""
    assert Workload.of("mlp", V100, mode=mode, dtype="float32", recompute=recompute).is_recomputed is repeated


@pytest.mark.parametrize(("wrong", "error", "named"), [
    ({"mode": "train"}, InvalidArgument, "mode"),
    ({"dtype": "float8"}, UnknownName, "dtype"),
    ({"dtype": "bfloat16", "device": "cpu"}, UnsupportedDtype, "dtype"),
    ({"optimizer": "lion"}, InvalidArgument, "optimizer"),
    ({"optimizer": ["sgd"]}, InvalidArgument, "optimizer"),
    ({"library": "cudnn"}, InvalidArgument, "library"),
    ({"recompute": "yes"}, InvalidArgument, "recompute"),
    ({"spec": "resnet51"}, UnknownName, "resnet51"),
    ({"device": "v101"}, InvalidArgument, "v101"),
])  # fmt: skip
def test_what_makes_no_sense_is_refused_by_name(wrong, error, named):
    """Each word is checked, before anything is planned or opened."""
    given = {"spec": "mlp", "device": V100, "mode": "inference", "dtype": "float32"} | wrong
    with pytest.raises(error) as caught:
        Workload.of(given.pop("spec"), given.pop("device"), **given)
    assert named in str(caught.value)


def test_every_optimizer_has_its_state_in_the_plan():
    """A name that is accepted is one whose state is counted."""
    assert tuple(STATE_COPIES) == OPTIMIZERS


def test_experimental_kernels_are_known_by_name():
    """One name or several; a misspelled one would change nothing, unnoticed."""
    work = Workload.of("mlp", V100, mode="training", dtype="float16")
    for names in (["norm_sums"], "norm_sums", {"norm_sums"}):
        assert attrs.evolve(work, experimental=names).experimental == {"norm_sums"}
    for names in (["norm_sums", "norm_sum"], "norm_sum", [["norm_sums"]]):
        with pytest.raises(UnknownName, match="norm_sums"):
            attrs.evolve(work, experimental=names)
    for value in (True, None):
        with pytest.raises(InvalidArgument, match="a list of names out of flash_attention, gelu_products, norm_sums"):
            attrs.evolve(work, experimental=value)
