"""Parameters of a network: initial values, layout in memory, and the optimizer's state."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from cubatch.engine import loss_scale, storage
from cubatch.engine.team import Team
from cubatch.memory.plan import STATE_COPIES
from cubatch.memory.schedule_records import LOSS_SCALE_BYTES
from cubatch.network.graph import Network

_VECTOR_ELEMENTS = 8
_TOKEN_DEVIATION = 0.02
"""Of class tokens and positions, from DeiT (Touvron et al., 2020, arXiv:2012.12877)."""
_PIECE = 1 << 20
"""Elements that are converted from or to 16 bits at a time: memory that no plan includes."""


def drawn(network: Network, seed: int) -> np.ndarray[Any, Any]:
    """
    Return a network's initial parameters as one flat float32 array.

    They are copied from `network.weights`. Other filters are normal random numbers from `seed` (He et al., 2015,
    arXiv:1502.01852), and so are tokens and positions, with deviation 0.02. Other gammas are 1, the rest is 0.
    """
    random = np.random.default_rng(seed)
    flat = np.zeros(network.parameters, dtype=np.float32)
    for layer, parameters in views(network, flat).items():
        given = network.weights.get(layer, {})
        for name, parameter in parameters.items():
            if name in given:
                parameter[...] = given[name]
            elif name in {"w", "w_in", "w_out"}:
                random.standard_normal(dtype=np.float32, out=parameter)
                np.multiply(parameter, np.float32(math.sqrt(2 / math.prod(parameter.shape[1:]))), out=parameter)
            elif name in {"token", "position"}:
                random.standard_normal(dtype=np.float32, out=parameter)
                np.multiply(parameter, np.float32(_TOKEN_DEVIATION), out=parameter)
            elif name == "gamma":
                parameter[...] = 1
    return flat


def statistics(network: Network, dtype: str, xp: Any) -> dict[str, dict[str, Any]]:
    """
    Return the initial running statistics by layer and name ("mean", "var"): the network's, else mean 0 and variance 1.

    They are arrays of `storage.sum_type`: float64 if the parameters are, else float32.
    """
    kind = storage.sum_type(dtype)
    return {
        node.name: {
            name: xp.array(network.weights.get(node.name, {}).get(name, np.full(shape, float(name == "var"))), kind)
            for name, shape in node.layer.state_shapes.items()
        }
        for node in network.nodes
        if node.layer.state_shapes
    }


def places(network: Network) -> dict[tuple[str, str], slice]:
    """
    Return the range of each parameter in a flat array, by layer and name, in the array's order.

    Parameters whose sizes are multiples of 8 come first, so that they are aligned for kernels that load vectors.
    """
    named = [(node.name, *item) for node in network.nodes for item in node.layer.parameter_shapes.items()]
    parts, start = {}, 0
    for layer, name, shape in sorted(named, key=lambda item: math.prod(item[2]) % _VECTOR_ELEMENTS != 0):
        parts[layer, name] = slice(start, start + math.prod(shape))
        start = parts[layer, name].stop
    return parts


def views(network: Network, flat: Any) -> dict[str, dict[str, Any]]:
    """Return the parameters in a flat array by layer and name, as views with their shapes."""
    parts = places(network)
    return {
        node.name: {
            name: flat[parts[node.name, name]].reshape(shape) for name, shape in node.layer.parameter_shapes.items()
        }
        for node in network.nodes
        if node.layer.parameter_shapes
    }


class Stepper:
    """
    Updates parameters by their gradients, and holds the optimizer's state.

    Args:
        flat: 1-D array of the parameters, in their storage type.
        dtype: Dtype of the parameters: "float32", "tf32", "float16" or "bfloat16".
        optimizer: "sgd", "momentum" or "adam".
        operations: A namespace of the functions of `functional`.
        xp: The array module that owns the memory: NumPy or CuPy.

    Attributes:
        master: float32 copy of 16-bit parameters, which steps change; None for wider parameters.
        state: The optimizer's flat arrays: none, the velocity, or Adam's mean and square.
        loss_scale: State of the module `loss_scale`, four words; None if the loss is not scaled.
        sums: Gradients added up since the last step, at least float32; None if each step has its own.
    """

    def __init__(self, flat: Any, *, dtype: str, optimizer: str, operations: Any, xp: Any) -> None:
        self._flat, self._rule, self._operations = flat, optimizer, operations
        wide = storage.decoded(flat)
        self.master = None if wide is flat else wide
        self.state = [xp.zeros_like(wide) for _ in range(STATE_COPIES[optimizer])]
        self.loss_scale = xp.asarray(loss_scale.initial_state()) if dtype in LOSS_SCALE_BYTES else None
        self.sums: Any = None
        self._begin = functools.partial(xp.zeros, len(flat), wide.dtype)

    @property
    def arrays(self) -> list[Any]:
        """All arrays that the optimizer needs: master weights, state, loss scale and sums, if there are any."""
        return [array for array in (self.master, *self.state, self.loss_scale, self.sums) if array is not None]

    def begin_sums(self) -> None:
        """Allocate the sum of gradients for `accumulate`; `step` then uses the sum."""
        self.sums = self._begin()

    def accumulate(self, team: Team, gradients: Sequence[Any], rank: int) -> None:
        """Add the gradients of all members to the sum, in the calling member's range of the parameters."""
        for piece in _pieces(team.shard(len(self._flat), rank)):
            for gradient in gradients:
                self.sums[piece] += storage.decoded(gradient[piece])

    def step(
        self, team: Team, rank: int, gradients: Sequence[Any], *, number: Any, learning_rate: Any, workspace: Any
    ) -> None:
        """
        Update the calling member's range of the parameters, once all members' gradients are complete.

        Args:
            team, rank: The members, and the rank of the caller.
            gradients: Flat gradient of each member.
            number: Number of the step, from 1; a number or an array of one element.
            learning_rate: Learning rate of the step; a number or an array of one element.
            workspace: 1-D uint8 array for this member.
        """
        team.barrier(rank)
        part = team.shard(len(self._flat), rank)
        if self.sums is not None:
            gradients = self._summed(team, rank, part, gradients)
        if self.loss_scale is not None:
            if rank == 0:
                self._operations.update_loss_scale(self.loss_scale, gradients, workspace=workspace)
            team.barrier(rank)
        getattr(self._operations, self._rule)(
            self._flat[part],
            [gradient[part] for gradient in gradients],
            *(array[part] for array in self.state),
            lr=learning_rate,
            master=None if self.master is None else self.master[part],
            scaling=self.loss_scale,
            workspace=workspace,
            **({"step": number} if self._rule == "adam" else {}),
        )
        if self.sums is not None:
            self.sums[part] = 0

    def _summed(self, team: Team, rank: int, part: slice, gradients: Sequence[Any]) -> Sequence[Any]:
        """
        Return the sum of gradients as a list of one flat array in the type of the parameters.

        If that type is narrower, the sum is rounded into the first of `gradients`; a member rounds its range `part`.
        """
        if self.sums.dtype == self._flat.dtype:
            return [self.sums]
        for piece in _pieces(part):
            gradients[0][piece] = storage.encoded(self.sums[piece], self._flat.dtype)
        team.barrier(rank)
        return gradients[:1]


def _pieces(part: slice) -> Iterator[slice]:
    for begin in range(part.start, part.stop, _PIECE):
        yield slice(begin, min(begin + _PIECE, part.stop))
