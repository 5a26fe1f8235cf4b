"""A process that is asked many different things keeps no more of them than its caches hold, which are bounded."""

from __future__ import annotations

import functools
import gc
import importlib
import pkgutil
import random

import cubatch as cb
from cubatch.tuning.candidate_layers import explain

FEW = 40  # objects that are no question's, as the interpreter's own


def caches():
    """Every cached function of the package, by its name."""
    for module in pkgutil.walk_packages(cb.__path__, "cubatch."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    gc.unfreeze()  # what pytest set aside belongs to no generation, and is not listed
    kind = type(functools.lru_cache(maxsize=1)(int))
    found = {f"{o.__module__}.{o.__qualname__}": o for o in gc.get_objects() if type(o) is kind}
    return {name.removeprefix("cubatch."): one for name, one in found.items() if name.startswith("cubatch.")}


# What their arguments are, which are few in any process.
WITHOUT_BOUND = {
    "kernels.variant._by_operation": "our own file",
    "kernels.variant._load": "our own file",
    "kernels.toolchain.nvrtc._load": "a library of this machine",
    "bench.bench_results._figures": "one of our own kernels",
    "hardware.gpu_library._check": "CuPy",
    "engine.layers._parameters": "one of our own functions",
    "frameworks.attributes.is_own_file": "an imported module",
    "frameworks.step_operators._written_arguments": "an operator of PyTorch",
    "frameworks.torch_memory._computes": "an operator of PyTorch",
    "hardware.architectures.like": "a compute capability",
    "estimate.vendor.fitted.shipped": "one of our own models",
}


def test_caches_have_a_bound_or_few_keys():
    """A cache without a bound takes no argument, or one of which there are few."""
    open_ended = {
        name
        for name, one in caches().items()
        if one.cache_parameters()["maxsize"] is None and one.__wrapped__.__code__.co_argcount
    }
    assert open_ended == set(WITHOUT_BOUND)


def ask(draw):
    """Plan, propose, predict and explain a network that was not asked about before."""
    c, k, m, h = draw.randrange(1, 900), draw.randrange(1, 900), draw.randrange(1, 900), draw.randrange(8, 300)
    first = {"type": "conv2d", "h": h, "w": h, "c": c, "k": k, "r": 3, "s": 3, "pad": 1}
    second = {"type": "conv2d", "h": h, "w": h, "c": k, "k": m, "r": 1, "s": 1}
    spec = {"name": f"net-{c}-{k}-{m}", "input_shape": [h, h, c], "layers": [first, second]}
    cb.footprint(spec, batch_size=3, device="t4")
    cb.candidates(spec, device="t4", max_batch_size=16)
    cb.predict(spec, device="t4", batch_sizes=[1, 8], library="vendor", mode="training")
    cb.predict(spec, device="t4", batch_sizes=[1, 8], library="cubatch")
    explain(spec, [cb.Candidate(8)], device="t4")


def test_different_questions_leave_nothing_behind_but_what_caches_hold():
    """Fifteen networks more, and with the caches emptied there are as many objects as after two (reliability, L13)."""
    known, draw = caches(), random.Random(0)

    def left_after(questions):
        for _ in range(questions):
            ask(draw)
        for one in known.values():
            if one.cache_parameters()["maxsize"] is not None:
                one.cache_clear()
        gc.collect()
        return len(gc.get_objects())

    left_after(2)
    first = left_after(2)
    assert left_after(15) - first < FEW
