"""
The kernels as records: each variant, its operation, its architectures and its resources.

`kernels/configs.toml` has them as data; this module expands the file.  No other module names a tile.
"""

from __future__ import annotations

import itertools
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import attrs

import cubatch
from cubatch.errors import InvalidArgument, UnknownName

DTYPES: Mapping[str, tuple[str, str]] = {
    "float32": ("f32", "float"),
    "float16": ("f16", "half_t"),
    "bfloat16": ("bf16", "bfloat16_t"),
    "tf32": ("tf32", "float"),
}
"""
By dtype: its part of a variant's name, and the type of its elements in the sources.

"tf32" is stored as float32 and multiplied on tensor cores with 10 bits of mantissa.
"""

_PACKAGE = Path(cubatch.__file__).parent
_ARCH = re.compile(r"sm_(\d{2,3})[af]?")


def kernels_path() -> Path:
    """Return the folder of the CUDA sources: next to the package in a checkout, inside it in an installed wheel."""
    inside = _PACKAGE / "_kernels"
    return inside if inside.is_dir() else _PACKAGE.parent / "kernels"


def arch_number(arch: str) -> int:
    """
    Return the compute capability times ten of an architecture "sm_70"; raise InvalidArgument for other text.

    Example:
        >>> arch_number("sm_70"), arch_number("sm_90a")
        (70, 90)
    """
    match = _ARCH.fullmatch(arch)
    if match is None:
        raise InvalidArgument("arch", arch, "an architecture as the compiler spells it, such as 'sm_70'")
    return int(match[1])


@attrs.frozen
class Tile:
    """The part of the output that a block computes, and its division among the threads."""

    name: str  # name in configs.toml: "128x128x8"
    m: int  # m, n, k: extents of the block's tile; k is the step of the main loop
    n: int
    k: int
    thread_m: int | None  # thread_m, thread_n: extents of a thread's tile; None on tensor cores
    thread_n: int | None
    threads: int  # threads per block
    stages: int  # slots of the shared-memory ring
    min_blocks: int = 1  # blocks per SM that the registers are bounded for
    min_arch: int | None = None  # min_arch, max_arch: compute capability times ten; None is no limit
    max_arch: int | None = None
    warp_m: int | None = None  # warp_m, warp_n: extents of a warp's tile; None on CUDA cores
    warp_n: int | None = None
    dynamic_shared_bytes: int = 0  # size of the ring, if it is allocated at the launch
    cluster: int | None = None  # neighboring blocks that share their operands; None without clusters
    swapped: int | None = None  # 1 if columns and rows are swapped in wgmma, else None


_TILE_MACROS = {
    "m": "TILE_M", "n": "TILE_N", "k": "TILE_K", "thread_m": "THREAD_M", "thread_n": "THREAD_N", "warp_m": "WARP_M",
    "warp_n": "WARP_N", "stages": "NUM_STAGES", "min_blocks": "MIN_BLOCKS",
    "dynamic_shared_bytes": "DYNAMIC_SHARED_BYTES", "cluster": "CLUSTER", "swapped": "SWAPPED",
}  # fmt: skip


@attrs.frozen
class Kernel:
    """A variant of a kernel."""

    name: str  # unique; operation, algorithm, dtype and family, then tile and vector if it has them
    family: str  # folder of its sources: "naive", "simt", "mma", "hopper", "winograd", "attention", "depthwise", "misc"
    source: str  # file under kernels/
    operation: str  # "conv2d_fprop", "gemm_nt", "relu", ...
    entry: str  # symbol in the compiled source; that of another operation if its code also computes this one
    dtype: str  # one of DTYPES: storage of its elements. Sums are float32
    threads: int  # threads per block
    defines: tuple[tuple[str, str], ...]  # macros of the source, in order; sources with equal macros are compiled once
    min_arch: int | None = None  # min_arch, max_arch: compute capability times ten; None is no limit
    max_arch: int | None = None
    dynamic_shared_bytes: int = 0  # shared memory that is allocated at the launch, in addition to static memory
    tile: Tile | None = None  # tile of tiled kernels; None for all others
    vector: int = 1  # elements of a global load; extents and addresses must be multiples of it
    axes: tuple[tuple[str, str], ...] = ()  # values of further macros
    # rows and columns of results that Winograd's algorithm computes at a time; None for other algorithms
    winograd: int | None = None

    def runs_on(self, arch: int) -> bool:
        """Return whether the kernel is compiled for an architecture, given as compute capability times ten."""
        return (self.min_arch or 0) <= arch <= (self.max_arch or arch)

    @property
    def sums_norms(self) -> bool:
        """Whether it is a product that also computes sums for a batch norm; only steps with "norm_sums" launch it."""
        return ("NORM_SUMS", "1") in self.axes

    @property
    def finishes_phases(self) -> bool:
        """Whether it finishes sums in registers also in the phases of a strided gradient: see `ranking.of_phases`."""
        return ("PHASE_ROWS", "1") in self.axes

    @property
    def tile_name(self) -> str:
        """The name of the tile, with Winograd's outputs before it: "f4x4_128x128x8"; empty without a tile."""
        name = self.tile.name if self.tile else ""
        return name if self.winograd is None else f"f{self.winograd}x{self.winograd}_{name}"

    @property
    def where(self) -> str:
        """The architectures that the kernel is compiled for, as text: "sm_80+", "sm_70 to sm_75", "sm_90" or "any"."""
        low = "" if self.min_arch is None else f"sm_{self.min_arch}"
        if self.max_arch is None:
            return f"{low}+" if low else "any"
        if self.max_arch == self.min_arch:
            return low
        return f"{low} to sm_{self.max_arch}".strip()


def kernels() -> tuple[Kernel, ...]:
    """Return all variants, in the order of configs.toml."""
    return _load(_configs())


def variants(operation: str, dtype: str, arch: int) -> tuple[Kernel, ...]:
    """
    Return the variants of an operation that run on an architecture, in the order of `kernels`; empty if there are none.

    An architecture is the compute capability times ten. UnknownName is raised for an operation, InvalidArgument for a
    dtype.
    """
    if dtype not in DTYPES:
        raise InvalidArgument("dtype", dtype, "one of " + ", ".join(DTYPES))
    return tuple(kernel for kernel in _of(operation) if kernel.dtype == dtype and kernel.runs_on(arch))


def find(operation: str, dtype: str, *, arch: int | None = None, **axes: object) -> Kernel:
    """
    Return the single variant of an operation with the given properties; InvalidArgument if there is none, or several.

    `axes` are values of its macros by name, `vector`, `family`, or `tile` as in `Kernel.tile_name`. `arch` None: any
    architecture.
    """
    wanted = {name: str(value) for name, value in axes.items()}
    candidates = _of(operation) if arch is None else variants(operation, dtype, arch)
    matching = [kernel for kernel in candidates if kernel.dtype == dtype and wanted.items() <= _facts(kernel).items()]
    if len(matching) != 1:
        names = ", ".join(kernel.name for kernel in matching) or "none"
        raise InvalidArgument(
            "axes", {"dtype": dtype, **axes}, f"properties of exactly one variant of {operation}, not of: {names}"
        )
    return matching[0]


def _configs() -> Path:
    return kernels_path() / "configs.toml"


def _facts(kernel: Kernel) -> dict[str, str]:
    return {"vector": str(kernel.vector), "family": kernel.family, "tile": kernel.tile_name, **dict(kernel.axes)}


def _of(operation: str) -> Sequence[Kernel]:
    known = _by_operation(_configs())
    if operation not in known:
        raise UnknownName("operation", operation, known)
    return known[operation]


@cache
def _by_operation(path: Path) -> Mapping[str, Sequence[Kernel]]:
    table: dict[str, list[Kernel]] = {}
    for kernel in _load(path):
        table.setdefault(kernel.operation, []).append(kernel)
    return table


@cache
def _load(path: Path) -> tuple[Kernel, ...]:
    with path.open("rb") as file:
        data = tomllib.load(file)
    plain = {"thread_m": None, "thread_n": None}
    tiles = {name: Tile(**{"name": name, **plain, **table}) for name, table in data.get("tiles", {}).items()}
    return tuple(kernel for module in data.get("modules", []) for kernel in _expand(module, tiles))


def _expand(module: Mapping[str, Any], tiles: Mapping[str, Tile]) -> Iterator[Kernel]:
    """
    Yield a variant for each combination of a module's operations, dtypes, tiles, vectors and further axes.

    `module` is an entry of "modules" in configs.toml, and `tiles` has the tiles of that file by name.
    """
    axes: Mapping[str, list[Any]] = module.get("axes", {})
    computed_by: Mapping[str, str] = module.get("computed_by", {})
    for dtype, tile_name, vector, *values in itertools.product(
        module["dtypes"], module.get("tiles", [None]), module.get("vectors", [1]), *axes.values()
    ):
        tile = None if tile_name is None else tiles[tile_name]
        chosen = tuple((name, str(value)) for name, value in zip(axes, values, strict=True))
        short, element = DTYPES[dtype]
        words = {"dtype": short, "tile": tile.name if tile else "", "vector": vector, **dict(chosen)}
        defines = [("CB_ELEMENT", element), *chosen]
        if "vectors" in module:
            defines.append(("VECTOR", str(vector)))
        if tile is not None:
            fields = ((macro, getattr(tile, field)) for field, macro in _TILE_MACROS.items())
            defines += [(macro, str(value)) for macro, value in fields if value]
        for operation in module["operations"]:
            compiled = computed_by.get(operation, operation)
            selects = [(f"OPERATION_{compiled.upper()}", "1")] if "entry" in module else []
            yield Kernel(
                name=module["name"].format(operation=operation, **words),
                family=module["family"],
                source=module["source"],
                operation=operation,
                entry=module.get("entry", compiled).format(operation=compiled),
                dtype=dtype,
                threads=tile.threads if tile else module["threads"],
                defines=(*defines, *selects),
                min_arch=_stricter(max, module.get("min_arch"), tile.min_arch if tile else None),
                max_arch=_stricter(min, module.get("max_arch"), tile.max_arch if tile else None),
                dynamic_shared_bytes=module.get("dynamic_shared_bytes", tile.dynamic_shared_bytes if tile else 0),
                tile=tile,
                vector=vector,
                axes=chosen,
                winograd=module.get("winograd"),
            )


def _stricter(pick: Callable[[Iterable[int]], int], *limits: int | None) -> int | None:
    given = [limit for limit in limits if limit is not None]
    return pick(given) if given else None
