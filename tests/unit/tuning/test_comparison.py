"""Several GPUs side by side, and what samples cost on them."""

from __future__ import annotations

import pickle

import pytest

import cubatch
from cubatch.errors import CubatchError, InvalidArgument, UnsupportedDtype

OPTIONS = {"batch_sizes": [8, 64], "mode": "training"}


def test_each_gpu_has_the_forecast_that_predict_gives_the_best_first():
    """Nothing is changed by asking for several; one named twice, or by another of its names, counts once."""
    found = cubatch.compare("lenet5", ["t4", "a40", "Tesla T4", cubatch.device("a40")], **OPTIONS)
    assert dict(found.forecasts) == {name: cubatch.predict("lenet5", device=name, **OPTIONS) for name in ("t4", "a40")}
    rates = [one.samples_per_second[one.batch_size] for one in found.forecasts.values()]
    assert rates == sorted(rates, reverse=True)
    assert (dict(found.failed), found.cost_per_million_samples) == ({}, {})


def test_latency_puts_the_shortest_step_first():
    """The objective says what best means."""
    found = cubatch.compare("lenet5", ["t4", "a40"], objective="latency", **OPTIONS)
    steps = [one.seconds[one.batch_size] for one in found.forecasts.values()]
    assert steps == sorted(steps)


def test_a_million_samples_cost_their_hours():
    """By hand: 10^6 samples at so many a second are so many hours, each at the price; without a price no cost."""
    found = cubatch.compare("lenet5", ["t4", "a40"], prices={"Tesla T4": 0.5}, **OPTIONS)
    one = found.forecasts["t4"]
    hours = 1_000_000 / one.samples_per_second[one.batch_size] / 3600
    assert found.cost_per_million_samples == {"t4": pytest.approx(0.5 * hours, rel=1e-12)}
    assert found.to_mapping()["cost_per_million_samples"] == found.cost_per_million_samples
    assert "per million" in found.table()
    assert "Only t4 has a price." in " ".join(str(found).split())
    assert pickle.loads(pickle.dumps(found)) == found


def test_who_cannot_is_named_and_if_nobody_can_the_reason_is_the_error():
    """TF32 needs sm_80."""
    found = cubatch.compare("lenet5", ["t4", "a40"], dtype="tf32", batch_sizes=iter([8]))
    assert (list(found.forecasts), list(found.failed)) == (["a40"], ["t4"])
    with pytest.raises(UnsupportedDtype):
        cubatch.compare("lenet5", ["t4"], dtype="tf32")


@pytest.mark.parametrize(
    ("devices", "prices", "says"),
    [
        (["t4"], {"t4": 1.0, "Tesla T4": 2.0}, "must be 1.0, as another name of t4 has it, got 2.0"),
        (1, None, "devices must be a list"), (["t4"], 2, "prices"), ("t4", None, "devices must be a list"),
        ([], None, "at least one"), (["t4"], {"t5": 1.0}, "t5"), (["t4"], {"t4": 0}, "above 0"),
        (["t4"], {"v100": 1.0}, "^prices must be one of"),
        (["t4"], {"t4": float("nan")}, "above 0"), (["t4"], {"t4": "cheap"}, "above 0"), (["t5"], None, "t5"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(devices, prices, says):
    """Before anything is predicted."""
    with pytest.raises(InvalidArgument, match=says):
        cubatch.compare("lenet5", devices, prices=prices)


def test_gpus_that_differ_have_names_that_differ(tmp_path):
    """Two files of one stem: one would be shown at the other's price; a name of its own tells them apart."""
    for folder, line in (("a", ""), ("b", ""), ("c", 'name = "other"')):
        (tmp_path / folder).mkdir()
        rest = f"peak_tflops = {{ float32 = {10 + ord(folder)} }}\n{line}\n"
        (tmp_path / folder / "card.toml").write_text(
            f"compute_capability = [8, 6]\nnum_sms = 28\nmemory_gib = 12\nbandwidth_gb_per_second = 360\n{rest}"
        )
    a, b, c = (str(tmp_path / folder / "card.toml") for folder in "abc")
    with pytest.raises(InvalidArgument, match="different names"):
        cubatch.compare("lenet5", [a, b], **OPTIONS)
    assert cubatch.compare("lenet5", [a], prices={b: 1.0, "t4": 0.5}, **OPTIONS).prices == {}
    found = cubatch.compare("lenet5", [a, c], prices={a: 1.0, c: 3.0}, **OPTIONS)
    assert ({*found.forecasts}, dict(found.prices)) == ({"card", "other"}, {"card": 1.0, "other": 3.0})


@pytest.mark.parametrize(
    "options",
    [
        {"batch_sizes": 64}, {"batch_sizes": "64"}, {"batch_sizes": {}}, {"anchors": 3}, {"anchors": "run.json"},
        {"anchors": {"run.json": 1}},
    ],
    ids=str,
)  # fmt: skip
def test_what_predict_refuses_is_refused_alike(options):
    """The same error, of the same words."""
    with pytest.raises(CubatchError) as alone:
        cubatch.predict("lenet5", device="t4", **options)
    with pytest.raises(type(alone.value)) as caught:
        cubatch.compare("lenet5", ["t4", "a40"], **options)
    assert str(caught.value) == str(alone.value)
