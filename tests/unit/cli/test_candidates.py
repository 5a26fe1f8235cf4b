"""`cubatch candidates`."""

from __future__ import annotations

import json


def test_candidates_lists_each_size_with_its_reasons(run):
    """For a GPU that is not here, with the rows of --explain in the JSON."""
    arguments = ["candidates", "lenet5", "--device", "v100-sxm2-16gb", "--max-batch-size", "64", "--dtype", "float16"]
    code, out, _ = run(*arguments, "--explain")
    _, text, _ = run(*arguments, "--explain", "--json", "-")
    found = json.loads(text)

    assert code == 0
    sizes = [candidate["batch_size"] for candidate in found["candidates"]]
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == 64
    assert all(candidate["reasons"] for candidate in found["candidates"])
    assert found["explain"]
    assert all(str(size) in out for size in sizes)
    assert "power of two" in out
    assert "V100" in out.splitlines()[0]
    assert found["device"]["slug"] == "v100-sxm2-16gb"


def test_candidates_of_a_gpu_whose_sms_are_not_known_say_what_is_missing(run):
    """No source prints a GB200's: no crests, no rule, nothing explained, and the reason on stderr."""
    code, out, err = run("candidates", "go-net", "--device", "gb200", "--max-batch-size", "64", "--explain")
    assert code == 0
    assert "coulom" not in out
    assert "Nothing to explain" in out
    assert "number of SMs of NVIDIA GB200" in err


def test_candidates_are_explained_where_no_time_is_known(run):
    """A card whose rates were never printed gets the blocks of every pass all the same."""
    code, out, err = run("candidates", "mlp", "--device", "rtx-pro-6000-blackwell-server", "--explain")
    assert (code, err) == (0, "")
    assert "fprop" in out


def test_candidates_of_a_step_that_recomputes(run):
    """The largest that fits is that of the same plan: `cubatch memory --recompute` names it too."""
    asked = ["resnet18", "--device", "v100-sxm2-16gb", "--mode", "training", "--recompute", "--json", "-"]
    _, listed, _ = run("candidates", *asked)
    _, planned, _ = run("memory", *asked)
    largest = json.loads(planned)["modes"]["training"]["max_batch_size"]
    assert json.loads(listed)["candidates"][-1]["batch_size"] == largest
    _, kept, _ = run("candidates", *(option for option in asked if option != "--recompute"))
    assert json.loads(kept)["candidates"][-1]["batch_size"] < largest
