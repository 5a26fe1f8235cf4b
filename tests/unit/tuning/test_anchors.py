"""Tuning results as anchors: what they are taken for, and which say nothing about a prediction."""

from __future__ import annotations

import json
import math
from typing import Any

import attrs
import pytest

from cubatch.errors import InvalidArgument, InvalidData
from cubatch.estimate.expected import step_of
from cubatch.hardware import catalogue
from cubatch.hardware.facts import Device
from cubatch.network import models
from cubatch.network.graph import Network
from cubatch.network.layers import Conv2d, Linear
from cubatch.tuning import anchors
from cubatch.tuning.anchors import gpu_of, work_of
from cubatch.tuning.prediction import predict
from cubatch.tuning.results import TuningResult
from cubatch.tuning.sharpen import sharpen
from cubatch.workload import Workload
from tests.building import workload
from tests.unit.tuned import measurement, tuned

V100, T4 = catalogue.find("v100-sxm2-16gb"), catalogue.find("t4")
ASKED = workload(models.build("mlp"), V100, mode="training", library="vendor")
SHARED = {
    "devices": ["cuda:0", "cuda:1"], "batch_size": 32, "step_seconds": 0.02, "alone_seconds": 0.01,
    "exchange_seconds": 0.012, "exposed_seconds": 0.01, "overlap": 0.2, "scaling_efficiency": 0.5,
    "samples_per_second": 3200.0,
}  # fmt: skip
MEASURED = [measurement(16, 0.01, "dropped"), measurement(32, 0.02), measurement(64, None, "out_of_memory")]


def facts(**more: Any) -> dict[str, Any]:
    """A result of the mlp on the GPU that is asked about."""
    return tuned(spec=models.build("mlp").to_mapping(), device=here(V100), measurements=MEASURED) | more


def here(device: Device, **more: Any) -> dict[str, Any]:
    """The device of a result, as a run writes it down."""
    capability = list(device.compute_capability or ())
    return {"name": device.name, "kind": "cuda", "compute_capability": capability, "num_sms": device.num_sms,
            "uuid": None, "mig": None} | more  # fmt: skip


def result(**more: Any) -> TuningResult:
    return TuningResult.from_json(json.dumps(facts(**more)))


def read(given: Any, asked: Workload = ASKED) -> anchors.Anchor:
    (found,) = anchors.read([given], asked)
    return found


def test_only_measurements_that_could_be_the_answer_count():
    """The median of what was "ok"; what was dropped early, or never ran, is left out."""
    found = read(result())
    assert found.seconds == {32: 0.02}
    assert (found.origin, found.work) == ("anchors[0]", ASKED)


@pytest.mark.parametrize(
    ("more", "sd"),
    [
        ({"latency_interval": [0.02 / 1.4, 0.02 * 1.4]}, math.log(1.4) / 1.6448536269514722),
        ({"latency_interval": [0.01, 0.04]}, math.log(2) / 1.6448536269514722),
        ({"latency_interval": [0.0199, 0.0201]}, 0.02),
        ({"latency_interval": None, "timings_seconds": [0.0199, 0.02, 0.0201]}, 0.1),
        ({"latency_interval": None, "timings_seconds": [0.01, 0.02, 0.03]}, math.log(3) / 2),
        ({"latency_interval": None, "timings_seconds": [0.02]}, 0.1),
        ({"latency_interval": None, "timings_seconds": []}, 0.1),
    ],
)
def test_a_median_is_as_unsure_as_its_own_timings_say(more, sd):
    """By its interval of 90 %, or where timings are too few for one by half of their range; 0.02 and 0.1 at least."""
    assert read(result(measurements=[measurement(32, 0.02, **more)])).sds == {32: pytest.approx(sd)}


def test_a_file_is_read_and_named(tmp_path):
    """Text or path; errors and notes call it by its path."""
    path = tmp_path / "tuned.json"
    path.write_text(result().to_json(), encoding="utf-8")
    for given in (path, str(path)):
        assert read(given) == attrs.evolve(read(result()), origin=str(path))


@pytest.mark.parametrize("name", ["Tesla V100-SXM2-16GB", "NVIDIA V100-SXM2-16GB", "v100-sxm2-16gb"])
def test_a_gpu_is_the_same_by_whatever_name_the_driver_gave(name):
    """Old and new drivers spell a board differently."""
    assert read(result(device=here(V100, name=name))).work.device is V100


@pytest.mark.parametrize("slug", ["rtx-3060-8gb", "rtx-3060-12gb", "rtx-3080-10gb", "rtx-2060-12gb"])
def test_a_board_whose_name_others_share_is_known_by_its_slug_or_its_memory(slug):
    """As a run on it writes it down, and as runs did before they wrote the catalogue's name."""
    board = catalogue.find(slug)
    name = board.name.rsplit(" ", 1)[0]
    assert len(catalogue.sharing(name)) > 1
    seen = {"name": name, "memory_bytes": int(0.98 * (board.memory_bytes or 0))}
    for facts_of in (here(board, **seen), here(board, **seen, slug=slug), here(board, name=seen["name"], slug=slug)):
        assert read(result(device=facts_of)).work.device == board
    asked = attrs.evolve(ASKED, device=attrs.evolve(board, name=seen["name"]))  # the driver's name, which others share
    others = [one for one in catalogue.sharing(name) if one != board]
    assert read(result(device=here(others[0], name=seen["name"], slug=others[0].slug)), asked).work.device == others[0]
    with pytest.raises(InvalidArgument, match="Several devices"):
        read(result(device=here(board, name=seen["name"])))


def test_a_gpu_outside_the_catalogue_is_known_by_name_or_uuid():
    """The one that is predicted is a Device made by hand, or the one in this machine."""
    own = attrs.evolve(V100, name="Own GPU", slug="", uuid="GPU-1")
    asked = attrs.evolve(ASKED, device=own)
    assert read(result(device=here(own)), asked).work.device is own
    assert read(result(device=here(own, name="Renamed", uuid="GPU-1")), asked).work.device is own


def test_the_facts_of_the_gpu_that_is_predicted_are_the_ones_used():
    """A board of the catalogue with a fact put right by hand, found under the driver's name."""
    own = attrs.evolve(V100, name="My V100", peak_bytes_per_second=800e9)
    assert read(result(device=here(V100)), attrs.evolve(ASKED, device=own)).work.device is own


def test_the_same_work_is_that_of_the_same_network_mode_library_and_dtype():
    """Whatever it is called; its error is another in training, in another dtype or library."""
    renamed = attrs.evolve(models.build("mlp"), name="mine")
    assert work_of(attrs.evolve(ASKED, spec=renamed)) == work_of(ASKED)
    others = [{"spec": models.build("mnist-cnn")}, {"mode": "inference"}, {"library": "cubatch"}, {"dtype": "float16"},
              {"recompute": True}]  # fmt: skip
    assert len({work_of(attrs.evolve(ASKED, **other)) for other in (*others, {})}) == 6
    inference = attrs.evolve(ASKED, mode="inference")
    assert work_of(attrs.evolve(inference, recompute=True)) == work_of(inference)


def test_inference_recomputes_nothing():
    """Whatever was asked: there is no backward pass to do it in."""
    inference = attrs.evolve(ASKED, mode="inference")
    again = step_of(attrs.evolve(inference, recompute=True), [64])
    assert again.seconds.tolist() == step_of(inference, [64]).seconds.tolist()


def test_a_board_goes_by_the_name_that_its_results_have():
    """The catalogue's, which one in this machine and one that is not share; else its own, else the driver's."""
    own = attrs.evolve(V100, uuid="GPU-1")
    for device, name in (
        (own, "v100-sxm2-16gb"),
        (attrs.evolve(own, slug=""), "GPU-1"),
        (attrs.evolve(V100, slug=""), V100.name),
    ):
        assert gpu_of(attrs.evolve(ASKED, device=device)) == name


def test_a_recomputed_step_is_compared_with_a_recomputed_one():
    """Measured with it, as long as a recomputed step is predicted: a ratio of one, which without would be larger."""
    net = Network(input_shape=(1, 1, 2048), layers=[Linear(k=2048) for _ in range(9)])
    asked = attrs.evolve(ASKED, spec=net, library="cubatch", recompute=True)
    again, plain = (step_of(one, [4096]).seconds[0] for one in (asked, attrs.evolve(asked, recompute=False)))
    more = {"spec": net.to_mapping(), "library": "cubatch", "measurements": [measurement(4096, float(again))]}
    known = read(result(**more, recompute=True), asked)
    assert known.work == asked
    assert sharpen(asked, [4096], [known]).ratios == (pytest.approx(1),)
    assert sharpen(asked, [4096], [known]).step.seconds[0] == pytest.approx(again)
    other = read(result(**more, recompute=False), asked)
    assert sharpen(asked, [4096], [other]).ratios == (pytest.approx(again / plain),)
    assert again > 1.1 * plain


def test_the_vendors_products_are_im2col_without_convolutions():
    """Linear layers run on the same library; our kernels are another."""
    assert read(result(library="im2col")).work.library == "vendor"
    assert read(result(library="cubatch")).work.library == "cubatch"


def test_gathered_convolutions_are_no_vendors_convolutions():
    """No library copies its operands to memory first: such a ratio would mislead."""
    conv = Conv2d(h=8, w=8, c=4, k=4, r=3, s=3).to_mapping()
    with pytest.raises(InvalidArgument, match="gathers operands"):
        read(result(spec=conv, library="im2col"))
    assert read(result(spec=conv, library="cubatch")).work.library == "cubatch"


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"device": {"name": "Xeon", "kind": "cpu", "num_sms": None}}, "measured on a CPU"),
        ({"spec": None, "mode": None, "dtype": None}, "callable"),
        ({"device": here(V100, name="GeForce 9999")}, "`cubatch devices` lists"),
        ({"device": here(V100, name="Titan X")}, "Several devices"),
        ({"device": here(V100, num_sms=14, mig="1g.5gb")}, "measured on 14"),
        ({"measurements": [measurement(64, None, "out_of_memory")]}, '"ok"'),
        ({"device": here(T4), "dtype": "float16"}, "share nothing"),
        ({"device": here(catalogue.find("rtx-pro-6000-blackwell-server"))}, "peak_bytes_per_second"),
        ({"data_parallel": SHARED}, "results of one GPU, got 'anchors[0]'. Leave this one out: several devices"),
    ],
)
def test_what_says_nothing_about_it_is_refused(changed, said):
    """With the file or the place in the list, and the reason."""
    with pytest.raises(InvalidArgument, match="anchors") as caught:
        read(result(**changed))
    assert said in str(caught.value)
    assert "anchors[0]" in str(caught.value)


@pytest.mark.parametrize(
    ("more", "remedy"),
    [
        ({"library": "cubatch"}, 'library="cubatch" (`--library cubatch`)'),
        ({"dtype": "float16"}, 'dtype="float16" (`--dtype float16`)'),
        (
            {"library": "cubatch", "dtype": "float16"},
            'library="cubatch", dtype="float16" (`--library cubatch --dtype float16`)',
        ),
    ],
)
def test_another_gpus_results_are_refused_with_what_would_take_them(more, remedy):
    """On a GPU `tune` times our kernels and `predict` goes by the vendor's: asked for ours, it learns from them."""
    given = result(device=here(T4), **more)
    with pytest.raises(InvalidArgument, match="share nothing") as caught:
        read(given)
    assert f"; predict with {remedy} to learn from it." in str(caught.value)
    assert read(given, attrs.evolve(ASKED, **more)).seconds == {32: 0.02}


@pytest.mark.parametrize("given", ["one.json", None, 3])
def test_anchors_are_a_list(given):
    """One path is not a list of its letters."""
    with pytest.raises(InvalidArgument, match="a list of tuning results"):
        anchors.read(given, ASKED)


def test_a_thing_that_is_no_anchor_is_named_by_its_place():
    """In a list of several."""
    with pytest.raises(InvalidArgument, match=r"anchors\[1\]"):
        anchors.read([result(), {"schema": 1}], ASKED)


def test_a_file_that_is_no_tuning_result_is_named(tmp_path):
    """By its path; what such a file may hold is tested with results."""
    path = tmp_path / "tuned.json"
    path.write_text(json.dumps(facts()).replace("0.02,", "1e999,", 1))
    with pytest.raises(InvalidData, match=r"tuned\.json: measurements\[1\]\.latency_seconds must be finite, got inf"):
        read(path)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    """Missing, a folder, no text, or a name that no file can have."""
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\xff")
    for path in (tmp_path / "none.json", tmp_path, tmp_path / "bytes", "x" * 5000, "a\0"):
        with pytest.raises(InvalidData, match="cannot be read"):
            read(path)


def test_a_prediction_is_no_measurement(tmp_path):
    """Or a model would confirm itself."""
    path = tmp_path / "predicted.json"
    path.write_text(predict("mlp", device=V100, batch_sizes=[32]).to_json())
    with pytest.raises(InvalidData, match="holds a prediction"):
        read(path)
