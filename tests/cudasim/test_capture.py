"""Stream capture and graphs of the simulated driver, by the rules of the programming guide, through real CuPy."""

from __future__ import annotations

import pytest

from tests.cudasim.simulation import NEEDS, python

pytestmark = NEEDS

CAPTURE = """
    import cupy
    x, y = cupy.arange(8, dtype="f4"), cupy.zeros(8, dtype="f4")
    cupy.add(y, x, out=y)
    stream = cupy.cuda.Stream(non_blocking={non_blocking})
    def captured(work, mode=cupy.cuda.runtime.streamCaptureModeThreadLocal):
        said = []
        with stream:
            stream.begin_capture(mode)
            for call in (work, lambda: cupy.add(y, x, out=y)):
                try:
                    call()
                except cupy.cuda.runtime.CUDARuntimeError as error:
                    said.append(error.status)
                except cupy.cuda.driver.CUDADriverError as error:
                    said.append(error.status)
            try:
                return stream.end_capture()
            except cupy.cuda.runtime.CUDARuntimeError as error:
                said.append(error.status)
        return said
"""


def capture(code: str, *, non_blocking: bool = True, **options: bool) -> str:
    return python(CAPTURE.format(non_blocking=non_blocking) + code, **options)


@pytest.mark.parametrize("late", [False, True])
def test_what_is_captured_is_done_by_each_launch_of_the_graph_and_not_before(late):
    """Two sums in a graph that is launched three times, in order with the stream: 1 + 6 times x."""
    code = """
    graph = captured(lambda: cupy.add(y, x, out=y))
    before = float(y[1])
    for _ in range(3):
        graph.launch()
    print(before, float(y[1]))
    """
    assert capture(code, late=late) == "1.0 7.0"


@pytest.mark.parametrize(
    ("work", "first"),
    [
        ("stream.synchronize", 900),
        ("cupy.cuda.runtime.deviceSynchronize", 900),
        ("lambda: cupy.cuda.runtime.memcpy(x.data.ptr, y.data.ptr, 32, 3)", 900),
        ("lambda: cupy.cuda.runtime.malloc(1 << 20)", 900),
    ],
)
def test_what_the_guide_forbids_spoils_a_capture(work, first):
    """The call says 900, the next in the stream and the end of the capture 901; the stream can be used again."""
    code = f"""
    print(captured({work}))
    print(float(cupy.add(y, x, out=y)[1]), stream.is_capturing())
    """
    assert capture(code).splitlines() == [str([first, 901, 901]), "2.0 False"]
