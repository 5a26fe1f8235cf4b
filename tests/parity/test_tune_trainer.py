"""`tune_trainer`: the Trainer of Hugging Face trains and evaluates with the sizes that were found."""

from __future__ import annotations

import random
import warnings

import numpy as np
import pytest

torch = pytest.importorskip("torch")  # first: a module that was skipped before is there in part only

from cubatch.errors import InvalidArgument  # noqa: E402
from cubatch.integrations.huggingface import _tune_evaluation, tune_trainer  # noqa: E402
from cubatch.tuning import length_plan  # noqa: E402
from tests.parity.beside_torchvision import registering_nothing  # noqa: E402

pytest.importorskip("transformers")
with registering_nothing():
    from transformers import (
        BertConfig,
        BertForSequenceClassification,
        HfArgumentParser,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )
    from transformers.trainer_pt_utils import get_length_grouped_indices

NUM_SAMPLES, LENGTH = 48, 8
TWO = {"budget": 120.0, "batch_sizes": [4, 8], "memory_limit": "1GiB"}


class Texts(torch.utils.data.Dataset):
    """Sequences of eight tokens of two classes."""

    def __len__(self):
        return NUM_SAMPLES

    def __getitem__(self, place):
        ids = torch.arange(place, place + LENGTH) % 32
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.tensor(place % 2)}


class Stream(torch.utils.data.IterableDataset):
    """The same, without a length."""

    def __iter__(self):
        return (Texts()[place] for place in range(NUM_SAMPLES))


class Random(Texts):
    """Draws from all random generators for each sample."""

    def __getitem__(self, place):
        random.random(), np.random.rand(), torch.rand(())  # noqa: NPY002 - the generator that users seed
        return super().__getitem__(place)


class Observed(Trainer):
    """Keeps the batch sizes that it trained and evaluated with."""

    def __init__(self, *args, **more):
        super().__init__(*args, **more)
        self.trained, self.evaluated = [], []

    def training_step(self, model, inputs, *args, **more):
        self.trained.append(len(inputs["labels"]))
        return super().training_step(model, inputs, *args, **more)

    def evaluation_loop(self, dataloader, *args, **more):
        self.evaluated.append(len(next(iter(dataloader))["labels"]))
        return super().evaluation_loop(dataloader, *args, **more)


def make(path, train=None, evaluation=None, **more):
    torch.manual_seed(0)
    config = BertConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    arguments = TrainingArguments(
        output_dir=str(path), use_cpu=True, report_to=[], save_strategy="no", max_steps=3, disable_tqdm=True,
        per_device_train_batch_size=2, per_device_eval_batch_size=2, **more,
    )  # fmt: skip
    return Observed(
        BertForSequenceClassification(config), arguments,
        train_dataset=train or Texts(), eval_dataset=evaluation or Texts(),
    )  # fmt: skip


@pytest.fixture(autouse=True)
def _quietly():
    with registering_nothing(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def test_training_and_evaluation_use_the_sizes_found(tmp_path):
    """Batches of the trainer have the recommended sizes; the model is as it was before tuning."""
    trainer = make(tmp_path)
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    found = tune_trainer(trainer, **TWO)
    assert all(torch.equal(value, before[name]) for name, value in trainer.model.state_dict().items())
    assert (found.training.mode, found.evaluation.mode) == ("training", "inference")
    assert not any("cannot be restored" in each for each in (*found.training.reasons, *found.evaluation.reasons))
    assert trainer.args.per_device_train_batch_size == found.training.batch_size
    assert trainer.args.per_device_eval_batch_size == found.evaluation.batch_size
    trainer.train()
    trainer.evaluate()
    assert set(trainer.trained) == {found.training.batch_size}
    assert trainer.evaluated == [found.evaluation.batch_size]


def test_a_target_that_no_measured_size_divides_is_warned_of(tmp_path):
    """13 is a prime above 8: batches of 1 are below all that was measured."""
    trainer = make(tmp_path)
    with pytest.warns(UserWarning, match="target_batch_size=13 is best cut into steps of 1 sample, fewer"):
        tune_trainer(trainer, target_batch_size=13, evaluation=False, **TWO)
    assert (trainer.args.per_device_train_batch_size, trainer.args.gradient_accumulation_steps) == (1, 13)


@pytest.mark.filterwarnings("ignore:target_batch_size=12:UserWarning")  # where steps of 4 and 8 take equally long
def test_a_target_is_kept_by_accumulation(tmp_path):
    """Batch size times accumulated batches is the target, in the arguments and in the loop."""
    trainer = make(tmp_path)
    found = tune_trainer(trainer, target_batch_size=12, evaluation=False, **TWO)
    arguments = trainer.args
    assert found.evaluation is None
    assert found.training.accumulate == 6
    assert arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps == 12
    trainer.train()
    per_step = arguments.gradient_accumulation_steps
    assert all(sum(trainer.trained[at : at + per_step]) == 12 for at in range(0, 3 * per_step, per_step))


def test_a_timed_step_clips_gradients_and_uses_the_optimizer_of_the_trainer(tmp_path, monkeypatch):
    """AdamW of the Trainer's own kind steps after its gradients were clipped to max_grad_norm."""
    clipped, stepped = [], set()
    clip, step = torch.nn.utils.clip_grad_norm_, torch.optim.AdamW.step
    monkeypatch.setattr(
        torch.nn.utils,
        "clip_grad_norm_",
        lambda given, norm, *a, **k: (clipped.append(norm), clip(given, norm, *a, **k))[1],
    )
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self, *a: (stepped.add(type(self)), step(self, *a))[1])
    tune_trainer(make(tmp_path, max_grad_norm=0.5), evaluation=False, **TWO)
    assert set(clipped) == {0.5}
    assert stepped == {torch.optim.AdamW}


@pytest.mark.parametrize(
    ("name", "value"),
    [*((name, each) for name in ("target_batch_size", "max_batch_size") for each in (0, 2.5, "64", True)),
     *((each, "mine") for each in ("loader", "accumulate", "mode", "loss", "optimizer"))],
)  # fmt: skip
def test_an_option_that_is_no_number_or_the_trainers_own_is_rejected(tmp_path, name, value):
    """The error names the option."""
    with pytest.raises(InvalidArgument) as caught:
        tune_trainer(make(tmp_path), **{name: value})
    assert (caught.value.field, caught.value.value) == (name, value)


def test_datasets_without_a_length_set_no_limit(tmp_path):
    """More than the samples of one epoch are tried, in training and in evaluation."""
    found = tune_trainer(make(tmp_path, Stream(), Stream()), **TWO | {"batch_sizes": [4, 2 * NUM_SAMPLES]})
    for result in (found.training, found.evaluation):
        assert {m.batch_size for m in result.measurements} == {4, 2 * NUM_SAMPLES}


def test_the_largest_of_several_evaluation_sets_is_tuned(tmp_path, monkeypatch):
    """Its batches are those timed, and its number of samples is the limit."""
    names, limits = [], []

    def tuned(module, batches, **options):
        limits.append((options["max_batch_size"], len(batches.dataset)))
        raise InterruptedError

    trainer = make(tmp_path, evaluation={"few": torch.utils.data.Subset(Texts(), range(5)), "many": Texts()})
    loader = trainer.get_eval_dataloader
    monkeypatch.setattr(trainer, "get_eval_dataloader", lambda name=None: (names.append(name), loader(name))[1])
    monkeypatch.setattr("cubatch.integrations.huggingface.autotune_module", tuned)
    with pytest.raises(InterruptedError):
        _tune_evaluation(trainer, {})
    assert (names, limits) == (["many"], [(NUM_SAMPLES, NUM_SAMPLES)])


def test_timed_batches_are_made_of_the_samples_of_the_trainer(tmp_path):
    """Their tokens count upwards as in the data set, which random ones do not."""
    timed, trainer = [], make(tmp_path)
    hook = lambda _, positional, named: timed.append(named["input_ids"])  # noqa: E731
    trainer.model.register_forward_pre_hook(hook, with_kwargs=True)
    tune_trainer(trainer, evaluation=False, **TWO)
    real = [ids for ids in timed if type(ids) is torch.Tensor and len(ids) in TWO["batch_sizes"]]
    assert {len(ids) for ids in real} == set(TWO["batch_sizes"])
    assert all((ids.diff() % 32 == 1).all() for ids in real)


def test_random_generators_of_the_user_are_restored(tmp_path):
    """Those of PyTorch, NumPy and Python, from which samples are drawn."""
    trainer = make(tmp_path, Random(), Random())

    def states():
        numbers = np.random.get_state()  # noqa: NPY002 - as above
        return random.getstate(), (numbers[1].tolist(), *numbers[2:]), torch.get_rng_state().tolist()

    before = states()
    tune_trainer(trainer, **TWO)
    assert states() == before


def test_a_loss_is_called_with_the_number_of_items_as_in_training(tmp_path):
    """With two batches of n labels to an optimizer step it is 2 n; a loss that divides by it needs it."""
    trainer, counts = make(tmp_path, gradient_accumulation_steps=2), set()

    def mean(outputs, labels, num_items_in_batch):
        if type(labels) is torch.Tensor:
            counts.add((len(labels), int(num_items_in_batch)))
        return torch.nn.functional.cross_entropy(outputs.logits, labels, reduction="sum") / num_items_in_batch

    trainer.compute_loss_func = mean
    found = tune_trainer(trainer, evaluation=False, **TWO)
    assert {m.status for m in found.training.measurements} <= {"ok", "dropped"}
    assert {(4, 8), (8, 16)} <= counts


def test_a_trainer_that_has_trained_is_tuned_and_left_as_it_was(tmp_path):
    """Its optimizer is accelerate's wrapper by then, and its model checkpoints already."""
    trainer = make(tmp_path, gradient_checkpointing=True)
    trainer.train()

    def state():
        hooks = [
            (len(part._forward_hooks), getattr(part, "gradient_checkpointing", None))
            for part in trainer.model.modules()
        ]
        return trainer.optimizer, hooks, [each["exp_avg"].tolist() for each in trainer.optimizer.state.values()]

    before = state()
    found = tune_trainer(trainer, evaluation=False, **TWO)
    assert {m.status for m in found.training.measurements} <= {"ok", "dropped"}
    assert state() == before


def test_a_trainer_without_training_data_is_refused(tmp_path):
    """It can evaluate only."""
    trainer = make(tmp_path)
    trainer.train_dataset = None
    with pytest.raises(InvalidArgument) as caught:
        tune_trainer(trainer)
    assert caught.value.field == "train_dataset"


class Average(TrainerCallback):
    """Has work after each optimizer step."""

    def on_step_end(self, *_, **__):
        """Do nothing."""


class Report(TrainerCallback):
    """Has none in a step."""

    def on_epoch_end(self, *_, **__):
        """Do nothing."""


def test_work_of_the_users_in_a_step_that_is_not_timed_comes_first(tmp_path):
    """The training_step of Observed and an average of weights are not in a timed step: sizes are compared without."""
    trainer = make(tmp_path)
    trainer.add_callback(Average())
    trainer.add_callback(Report())
    with pytest.warns(UserWarning, match="Not timed: training_step of Observed and on_step_end of Average"):
        found = tune_trainer(trainer, **TWO)
    assert found.training.reasons[0].startswith("Not timed: training_step of Observed and on_step_end of Average.")
    assert not found.evaluation.reasons[0].startswith("Not timed")
    trainer = Trainer(trainer.model, trainer.args, train_dataset=Texts(), callbacks=[Report()])
    found = tune_trainer(trainer, **TWO)
    assert not found.training.reasons[0].startswith("Not timed")


@pytest.fixture
def steps(monkeypatch):
    """Collect the modules that would be tuned."""
    made = []

    def tuned(module, batches, **options):
        made.append(module)
        raise InterruptedError

    monkeypatch.setattr("cubatch.integrations.huggingface.autotune_module", tuned)
    return made


@pytest.mark.parametrize(
    ("options", "rows"), [({}, 24), ({"eval_accumulation_steps": 3}, 8), ({"batch_eval_metrics": True}, 0)]
)
def test_an_evaluation_step_appends_to_the_outputs_before_it(tmp_path, steps, options, rows):
    """evaluate() joins all outputs for compute_metrics, after each batch or each third: of 48 samples 24 on average."""
    trainer = make(tmp_path, **options)
    trainer.compute_metrics = lambda outputs, compute_result=True: {}
    with pytest.raises(InterruptedError):
        _tune_evaluation(trainer, {})
    _, outputs = steps[0](**next(iter(trainer.get_eval_dataloader())))
    assert [each.shape for each in outputs] == [(rows + 2, 2)]


def test_steps_are_compiled_if_training_is(tmp_path, steps):
    """torch_compile of the arguments compiles the model, with the backend that they name."""
    with pytest.raises(InterruptedError):
        tune_trainer(make(tmp_path, torch_compile=True, torch_compile_backend="eager"))
    assert steps[0].model._orig_mod is not steps[0].model
    with pytest.raises(InterruptedError):
        tune_trainer(make(tmp_path))
    assert not hasattr(steps[1].model, "_orig_mod")


@pytest.mark.parametrize("size", [4, 16])  # 50 batches of 4 are a stretch; of 16, a quarter of the samples
def test_grouped_batches_are_those_of_the_trainer(size):
    """The same samples are padded together, but that the Trainer exchanges the longest and the longest of a stretch."""
    shuffled = torch.randperm(2000, generator=torch.Generator().manual_seed(3)).tolist()  # lengths are places
    order = get_length_grouped_indices(range(2000), size, generator=torch.Generator().manual_seed(3))
    theirs = [set(order[start : start + size]) for start in range(0, 2000, size)]
    exchanged = [a ^ set(b) for a, b in zip(theirs, length_plan._of_groups(shuffled, size), strict=True)]
    exchanged = [each for each in exchanged if each]
    assert len(exchanged) in {0, 2}
    assert all(each == {1999, max(shuffled[: size * min(50, 2000 // (4 * size))])} for each in exchanged)


def test_the_options_of_a_plan_are_fields_of_the_trainer(tmp_path):
    """Its own parser of the command line takes the batch size and the sampler."""
    batching = {"padding_share": 0.1, "tokens_per_second": 1e6}
    for name, sampler in (("grouped", "group_by_length"), ("random", "random")):
        ways = (length_plan.Batching(name=name, batch_sizes={64: 24}, **batching),)
        options = length_plan.LengthPlan(axis="sequence", num_samples=9, ways=ways).to_huggingface().split()
        (arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(
            [*options, "--output_dir", str(tmp_path), "--report_to", "none"]
        )
        assert (arguments.per_device_train_batch_size, arguments.train_sampling_strategy) == (24, sampler)
