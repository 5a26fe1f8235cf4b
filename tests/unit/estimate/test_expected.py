"""What a step should take, by the model or by the roofline, and which facts that needs."""

from __future__ import annotations

import attrs
import pytest

from cubatch.estimate import expected as expectation, roofline
from cubatch.estimate.step import predict_step
from cubatch.hardware import arithmetic, catalogue
from cubatch.hardware.facts import Device
from cubatch.network import models
from cubatch.network.graph import Network
from cubatch.network.layers import Linear, ReLU
from tests.building import workload

V100 = catalogue.find("v100-sxm2-16gb")
MLP = models.build("mlp")
CPU = Device(name="cpu", kind="cpu", peak_flops_per_second={"float32": 1e11}, peak_bytes_per_second=1e10)


@pytest.mark.parametrize("library", ["vendor", "cubatch"])
def test_a_gpu_of_known_facts_misses_none(library):
    """Every fact that the model asks for is one that it names."""
    assert expectation.missing_facts(V100, "float32", library) == ()


@pytest.mark.parametrize(
    ("library", "fact", "named"),
    [
        ("vendor", {"num_sms": None}, "num_sms"),
        ("vendor", {"compute_capability": None}, "compute_capability"),
        ("vendor", {"peak_bytes_per_second": None}, "peak_bytes_per_second"),
        ("vendor", {"peak_flops_per_second": {"float32": 1e13}}, "peak_flops_per_second['float16']"),
        ("cubatch", {"clock_hz": None}, "clock_hz"),
        ("cubatch", {"tensor_cores": None}, "tensor_cores"),
    ],
)
def test_what_is_missing_is_named_as_the_record_has_it(library, fact, named):
    """One fact less is one name, and the library says which facts count."""
    assert expectation.missing_facts(attrs.evolve(V100, **fact), "float16", library) == (named,)


def test_sixteen_bits_without_tensor_cores_need_the_rate_of_float32():
    """A Titan X (Pascal) computes them in float32, whose rate is known."""
    assert expectation.missing_facts(catalogue.find("titan-x-pascal"), "float16", "vendor") == ()


@pytest.mark.parametrize(("library", "model"), [("cubatch", "cubatch"), ("im2col", "vendor")])
def test_a_known_gpu_is_predicted_by_the_library_that_would_run(monkeypatch, library, model):
    """Our own kernels' times, or the vendor's products."""
    asked = []

    def step(*arguments, **options):
        asked.append(options["library"])
        return predict_step(*arguments, **options)

    monkeypatch.setattr(expectation, "predict_step", step)
    found = expectation.step_seconds(workload(MLP, V100, mode="training", library=library), [1, 64])
    expected = predict_step(MLP, [1, 64], V100, mode="training", library=model)
    assert found == pytest.approx(list(expected.seconds), rel=1e-12)
    assert asked == [model]


@pytest.mark.parametrize("library", ["vendor", "cubatch"])
def test_what_a_library_does_by_a_call_of_its_own_is_recomputed_by_one(library):
    """A ReLU behind each of the nine: done again with the four, where our kernels do it to their products at hand."""
    net = Network(input_shape=(1, 1, 2048), layers=[one for _ in range(9) for one in (Linear(k=2048), ReLU())])
    works = [workload(net, V100, mode="training", library=library, recompute=again) for again in (False, True)]
    plain, again = (expectation.step_seconds(work, [4096])[0] for work in works)
    forward = predict_step(net, [4096], V100, library=library)
    assert again - plain == pytest.approx(4 * forward.seconds[0] / 9, rel=1e-5)
    assert (forward.passes[1].seconds[0] > 0) == (library == "vendor"), "the ReLU"


@pytest.mark.parametrize("device", [CPU, attrs.evolve(V100, num_sms=None)], ids=["cpu", "unknown SMs"])
@pytest.mark.parametrize("mode", ["inference", "training"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_elsewhere_it_is_the_roofline(device, mode, dtype):
    """A CPU with known rates, and a GPU without a number of SMs, in the mode and dtype that were asked for."""
    found = expectation.step_seconds(workload(MLP, device, mode=mode, dtype=dtype), [1, 64])
    assert found == [roofline.roofline_seconds(MLP, n, device, mode, dtype) for n in (1, 64)]
    assert None not in found


@pytest.mark.parametrize("library", ["vendor", "cubatch"])
def test_every_gpu_of_the_catalogue_has_an_answer_in_every_dtype_it_takes(library):
    """A time, or none where its rates are unknown: never an error, which would keep it from being tuned."""
    devices = catalogue.all_devices()
    for device, dtype in ((one, dtype) for one in devices for dtype in arithmetic.supported_dtypes(one)):
        (found,) = expectation.step_seconds(workload(MLP, device, mode="training", dtype=dtype, library=library), [32])
        assert found is None or found > 0, (device.slug, dtype)
    turing = Device(name="card", num_sms=24, compute_capability=(7, 5), clock_hz=1.8e9, peak_bytes_per_second=3e11)
    assert expectation.step_seconds(workload(MLP, turing, dtype="float16", library=library), [32]) == [None]


def test_without_rates_it_is_unknown():
    """Nothing is guessed."""
    assert expectation.step_seconds(workload(MLP, Device(name="bare")), [1]) == [None]
