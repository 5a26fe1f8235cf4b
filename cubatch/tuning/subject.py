"""The interface between the tuning pipeline and the networks, modules, files and functions that it tunes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import attrs

from cubatch.frameworks.loader_rate import LoaderRate
from cubatch.hardware.facts import Device
from cubatch.hardware.memory_limit import MemoryLimit
from cubatch.measure.records import Candidate, Measured
from cubatch.measure.runner import RunnerFactory
from cubatch.tuning.ladder import Ladder, between
from cubatch.tuning.notes import Note
from cubatch.tuning.request import Request
from cubatch.tuning.results import TuningResult
from cubatch.tuning.store import Run


@attrs.frozen(kw_only=True)
class SubjectFacts:
    """Figures of a step that are computed, not measured: FLOP, roofline, layers and bytes of the process."""

    flops_per_sample: float | None = None  # FLOP of one sample; None where unknown
    roofline_seconds: Mapping[int, float] = attrs.field(factory=dict)  # lower bound of a step in seconds, by batch size
    # rows of `Measurement.layers`, by batch size
    layers: Mapping[int, Sequence[Mapping[str, Any]]] = attrs.field(factory=dict)
    # predicted bytes of the process on the device, by batch size
    device_bytes: Mapping[int, int] = attrs.field(factory=dict)


@attrs.frozen(kw_only=True)
class Revision:
    """The candidates and their memory predictions after measuring."""

    ladder: Ladder  # the candidates; the same object as before if nothing has changed
    measured: Measured  # the timings, with predictions for sizes that the search added
    notes: Sequence[Note] = ()  # facts that a user should know


class Subject(Protocol):
    """
    A network, module, file or function whose batch size can be tuned.

    `session.tune` calls the methods in the order in which they stand here. A new kind of subject derives from this
    class; it must have `device`, `memory`, `ladder` and `runner_factory`, and overrides others as needed.
    """

    @property
    def device(self) -> Device:
        """The device that steps run on."""

    @property
    def memory(self) -> MemoryLimit:
        """The bytes that a step may take on the device, and the origin of this limit."""

    @property
    def identity(self) -> Mapping[str, Any] | None:
        """Fields, besides those of request and device, by which cached timings are looked up; None: never cached."""
        return None

    @property
    def conditions(self) -> Mapping[str, Any]:
        """
        Versions and settings by name on which timings depend, besides those of the engine.

        Cached timings are used only if these are equal.
        """
        return {}

    @property
    def multiple(self) -> int:
        """Every batch size that the search adds is a multiple of this number; 1 allows all."""
        return 1

    def start(self, *, refresh: bool) -> Sequence[Note]:  # noqa: ARG002 - for those that cache more than timings
        """Return the notes known before measuring, if any; with `refresh`, discard caches other than timings."""
        return ()

    def ladder(self, request: Request, cached: Ladder | None, *, is_finished: bool) -> Ladder:
        """
        Return the candidate batch sizes.

        `cached` are the candidates of an earlier call, None without one; `is_finished` is whether it measured them all.
        """

    @property
    def worker_pid(self) -> int | None:
        """Process id of a worker whose CPU time before measuring is no interference; None if there is none."""
        return None

    def runner_factory(self, ladder: Ladder, request: Request) -> RunnerFactory:
        """Return the function that makes the runner; it is called only if there is something to measure."""

    def candidate(self, ladder: Ladder, batch_size: int) -> Candidate:
        """Return a candidate of a size that the search adds between the given candidates."""
        return between(batch_size, ladder.candidates)

    def close(self) -> None:
        """Release the memory and processes that choosing the candidates and measuring took, also after an error."""
        return

    def revise(self, ladder: Ladder, measured: Measured, request: Request) -> Revision:  # noqa: ARG002 - as above
        """Return the candidates and timings, with memory predictions updated after measuring, and further notes."""
        return Revision(ladder=ladder, measured=measured)

    def describe(self, ladder: Ladder) -> Mapping[str, Any]:  # noqa: ARG002 - as above
        """Return the result's fields of the subject by name, such as `l2`; `environment` is added to the device's."""
        return {"l2": "warm"}

    def facts(self, sizes: Sequence[int]) -> SubjectFacts:  # noqa: ARG002 - as above
        """Return computed figures of steps of these batch sizes, such as FLOP and the roofline's seconds."""
        return SubjectFacts()

    def measure_loader(self, result: TuningResult, request: Request) -> LoaderRate | Note | None:  # noqa: ARG002 - as above
        """Return the measured rate of the user's data loader, a note if measuring fails, or None without a loader."""
        return None

    def run_loop(self, result: TuningResult, request: Request) -> LoaderRate | Note | None:  # noqa: ARG002 - as above
        """Run the loop of loader and step at some batch sizes; return rates, a note of failure, or None if not run."""
        return None

    def complete(self, result: TuningResult, run: Run, request: Request) -> TuningResult:  # noqa: ARG002 - as above
        """Return the result with further measurements at the recommended batch size."""
        return result

    def remedy(self, ladder: Ladder) -> str:  # noqa: ARG002 - as above
        """Return sentences on what the user can do if no batch size could be measured; empty if there are none."""
        return ""
