"""Where an operation of the schedule works, and with which arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from cubatch.engine.arena import Arena
from cubatch.engine.step_numbers import StepNumbers
from cubatch.engine.team import Team
from cubatch.memory.schedule_records import Op


@attrs.frozen(eq=False)
class Place:
    """
    The shard of the batch, gradients and shared parameters of one member of a team.

    Attributes:
        operations: The functions that compute: `functional`, or the hand-written kernels under the same names.
        arena: The shard's buffers.
        parameters: By layer and name; shared by all members.
        gradients: By layer and name; this member's own.
        states: Running statistics by layer and name; shared, written by the first member.
        team, rank: The members, and the number of this one.
        batch_size: Samples of the whole batch.
        begin: First sample of the shard in the batch.
        first: First sample of that batch in the one that several ranks share, else 0.
        clock: Number of finished passes over a batch, in a list of one; draws the dropout masks.
        numbers: The same number where kernels read it, instead of `clock`; None on the host.
        seed: Seed of those draws.
    """

    operations: Any
    arena: Arena
    parameters: Mapping[str, Mapping[str, Any]]
    gradients: Mapping[str, Mapping[str, Any]]
    states: Mapping[str, Mapping[str, Any]]
    team: Team
    rank: int
    batch_size: int
    begin: int
    first: int
    clock: list[int]
    numbers: StepNumbers | None
    seed: int


@attrs.frozen(eq=False)
class Bound:
    """An operation with its arrays."""

    op: Op
    layer: Any
    reads: dict[str, Any]
    writes: dict[str, Any]
    workspace: Any
    place: Place
    training: bool

    @property
    def name(self) -> str:
        """The layer's name."""
        return self.op.node.name if self.op.node else ""

    @property
    def parameters(self) -> Mapping[str, Any]:
        """Parameters of the layer by name."""
        return self.place.parameters.get(self.name, {})

    @property
    def gradients(self) -> Mapping[str, Any]:
        """Gradients of its parameters, by name."""
        return self.place.gradients.get(self.name, {})

    @property
    def x_shape(self) -> tuple[int, int, int, int]:
        """Shape of the shard's input."""
        return (self.place.arena.samples, *self.layer.input_shape)

    @property
    def positions(self) -> int:
        """Values per channel in the whole batch."""
        h, w, _ = self.layer.input_shape
        return int(self.place.batch_size * h * w)
