"""Memory of simulated GPUs: watched, refused beyond what is there, and what a process took of it kept."""

from __future__ import annotations

import json

import pytest

from tests.cudasim.simulation import NEEDS, cubatch, python

pytestmark = NEEDS

MIB = 2**20

PREPARE = """
    from cubatch.engine.network import Model
    from cubatch.errors import OutOfMemory
    from cubatch.hardware import probe
    from cubatch.network import models
    model = Model(models.build("mlp"), device=probe.resolve("cuda"))
    model.prepare(8)
    try:
        model.prepare(2_000_000)
    except OutOfMemory as error:
        print(error.needed_bytes > error.available_bytes, error.largest_batch_size > 8)
    model.prepare(8)
    model.step()
    print("stepped")
"""


def test_all_gpus_are_watched():
    """By nvidia-ml-py, as on real ones."""
    found = json.loads(cubatch("watch", "--json", "-", devices="h100,a100").stdout)
    assert [gpu["gpu"]["index"] for gpu in found["gpus"]] == [0, 1]
    assert all(gpu["now"]["used_bytes"] and not gpu["problem"] for gpu in found["gpus"])
    assert found["gpus"][0]["now"]["power_watts"] == 412.5


def test_a_slice_is_watched_by_its_memory():
    """Its board's figures are nobody's."""
    (gpu,) = json.loads(cubatch("watch", "--json", "-", faults="mig").stdout)["gpus"]
    assert (gpu["gpu"]["uuid"][:4], gpu["now"]["power_watts"]) == ("MIG-", None)
    assert gpu["now"]["total_bytes"]


def test_what_a_driver_would_let_spill_is_refused():
    """It is asked what is free before anything is taken; the next batch size is prepared as if nothing had been."""
    assert python(PREPARE, faults=f"spill,memory:{2048 * MIB}") == "True True\nstepped"


BESIDE = """
    import cupy, pathlib, tempfile
    from cubatch.hardware import memory_limit as hardware_memory
    from cubatch.hardware import probe, context_overhead
    context_overhead.folder = lambda folder=pathlib.Path(tempfile.mkdtemp()): folder
    from cubatch.measure.network_runner import network_runner
    from cubatch.network import models
    before = hardware_memory.memory_limit(probe.resolve("cuda")).overhead_bytes
    theirs = cupy.zeros({theirs}, dtype=cupy.uint8)
    options = {{"mode": "training", "dtype": "float32", "optimizer": "sgd", "library": "im2col"}}
    spec = models.build("mlp").to_mapping()
    runner = network_runner(spec=spec, device="cuda:0", recompute=False, seed=0, **options)
    runner.prepare(4)
    runner.step()
    runner.{ends}
    print(before >> 20, hardware_memory.memory_limit(probe.resolve("cuda")).overhead_bytes >> 20)
"""


@pytest.mark.parametrize("ends", ["close()", "prepare(8)", "release()"])
def test_what_a_process_takes_beside_its_arrays_is_kept(ends):
    """The simulated context of 512 MiB, which the rule took for less; the limit of the next run follows it."""
    before, after = map(int, python(BESIDE.format(ends=ends, theirs=0)).split())
    assert before != after
    assert 512 <= after < 600


def test_what_somebody_else_took_in_the_process_is_not_kept():
    """128 MiB of a user's array, there before the model was: whose the rest is cannot be told, so the rule stays."""
    before, after = map(int, python(BESIDE.format(ends="close()", theirs=128 * MIB)).split())
    assert before == after


def test_a_closed_model_leaves_nothing_to_the_next():
    """In CuPy's pool, where a small array of the next would keep a block of its weights: each holds its own plan."""
    code = """
        import cupy
        from cubatch.engine.network import Model
        from cubatch.hardware import probe
        from cubatch.measure import kernel_context
        from cubatch.network import models
        GPU, POOL = probe.resolve("cuda"), cupy.get_default_memory_pool()
        context = kernel_context.kernel_context(GPU, "float32", overlaps=False, seconds=0.0, path=None)
        for name in ("alexnet", "mnist-cnn"):
            with Model(models.build(name), device=GPU, mode="training", optimizer="momentum", context=context) as model:
                model.prepare(2)
                model.load_random()
                print(0 <= model.held_bytes - model.plan.total < 2**14)
            print(POOL.total_bytes())
    """
    assert python(code).split() == ["True", "0", "True", "0"]


def test_a_run_on_one_gpu_takes_nothing_of_another():
    """Neither a model's arrays nor what times its kernels lies on GPU 0, which is current, when GPU 1 was asked for."""
    code = """
        from cubatch.hardware import nvml, probe
        from cubatch.measure.network_runner import network_runner
        from cubatch.network import models
        used = [nvml.Monitor(probe.resolve(name).uuid).snapshot for name in ("cuda:0", "cuda:1")]
        before = [read().used_bytes for read in used]
        options = {"mode": "training", "dtype": "float32", "optimizer": "sgd", "library": "cubatch"}
        spec = models.build("mlp").to_mapping()
        runner = network_runner(spec=spec, device="cuda:1", recompute=False, seed=0, choice_seconds=5.0, **options)
        runner.prepare(4)
        runner.step()
        print([read().used_bytes > bytes for read, bytes in zip(used, before, strict=True)])
    """
    assert python(code, devices="h100,h100") == "[False, True]"
