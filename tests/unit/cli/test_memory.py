"""`cubatch memory`."""

from __future__ import annotations

import inspect
import json

import pytest

import cubatch
import cubatch.engine
import cubatch.tuning
from cubatch.hardware import probe
from cubatch.hardware.memory_limit import memory_limit
from cubatch.memory import fit


@pytest.mark.parametrize("options", [["--recompute"], ["--library", "im2col"]])
def test_memory_gives_one_plan_whatever_is_asked(run, options):
    """The rules of thumb stand beside the very plan and the largest batch that are shown above them."""
    _, out, _ = run(
        "memory", "vgg16", "--batch-size", "8", "--device", "t4", "--memory", "8GiB", *options, "--json", "-"
    )
    found = json.loads(out)
    assert found["schema"] == 2
    assert set(found["modes"]) == {"inference", "training"}
    for facts in found["modes"].values():
        computed = {rule["unit"]: rule["computed"] for rule in facts["rules_of_thumb"]}
        assert (computed["bytes"], computed["samples"]) == (facts["footprint"]["total"], facts["max_batch_size"])


def test_memory_json_agrees_with_the_library(run):
    """A program gets the same numbers."""
    code, out, _ = run("memory", "mlp", "--batch-size", "8", "--device", "cpu", "--memory", "1GiB", "--json", "-")
    found = json.loads(out)["modes"]

    assert code == 0
    for mode, facts in found.items():
        assert facts["footprint"] == json.loads(
            json.dumps(cubatch.footprint("mlp", batch_size=8, mode=mode, device="cpu").to_mapping())
        )
        assert facts["max_batch_size"] == cubatch.max_batch_size("mlp", memory="1GiB", mode=mode, device="cpu")


def test_memory_of_a_target_is_that_of_training_beside_the_sum(run):
    """The footprint and the largest batch are the library's for the same target; inference has none to show."""
    arguments = ["memory", "mlp", "--batch-size", "8", "--device", "cpu", "--memory", "1GiB"]
    code, out, _ = run(*arguments, "--target-batch-size", "32", "--json", "-")
    found = json.loads(out)["modes"]
    options = {"mode": "training", "device": "cpu", "target_batch_size": 32}
    assert code == 0
    assert set(found) == {"training"}
    assert found["training"]["footprint"]["total"] == cubatch.footprint("mlp", batch_size=8, **options).total
    assert found["training"]["max_batch_size"] == cubatch.max_batch_size("mlp", memory="1GiB", **options) == 32
    out = " ".join(run(*arguments, "--target-batch-size", "32")[1].split())
    assert "batch 8 of 32" in out
    # A formula of memory knows nothing of what divides 32: beside it the plan's 32 would tell of no error.
    assert "The largest batch that divides 32 whose step fits in 1.00 GiB, by the plan: 32." in out
    assert "max batch formula" not in out


def test_a_mode_that_is_asked_for_stands_alone(run):
    """Without it both stand side by side; with it the other is not worked out."""
    arguments = ["memory", "mlp", "--device", "cpu", "--memory", "1GiB"]
    code, out, _ = run(*arguments, "--mode", "training")
    _, both, _ = run(*arguments)
    assert code == 0
    assert "inference" not in out
    assert "inference" in both
    assert "training" in both


def test_functions_and_commands_have_one_default_mode():
    """Inference everywhere: who tunes and then asks for the memory asks about one thing."""
    functions = (
        cubatch.autotune, cubatch.predict, cubatch.candidates, cubatch.footprint, cubatch.max_batch_size,
        cubatch.rules_of_thumb, cubatch.autotune_module,
    )  # fmt: skip
    assert {inspect.signature(function).parameters["mode"].default for function in functions} == {"inference"}


def test_where_only_inference_fits_it_is_still_shown(run):
    """A training step of resnet50 needs more than 200 MiB: no batch of it fits, and the columns stand all the same."""
    arguments = ["memory", "resnet50", "--device", "cpu", "--memory", "200MiB"]
    code, text, _ = run(*arguments, "--json", "-")
    found = json.loads(text)["modes"]
    assert code == 0
    assert found["training"]["max_batch_size"] == 0
    assert found["inference"]["max_batch_size"] > 0
    assert "no batch" in run(*arguments)[1]
    assert run(*arguments, "--mode", "training")[0] == 1


PRICES = 't4 = 0.35\n"NVIDIA L4" = 0.71\nv100-sxm2-16gb = 2.5\n'


def test_several_devices_share_a_table_with_what_an_hour_costs(run, tmp_path):
    """Each has its own limit and largest batch, as alone; the cheapest on which the batch fits is named."""
    (tmp_path / "prices.toml").write_text(PRICES)
    limit = memory_limit(probe.resolve("t4", live=False)).bytes
    size = cubatch.max_batch_size("resnet50", memory=limit, mode="training", device="t4") + 1
    asked = ["memory", "resnet50", "--batch-size", size, "--mode", "training", "--prices", tmp_path / "prices.toml"]
    code, text, _ = run(*asked, "--device", "t4,l4", "--json", "-")
    rows = {row["device"]: row for row in json.loads(text)["devices"]}
    assert (code, list(rows)) == (1, ["t4", "l4"])  # it does not fit on the first
    for name, row in rows.items():
        options = {"mode": "training", "device": name}
        assert row["memory"] == memory_limit(probe.resolve(name, live=False)).bytes
        (mode,) = row["modes"].values()
        assert mode["max_batch_size"] == cubatch.max_batch_size("resnet50", memory=row["memory"], **options)
        assert mode["fits"] == (cubatch.footprint("resnet50", batch_size=size, **options).total <= row["memory"])
    assert [row["price_per_hour"] for row in rows.values()] == [0.35, 0.71]
    code, text, err = run(*asked, "--device", "t4,l4,a40")
    assert f"Batch {size} fits on l4 and a40. Only l4 has a price." in " ".join(text.split())
    assert (code, err) == (1, f"cubatch: batch {size} does not fit on Tesla T4\n")


def test_a_limit_counts_on_every_device_that_has_more(run):
    """Of two GiB on a GPU of 16; a GPU that has less keeps what it has."""
    asked = ["memory", "mlp", "--device", "t4,gtx-980", "--mode", "inference", "--json", "-"]
    rows = json.loads(run(*asked, "--limit", "8GiB")[1])["devices"]
    assert [row["memory"] == 8 * 2**30 for row in rows] == [True, False]
    assert rows[1]["memory"] == memory_limit(probe.resolve("gtx-980", live=False)).bytes


def test_the_exit_code_tells_whether_the_batch_fits(run):
    """By the mode that was asked for, else by inference; the table is shown all the same."""
    asked = ["memory", "resnet18", "--device", "cpu", "--limit", "300MiB"]
    most = json.loads(run(*asked, "--json", "-")[1])["modes"]
    for mode, facts in most.items():
        size = facts["max_batch_size"]
        assert run(*asked, "--mode", mode, "--batch-size", size)[0] == 0
        code, out, err = run(*asked, "--mode", mode, "--batch-size", size + 1)
        assert (code, f"{size + 1} does not fit" in out, f"batch {size + 1} does not fit on" in err) == (1, True, True)
    assert most["training"]["max_batch_size"] < most["inference"]["max_batch_size"]
    assert run(*asked, "--batch-size", most["inference"]["max_batch_size"])[0] == 0


def test_the_largest_batch_is_computed_once_for_each_mode(run, monkeypatch):
    """The rule of thumb about it stands next to that very number."""
    sizes, largest = [], fit.largest
    monkeypatch.setattr(fit, "largest", lambda *given: sizes.append(largest(*given)) or sizes[-1])
    found = json.loads(run("memory", "mlp", "--device", "t4", "--memory", "1GiB", "--json", "-")[1])["modes"]
    assert sizes == [facts["max_batch_size"] for facts in found.values()]
    assert sizes == [facts["rules_of_thumb"][-1]["computed"] for facts in found.values()]
