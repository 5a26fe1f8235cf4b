"""Steps as graphs on a made-up CuPy: when they are captured, what is launched, and what falls back."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest

from cubatch.engine.step_graphs import StepGraphs
from cubatch.errors import DeviceFailed, OutOfMemory


class CUDARuntimeError(RuntimeError):
    """As CuPy raises it, with the driver's status."""

    __module__ = "cupy_backends.cuda.api.runtime"

    def __init__(self, status):
        super().__init__(f"status {status}")
        self.status = status


class FakeCupy:
    """Streams that can be captured: what walks enqueue is done at once, or kept in a graph."""

    def __init__(self, *, begin=None, end=None, upload=None, launch=None):
        self.done, self.captured, self.ended, self.allocators = [], None, 0, []
        self.errors = {"begin": begin, "end": end, "upload": upload, "launch": launch}
        self.cuda = SimpleNamespace(
            Stream=self._stream,
            using_allocator=self._allocator,
            runtime=SimpleNamespace(streamCaptureModeThreadLocal=1),
        )

    @contextlib.contextmanager
    def _allocator(self, allocate):
        self.allocators.append(allocate)
        try:
            yield
        finally:
            self.allocators.pop()

    def _stream(self, *, non_blocking):
        assert non_blocking
        return FakeStream(self)

    def enqueue(self, name):
        (self.done if self.captured is None else self.captured).append(name)

    def fail(self, where):
        if self.errors[where] is not None:
            raise self.errors[where]


class FakeStream(contextlib.AbstractContextManager):
    def __init__(self, cupy):
        self.cupy = cupy

    def __exit__(self, *_):
        return None

    def begin_capture(self, mode):
        assert mode == 1
        self.cupy.fail("begin")
        self.cupy.captured = []

    def end_capture(self):
        kept, self.cupy.captured = self.cupy.captured, None
        self.cupy.ended += 1
        self.cupy.fail("end")
        return SimpleNamespace(
            upload=lambda: self.cupy.fail("upload"),
            launch=lambda: (self.cupy.fail("launch"), self.cupy.done.extend(kept)),
        )


def walks_of(cupy, sets, counts):
    """A walk of two launches for each buffer set, counting how often it was made."""

    def walk(turn):
        counts[turn] += 1
        cupy.enqueue(f"a{turn}")
        cupy.enqueue(f"b{turn}")

    return [lambda turn=turn: walk(turn) for turn in range(sets)]


def test_the_first_step_is_launched_and_the_others_are_graphs_of_their_buffer_set():
    """Each set is walked once more, to be captured; what is done is a0 b0 a1 b1 a0 ..., as without graphs."""
    cupy, counts = FakeCupy(), [0, 0]
    steps = StepGraphs(walks_of(cupy, 2, counts), cupy, launches=2)
    assert steps.launch == {"launches": 2, "graph": False, "refusal": None}
    for number in range(6):
        steps.run(number % 2)
    assert cupy.done == ["a0", "b0", "a1", "b1"] * 3
    assert counts == [2, 1]
    assert steps.launch == {"launches": 2, "graph": True, "refusal": None}


@pytest.mark.parametrize("where", ["begin", "end", "upload"])
def test_a_driver_that_refuses_leaves_ordinary_launches_and_the_reason(where):
    """It is asked once; the step that was to be captured is done all the same."""
    cupy, counts = FakeCupy(**{where: CUDARuntimeError(801)}), [0]
    steps = StepGraphs(walks_of(cupy, 1, counts), cupy, launches=2)
    for _ in range(3):
        steps.run(0)
    assert cupy.done == ["a0", "b0"] * 3
    assert cupy.ended == (where != "begin")
    assert steps.launch == {"launches": 2, "graph": False, "refusal": "CUDARuntimeError: status 801"}


def test_a_step_that_takes_memory_ends_its_capture_and_is_launched():
    """The allocator of a capture refuses: a graph would write to memory that was given to others."""
    cupy = FakeCupy()

    def walk():
        for allocate in list(cupy.allocators):
            allocate(640)
        cupy.enqueue("a")

    steps = StepGraphs([walk], cupy, launches=1)
    steps.run(0)
    steps.run(0)
    assert (cupy.done, cupy.ended, cupy.allocators) == (["a", "a"], 1, [])
    assert "640 bytes" in steps.refusal


def test_an_interrupted_capture_is_ended_and_no_reason_to_give_up():
    """Ctrl-C goes on its way; the stream is left as it was."""
    cupy, calls = FakeCupy(), []

    def walk():
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        cupy.enqueue("a")

    steps = StepGraphs([walk], cupy, launches=1)
    steps.run(0)
    with pytest.raises(KeyboardInterrupt):
        steps.run(0)
    assert (cupy.captured, cupy.ended, steps.refusal) == (None, 1, "")
    steps.run(0)
    assert steps.launch["graph"]


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (CUDARuntimeError(719), DeviceFailed, "launching a step's graph failed with CUDA driver status 719"),
        (MemoryError("none left"), OutOfMemory, "launching a step's graph"),
        (ZeroDivisionError("a mistake"), ZeroDivisionError, "a mistake"),
    ],
)
def test_an_error_of_the_launch_names_the_graph(error, kind, said):
    """By the driver's status; what is not the driver's is raised as it is."""
    cupy = FakeCupy(launch=error)
    steps = StepGraphs(walks_of(cupy, 1, [0]), cupy, launches=2)
    steps.run(0)
    with pytest.raises(kind, match=said):
        steps.run(0)


def test_what_is_not_to_be_captured_is_never():
    """With a reason given beforehand no stream is made."""
    cupy = FakeCupy(begin=AssertionError("captured"))
    steps = StepGraphs(walks_of(cupy, 1, [0]), cupy, None, "because")
    for _ in range(3):
        steps.run(0)
    assert steps.launch == {"launches": None, "graph": False, "refusal": "because"}
