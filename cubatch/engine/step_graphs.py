"""
A step's launches as one CUDA graph: captured once, launched in every step.

Enqueueing a launch takes the host some microseconds, and a step has hundreds: at small batches that would be measured,
and not the GPU. So the second step of a prepared batch is captured instead of run, for every buffer set, on a separate
stream. The first step has compiled, chosen and loaded all kernels by then. Afterwards a step is one launch into the
current stream, in order with copies, events and results.

A capture fails for memory allocated during a step, since a graph would write to it after its release. It also fails if
the host waits for the device, or if the driver refuses. Steps are then launched kernel by kernel as before, and
`refusal` has the reason. A graph's memory on the device lies outside CuPy's pool, in the driver's memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Never

from cubatch.errors import DeviceFailed, OutOfMemory, is_out_of_memory

Walk = Callable[[], object]
"""Enqueues a step's launches."""


class StepGraphs:
    """
    Runs the steps of a prepared batch, as CUDA graphs where that is possible.

    Args:
        walks: Functions that enqueue a step, one for each buffer set.
        xp: The array module: CuPy.
        launches: Kernels of a step; None if unknown.
        refusal: The reason not to capture graphs; empty: try to.

    Attributes:
        launches: The argument of this name.
        refusal: The reason why steps are launched kernel by kernel; empty if they are or may become graphs.
    """

    def __init__(self, walks: Sequence[Walk], xp: Any, launches: int | None, refusal: str = "") -> None:
        self.launches, self.refusal = launches, refusal
        self._walks, self._xp = walks, xp
        self._graphs: list[Any] = []
        self._has_run = False

    @property
    def launch(self) -> dict[str, Any]:
        """
        How a step is launched, as results show it.

        "launches" is the number of a step's kernels, None if unknown. "graph" is whether they are one CUDA graph, which
        starts with the second step. "refusal" is the reason why they cannot be a graph, else None.
        """
        return {"launches": self.launches, "graph": bool(self._graphs), "refusal": self.refusal or None}

    def run(self, turn: int) -> None:
        """Enqueue a step on buffer set `turn`; as a CUDA graph from the second step on, if that is possible."""
        if self._has_run and not self._graphs and not self.refusal:
            self._capture()
        if self._graphs:
            _launch(self._graphs[turn])
        else:
            self._walks[turn]()
            self._has_run = True

    def _capture(self) -> None:
        cuda = self._xp.cuda
        try:
            # With a blocking stream, any call to the legacy stream would end the capture.
            stream = cuda.Stream(non_blocking=True)
            with stream, cuda.using_allocator(_no_memory):
                graphs = [self._captured(walk, stream) for walk in self._walks]
            for graph in graphs:
                graph.upload()  # now, since the step that launches it first may be timed
            self._graphs = graphs
        except Exception as error:  # noqa: BLE001 - the step itself will raise it again
            self.refusal = f"{type(error).__name__}: {error}"

    def _captured(self, walk: Walk, stream: Any) -> Any:
        """
        Return the CUDA graph of what a step enqueues.

        Raises the error of the step, as of one that waits (CuPy's CUDARuntimeError) or allocates memory (MemoryError).
        """
        stream.begin_capture(self._xp.cuda.runtime.streamCaptureModeThreadLocal)
        try:
            walk()
        except BaseException:
            with contextlib.suppress(Exception):  # the first error is the cause
                stream.end_capture()
            raise
        return stream.end_capture()


def _no_memory(num_bytes: int) -> Never:
    raise MemoryError(
        f"the step allocates {num_bytes} bytes while it runs, and a CUDA graph would use that memory after it is freed"
    )


def _launch(graph: Any) -> None:
    try:
        graph.launch()
    except Exception as error:
        what = "launching a step's graph"
        if is_out_of_memory(error):
            raise OutOfMemory(what) from error
        status = getattr(error, "status", None)
        if status is None:
            raise
        raise DeviceFailed.by_driver(what, status) from error
