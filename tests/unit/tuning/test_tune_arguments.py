"""What `autotune` refuses before anything is measured, by name."""

from __future__ import annotations

import json
import math
from fractions import Fraction

import numpy as np
import pytest

from cubatch import errors
from cubatch.tuning.prediction import predict
from cubatch.tuning.step_memory import max_batch_size
from cubatch.tuning.tune import autotune
from tests.unit.tuning.small_runs import tune

pytestmark = pytest.mark.usefixtures("quiet")

NAN = math.nan


@pytest.mark.parametrize(
    ("options", "error", "field"),
    [
        *[({"batch_sizes": value}, errors.InvalidArgument, "batch_sizes") for value in (
            [], [0], [-1], [1.5], [NAN], ["8"], [10**12], [True], [None], "32", 32, [[1]],
        )],
        *[({"max_batch_size": value}, errors.InvalidArgument, "max_batch_size") for value in (0, 2.5, NAN, "8", True)],
        *[({"memory_limit": value}, errors.InvalidArgument, "memory_limit") for value in (0, -1, NAN, "8 lots", "0%")],
        *[({"latency_limit": value}, errors.InvalidArgument, "latency_limit") for value in (0, NAN, math.inf, 1e31)],
        *[({"tolerance": value}, errors.InvalidArgument, "tolerance") for value in (-0.1, 1, NAN, "1%", None, True)],
        *[({"budget": value}, errors.InvalidArgument, "budget") for value in (0, -1, NAN, math.inf, "60", None, 1e31)],
        *[({"seed": value}, errors.InvalidArgument, "seed") for value in (-1, 0.5, "0", None, True)],
        *[({"isolate": value}, errors.InvalidArgument, "isolate") for value in ("yes", None, 2, [])],
        *[({"recompute": value}, errors.InvalidArgument, "recompute") for value in ("yes", 1, None)],
        *[({"store": value}, errors.InvalidArgument, "store") for value in (None, 3, [], "/no/folder/s.db")],
        *[({"objective": value}, errors.InvalidArgument, "objective") for value in ("speed", None)],
        *[({"mode": value}, errors.InvalidArgument, "mode") for value in ("train", None)],
        *[({"optimizer": value}, errors.InvalidArgument, "optimizer") for value in ("adam", "adamw", None)],
        *[({"dtype": value}, errors.InvalidArgument, "dtype") for value in ("float16", "tf32", "float33", None)],
        *[({"library": value}, errors.InvalidArgument, "library") for value in ("cubatch", "cudnn", None)],
        *[({"device": value}, errors.InvalidArgument, "device") for value in ("tpu", "titan x", 3)],
        ({"progress": "bar"}, errors.InvalidArgument, "progress"),
        ({"batch_sizes": [8, 64], "max_batch_size": 32}, errors.InvalidArgument, "batch_sizes"),
        *[({"sweeps": value}, errors.InvalidArgument, "sweeps") for value in (0, -1, 2.5, True)],
        ({"sweeps": 5, "batch_sizes": None}, errors.InvalidArgument, "sweeps"),
    ],
    ids=str,
)  # fmt: skip
def test_bad_arguments_are_refused_by_name(options, error, field, no_runner, tmp_path):
    """Each is an error of ours with field and value, before a runner is made or anything is kept."""
    no_runner()
    kept = tmp_path / "store.sqlite3"
    with pytest.raises(error) as caught:
        tune(**{"store": kept} | options)
    assert isinstance(caught.value, errors.CubatchError)
    assert caught.value.field == field
    assert not kept.exists()


def test_a_latency_limit_as_text_is_answered_with_its_unit():
    """The limit is a number of seconds, not "10ms"."""
    with pytest.raises(errors.InvalidArgument, match="latency_limit must be a finite number of seconds, got '10ms'"):
        tune(latency_limit="10ms")


def test_our_kernels_on_a_cpu_are_refused():
    """library="cubatch" means a GPU; the error names what there is instead."""
    with pytest.raises(errors.InvalidArgument, match="im2col") as caught:
        tune(library="cubatch")
    assert (caught.value.field, caught.value.value) == ("library", "cubatch")


@pytest.mark.parametrize(
    ("spec", "error"),
    [
        ("resnet5", errors.InvalidArgument),
        ("no-such-file.toml", errors.CubatchError),
        ({"layers": []}, errors.InvalidSpec),
        ({"input_shape": [4, 4, 3], "layers": [{"type": "conv2d", "k": 4, "r": 9, "s": 9}]}, errors.InvalidSpec),
        (None, errors.CubatchError),
        ({"input_shape": [4, 4, 3], "layers": [{"type": "opaque"}]}, errors.UnsupportedLayer),
    ],
)
def test_specs_that_cannot_be_run_are_refused(spec, error, no_runner):
    """A typo, a missing file, no layers, a filter too large, nothing, or a layer without code."""
    no_runner()
    with pytest.raises(error):
        autotune(spec, device="cpu", batch_sizes=[1], budget=0.5, store=False, isolate=False)


def test_what_the_machine_does_not_have_is_refused(no_runner):
    """A catalogued GPU that is not here, energy without a reading, a limit below one sample."""
    no_runner()
    with pytest.raises(errors.DeviceNotAvailable):
        tune(device="titan-x-maxwell")
    with pytest.raises(errors.EnergyNotAvailable):
        tune(objective="energy")
    with pytest.raises(errors.DoesNotFit) as caught:
        tune(memory_limit=1000)
    assert caught.value.available_bytes == 1000
    assert isinstance(caught.value, MemoryError)


@pytest.mark.parametrize("kind", [np.float32, Fraction])
def test_numbers_of_other_kinds_ask_the_same_question(kind, tmp_path, virtual):
    """A quarter and a half, which every kind holds exactly: answered from what was kept of 0.25 and 0.5."""
    plain, others = ({"tolerance": of(0.25), "latency_limit": of(0.5)} for of in (float, kind))
    tune(store=tmp_path / "kept", **plain)
    assert any("Answered from the store" in reason for reason in tune(store=tmp_path / "kept", **others).reasons)
    found, same = (predict("lenet5", device="t4", batch_sizes=[8], **asked).to_mapping() for asked in (others, plain))
    assert json.loads(json.dumps(found)) == json.loads(json.dumps(same))


def test_integers_of_numpy_ask_the_same_question(tmp_path, virtual):
    """A seed and bytes as NumPy computes them: answered from what was kept of Python's, and as many fit."""
    plain, others = ({"seed": of(3), "memory_limit": of(2**26)} for of in (int, np.uint64))
    tune(store=tmp_path / "kept", **plain)
    result = tune(store=tmp_path / "kept", **others)
    assert any("Answered from the store" in reason for reason in result.reasons)
    assert (result.seed, json.loads(result.to_json())["limits"]["memory_bytes"]) == (3, 2**26)
    assert max_batch_size("mlp", memory=np.int32(2**26), device="cpu") == max_batch_size(
        "mlp", memory="64MiB", device="cpu"
    )
