"""
Comparison of a GPU's instructions with their emulation on the CPU: each wrapper by itself, against its twin.

The kernels are those of the twins' tests (tests/cpusim/*twins.cu); a probe is a launch of one of them.  The answer of
the GPU is stored whole, so that the twins can be compared with the hardware on machines without a GPU.
"""

from __future__ import annotations

import base64
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import attrs
import numpy as np

from cubatch.engine.backend import to_host
from cubatch.engine.native.context import Grid, Launcher
from cubatch.kernels.tensor_map import TensorMap
from cubatch.kernels.toolchain import compile as compiler
from cubatch.kernels.variant import Kernel
from tests.cpusim import building

Array = np.ndarray[Any, Any]
Arguments = Callable[[Callable[[Any], Any]], Sequence[Any]]

WHOLE = slice(None)


@attrs.frozen(kw_only=True, eq=False)
class Probe:
    """
    A launch with a known answer.

    Attributes:
        name: Unique.
        kernel: A kernel of tests/cpusim.
        arguments: Returns the arguments of the launch; called with a function that copies an array to the launcher.
        outputs: Indices of the arguments that are answers, with the part that counts; of a tensor map its array.
        grid: Blocks.
        slack: Largest error of sums that may be added in any order; 0 for exact answers.
    """

    name: str
    kernel: Kernel
    arguments: Arguments
    outputs: Mapping[int, slice]
    grid: Grid = (1, 1, 1)
    slack: float = 0.0


def answer(probe: Probe, launcher: Launcher) -> list[Array]:
    """Launch a probe; return its answers."""
    arguments = probe.arguments(launcher.module.array)
    launcher.bind(probe.kernel, probe.grid, arguments)()
    outputs = [arguments[index] for index in probe.outputs]
    arrays = [each.array if isinstance(each, TensorMap) else each for each in outputs]
    return [to_host(array)[part] for array, part in zip(arrays, probe.outputs.values(), strict=True)]


def differences(probe: Probe, got: Sequence[Array], want: Sequence[Array]) -> list[str]:
    """Return where answers differ, the first place of each array; all NaN are equal, and so are both zeros."""
    different = []
    for index, ours, theirs in zip(probe.outputs, got, want, strict=True):
        same = ours.view(f"u{ours.itemsize}") == theirs.view(f"u{theirs.itemsize}")
        if ours.dtype.kind == "f":
            same |= (ours == theirs) | (np.isnan(ours) & np.isnan(theirs))
        if probe.slack:
            same |= np.abs(ours.astype(float) - theirs) <= probe.slack
        if not same.all():
            place = tuple(int(i) for i in np.argwhere(~same)[0])
            values = f"{ours[place]}, its twin has {theirs[place]}"
            count = f"{np.count_nonzero(~same)} of {same.size}"
            different.append(f"argument {index}: {count} differ, at {place} it is {values}")
    return different


def conforms(probe: Probe, session: Any) -> dict[str, Any]:
    """Compare the answers of the GPU and its twin; that of the GPU goes into the JSON."""
    from benchmarks.gpu.items import arch_of
    from tests.cpusim.simulator import Simulator

    with session.target.trying(probe.kernel):
        got = answer(probe, session.target.launcher)
    result: dict[str, Any] = {"answer": [packed(array) for array in got]}
    if reason := building.reason_to_skip():
        return result | {"status": "unchecked", "message": reason}
    different = differences(probe, got, answer(probe, Simulator(arch_of(session.device))))
    return result | {"status": "differs" if different else "ok", "differences": different}


def sources(probes: Sequence[Probe]) -> list[Kernel]:
    """Return one kernel of each source of the probes."""
    return list({probe.kernel.source: probe.kernel for probe in probes}.values())


def build(probes: Sequence[Probe], session: Any) -> dict[str, Any]:
    """Compile the probes and their twins in advance."""
    from benchmarks.gpu.items import arch_of

    begun, reason = time.monotonic(), building.reason_to_skip()
    twins = () if reason else {probe.kernel for probe in probes}  # a GPU's unit has a whole source, a twin's one entry
    with ThreadPoolExecutor(session.workers) as pool:
        made = [pool.submit(compiler.compile_unit, each, session.device.arch or "") for each in sources(probes)]
        made += [pool.submit(building.shared_object, each, arch_of(session.device), "plain") for each in twins]
        for future in made:
            future.result()
    return {"seconds": time.monotonic() - begun, "no_twins": reason}


def packed(array: Array) -> dict[str, Any]:
    """Write an array for JSON."""
    data = base64.b64encode(zlib.compress(np.ascontiguousarray(array).tobytes(), 9)).decode("ascii")
    return {"dtype": array.dtype.str, "shape": list(array.shape), "zlib": data}


def unpacked(stored: Mapping[str, Any]) -> Array:
    """Read an array that `packed` wrote."""
    data = zlib.decompress(base64.b64decode(stored["zlib"]))
    return np.frombuffer(data, stored["dtype"]).reshape(stored["shape"])


def twin_kernel(source: str, entry: str, threads: int, shared: int = 0) -> Kernel:
    """Return a kernel of tests/cpusim; Hopper's are compiled as the family of that name."""
    return Kernel(
        name=entry,
        family="hopper" if "hopper" in source else "twins",
        source=str(building.HERE / source),
        operation=entry,
        entry=entry,
        dtype="float32",
        threads=threads,
        defines=(),
        dynamic_shared_bytes=shared,
    )


def random_for(seed: object) -> np.random.Generator:
    """Return random numbers that are the same in every process."""
    return np.random.default_rng(zlib.crc32(str(seed).encode()))


def elements(random: np.random.Generator, shape: tuple[int, ...], dtype: str, *, whole: bool) -> Array:
    """Draw elements as they are stored: small integers, whose sums are exact, or reals in [-1, 1)."""
    values = (random.integers(-2, 3, shape) if whole else random.uniform(-1, 1, shape)).astype(np.float32)
    if dtype == "bfloat16":
        return (values.view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(np.float16 if dtype == "float16" else np.float32)


def blank(shape: tuple[int, ...], dtype: Any = np.uint32) -> Array:
    """Return an array with all bits set, which shows what was not written."""
    return np.full(shape, -1, f"i{np.dtype(dtype).itemsize}").view(dtype)


def hard_floats() -> Array:
    """Return floats that are hard to round to 16 bits or tf32: ties, their neighbors, ends of ranges, random bits."""
    ties = [
        np.float32(1 + 2.0**-bits) + np.arange(40, dtype=np.float32) * np.float32(2.0 ** (1 - bits)) for bits in (11, 8)
    ]
    near = [np.nextafter(tie, np.float32(way)) for tie in ties for way in (0, 9)]
    scaled = [tie * np.float32(2.0**power) for tie in ties for power in (-24, -15, -126, 15, 127)]
    ends = np.array([0, 0x80000000, 0x7F800000, 0xFF800000, 0x7F801000, 0x7FFFFFFF, 0x7F7FFFFF, 1], np.uint32)
    any_bits = random_for("floats").integers(0, 2**32, 1000, dtype=np.uint32)
    return np.concatenate([*ties, *near, *scaled, ends.view(np.float32), any_bits.view(np.float32)])
