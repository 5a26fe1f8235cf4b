"""What a model has learnt and keeps from step to step: shown, copied out, and put back to the bit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import numpy as np

from cubatch.engine import backend, loss_scale, storage, weights
from cubatch.engine.weights import Stepper
from cubatch.errors import InvalidArgument
from cubatch.network.graph import Network


class Learned:
    """
    Parameters, running statistics, the optimiser's state and the count of steps: a `Model`'s, which computes with them.

    Attributes:
        network: Whose parameters they are.
    """

    network: Network
    _xp: Any
    _flat: Any
    _states: dict[str, dict[str, Any]]
    _stepper: Stepper | None
    # Passes over a batch, which draw the dropout masks, and steps of the optimiser: one for each, but where gradients
    # of several batches are added up.
    _clock: list[int]
    _updates: int
    # Batches whose gradients were added up since the optimiser's last step.
    _added: int

    @property
    def parameters(self) -> dict[str, dict[str, Any]]:
        """
        Parameters by layer and name, as views of how they are stored: bfloat16 is uint16 where kernels run.

        Writing to them changes the model, but for training in 16 bits, whose next step rounds the master weights to
        them again.
        """
        return weights.views(self.network, self._flat)

    @property
    def states(self) -> dict[str, dict[str, Any]]:
        """Running statistics of batch norm by layer and name."""
        return self._states

    @property
    def loss_scale(self) -> float:
        """What the next step's loss is scaled by; 1 but for training in float16. Waits for the device."""
        return 1.0 if self._scaling is None else float(self._scaling[loss_scale.SCALE])

    @property
    def skipped_steps(self) -> int:
        """Steps that changed nothing, since gradients of the scaled loss were not finite. Waits for the device."""
        return 0 if self._scaling is None else int(self._scaling[loss_scale.SKIPPED])

    @property
    def _scaling(self) -> Any:
        return None if self._stepper is None else self._stepper.loss_scale

    def trained(self) -> Network:
        """Give the network with the weights as they are now, in float32: the master weights, where there are such."""
        master = None if self._stepper is None else self._stepper.master
        parameters = self.parameters if master is None else weights.views(self.network, master)
        found: dict[str, dict[str, Any]] = {}
        for arrays in (parameters, self._states):
            for layer, by_name in arrays.items():
                for name, array in by_name.items():
                    numbers = storage.decoded(backend.to_host(array)).astype(np.float32)
                    found.setdefault(layer, {})[name] = numbers
        return attrs.evolve(self.network, weights=found)

    def snapshot(self) -> dict[str, np.ndarray[Any, Any]]:
        """
        Copy all that the next steps depend on to the host, by name.

        Random numbers need nothing more: the masks of dropout are drawn from the seed, the count of steps, and where a
        thread's share of the batch begins.

        Raises:
            InvalidArgument: If gradients were added up that the optimiser has not stepped by: it would lose them.
        """
        if self._added:
            batches = f"with the gradients of {self._added} batch{'es' * (self._added > 1)} added up"
            raise InvalidArgument(
                "snapshot", batches, "taken after a step of the optimiser", "Call update() before it."
            )
        clock = np.array([self._clock[0], self._updates], np.int64)
        return {"clock": clock} | {name: np.array(backend.to_host(array)) for name, array in self._kept().items()}

    def restore(self, arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
        """
        Put a snapshot's contents back, bit for bit; gradients that were added up since it are forgotten.

        Raises:
            InvalidArgument: If it is one of another network, dtype or optimiser.
        """
        kept = self._kept()
        if "clock" not in arrays or (arrays["clock"].shape, arrays["clock"].dtype) != ((2,), np.int64):
            raise InvalidArgument("snapshot", "clock", "there, as `snapshot` gives it")
        for name, array in kept.items():
            if name not in arrays or (arrays[name].shape, arrays[name].dtype) != (array.shape, array.dtype):
                raise InvalidArgument("snapshot", name, "of this network, dtype and optimiser")
        for name, array in kept.items():
            array[...] = self._xp.asarray(arrays[name])
        self._clock[0], self._updates = (int(count) for count in arrays["clock"])
        self._added = 0
        if self._stepper is not None and self._stepper.sums is not None:
            self._stepper.sums[...] = 0

    def _kept(self) -> dict[str, Any]:
        """Give views of what steps change, by name."""
        flats = {"parameters": self._flat}
        found: dict[str, Any] = {}
        if self._stepper is not None:
            state = {f"optimizer{number}": array for number, array in enumerate(self._stepper.state)}
            flats |= state | ({} if self._stepper.master is None else {"master": self._stepper.master})
            found = {} if self._scaling is None else {"loss_scale": self._scaling}
        by_layer = {part: weights.views(self.network, flat) for part, flat in flats.items()}
        for part, arrays in (by_layer | {"statistics": self._states}).items():
            for layer, by_name in arrays.items():
                found |= {f"{part}.{layer}.{name}": array for name, array in by_name.items()}
        return found
