"""The learned state of a model: access, copies, and restoring to the same bits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import numpy as np

from cubatch.engine import backend, flat_parameters, loss_scale, storage
from cubatch.engine.flat_parameters import Stepper
from cubatch.errors import InvalidArgument
from cubatch.network.graph import Network


class Learned:
    """Parameters, running statistics, optimizer state and step count of a `Model`."""

    network: Network  # the network of the parameters
    _xp: Any
    _flat: Any
    _states: dict[str, dict[str, Any]]
    _stepper: Stepper | None  # the optimizer with its state; None in inference
    # Passes over a batch, which draw the dropout masks, and steps of the optimizer, which may take several passes.
    _clock: list[int]
    _updates: int
    # Batches whose gradients were added up since the optimizer's last step.
    _added: int

    @property
    def parameters(self) -> dict[str, dict[str, Any]]:
        """
        Parameters by layer and name, as views in their storage type: bfloat16 is uint16 for kernels.

        Writing to them changes the model. In training with 16 bits, the next step overwrites them with the master
        weights.
        """
        return flat_parameters.views(self.network, self._flat)

    @property
    def states(self) -> dict[str, dict[str, Any]]:
        """Running statistics of batch norm by layer and name."""
        return self._states

    @property
    def loss_scale(self) -> float:
        """Factor of the next step's loss; 1 except for training in float16. Reading it waits for the device."""
        return 1.0 if self._scaling is None else float(self._scaling[loss_scale.SCALE])

    @property
    def skipped_steps(self) -> int:
        """Number of steps skipped because of gradients that were not finite. Reading it waits for the device."""
        return 0 if self._scaling is None else int(self._scaling[loss_scale.SKIPPED])

    @property
    def _scaling(self) -> Any:
        return None if self._stepper is None else self._stepper.loss_scale

    def trained(self) -> Network:
        """Return the network with its current weights in float32: the master weights, if there are any."""
        master = None if self._stepper is None else self._stepper.master
        parameters = self.parameters if master is None else flat_parameters.views(self.network, master)
        learned: dict[str, dict[str, Any]] = {}
        for arrays in (parameters, self._states):
            for layer, by_name in arrays.items():
                for name, array in by_name.items():
                    numbers = storage.decoded(backend.to_host(array)).astype(np.float32)
                    learned.setdefault(layer, {})[name] = numbers
        return attrs.evolve(self.network, weights=learned)

    def snapshot(self) -> dict[str, np.ndarray[Any, Any]]:
        """
        Return host copies of all that the next steps depend on: arrays by name, and "clock", which counts batches.

        "clock" has the number of batches and that of optimizer updates, as int64. There is no random state. The masks
        of dropout are drawn from the seed, the first of these, and the first sample of a thread's share of the batch.

        Raises:
            InvalidArgument: If gradients have been added up since the last step of the optimizer.
        """
        if self._added:
            batches = f"with the gradients of {self._added} batch{'es' * (self._added > 1)} added up"
            raise InvalidArgument(
                "snapshot", batches, "taken after a step of the optimizer", "Call update() before it."
            )
        clock = np.array([self._clock[0], self._updates], np.int64)
        return {"clock": clock} | {name: np.array(backend.to_host(array)) for name, array in self._arrays().items()}

    def restore(self, arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
        """Restore a snapshot bit for bit and discard added-up gradients; raise InvalidArgument if it does not match."""
        own = self._arrays()
        if "clock" not in arrays or (arrays["clock"].shape, arrays["clock"].dtype) != ((2,), np.int64):
            raise InvalidArgument("snapshot", "arrays without a valid 'clock'", "the arrays that `snapshot` returned")
        for name, array in own.items():
            if name not in arrays or (arrays[name].shape, arrays[name].dtype) != (array.shape, array.dtype):
                given = f"arrays in which {name} is missing, or has another shape or dtype"
                raise InvalidArgument("snapshot", given, "of the network, dtype and optimizer of this model")
        for name, array in own.items():
            array[...] = self._xp.asarray(arrays[name])
        self._clock[0], self._updates = (int(count) for count in arrays["clock"])
        self._added = 0
        if self._stepper is not None and self._stepper.sums is not None:
            self._stepper.sums[...] = 0

    def _arrays(self) -> dict[str, Any]:
        """Return views of all arrays that steps change, by name."""
        flats = {"parameters": self._flat}
        named: dict[str, Any] = {}
        if self._stepper is not None:
            state = {f"optimizer{number}": array for number, array in enumerate(self._stepper.state)}
            flats |= state | ({} if self._stepper.master is None else {"master": self._stepper.master})
            named = {} if self._scaling is None else {"loss_scale": self._scaling}
        by_layer = {part: flat_parameters.views(self.network, flat) for part, flat in flats.items()}
        for part, arrays in (by_layer | {"statistics": self._states}).items():
            for layer, by_name in arrays.items():
                named |= {f"{part}.{layer}.{name}": array for name, array in by_name.items()}
        return named
