"""The shard of the batch on which a member of a team runs operations, and the arrays of one operation."""

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
    """The shard, gradients and shared parameters on which a member of a team works."""

    operations: Any  # the functions that compute: `functional`, or the hand-written kernels under the same names
    arena: Arena  # the shard's buffers
    parameters: Mapping[str, Mapping[str, Any]]  # parameters by layer and name; shared by all members
    gradients: Mapping[str, Mapping[str, Any]]  # this member's gradients by layer and name
    states: Mapping[str, Mapping[str, Any]]  # running statistics by layer and name; shared, written by the first member
    team: Team  # team, rank: the members, and the number of this one
    rank: int
    batch_size: int  # samples of the whole batch
    begin: int  # first sample of the shard in the batch
    first: int  # first sample of this rank's batch in the batch of all ranks; 0 without other ranks
    clock: list[int]  # number of finished passes over a batch, in a list of one; draws the dropout masks
    # the numbers of pass and step in memory that kernels read, instead of `clock`; None on the host
    numbers: StepNumbers | None
    seed: int  # seed of the dropout masks


@attrs.frozen(eq=False)
class Bound:
    """An operation of the schedule with the arrays that it reads and writes."""

    op: Op  # the operation
    layer: Any  # its layer
    reads: dict[str, Any]  # reads, writes: its arrays by role: "x0", "dy", "mask", ...
    writes: dict[str, Any]
    workspace: Any  # its scratch memory, a 1-D uint8 array
    place: Place  # the shard, with parameters and gradients
    training: bool  # whether batch norms use the statistics of the batch

    @property
    def name(self) -> str:
        """The layer's name; empty for an operation without a layer."""
        return self.op.node.name if self.op.node else ""

    @property
    def parameters(self) -> Mapping[str, Any]:
        """Arrays of the layer's parameters by name, on the device; empty if it has none."""
        return self.place.parameters.get(self.name, {})

    @property
    def gradients(self) -> Mapping[str, Any]:
        """Arrays of this member's gradients by name of the layer's parameter; empty if it has none."""
        return self.place.gradients.get(self.name, {})

    @property
    def x_shape(self) -> tuple[int, int, int, int]:
        """Shape of the layer's input in this shard: (samples, h, w, c)."""
        return (self.place.arena.samples, *self.layer.input_shape)

    @property
    def positions(self) -> int:
        """Number of input values per channel in the whole batch: samples times pixels."""
        h, w, _ = self.layer.input_shape
        return int(self.place.batch_size * h * w)
