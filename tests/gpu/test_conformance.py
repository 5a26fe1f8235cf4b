"""
Each instruction of the kernels by itself: on a GPU against its twin on the CPU, and what GPUs answered before.

Where there is no GPU the same probes run on the twins alone, which shows that there is something to compare.
"""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path
from types import SimpleNamespace

import attrs
import numpy as np
import pytest

from benchmarks.gpu import conformance, items as gpu_items, probes
from cubatch.bench.target import on_gpu
from cubatch.hardware import catalogue
from cubatch.kernels import variant
from tests.cpusim import building
from tests.cpusim.simulator import Simulator
from tests.gpu.here import GPU

ARCHS = (52, 70, 75, 80, 90)
EVERY = {arch: probes.probes(arch) for arch in ARCHS}
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
UNPROBED = {
    "misuse", "atom_places", "places", "turns", "untouched",  # no question to a GPU
    "mathematics",  # rounded as CUDA's library does, which a GPU's own tests know
}  # fmt: skip
NO_TWIN = {
    "cb_cluster_rank", "cb_cluster_sync",  # of two blocks: the correctness stage has them
    "cb_short_exp2", "cb_short_reciprocal",  # approximations: tests of GELU in products allow for their errors
    "cb_registers_release", "cb_registers_request", "cb_shared_address",  # nothing that a program sees
}  # fmt: skip


class Nobody:
    """A launcher that launches nothing."""

    module = np

    def bind(self, *_):
        """Give what does nothing."""
        return lambda: None


NOTHING_TO_WRITE = {"cp.async of 16, 8 and 4 bytes, 0 of them valid", "TMA store at 200, 0", "TMA store at 0, 30"}
needs_twins = pytest.mark.skipif(bool(building.reason_to_skip()), reason=building.reason_to_skip())


@pytest.fixture(scope="module")
def here():
    """The GPU as a place for kernels."""
    return on_gpu(GPU)


@pytest.mark.gpu
@pytest.mark.skipif(GPU is None, reason="no GPU in this machine")
@needs_twins
@pytest.mark.parametrize("asked", probes.probes(gpu_items.arch_of(GPU)) if GPU else [], ids=lambda asked: asked.name)
def test_the_gpu_answers_as_its_twin(asked, here):
    """Bit for bit, or for sums that may be added in any order within the rounding of all of them."""
    got = conformance.answer(asked, here.launcher)
    want = conformance.answer(asked, Simulator(gpu_items.arch_of(GPU)))
    assert conformance.differences(asked, got, want) == []


def kept_answers():
    """What GPUs answered, from the results that are kept: file, architecture, and answers by probe."""
    for path in sorted(RESULTS.glob("**/*.json")):
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            continue
        items = [item for run in found.get("stages", []) if run["name"] == "conformance" for item in run["items"]]
        if items:
            major, minor = found["device"]["compute_capability"]
            yield path.name, 10 * major + minor, {item["name"]: item["answer"] for item in items if "answer" in item}


@needs_twins
def test_the_twins_answer_as_gpus_did():
    """The results of GPU passes hold the hardware's answers: fixtures, as soon as one is kept."""
    kept = list(kept_answers())
    if not kept:
        pytest.skip("no GPU has answered yet")
    for name, arch, answers in kept:
        known = {one.name: one for one in probes.probes(arch)}
        assert answers.keys() <= known.keys(), f"{name}: a probe that was renamed is compared with nothing"
        for asked, arrays in answers.items():
            got = [conformance.unpacked(array) for array in arrays]
            want = conformance.answer(known[asked], Simulator(arch))
            assert conformance.differences(known[asked], got, want) == [], f"{name}: {asked}"


@needs_twins
@pytest.mark.parametrize("arch", ARCHS)
def test_the_twins_answer_every_probe_and_always_alike(arch):
    """In two orders of threads and both modes of copies; some output is written by each."""
    for asked in EVERY[arch]:
        first = conformance.answer(asked, Simulator(arch, schedule="in_order", copies="early"))
        second = conformance.answer(asked, Simulator(arch, schedule="shuffled", copies="late", seed=7))
        assert conformance.differences(attrs.evolve(asked, slack=0.0), first, second) == [], asked.name
        before = conformance.answer(asked, Nobody())
        writes = [not np.array_equal(old, new) for old, new in zip(before, first, strict=True)]
        assert all(writes) or asked.name in NOTHING_TO_WRITE, asked.name


@pytest.mark.parametrize("arch", ARCHS)
def test_probes_have_names_of_their_own_and_the_same_data_in_every_process(arch):
    """An answer is found by its name, in a file of another day."""
    again = probes.probes(arch)
    assert len({asked.name for asked in again}) == len(again) > 0
    for one, other in zip(EVERY[arch], again, strict=True):
        pairs = zip(one.arguments(np.array), other.arguments(np.array), strict=True)
        assert all(a.tobytes() == b.tobytes() for a, b in pairs if isinstance(a, np.ndarray | np.generic)), one.name


@needs_twins
@pytest.mark.parametrize("arch", [80, 90])
def test_an_answer_that_is_off_is_told_with_its_place(arch):
    """One bit of a whole number, more than the slack of a sum; NaN is like NaN."""
    for asked in EVERY[arch]:
        want = conformance.answer(asked, Simulator(arch))
        got = [array.copy() for array in want]
        flat = got[-1].reshape(-1)
        if asked.slack:
            flat[3] += 2 * asked.slack
        else:
            flat.view(np.uint8)[3 * flat.itemsize] ^= 1
        said = conformance.differences(asked, got, want)
        is_nan = flat.dtype.kind == "f" and np.isnan(flat[3])
        assert is_nan or len(said) == 1, asked.name
        assert is_nan or f"1 of {flat.size} differ" in said[0]


@pytest.mark.parametrize("reason", ["", "no g++"])
def test_probes_and_twins_are_built_beforehand(reason, monkeypatch):
    """
    Every source once for the GPU, whose unit has all of its kernels, and every kernel's twin: g++ would take the time
    of half of the probes. Without g++ the twins are left out, and it is said.
    """
    compiled, built = [], []
    monkeypatch.setattr(conformance.compiler, "compile_unit", lambda found, arch: compiled.append((found, arch)))
    monkeypatch.setattr(building, "shared_object", lambda found, arch, mode: built.append((found, arch, mode)))
    monkeypatch.setattr(building, "reason_to_skip", lambda: reason)
    h200 = SimpleNamespace(workers=2, device=catalogue.find("h200-sxm"))
    assert conformance.build(EVERY[90], h200)["no_twins"] == reason
    sources = {asked.kernel.source for asked in EVERY[90]}
    assert len(sources) == 3
    assert {found.source for found, _ in compiled} == sources
    assert {arch for _, arch in compiled} == {"sm_90"}
    assert {found for found, *_ in built} == (set() if reason else {asked.kernel for asked in EVERY[90]})
    assert {tuple(rest) for _, *rest in built} <= {(90, "plain")}


def test_an_answer_comes_back_from_json():
    """Every type and shape, bit for bit."""
    for array in (np.arange(12, dtype=np.uint16).reshape(3, 4), np.array([np.nan, -0.0, 1e-45], np.float32)):
        back = conformance.unpacked(json.loads(json.dumps(conformance.packed(array))))
        assert (back.dtype, back.shape) == (array.dtype, array.shape)
        assert back.tobytes() == array.tobytes()


def test_every_kernel_of_the_twins_is_probed():
    """What the tests ask a twin, a GPU is asked too."""
    entries = set()
    for path in Path(building.HERE).glob("*twins.cu"):
        entries |= set(re.findall(r"^CB_KERNEL\(\d+, 1\) (\w+)|^CB_MULTIPLY\((\w+)", path.read_text(), re.MULTILINE))
    names = {name for pair in entries for name in pair if name}
    assert names - {asked.kernel.entry for found in EVERY.values() for asked in found} == UNPROBED


def test_every_instruction_of_the_headers_is_in_a_probe():
    """Of mma and Hopper; what has no twin is listed."""
    sources = "\n".join(path.read_text() for path in Path(building.HERE).glob("*twins.cu"))
    for header in ("device_mma.cuh", "device_hopper.cuh"):
        text = (variant.kernels_path() / "common" / header).read_text()
        gpu = text[text.index("#if defined(__CUDACC__)") : text.index("#else\n\n")]
        wrappers = set(re.findall(r"CB_DEVICE [\w<>, ]+? (cb_\w+)\(", gpu))
        assert wrappers
        assert {name for name in wrappers if not re.search(rf"\b{name}\b", sources)} <= NO_TWIN


@needs_twins
def test_a_gpu_without_a_compiler_for_the_twins_leaves_its_answer_unchecked(monkeypatch):
    """The answer is kept; nothing is said of it."""

    here = SimpleNamespace(target=SimpleNamespace(launcher=Simulator(80), trying=contextlib.nullcontext))
    asked = EVERY[80][0]
    monkeypatch.setattr(building, "reason_to_skip", lambda: "no g++")
    found = conformance.conforms(asked, here)
    assert (found["status"], found["message"]) == ("unchecked", "no g++")
    want = conformance.answer(asked, Simulator(80))
    assert conformance.differences(asked, [conformance.unpacked(a) for a in found["answer"]], want) == []
