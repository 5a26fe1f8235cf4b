"""
`CubatchBatchSizeFinder`: a Lightning callback that finds the fastest batch size.

Lightning's own `BatchSizeFinder` doubles the size until memory runs out. This one has the same use and the same
restrictions, but tunes a step of the module with `autotune_module`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from cubatch.checks import check_batch_size
from cubatch.choices import Objective
from cubatch.errors import InvalidArgument, MissingDependency
from cubatch.frameworks import loader_rate, optimizers
from cubatch.frameworks.batch_sources import LoaderBatches
from cubatch.frameworks.torch_inputs import Inputs
from cubatch.frameworks.torch_state import SavedState
from cubatch.measure.runner import Remark
from cubatch.tuning.accumulation import concern, cut
from cubatch.tuning.results import TuningResult
from cubatch.tuning.tune_module import autotune_module
from cubatch.units import join_words

_STEPS = {"fit": "training_step", "validate": "validation_step", "test": "test_step", "predict": "predict_step"}
_STAGES = {"fit": "train", "validate": "validation", "test": "test", "predict": "predict"}
_OTHERWISE = "Time such a step with autotune_callable(), whose batches are your own."
_HOOKS_OF_TRAINING = (
    "on_before_optimizer_step", "on_before_zero_grad", "on_before_backward", "on_after_backward", "backward",
    "optimizer_step", "configure_gradient_clipping",
)  # fmt: skip
_AUTOCAST = {"16-mixed": "float16", "bf16-mixed": "bfloat16"}


class _Finder:
    """The parts of the callback that differ from Lightning's `BatchSizeFinder`."""

    optimal_batch_size: int | None  # the recommendation; None before the search ends, and without a recommendation
    _batch_arg_name: str

    def __init__(
        self,
        *,
        batch_arg_name: str = "batch_size",
        target_batch_size: int | None = None,
        max_batch_size: int | None = None,
        memory_limit: int | str | None = None,
        latency_limit: float | None = None,
        objective: Objective = "throughput",
        tolerance: float = 0.01,
        budget: float = 60.0,
        seed: int = 0,
        progress: Callable[[Any], None] | None = None,
        constant_inputs: Iterable[str] = (),
    ) -> None:
        super().__init__(batch_arg_name=batch_arg_name)  # type: ignore[call-arg]
        self.optimal_batch_size = None
        self.result: TuningResult | None = None
        given = {"max_batch_size": max_batch_size, "target_batch_size": target_batch_size}
        self._max_batch_size, self._target = (
            None if size is None else check_batch_size(size, name) for name, size in given.items()
        )
        self._options: dict[str, Any] = {
            "memory_limit": memory_limit, "latency_limit": latency_limit, "objective": objective,
            "tolerance": tolerance, "budget": budget, "seed": seed, "progress": progress,
            "constant_inputs": constant_inputs,
        }  # fmt: skip

    def scale_batch_size(self, trainer: Any, pl_module: Any) -> None:
        """Find the batch size; set it in the module, its `hparams` or the data module, as Lightning's finder does."""
        from lightning.pytorch.tuner.batch_size_scaling import _reset_dataloaders
        from lightning.pytorch.utilities.parsing import lightning_setattr
        from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
        from lightning.pytorch.utilities.seed import isolate_rng

        if trainer.fast_dev_run:
            rank_zero_warn("Skipping the batch size finder since `fast_dev_run` is enabled.")
            return
        saved = SavedState(pl_module, training=True)  # hooks write to parameters in any stage, as of averaged weights
        with isolate_rng(), _quiet(trainer, pl_module), saved:
            if trainer.state.fn == "fit":
                pl_module.on_fit_start()  # which Lightning calls after those of callbacks, of which this is one
            batch, num_samples = _first_batch(trainer)
            _begin(trainer, pl_module, batch)
            self.result = self._tuned(trainer, pl_module, batch, num_samples)
        self.optimal_batch_size = self.result.batch_size if self.result.recommended else None
        reason = self.result.reasons[0]
        if self.optimal_batch_size is not None and self._target is not None and trainer.state.fn == "fit":
            reason = self._divide(trainer, self.result, self._target)
        if self.optimal_batch_size is not None:
            lightning_setattr(pl_module, self._batch_arg_name, self.optimal_batch_size)
        _reset_dataloaders(trainer)  # they are there already, with the old size
        if trainer.state.fn != "fit":
            trainer._active_loop.reset()  # noqa: SLF001 - as Lightning's finder does
        if self.optimal_batch_size is None:
            rank_zero_warn(f"{reason} {self._batch_arg_name} stays as it is.")
            return
        rank_zero_info(reason)
        if trainer.state.fn == "fit" and _loader(trainer) is None:
            rank_zero_warn(
                "The rate is that of the steps. The data loaders were not measured, and slow ones make larger batches "
                "useless: only a single loader with a batch size is measured."
            )
        for loader in trainer._active_loop._combined_loader.flattened:  # noqa: SLF001 - as Lightning's finder does
            if (size := getattr(loader, "batch_size", None)) not in {None, self.optimal_batch_size}:
                rank_zero_warn(
                    f"A data loader's batch size is {size}, not the {self.optimal_batch_size} found: make it of "
                    f"{self._batch_arg_name}."
                )

    def _divide(self, trainer: Any, result: TuningResult, target: int) -> str:
        """Set the batch size and the accumulated batches of a target, and return the reason as a sentence."""
        from lightning.pytorch.utilities.rank_zero import rank_zero_warn

        division = cut(result, target)
        self.optimal_batch_size, trainer.accumulate_grad_batches = division.batch_size, division.steps
        if text := concern(result, division):
            rank_zero_warn(text)
        return str(division)

    def _tuned(self, trainer: Any, pl_module: Any, batch: Any, num_samples: int | None) -> TuningResult:
        limits = [limit for limit in (self._max_batch_size, num_samples) if limit is not None]
        training: dict[str, Any] = {}
        if trainer.state.fn == "fit":
            if not pl_module.automatic_optimization:
                raise InvalidArgument(
                    "automatic_optimization", value=False, allowed="True",
                    remedy="Steps with manual optimization cannot be run here: time them with autotune_callable().",
                )  # fmt: skip
            training = {
                "mode": "training", "loss": _loss, "optimizer": _optimizer(trainer, pl_module),
                "accumulate": self._accumulated(trainer, batch), "loader": _loader(trainer),
            }  # fmt: skip
        batches: Any = _drawn(trainer)
        if batches is None:
            _check_rows(trainer, batch)
            batches = {"batch": batch, "batch_idx": 0}
        step = _as_step(trainer, pl_module, _STEPS[trainer.state.fn])
        if parts := _not_timed(trainer, pl_module):
            step.cubatch_remarks = [Remark(code="not_timed", values={"parts": parts})]
        return autotune_module(
            step,
            batches,
            autocast=_AUTOCAST.get(trainer.precision),
            max_batch_size=min(limits, default=None),
            **training,
            **self._options,
        )

    def _accumulated(self, trainer: Any, batch: Any) -> int:
        """Return the batches per optimizer step: the trainer's, or target / batch size of the loader, at least 1."""
        if self._target is None:
            return int(trainer.accumulate_grad_batches)
        return max(1, self._target // (_loader_size(trainer) or Inputs.of((batch,), None).batch_size))


def _not_timed(trainer: Any, pl_module: Any) -> str:
    """
    Return the hooks that a loop calls in each step and cubatch does not, with their owners; "" if there are none.

    The owners are the module and callbacks, except those that a Trainer has by default. A warning names the hooks.
    """
    from lightning.pytorch.callbacks import Checkpoint, ProgressBar, Timer
    from lightning.pytorch.utilities.model_helpers import is_overridden
    from lightning.pytorch.utilities.rank_zero import rank_zero_warn

    stage = _STAGES[trainer.state.fn]
    hooks = (f"on_{stage}_batch_start", f"on_{stage}_batch_end", *(_HOOKS_OF_TRAINING if stage == "train" else ()))
    callbacks = [each for each in trainer.callbacks if not isinstance(each, Checkpoint | ProgressBar | Timer)]
    parts = list[str]()
    for owner in (pl_module, *callbacks):
        if own := [name for name in hooks if hasattr(owner, name) and is_overridden(name, owner)]:
            parts.append(f"{', '.join(own)} of {type(owner).__name__}")
    if parts:
        rank_zero_warn(
            f"Not timed: {join_words(parts)}. If they take long, as an average of weights does, the loop is slower "
            "than reported, and a larger batch may be faster."
        )
    return join_words(parts)


def _first_batch(trainer: Any) -> tuple[Any, int | None]:
    """Return the first batch as a step receives it, and the number of samples in the data set, None if unknown."""
    step = getattr(trainer.lightning_module, _STEPS[trainer.state.fn])
    if "dataloader_iter" in inspect.signature(step).parameters:
        raise InvalidArgument(_STEPS[trainer.state.fn], "one of dataloader_iter", "one of a batch", _OTHERWISE)
    loop = trainer._active_loop  # noqa: SLF001 - as Lightning's finder does
    loop.setup_data()
    loader = loop._combined_loader  # noqa: SLF001 - as above
    try:
        num_samples: int | None = loader._dataset_length()  # noqa: SLF001 - as above
    except NotImplementedError:  # an iterable has no length
        num_samples = None
    _loader_size(trainer)
    return _as_steps_get_it(trainer, next(iter(loader))[0]), num_samples


def _as_steps_get_it(trainer: Any, batch: Any) -> Any:
    """Return a batch as a step receives it: converted, passed through Lightning's hooks, and on the device."""
    batch = trainer.precision_plugin.convert_input(batch)
    batch = trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=0)  # noqa: SLF001 - as its loops
    return trainer.strategy.batch_to_device(batch, dataloader_idx=0)  # whose hooks may be what makes tensors


def _together(trainer: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """Return the data loaders whose batches make up one batch, and a function that joins a batch of each."""
    from torch.utils._pytree import tree_unflatten

    combined = trainer._active_loop._combined_loader  # noqa: SLF001 - as Lightning's finder does
    if combined._mode == "sequential":  # noqa: SLF001 - as above
        return combined.flattened[:1], lambda batches: batches[0]
    return combined.flattened, lambda batches: tree_unflatten(batches, combined._spec)  # noqa: SLF001 - as above


def _drawn(trainer: Any) -> Callable[[int], Any] | None:
    """
    Return a function from a batch size to the arguments of a step by name, with a batch of the loaders' samples.

    The result is None if a loader cannot make batches of other sizes than its own.
    """
    loaders, join = _together(trainer)
    if any(loader_rate.measurable(each) is None for each in loaders):
        return None
    sources = [LoaderBatches(each) for each in loaders]

    def make(batch_size: int) -> dict[str, Any]:
        batch = join([source(batch_size) for source in sources])
        return {"batch": _as_steps_get_it(trainer, batch), "batch_idx": 0}

    vars(make).update(repeats=True, loader=loaders[0])  # as of `DataSetBatches`
    return make


def _loader(trainer: Any) -> Any:
    """Return the only data loader of the trainer's loop; None for several loaders or one that cannot be timed."""
    loaders = trainer._active_loop._combined_loader.flattened  # noqa: SLF001 - as Lightning's finder does
    return loader_rate.measurable(loaders[0]) if len(loaders) == 1 else None


def _loader_size(trainer: Any) -> int | None:
    """Return the batch size of the data loaders, None if unknown; raise InvalidArgument if their sizes differ."""
    sizes = {size for each in _together(trainer)[0] if (size := getattr(each, "batch_size", None)) is not None}
    if len(sizes) > 1:
        given = " and ".join(map(str, sorted(sizes)))
        raise InvalidArgument("batch_size", given, "the same of all data loaders that a batch is made of", _OTHERWISE)
    return next(iter(sizes), None)


def _check_rows(trainer: Any, batch: Any) -> None:
    """Raise InvalidArgument if a batch has more rows than samples: one sample then has an unknown number of rows."""
    rows, size = Inputs.of((batch,), None).batch_size, _loader_size(trainer)
    if size is not None and rows > size > 1:  # at 1 a dataset may give whole batches
        field, allowed = "axis 0 of a batch's first tensor", f"at most {size}, the batch size of the data loader"
        raise InvalidArgument(field, rows, allowed, _OTHERWISE)


def _begin(trainer: Any, pl_module: Any, batch: Any) -> None:
    """Call the module's hooks before a first step, as Lightning's loops do: a step may need their effects."""
    stage = _STAGES[trainer.state.fn]
    getattr(pl_module, f"on_{stage}_start")()
    getattr(pl_module, f"on_{stage}_epoch_start")()
    getattr(pl_module, f"on_{stage}_batch_start")(batch, 0)


class _quiet:  # noqa: N801 - used like a function
    """Context manager that discards the module's calls of `log`, which Lightning rejects outside of its loops."""

    def __init__(self, trainer: Any, pl_module: Any) -> None:
        self._trainer, self._module = trainer, pl_module

    def __enter__(self) -> None:
        from lightning.pytorch.loggers.logger import DummyLogger

        self._loggers = self._trainer.loggers
        self._trainer.logger = DummyLogger() if self._loggers else None
        for name in ("log", "log_dict"):
            vars(self._module)[name] = lambda *_, **__: None

    def __exit__(self, *_: object) -> None:
        self._trainer.loggers = self._loggers
        for name in ("log", "log_dict"):
            vars(self._module).pop(name, None)


def _as_step(trainer: Any, pl_module: Any, name: str) -> Any:
    """Return a module whose forward pass is the step `name` of the user's module, in the trainer's precision."""
    import torch

    class Step(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = pl_module

        def forward(self, batch: Any, batch_idx: int) -> Any:
            step = getattr(self.module, name)
            takes = inspect.signature(step).parameters
            with trainer.precision_plugin.forward_context():
                return step(batch, batch_idx) if len(takes) > 1 else step(batch)

    Step.__name__ = type(pl_module).__name__
    return Step()


def _loss(output: Any) -> Any:
    """Return the loss in the output of a training step: its entry "loss" if it is a mapping, else the output itself."""
    return output["loss"] if isinstance(output, Mapping) else output


def _optimizer(trainer: Any, pl_module: Any) -> Callable[[Iterable[Any]], Any]:
    """
    Return a function from parameters to an optimizer like the trainer's first, with its gradient clipping.

    InvalidArgument is raised for a module without an optimizer.
    """
    from lightning.pytorch.core.optimizer import _MockOptimizer  # stands where there is none

    optimizer = trainer.optimizers[0]
    if isinstance(optimizer, _MockOptimizer):
        remedy = "Without one nothing is trained: find the batch size of trainer.validate()."
        raise InvalidArgument("configure_optimizers", None, "a function that returns an optimizer", remedy)
    is_norm = trainer.gradient_clip_algorithm in (None, "norm")
    trained = [parameter for parameter in pl_module.parameters() if parameter.requires_grad]
    return optimizers.like(optimizer, trained, clip_norm=trainer.gradient_clip_val if is_norm else None)


if TYPE_CHECKING:
    from lightning.pytorch.callbacks import BatchSizeFinder

    class CubatchBatchSizeFinder(_Finder, BatchSizeFinder):
        """Find the fastest batch size in a Lightning callback; `_DOC` is its docstring at run time."""


def __getattr__(name: str) -> Any:
    """
    Return the class CubatchBatchSizeFinder, made on first use: this module can be imported without Lightning.

    Raises:
        AttributeError: For any other name.
        MissingDependency: If Lightning is not installed.
    """
    if name != "CubatchBatchSizeFinder":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from lightning.pytorch.callbacks import BatchSizeFinder
    except ImportError as error:
        raise MissingDependency("Lightning", "CubatchBatchSizeFinder", "lightning") from error
    made = type(name, (_Finder, BatchSizeFinder), {"__module__": __name__, "__doc__": _DOC})
    globals()[name] = made
    return made


_DOC = """
Find the batch size at which the module steps fastest, before it is trained, validated, tested or predicts.

Used as Lightning's `BatchSizeFinder`, with its hooks and conditions: the data loaders come from the module or its data
module and read a `batch_size` of one of them or its `hparams`; one device. Steps take batches made in advance of the
loader's samples, so that their times exclude the loader; without a `batch_size` of its own they are random ones like
its first. Before training the loader is measured too; if it is slower than the steps, it limits the recommended size.
The module's hooks before a first step, such as `on_train_start`, are called once more than by Lightning alone; their
effects outside of the module remain. Memory is predicted, and the module, its metrics and random numbers are restored.
A tensor of the batch without a batch axis prevents a recommendation unless `constant_inputs` names it, as in
"batch['table']".

Args:
    batch_arg_name: The attribute that holds the batch size.
    target_batch_size: Samples of one optimizer step. Batches that divide it are accumulated: the trainer's
        `accumulate_grad_batches` is set too.
    max_batch_size: Propose nothing larger; the number of samples is always a limit.
    memory_limit, latency_limit, objective, tolerance, budget, seed, progress, constant_inputs: As for
        `cubatch.autotune_module`.

Attributes:
    optimal_batch_size: The batch size that was set; None before there is a recommendation.
    result: The `TuningResult` behind it.

Raises:
    InvalidArgument: If the module optimizes manually (`automatic_optimization = False`), if data loaders of different
        batch sizes make a batch together, or if a batch's first tensor has more rows than the loader's batch size.

Example:
    >>> trainer = Trainer(callbacks=[CubatchBatchSizeFinder()])    # doctest: +SKIP
    >>> trainer.fit(model, datamodule=data)                        # doctest: +SKIP
"""
