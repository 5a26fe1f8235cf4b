"""Batch sizes and accumulation steps for the Trainer of Hugging Face."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sized
from typing import Any

import attrs

from cubatch.checks import check_batch_size, check_options
from cubatch.errors import InvalidArgument
from cubatch.frameworks import loader_rate, optimizers
from cubatch.frameworks.attributes import kept_attributes
from cubatch.frameworks.torch_state import kept_random_state
from cubatch.frameworks.torch_step import tensors_of
from cubatch.measure.runner import Remark
from cubatch.tuning.accumulation import concern, cut
from cubatch.tuning.results import TuningResult
from cubatch.tuning.tune_module import autotune_module
from cubatch.units import join_words

_OF_THE_TRAINER = ("module", "batches", "example_inputs", "mode", "loss", "optimizer", "accumulate", "loader")
_HOOKS = ("on_step_begin", "on_substep_end", "on_pre_optimizer_step", "on_optimizer_step", "on_step_end")
"""Methods of callbacks that `train()` calls for each step."""


def batch_arguments(
    result: TuningResult | TrainerResult, target_batch_size: int, *, num_devices: int = 1
) -> dict[str, int]:
    """
    Return the arguments that divide an effective batch into the steps that take the least time in total.

    The product of both arguments and `num_devices` is exactly the target, so that learning rates keep their meaning.
    Times are those measured, interpolated linearly between measured sizes. If all divisors are below the measured
    sizes, the largest divisor is taken.

    Args:
        result: The result of tuning a training step, as of `autotune_module(model, inputs, mode="training")` or
            `tune_trainer`.
        target_batch_size: Samples per optimizer step on all devices together.
        num_devices: Number of devices that train in parallel.

    Warns:
        UserWarning: If no divisor of the target reaches 90 % of the best measured throughput, or all divisors are below
            the measured sizes. The message names better targets. Also if the result has no recommendation.

    Returns:
        dict[str, int]: `per_device_train_batch_size` and `gradient_accumulation_steps`.

    Raises:
        InvalidArgument: If the target is no multiple of `num_devices`, or a number is below 1. Also if the result is of
            inference or has no measured size.

    Example:
        >>> arguments = TrainingArguments(**batch_arguments(result, 512), learning_rate=1e-3)     # doctest: +SKIP
    """
    target, devices = check_batch_size(target_batch_size, "target_batch_size"), check_batch_size(
        num_devices, "num_devices"
    )  # fmt: skip
    if target % devices:
        nearest = max(1, round(target / devices)) * devices
        remedy = f"{nearest} is the nearest."
        raise InvalidArgument("target_batch_size", target, f"a multiple of num_devices={devices}", remedy)
    result = result.training if isinstance(result, TrainerResult) else result
    division = cut(result, target // devices)
    if text := concern(result, division, num_devices=devices):
        warnings.warn(text, stacklevel=2)
    return {"per_device_train_batch_size": division.batch_size, "gradient_accumulation_steps": division.steps}


@attrs.frozen(kw_only=True)
class TrainerResult:
    """The results of `tune_trainer`; `evaluation` is None if evaluation steps were not tuned."""

    training: TuningResult  # the `TuningResult` of training steps
    evaluation: TuningResult | None  # the `TuningResult` of evaluation steps; None without an evaluation dataset

    def __str__(self) -> str:
        """Return the tables of both results for a terminal."""
        return "\n\n".join(result.table() for result in (self.training, self.evaluation) if result is not None)


def tune_trainer(
    trainer: Any,
    *,
    target_batch_size: int | None = None,
    evaluation: bool = True,
    budget: float = 60.0,
    **options: Any,
) -> TrainerResult:
    """
    Find the fastest batch sizes of a Trainer, and set them in it; call it before `trainer.train()`.

    Training steps are timed with the Trainer's own loss, precision, optimizer, clipping of gradients, checkpointing and
    accumulation. Batches are made of the samples of its loader in advance. The model and the random generators of
    PyTorch, NumPy and Python are restored at the end. In `trainer.args`, `per_device_train_batch_size` and
    `per_device_eval_batch_size` are replaced where a size is recommended.

    Args:
        trainer: A transformers.Trainer. With several processes, all call it together.
        target_batch_size: Samples of one optimizer step on all devices together, so that learning rates keep their
            meaning. Batches whose size divides it are accumulated: `gradient_accumulation_steps` is set too. None:
            `gradient_accumulation_steps` stays as it is.
        evaluation: Whether to tune evaluation steps too, if there is an evaluation dataset; of several datasets, the
            one with most samples.
        budget: Seconds of measuring, for training and for evaluation each.
        options: Further arguments of `cubatch.autotune_module`: memory_limit, max_batch_size, tolerance, seed.

    Warns:
        UserWarning: If no size can be recommended; the arguments then stay as they are. Also if no measured divisor of
            the target reaches 90 % of the best throughput, as for `batch_arguments`. Also if the Trainer has its own
            `training_step`, which is not timed.

    Returns:
        TrainerResult: The results of training and, if tuned, of evaluation.

    Raises:
        InvalidArgument: If `trainer` is no Trainer, uses DataParallel, or has no training dataset. Also if the target
            is no multiple of the number of processes. Also if an option is invalid, or is the Trainer's own: its
            loader, loss, optimizer or accumulation.

    Example:
        >>> trainer = Trainer(model, TrainingArguments("out"), train_dataset=data)     # doctest: +SKIP
        >>> tune_trainer(trainer, target_batch_size=256)                               # doctest: +SKIP
        >>> trainer.train()                                                            # doctest: +SKIP
    """
    if not hasattr(getattr(trainer, "args", None), "n_gpu"):
        remedy = "Call autotune_module() for a module."
        raise InvalidArgument("trainer", type(trainer).__name__, "a transformers.Trainer", remedy)
    arguments = trainer.args
    if arguments.n_gpu > 1:
        allowed = "one process for each GPU, as torchrun starts them"
        raise InvalidArgument("trainer", f"on {arguments.n_gpu} GPUs in one process", allowed)
    if trainer.train_dataset is None:
        remedy = "For evaluation alone, call autotune_module(trainer.model, trainer.get_eval_dataloader())."
        raise InvalidArgument("train_dataset", None, "the Trainer's data set of training", remedy)
    for name in _OF_THE_TRAINER:
        if name in options:
            remedy = "Set it in the Trainer, or call autotune_module()."
            raise InvalidArgument(name, options[name], "left to the Trainer", remedy)
    check_options(options, autotune_module)
    devices = arguments.world_size
    if target_batch_size is not None and check_batch_size(target_batch_size, "target_batch_size") % devices:
        raise InvalidArgument("target_batch_size", target_batch_size, f"a multiple of the {devices} processes")
    given = {"autocast": "float16" if arguments.fp16 else "bfloat16" if arguments.bf16 else None, **options}
    judged = None
    with kept_random_state():
        training = _tune_training(trainer, target_batch_size, {"budget": budget, **given})
        if evaluation and trainer.eval_dataset is not None:
            judged = _tune_evaluation(trainer, {"budget": budget, **given})
    return TrainerResult(training=training, evaluation=judged)


def _tune_training(trainer: Any, target: int | None, options: dict[str, Any]) -> TuningResult:
    arguments = trainer.args
    size, devices = arguments.per_device_train_batch_size, arguments.world_size
    accumulate = arguments.gradient_accumulation_steps if target is None else max(1, target // (size * devices))
    loader = trainer.get_train_dataloader()
    own, trainer.optimizer = trainer.optimizer, trainer.create_optimizer()
    trained = [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]
    optimizer = optimizers.like(trainer.optimizer, trained, clip_norm=arguments.max_grad_norm)
    trainer.optimizer = own

    def compute_loss(model: Any, inputs: dict[str, Any]) -> Any:
        count = getattr(trainer, "_get_num_items_in_batch", None)  # older versions of transformers have no such number
        counted = {} if count is None else {"num_items_in_batch": count([inputs] * accumulate, arguments.device)}
        return trainer.compute_loss(model, inputs, **counted)

    step = _step(trainer, compute_loss)
    if parts := _not_timed(trainer):
        warnings.warn(
            f"Not timed: {parts}. A step here is compute_loss(), a backward pass and the optimizer's step. Other work "
            "in each step takes time too, and may favor another batch size.",
            stacklevel=3,
        )  # fmt: skip
        step.cubatch_remarks = [Remark(code="not_timed", values={"parts": parts})]
    with _checkpointing(trainer):
        result = autotune_module(
            step, _batches(loader), mode="training", loss=_as_it_is,
            optimizer=optimizer, accumulate=accumulate,
            loader=loader_rate.measurable(loader),
            **_limited(options, trainer.train_dataset, devices),
        )  # fmt: skip
    if not result.recommended or result.batch_size is None:
        warnings.warn(f"{result.reasons[0]} per_device_train_batch_size stays {size}.", stacklevel=3)
        return result
    if target is not None:
        division = cut(result, target // devices)
        if text := concern(result, division, num_devices=devices):
            warnings.warn(text, stacklevel=3)
        arguments.gradient_accumulation_steps = trainer.accelerator.gradient_accumulation_steps = division.steps
    arguments.per_device_train_batch_size = result.batch_size if target is None else division.batch_size
    trainer._train_batch_size = arguments.train_batch_size  # noqa: SLF001 - its loader's size, as auto_find_batch_size
    return result


def _not_timed(trainer: Any) -> str:
    """Return the user's methods that `train()` calls in each step and cubatch does not; "" if there are none."""
    parts = []
    for owner in (trainer, *trainer.callback_handler.callbacks):
        methods = [(name, getattr(type(owner), name, None)) for name in ("training_step", *_HOOKS)]
        if own := [name for name, method in methods if method and not method.__module__.startswith("transformers.")]:
            parts.append(f"{', '.join(own)} of {type(owner).__name__}")
    return join_words(parts)


def _tune_evaluation(trainer: Any, options: dict[str, Any]) -> TuningResult:
    arguments = trainer.args
    loss_only = arguments.prediction_loss_only or trainer.compute_metrics is None

    def evaluate(model: Any, inputs: dict[str, Any]) -> Any:
        loss, outputs, labels = trainer.prediction_step(model, inputs, loss_only)
        if outputs is not None and trainer.preprocess_logits_for_metrics is not None:
            outputs = trainer.preprocess_logits_for_metrics(outputs, labels)
        return loss, [_appended(each, earlier) for each in tensors_of(outputs)]

    dataset, name = trainer.eval_dataset, None
    if isinstance(dataset, dict):  # one without a length counts as the largest
        name = max(dataset, key=lambda each: float("inf") if (count := _length(dataset[each])) is None else count)
        dataset = dataset[name]
    # evaluate() appends the outputs of each batch to all before it, which are those of half the samples on average.
    is_appended = arguments.eval_do_concat_batches and not arguments.batch_eval_metrics
    earlier = (_length(dataset) or 0) // (2 * (arguments.eval_accumulation_steps or 1)) if is_appended else 0
    batches = _batches(trainer.get_eval_dataloader(name))
    result = autotune_module(_step(trainer, evaluate), batches, **_limited(options, dataset, arguments.world_size))
    if result.recommended and result.batch_size is not None:
        arguments.per_device_eval_batch_size = result.batch_size
    else:
        unchanged = arguments.per_device_eval_batch_size
        warnings.warn(f"{result.reasons[0]} per_device_eval_batch_size stays {unchanged}.", stacklevel=3)
    return result


def _batches(loader: Any) -> Any:
    """Return the loader if batches of any size can be made of its samples, else its first batch."""
    return next(iter(loader)) if loader_rate.measurable(loader) is None else loader


def _length(dataset: Any) -> int | None:
    return len(dataset) if isinstance(dataset, Sized) else None


def _limited(options: dict[str, Any], dataset: Any, devices: int) -> dict[str, Any]:
    """
    Return the options with a `max_batch_size` of at most the samples of the dataset per device.

    `devices` is the number of devices. A dataset without a length leaves the options unchanged.
    """
    most, count = options.get("max_batch_size"), _length(dataset)
    if count is None:
        return options
    own = count // devices
    top = own if most is None else min(check_batch_size(most, "max_batch_size"), own)
    return {**options, "max_batch_size": max(1, top)}


def _step(trainer: Any, call: Callable[[Any, dict[str, Any]], Any]) -> Any:
    """
    Return a module that runs `call(model, inputs)` as its forward pass.

    `model` is the trainer's, compiled if it would be, and `inputs` are the forward pass's keyword arguments by name.
    """
    import torch

    arguments = trainer.args

    class Step(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = trainer.model
            if arguments.torch_compile:
                self.model = torch.compile(
                    trainer.model, backend=arguments.torch_compile_backend, mode=arguments.torch_compile_mode
                )

        def forward(self, **inputs: Any) -> Any:
            with trainer.compute_loss_context_manager():
                return call(self.model, inputs)

    Step.__name__ = type(trainer.model).__name__
    return Step()


def _appended(output: Any, earlier: int) -> Any:
    """Return a tensor after `earlier` rows of the same shape."""
    import torch

    return torch.cat((output.new_empty(earlier, *output.shape[1:]), output)) if output.ndim and earlier else output


def _as_it_is(loss: Any) -> Any:
    return loss


@contextlib.contextmanager
def _checkpointing(trainer: Any) -> Iterator[None]:
    """Enable gradient checkpointing of the model in the block, if `trainer.train()` would."""
    names = ("activation_checkpointing", "gradient_checkpointing")  # since transformers 5, and before
    name = next((name for name in names if hasattr(trainer.model, f"{name}_enable")), None)
    arguments = trainer.args
    if name is None or not any(getattr(arguments, each, False) for each in names):
        yield
        return
    given = dict(next((own for each in names if (own := getattr(arguments, f"{each}_kwargs", None))), {}))
    more = {each: given.pop(each) for each in ("every_n_layers", "offload") if each in given}
    with kept_attributes(trainer.model):  # hooks among them
        getattr(trainer.model, f"{name}_enable")(**{f"{name}_kwargs": given or None}, **more)
        yield
