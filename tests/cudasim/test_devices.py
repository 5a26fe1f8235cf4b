"""Two simulated GPUs share a training step: real CuPy and its NCCL, on a library that adds up what ranks send it."""

from __future__ import annotations

import json

import pytest

from tests.cudasim.simulation import NEEDS, cubatch, python

pytestmark = NEEDS

TRAINING = """
    import json
    import numpy as np
    import cubatch as cb

    NETWORK = cb.Network(input_shape=(28, 28, 1), layers=[
        cb.Conv2d(k=8, r=3, s=3, stride=2, pad=1), cb.ReLU(), cb.MaxPool2d(r=2, s=2), cb.Flatten(), cb.Linear(k=16),
        cb.ReLU(), cb.Linear(k=10),
    ], name="small")

    def losses(dtype, batch_size, **where):
        found = []
        cb.train(
            NETWORK, data="tests/data/mnist-sample", batch_size=batch_size, epochs=1, learning_rate=0.02, dtype=dtype,
            stepped=lambda step: found.append(step.loss), **where,
        )
        return found
"""


@pytest.mark.parametrize(
    ("dtype", "tolerance", "late"),
    [("float32", 1e-4, False), ("float32", 1e-4, True), ("float16", 2e-2, True), ("bfloat16", 1e-1, True)],
)
def test_two_gpus_train_to_the_losses_of_one(dtype, tolerance, late):
    """
    Four steps of 200 samples: those of 100 on each of two GPUs, whose gradients are summed in another order.

    A loss near 2.3 is a mean of 200 terms; gradients of the stored type carry its unit roundoff (6e-8, 5e-4, 4e-3), and
    four steps pass it on: a few hundred units for float32's sums of 784 x 200 terms, a few tens for the 16-bit types.
    With `late` a sum that does not wait for its gradient, or a step that does not wait for its sum, finds poison.
    """
    code = (
        TRAINING
        + f"""
    one = losses("{dtype}", 200, device="cuda:0")
    two = losses("{dtype}", 100, devices=2)
    print(json.dumps([one, two]))
"""
    )
    one, two = json.loads(python(code, devices="h100,h100", late=late).splitlines()[-1])
    assert len(one) == len(two) == 4
    assert one[-1] < one[0]
    assert two == pytest.approx(one, rel=tolerance)


def test_two_gpus_are_tuned_as_one():
    """`tune --devices`: an answer, and what the exchange takes by the devices' own events."""
    done = cubatch(
        "tune", "mlp", "--mode", "training", "--devices", "cuda:0,cuda:1", "--batch-sizes", "4,8", "--budget", "600",
        "--no-store", "--json", "-", devices="h100,h100",
    )  # fmt: skip
    result = json.loads(done.stdout)
    assert result["batch_size"] in {4, 8}
    found = result["data_parallel"]
    assert len(found["devices"]) == 2
    assert found["exchange_seconds"] > 0
    assert found["samples_per_second"] == pytest.approx(2 * found["batch_size"] / found["step_seconds"])


def test_gpus_that_are_named_twice_are_refused():
    """One GPU cannot be two ranks."""
    done = cubatch("tune", "mlp", "--mode", "training", "--devices", "cuda:0,cuda:0", devices="h100,h100", check=False)
    assert done.returncode == 2
    assert "--devices" in done.stderr


def test_a_sum_waits_for_what_it_sums():
    """Of two ranks, whose work waits until somebody waits for it: a sum alone brings about what it adds up."""
    code = """
    import os
    from cubatch.engine.exchange import NcclExchange, nccl_identifier

    identifier = nccl_identifier()
    rank = 1 if os.fork() == 0 else 0
    exchange = NcclExchange(identifier, rank, 2, rank)
    numbers = exchange.xp.full(4, rank + 1.0)
    exchange.begin(numbers)
    exchange._stream.synchronize()  # and not the stream that the numbers are written in
    if rank == 0:
        print(numbers.get().tolist())
        os.wait()
    """
    assert python(code, devices="h100,h100", late=True) == "[3.0, 3.0, 3.0, 3.0]"


def test_a_callable_is_timed_on_the_gpu_that_is_named():
    """CuPy's arrays, pool and stream are those of cuda:1, at whatever size; afterwards GPU 0 is current again."""
    code = """
    import cupy
    import cubatch as cb

    seen = set()

    def make_step(n):
        x, y = cupy.zeros((2, n, 2**20), dtype=cupy.uint8)
        seen.add((x.device.id, cupy.cuda.Device().id))

        def step():
            seen.add((x.device.id, cupy.cuda.Device().id))
            cupy.copyto(y, x)

        return step

    result = cb.autotune_callable(make_step, max_batch_size=4, batch_sizes=[4], device="cuda:1", budget=20)
    print(sorted(seen), cupy.cuda.Device().id, result.measurements[0].peak_bytes >= 2 * 4 * 2**20)
    """
    assert python(code, devices="h100,h100") == "[(1, 1)] 0 True"
