"""
A network that runs: parameters, one prepared batch size, steps.

The schedule is executed in order. On a CPU every thread computes its shard of the batch for the whole step, with its
own buffers. The threads meet for the statistics of batch norm and the sum of the gradients. On a GPU there is one
member and a stream.

Operations are those of `functional`, by the array library's own calls, or of `native`, by hand-written kernels. The
caller of `Model` decides which, and which variant of each kernel.

With float16 or bfloat16, activations, gradients and the parameters of layers have 16 bits. Training updates a float32
copy of the parameters, the master weights, and rounds it to 16 bits. Statistics and optimizer state are float32. In
float16 the loss is scaled (`loss_scale`).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Collection
from typing import Any, Self

import attrs
import numpy as np

from cubatch.engine import backend, batch, flat_parameters, functional, layers, storage
from cubatch.engine.arena import Arena, check_room, out_of_memory
from cubatch.engine.flat_parameters import Stepper
from cubatch.engine.learned import Learned
from cubatch.engine.native.context import Context
from cubatch.engine.native.operations import operations as on_kernels
from cubatch.engine.place import Place
from cubatch.engine.program import Program, Trace
from cubatch.engine.step_graphs import StepGraphs
from cubatch.engine.step_numbers import StepNumbers
from cubatch.engine.team import Team
from cubatch.errors import InvalidArgument, UnsupportedDtype, is_out_of_memory
from cubatch.hardware import gpu_library
from cubatch.hardware.facts import Device
from cubatch.memory.plan import Plan, plan as lay_out
from cubatch.memory.schedule_records import Op
from cubatch.network.graph import Spec, as_network
from cubatch.workload import Workload


class Model(Learned):
    """
    A network or layer on a device, with parameters, ready to be prepared for any batch size.

    Args:
        spec: The network or layer.
        device: A device in this machine.
        mode: "inference" or "training".
        dtype: "float32", "tf32", "float16" or "bfloat16": storage of parameters and activations.
        optimizer: "sgd", "momentum" or "adam", for training.
        learning_rate: Learning rate of the optimizer; the attribute of this name may change between steps.
        recompute: Discard activations and compute them again in the backward pass.
        seed: Draws the initial parameters, random data and dropout masks.
        share: Another model of the same network, whose parameters are used instead of new ones.
        context: Runs the operations on hand-written kernels; None uses the array library's calls.
        operations: Functions instead of both, under the names of `functional`; needed for 16 bits without kernels.
        graphs: Steps on hand-written kernels may be CUDA graphs; False launches their kernels one by one.
        experimental: Names of ways to run hand-written kernels that were not measured on a GPU yet. With "norm_sums"
            products of a training step compute the sums of the batch norms next to them. With "gelu_products" they
            apply the slope of GELU and compute the gradient of the bias before it, in 16 bits on Hopper. With
            "space_to_depth" a network's batch is stored in patches of the stride of its first convolution, for faster
            kernels. With "flash_attention" attention in training stores a number per query and head instead of its
            weights. It needs 16 bits, sm_80 and heads of at most 64 channels; without them weights are stored. With
            "reversed_sums" kernels that sum over the batch read it from the last row to the first.

    Raises:
        UnsupportedLayer: If the engine cannot compute one of the layers.
        UnsupportedDtype: If the dtype has 16 bits, and neither kernels nor operations compute with them.
        InvalidArgument: If the other model is of another network or dtype. UnknownName, a subclass, if `experimental`
            has an unknown name.

    Example:
        >>> import math
        >>> from cubatch.hardware import probe
        >>> from cubatch.network import models
        >>> with Model(models.build("mlp"), device=probe.device("cpu"), mode="training") as model:
        ...     model.prepare(32)
        ...     model.load_random()
        ...     model.step()
        ...     math.isfinite(model.loss())
        True
    """

    def __init__(
        self,
        spec: Spec,
        *,
        device: Device,
        mode: str = "inference",
        dtype: str = "float32",
        optimizer: str = "sgd",
        learning_rate: float = 0.01,
        recompute: bool = False,
        seed: int = 0,
        share: Model | None = None,
        context: Context | None = None,
        operations: Any = None,
        graphs: bool = True,
        experimental: Collection[str] = (),
    ) -> None:
        self.spec, self.network, self.device = spec, as_network(spec), device
        self._usual_device: int | None = None
        self.mode, self.dtype, self.optimizer, self.recompute, self.seed = mode, dtype, optimizer, recompute, seed
        for node in self.network.nodes:
            layers.check(node.layer, node.name)
        self._xp = context.launcher.module if context else np if device.kind == "cpu" else gpu_library.cupy()
        self.library = "cubatch" if context else "im2col"
        self._work = Workload(
            spec=spec, device=device, mode=mode, dtype=dtype, optimizer=optimizer, library=self.library,
            recompute=recompute, experimental=experimental,
        )  # fmt: skip
        self._kind = np.dtype(storage.element_type(dtype, self.library))
        is_narrow = self._kind.itemsize < np.dtype(np.float32).itemsize
        if is_narrow and not (context or operations):
            remedy = "Pass `context`: cubatch's kernels take it."
            raise UnsupportedDtype(dtype, 'library="im2col"', ("float32",), remedy)
        if context and "reversed_sums" in self._work.experimental:
            context = attrs.evolve(context, reverses_sums=True)
        self._operations = operations or (on_kernels(context) if context else functional)
        self._on_gpu = self._xp is not np
        if self._on_gpu:  # all that follows is allocated and launched on the current device
            self._usual_device = int(self._xp.cuda.Device().id)
            self._xp.cuda.Device(device.index).use()
        self.learning_rate = learning_rate
        self._clock, self._updates, self._added = [0], 0, 0
        if share is None:
            self._flat = self._xp.asarray(storage.encoded(flat_parameters.drawn(self.network, seed), self._kind))
            self._states = flat_parameters.statistics(self.network, dtype, self._xp)
        else:
            if (share.network, share.dtype) != (self.network, dtype):
                raise InvalidArgument(
                    "share", f"{share.dtype} {share.network.name}", f"a model of the same network in {dtype}"
                )
            self._clock, self._flat, self._states = share._shared()  # noqa: SLF001 - of the same class
        trains, how = mode == "training", {"operations": self._operations, "xp": self._xp}
        self._numbers = StepNumbers(self._xp) if context and trains else None
        self._stepper = Stepper(self._flat, dtype=dtype, optimizer=optimizer, **how) if trains else None
        self.plan: Plan | None = None
        self._team: Team | None = None
        self._places: list[list[Place]] = []
        self._program: Program | None = None
        self._gradients: list[Any] = []
        self._losses: list[Any] = []
        self._turn = 0
        self._target: int | None = None
        self._first, self._samples = 0, 0  # of the batch of all ranks: this rank's first sample, and their number
        self._may_be_graphs = graphs
        self._graphs: StepGraphs | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- parameters ----------------------------------------------------------------------------

    def _shared(self) -> tuple[list[int], Any, dict[str, dict[str, Any]]]:
        return self._clock, self._flat, self._states

    @property
    def _whole(self) -> list[Any]:
        """Arrays whose sum is the gradient: one array of each thread."""
        return self._gradients

    @property
    def gradients(self) -> dict[str, dict[str, Any]]:
        """Gradients of the scaled loss by layer and name: of the last step, or the sum since the last update."""
        self._prepared()
        total: Any = None if self._stepper is None else self._stepper.sums
        if total is None:
            total = functools.reduce(self._xp.add, map(storage.decoded, self._whole))
        return flat_parameters.views(self.network, total)

    # --- preparing -----------------------------------------------------------------------------

    @property
    def held_bytes(self) -> int:
        """
        Bytes of the device's memory that the model has allocated.

        On a GPU it is the size of CuPy's pool, which is emptied before each batch size. The graphs of steps are not in
        it: they lie in the driver's memory, which the driver counts for the process.
        """
        if self._on_gpu:
            return int(self._xp.get_default_memory_pool().total_bytes())
        arrays = [self._flat, *self._gradients, *(self._stepper.arrays if self._stepper else ())]
        arrays += [array for state in self._states.values() for array in state.values()]
        arenas = [place.arena for places in self._places for place in places]
        return sum(int(array.nbytes) for array in [*arrays, *arenas])

    def prepare(self, batch_size: int, target_batch_size: int | None = None) -> None:
        """
        Allocate the memory of a batch size and bind every operation to it.

        Args:
            batch_size: Samples that go through together.
            target_batch_size: Samples of an optimizer step, over which the loss is the mean. Steps then only add
                up their gradients until `update`; the sum takes the memory of a gradient in float32. None: every
                training step updates the parameters.

        Raises:
            InvalidArgument: If a target batch size is given and the model does not train a network.
            OutOfMemory: If the batch does not fit; nothing is prepared then.
        """
        if target_batch_size is not None and (self.mode != "training" or self.spec is not self.network):
            raise InvalidArgument("target_batch_size", target_batch_size, "left out, except for training a network")
        self.release()
        work = attrs.evolve(self._work, accumulate=target_batch_size is not None)
        plan, self._target = lay_out(work, batch_size), target_batch_size
        check_room(work, plan, self.held_bytes, self._xp)
        try:
            self._lay_out(plan)
        except Exception as error:
            with contextlib.suppress(Exception):  # a GPU that faulted releases nothing; the first error is the cause
                self.release()
            if is_out_of_memory(error):
                raise out_of_memory(work, plan, self.held_bytes) from error
            raise
        self.plan = plan

    def _lay_out(self, plan: Plan) -> None:
        team = self._team = Team(plan.members)
        if self.mode == "training":
            self._gradients = [self._xp.empty_like(self._flat) for _ in range(plan.members)]
        if self._stepper is not None and self._target is not None:
            self._stepper.begin_sums()
        ops = plan.schedule.ops if self._target is None else plan.schedule.ops[:-1]  # the last is the update
        self._losses = [self._xp.zeros(1, dtype=np.float64) for _ in range(plan.members)]
        parameters, gradients = self.parameters, [flat_parameters.views(self.network, flat) for flat in self._gradients]
        works: list[list[list[Callable[[], object]]]] = []
        for _ in range(plan.copies):
            places = [self._place(plan, team, rank, parameters, gradients) for rank in range(plan.members)]
            if self.library == "cubatch":  # variants are timed while they are bound, on numbers like those of a step
                block = batch.random_block(batch.RANDOM_BLOCK, self.seed, self._kind, self._xp)
                for place in places:
                    place.arena.fill(block)
            self._places.append(places)
            works.append([[self._bind(op, place) for op in ops] for place in places])
        self._program = Program(team, works)
        if self._on_gpu:
            self._graphs = self._as_graphs(self._program)

    def _place(self, plan: Plan, team: Team, rank: int, parameters: Any, gradients: Any) -> Place:
        shard = team.shard(plan.batch_size, rank)
        return Place(
            operations=self._operations, arena=Arena(plan, shard.stop - shard.start, self._xp), parameters=parameters,
            gradients=gradients[rank] if gradients else {}, states=self._states, team=team, rank=rank,
            batch_size=plan.batch_size, begin=shard.start, first=self._first, clock=self._clock, numbers=self._numbers,
            seed=self.seed,
        )  # fmt: skip

    def _as_graphs(self, program: Program) -> StepGraphs:
        walks = [functools.partial(program.run, turn) for turn in range(len(program))]
        if self.library != "cubatch":
            return StepGraphs(walks, self._xp, None, "CuPy's own calls take memory and wait for the device")
        refusal = "" if self._may_be_graphs else "they were not requested"
        return StepGraphs(walks, self._xp, program.calls, refusal)

    def _bind(self, op: Op, place: Place) -> Callable[[], object]:
        if op.kind == "loss":
            return self._bind_loss(op, place)
        if op.kind == "update" and op.workspace is not None:
            update = functools.partial(self._update, place.rank, place.arena.workspace(op.workspace))
            return update if self._numbers is None else backend.prepare(update)
        return layers.bind(op, place, training=self.mode == "training")

    def _bind_loss(self, op: Op, place: Place) -> Callable[[], object]:
        arena = place.arena
        labels = arena[op.reads["labels"]]
        shape = (*labels.shape, -1)
        return backend.prepare(
            self._operations.softmax_cross_entropy,
            arena[op.reads["x0"]].reshape(shape),
            labels,
            loss=self._losses[place.rank],
            dlogits=arena[op.writes["dy"]].reshape(shape),
            count=(self._samples or self._target or place.batch_size) * math.prod(labels.shape[1:]),
            scale=None if self._scaling is None else self._scaling[:1],
            workspace=None if op.workspace is None else arena.workspace(op.workspace),
        )

    def _update(self, rank: int, workspace: Any) -> None:
        if self._team is None or self._stepper is None or self.spec is not self.network:
            return  # a single layer has no loss
        self._stepper.step(
            self._team,
            rank,
            self._whole,
            number=self._updates + 1 if self._numbers is None else self._numbers.updates,
            learning_rate=self.learning_rate if self._numbers is None else self._numbers.rate,
            workspace=workspace,
        )

    def release(self) -> None:
        """Release the memory of the prepared batch size."""
        if self._team is not None:
            self._team.close()
        self._team, self._program, self.plan, self._turn, self._added = None, None, None, 0, 0
        self._places, self._gradients, self._graphs = [], [], None
        if self._stepper is not None:
            self._stepper.sums = None
        if self._on_gpu:
            self._xp.get_default_memory_pool().free_all_blocks()

    def close(self) -> None:
        """Release all memory; the model cannot be used afterwards."""
        # Before the pool is emptied: the weights' blocks would stay in it, each held by any later small array.
        self._flat, self._states, self._stepper = self._xp.empty(0), {}, None
        self._numbers, self._losses = None, []
        self.release()
        if self._usual_device is not None:
            self._xp.cuda.Device(self._usual_device).use()

    # --- steps ---------------------------------------------------------------------------------

    def _prepared(self) -> tuple[Plan, Program]:
        if self.plan is None or self._program is None:
            raise InvalidArgument("batch size", None, "prepared before this", "Call prepare(batch_size) first.")
        return self.plan, self._program

    def load(self, x: Any, labels: Any = None) -> None:
        """
        Copy a batch (n, h, w, c) to the device, for the following steps.

        Labels are class numbers, for training a network; None leaves those on the device.
        """
        plan, _ = self._prepared()
        batch.check(plan, x, labels)
        for place in itertools.chain(*self._places):
            batch.fill(plan, place, x, labels, kind=self._kind, xp=self._xp)

    def load_random(self) -> None:
        """Fill the batch with normal random numbers, and draw labels, or the output's gradient of a single layer."""
        plan, _ = self._prepared()
        needed = math.prod(self.network.input_shape) + math.prod(self.network.output_shape)
        block = batch.random_block(min(batch.RANDOM_BLOCK, plan.batch_size * needed), self.seed, self._kind, self._xp)
        batch.fill_randomly(plan, list(itertools.chain(*self._places)), block, self.seed, self._xp)
        if self._on_gpu:  # the block of numbers is no part of the batch
            del block
            self._xp.get_default_memory_pool().free_all_blocks()

    def step(self, trace: Trace | None = None) -> None:
        """
        Run one step: forward, and in training backward and, without a target batch size, the optimizer.

        On a GPU it is enqueued. `trace` observes each operation, outside a CUDA graph; None: run at full speed.
        """
        _, program = self._prepared()
        turn, self._turn = self._turn, (self._turn + 1) % len(program)
        if self._numbers is not None:
            self._numbers.write(self._clock[0] + 1, self._updates + 1, self.learning_rate)
        if trace is not None or self._graphs is None:
            program.run(turn, trace)
        else:
            self._graphs.run(turn)
        if self._stepper is None or self._team is None:
            return
        self._clock[0] += 1
        if self._target is None:
            self._updates += 1
        else:
            program.together(functools.partial(self._stepper.accumulate, self._team, self._gradients))
            self._added += 1

    def update(self) -> None:
        """
        Take an optimizer step with the gradients that were added up since the last optimizer step.

        Raises InvalidArgument unless a batch with a target batch size is prepared.
        """
        plan, program = self._prepared()
        scratch = plan.schedule.ops[-1].workspace
        if self._target is None or scratch is None:
            raise InvalidArgument("target_batch_size", self._target, "given to prepare() before update()")
        if self._numbers is not None:
            self._numbers.write(self._clock[0], self._updates + 1, self.learning_rate)
        program.together(lambda rank: self._update(rank, self._places[0][rank].arena.workspace(scratch)))
        self._updates, self._added = self._updates + 1, 0

    @property
    def launch(self) -> dict[str, Any] | None:
        """How a step of the prepared batch is launched, as in `StepGraphs.launch`; None on a CPU."""
        return None if self._graphs is None else self._graphs.launch

    def loss(self) -> float:
        """
        Return the mean loss of the last step's samples, before the optimizer's step; NaN or infinite after an overflow.

        With a target batch size it is that batch's part of the mean over the optimizer step; the parts add up.
        """
        return sum(float(loss[0]) for loss in self._losses)

    def output(self) -> np.ndarray[Any, Any]:
        """Return the output of the last inference step on the host, in float32 or wider: (batch_size, h, w, c)."""
        plan, _ = self._prepared()
        number = plan.schedule.outputs[self.network.nodes[-1].name]
        return self._gathered(number).reshape(plan.batch_size, *self.network.output_shape)

    def input_gradient(self) -> np.ndarray[Any, Any]:
        """Return the gradient of a single layer's input on the host, after a training step: (batch_size, h, w, c)."""
        plan, _ = self._prepared()
        (number,) = [n for n in plan.schedule.results if plan.schedule.buffers[n].part == "activation_gradients"]
        return self._gathered(number).reshape(plan.batch_size, *self.network.input_shape)

    def _gathered(self, number: int) -> np.ndarray[Any, Any]:
        return batch.gathered(self._places[self._turn - 1], number)
