"""What the simulator refuses, how it fails, and that it goes on afterwards."""

from __future__ import annotations

import attrs
import numpy as np
import pytest

from tests.cpusim import building
from tests.cpusim.planting import CENTER_ROWS, SGEMM, twin
from tests.cpusim.simulator import SimulationError, Simulator
from tests.kernels.cases import reserved

pytestmark = pytest.mark.skipif(bool(building.reason_to_skip()), reason=building.reason_to_skip())

SOURCE = """
#include "common/device.cuh"
struct Shape { const float* x; i64 offset; int count; float scale; };
CB_KERNEL(32, 1) scaled(const Shape shape, float* y) {
  if (cb_thread() < shape.count) y[cb_thread()] = shape.scale * shape.x[shape.offset + cb_thread()];
}
CB_KERNEL(32, 1) block_numbers(float* y) {
  if (cb_thread() == 0) y[(i64)cb_block_x() << 20] = (float)cb_block_x();
}
"""
SHAPE = np.dtype([("x", np.uint64), ("offset", np.int64), ("count", np.int32), ("scale", np.float32)], align=True)


@pytest.fixture
def written(tmp_path):
    """Give a function that makes a kernel of CUDA text."""

    def write(entry, text=SOURCE):
        path = tmp_path / "kernel.cu"
        path.write_text(text)
        return attrs.evolve(twin(entry, 32), source=str(path))

    return write


def correct(kernel, **changes):
    return attrs.evolve(kernel, defines=(("MUTANT", "CORRECT"),), **changes)


def test_records_are_passed_by_value(written):
    """A structure's members arrive where the kernel's structure has them."""
    x, y = np.arange(10, dtype=np.float32), np.zeros(32, np.float32)
    shape = np.array((x.ctypes.data, 3, 5, 2.0), SHAPE)[()]
    Simulator(52).launch(written("scaled"), (1, 1, 1), [shape, y])
    assert y.tolist() == [6, 8, 10, 12, 14] + [0] * 27


FLOATS = np.zeros(4, np.float32)
READ_ONLY = np.broadcast_to(np.float32(0), (4,))
ARGUMENTS = [FLOATS, FLOATS, FLOATS, np.int32(1), np.int32(1), np.int32(1)]


@pytest.mark.parametrize(
    ("index", "value", "message"),
    [
        (3, np.int64(1), "parameter 3 has 4 bytes of kind 'i', got int64 of 8"),
        (3, np.float32(1), "parameter 3 has 4 bytes of kind 'i', got float32"),
        (3, 1, "parameter 3 is by value: wants a NumPy scalar, got int"),
        (0, np.float32(1), "parameter 0 is a pointer: wants an array or None, got float32"),
        (0, np.zeros(4), "parameter 0 points to 4 bytes each, got an array of float64"),
        (2, READ_ONLY, "parameter 2 may be written to, got a read-only array"),
    ],
)
def test_arguments_must_fit_the_parameters(index, value, message):
    """Drift between host code and kernel is named before anything runs."""
    arguments = [value if i == index else argument for i, argument in enumerate(ARGUMENTS)]
    with pytest.raises(SimulationError, match=message):
        Simulator().bind(correct(SGEMM), (1, 1, 1), arguments)


def test_variants_of_a_kernel_keep_their_own_parameters(written):
    """Objects loaded side by side have an entry of the same name for elements of other sizes."""
    text = '#include "common/device.cuh"\nCB_KERNEL(32, 1) ones(CB_ELEMENT* y) { y[cb_thread()] = 1; }\n'
    for element, dtype in (("float", np.float32), ("u16", np.uint16), ("double", np.float64), ("float", np.float32)):
        y = np.zeros(32, dtype)
        Simulator().launch(attrs.evolve(written("ones", text), defines=(("CB_ELEMENT", element),)), (1, 1, 1), [y])
        assert (y == 1).all()


def test_constant_pointers_take_read_only_arrays():
    """Only what may be written must be writable."""
    Simulator().bind(correct(SGEMM), (1, 1, 1), [READ_ONLY, *ARGUMENTS[1:]])


@pytest.mark.parametrize("grid", [(0, 1, 1), (1, 2**16, 1), (1, 1, 2**16), (2**31, 1, 1)])
def test_a_grid_that_no_gpu_takes_is_refused(grid):
    """The limits of a launch hold on the CPU too."""
    with pytest.raises(SimulationError, match="grid"):
        Simulator().bind(correct(SGEMM), grid, ARGUMENTS)


@pytest.mark.parametrize("changes", [{"threads": 48}, {"threads": 2048}, {"min_arch": 90}, {"max_arch": 70}])
def test_a_kernel_that_cannot_run_there_is_refused(changes):
    """Threads are whole warps of one block, and the architecture is one it is for."""
    with pytest.raises(SimulationError, match=r"whole warps|not for sm_80"):
        Simulator(80).bind(correct(SGEMM, **changes), (1, 1, 1), ARGUMENTS)


MISUSES = [
    "misaligned vector store",
    "misaligned vector load",
    "cb_load of shared memory",
    "cb_copy_async to a misaligned place",
    "cb_copy_async from a misaligned place",
    "cb_copy_async to what is not shared memory",
    "cb_copy_async with valid outside 0..BYTES",
    "cb_copy_async from a null pointer",
    "cb_shuffle_xor with bits outside 0..31",
    "cb_shuffle_down with a distance outside 0..31",
    "more copies under way than cpusim keeps",
]


@pytest.mark.parametrize(("which", "message"), list(enumerate(MISUSES)), ids=MISUSES)
def test_misuse_names_its_line(which, message):
    """What a GPU would trap, wrap or get wrong is an error at the line that asks for it."""
    x, y = np.zeros(16, np.float32), np.zeros(16, np.float32)
    source = (building.HERE / "twins.cu").read_text().splitlines()
    line = next(number for number, text in enumerate(source, 1) if f"which == {which})" in text)
    with pytest.raises(SimulationError, match=rf"thread \d+: {message} at tests/cpusim/twins.cu:({line}|{line + 1})$"):
        Simulator(80).launch(twin("misuse", 32), (1, 1, 1), [x, y, np.int32(which)])


def test_a_failed_launch_leaves_the_next_one_whole():
    """After a deadlock fibers are rebuilt: the same process runs the same kernel, right, many times."""
    x = np.ones((7, 125), np.float32)
    simulator = Simulator()
    for mutant in ("DIVERGENT_BARRIER", "CORRECT", "EXITED_LANE", "CORRECT", "CORRECT", "EARLY_RETURN", "CORRECT"):
        kernel = attrs.evolve(CENTER_ROWS, defines=(("MUTANT", mutant),))
        y = np.full_like(x, np.nan)
        run = simulator.bind(kernel, (3, 1, 1), [x, y, *map(np.int32, x.shape)])
        if mutant == "CORRECT":
            run()
            assert (y == -124).all()
        else:
            with pytest.raises(SimulationError, match=r"center_rows, block \([0-2], 0, 0\): .*rows.cu:\d+"):
                run()


def test_what_is_bound_runs_again_on_what_the_arrays_hold_then():
    """A launch is prepared once and repeated."""
    x, y = np.ones((2, 3), np.float32), np.zeros((2, 3), np.float32)
    run = Simulator().bind(correct(CENTER_ROWS), (1, 1, 1), [x, y, np.int32(2), np.int32(3)])
    run()
    assert (y == -2).all()
    x[:] = 5
    run()
    assert (y == -10).all()


@pytest.mark.parametrize("blocks", [[(2100, 0, 0), (7, 0, 0)], lambda grid: [(7, 0, 0), (grid[0] - 1, 0, 0)]])
def test_only_the_wanted_blocks_of_a_huge_grid_run(written, blocks):
    """Offsets beyond 2^31 elements are reached without the memory or the time for all of them."""
    y = reserved((2101 << 20,), np.float32)
    assert y.size > 2**31
    Simulator(blocks=blocks).launch(written("block_numbers"), (2101, 1, 1), [y])
    assert (y[7 << 20], y[6 << 20], y[2100 << 20]) == (7, 0, 2100)


def test_an_edited_header_is_compiled_anew(tmp_path, monkeypatch):
    """Objects are kept by content, of what is included too; what has not changed is not compiled again."""
    monkeypatch.setenv("CUBATCH_CPUSIM_CACHE", str(tmp_path / "cache"))
    source, header = tmp_path / "kernel.cu", tmp_path / "part.cuh"
    source.write_text('#include "common/device.cuh"\n#include "part.cuh"\nCB_KERNEL(32, 1) k() { part(); }\n')
    kernel = attrs.evolve(twin("k", 32), source=str(source))

    def compiled(text):
        header.write_text(text)
        made = building.shared_object.__wrapped__(kernel, 80, "plain")
        return made, made.stat().st_mtime_ns

    one = compiled("CB_DEVICE void part() {}\n")
    assert compiled("CB_DEVICE void part() {}\n") == one
    assert compiled("CB_DEVICE void part() { cb_sync(); }\n")[0] != one[0]
