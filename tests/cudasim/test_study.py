"""Studies on a GPU: what only there is known, by real CuPy."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cudasim.simulation import NEEDS, cubatch

pytestmark = NEEDS
SAMPLE = Path(__file__).parents[1] / "data" / "mnist-sample"


def test_memory_rules_hold_the_plan_against_what_the_gpu_gave(tmp_path):
    """
    Every size ran on our kernels, in float16, and took what the plan says; the driver's context is named beside it.

    CuPy's pool rounds each allocation up to 512 bytes: parameters, gradients, two of the optimiser's, the loss and its
    scale, the input, and the block of all else are 8.
    """
    done = cubatch(
        "study", "memory-rules", "mlp", "--quick", "--device", "cuda", "--dtype", "float16", "--out", str(tmp_path),
        "--json", "-", devices="a100",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["library"], found["device"]["kind"], found["dtype"]) == ("cubatch", "cuda", "float16")
    assert [(t["mode"], t["batch_size"]) for t in found["measured"]] == [
        (mode, n) for mode in ("inference", "training") for n in (1, 8)
    ]
    for row in found["measured"]:
        assert 0 <= row["measured_bytes"] - row["planned_bytes"] <= 8 * 512
        assert row["device_bytes"] > row["measured_bytes"]
    assert any("context, kernels and libraries" in line for line in found["points"])
    assert "A100" in (tmp_path / "index.html").read_text()


def test_powers_of_two_are_compared_in_a_worker(tmp_path):
    """On a GPU steps run in another process; each size has its five visits there."""
    done = cubatch(
        "study", "powers-of-two", "mlp", "--quick", "--budget", "120", "--max-batch-size", "5", "--device", "cuda",
        "--out", str(tmp_path), "--json", "-", devices="a100",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [(c["batch_size"], c["reference"], c["trials"]) for c in found["comparisons"]] == [
        (3, 4, [5, 5]),
        (5, 4, [5, 5]),
    ]


BOARD = """
name = "board"
input_shape = [32, 32, 4]
[[layers]]
type = "conv2d"
k = 8
r = 3
s = 3
pad = 1
"""


def test_waves_of_blocks_are_measured_and_predicted(tmp_path):
    """
    1024 outputs a sample and tiles of 128 rows are 8 blocks; of 13 samples 108 SMs have one each.

    The simulation's time knows nothing of SMs: the answer is whatever it is, with each size visited three times.
    """
    (tmp_path / "board.toml").write_text(BOARD, encoding="utf-8")
    done = cubatch(
        "study", "waves", str(tmp_path / "board.toml"), "--quick", "--device", "cuda", "--max-batch-size", "16",
        "--budget", "200", "--out", str(tmp_path), "--json", "-", devices="a100",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["distribution"]["unit"] == "SM"
    assert [(top["batch_size"], top["busiest"]) for top in found["full_waves"]] == [(13, [1, 2])]
    past = [c for c in found["comparisons"] if (c["batch_size"], c["reference"]) == (14, 13)]
    assert [c["trials"] for c in past] == [[3, 3]]
    assert [row["batch_size"] for row in found["sizes"]] == list(range(10, 17))
    assert all(row["predicted"] > 0 for row in found["sizes"])


LINEAR = """
name = "linear"
input_shape = [28, 28, 1]
[[layers]]
type = "flatten"
[[layers]]
type = "linear"
k = 10
"""


def test_sharpness_on_a_gpu_is_that_of_the_cpu(tmp_path):
    """
    The same weights are trained in float32 by our kernels, and their Hessian has the same largest eigenvalue.

    The first run of the study, a convex loss, trained alike but for rounding: accuracies of 200 images may differ by
    one image, losses and eigenvalues by some 100 updates times float32's 6e-8, and 1e-5 of the difference of gradients.
    """
    (tmp_path / "linear.toml").write_text(LINEAR, encoding="utf-8")
    found = {}
    for device in ("cuda", "cpu"):
        done = cubatch(
            "study", "generalisation", str(tmp_path / "linear.toml"), "--quick", "--data", str(SAMPLE), "--device",
            device, "--budget", "1", "--out", str(tmp_path / device), "--json", "-", devices="a100",
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        found[device] = json.loads(done.stdout)
    assert found["cuda"]["library"] == "cubatch"
    on_gpu, on_cpu = (found[device]["rows"][0]["runs"][0] for device in ("cuda", "cpu"))
    assert abs(on_gpu["test_accuracy"] - on_cpu["test_accuracy"]) <= 1 / 200
    assert abs(on_gpu["training_loss"] / on_cpu["training_loss"] - 1) <= 1e-4
    assert abs(on_gpu["sharpness"]["eigenvalue"] / on_cpu["sharpness"]["eigenvalue"] - 1) <= 1e-3
