"""Loops that a trainer runs: Lightning's with accumulation, and that of Hugging Face."""

from __future__ import annotations

import contextlib
import tempfile
import time
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - PyTorch's own abbreviation
from torch.utils.data import DataLoader, Dataset

from benchmarks.loops.image_loops import CLASSES, Augmented, Residual, adam, classifier
from benchmarks.loops.plain_loop import CURRENT, Block, Loop
from benchmarks.modules import zoo
from cubatch import TuningResult

with contextlib.suppress(ImportError):  # first: Lightning and Transformers import it where it is installed
    zoo.torchvision_package()  # its import works with any build of PyTorch
import lightning.pytorch as pl
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainerCallback, TrainingArguments

from cubatch.integrations.huggingface import tune_trainer
from cubatch.integrations.lightning import CubatchBatchSizeFinder

ACCUMULATED, WORDS, LENGTH = 4, 500, 32


class Classifier(pl.LightningModule):
    """A small classifier of images with the loader that it trains on."""

    def __init__(self, data: Dataset, batch_size: int) -> None:
        super().__init__()
        self.data, self.batch_size = data, batch_size
        self.net = classifier(Residual, (8, 16, 32))

    def training_step(self, batch: Any) -> torch.Tensor:
        images, labels = batch
        return F.cross_entropy(self.net(images), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return adam(self.parameters())

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.data, self.batch_size, shuffle=True, drop_last=True)


class Watch:
    """Counts the batches after a first optimizer step until the time is over."""

    def __init__(self, seconds: float, skipped: int) -> None:
        self.seconds, self.batches, self._skipped = seconds, 0, skipped

    def is_over(self) -> bool:
        """Count a batch and return whether the time is over."""
        now = time.perf_counter()
        if self._skipped:
            self._skipped, self._began = self._skipped - 1, now
            return False
        self.batches, self.spent = self.batches + 1, now - self._began
        return self.spent >= self.seconds


class StopLightning(pl.Callback):
    def __init__(self, watch: Watch) -> None:
        self.watch = watch

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        trainer.should_stop = self.watch.is_over()


def lightning() -> Loop:
    data = Augmented(4096, 32)

    def fit(batch_size: int, callback: Any, **options: Any) -> None:
        trainer = pl.Trainer(
            accelerator="cpu", accumulate_grad_batches=ACCUMULATED, callbacks=[callback], logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, **options,
        )  # fmt: skip
        trainer.fit(Classifier(data, batch_size))

    def open_loop() -> Block:
        def block(batch_size: int, seconds: float) -> tuple[int, float]:
            watch = Watch(seconds, skipped=min(ACCUMULATED, len(data) // batch_size - 1) or 1)
            fit(batch_size, StopLightning(watch), max_epochs=-1)
            return watch.batches * batch_size, watch.spent

        return block

    def tune(budget: float) -> TuningResult:
        finder = CubatchBatchSizeFinder(budget=budget)
        fit(CURRENT, finder, max_steps=1)
        return finder.result

    return Loop(num_samples=len(data), open=open_loop, tune=tune)


class Texts(Dataset):
    """Labeled sequences of one length, as a tokenizer with padding to that length returns them."""

    def __init__(self, count: int) -> None:
        self.ids, self.labels = torch.randint(WORDS, (count, LENGTH)), torch.randint(CLASSES, (count,))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, place: int) -> dict[str, torch.Tensor]:
        ids = self.ids[place]
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": self.labels[place]}


def bert() -> nn.Module:
    config = BertConfig(
        vocab_size=WORDS, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=256,
        num_labels=CLASSES,
    )  # fmt: skip
    return BertForSequenceClassification(config)


class StopTrainer(TrainerCallback):
    def __init__(self, watch: Watch) -> None:
        self.watch = watch

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002 - names of a hook
        control.should_training_stop = self.watch.is_over()


def hugging_face() -> Loop:
    data = Texts(4096)

    def make(folder: str, batch_size: int, callbacks: list[Any]) -> Trainer:
        arguments = TrainingArguments(
            folder, per_device_train_batch_size=batch_size, use_cpu=True, report_to=[], save_strategy="no",
            logging_strategy="no", disable_tqdm=True, num_train_epochs=10_000, dataloader_drop_last=True,
        )  # fmt: skip
        return Trainer(bert(), arguments, train_dataset=data, callbacks=callbacks)

    def open_loop() -> Block:
        def block(batch_size: int, seconds: float) -> tuple[int, float]:
            watch = Watch(seconds, skipped=1)
            with tempfile.TemporaryDirectory() as folder:
                make(folder, batch_size, [StopTrainer(watch)]).train()
            return watch.batches * batch_size, watch.spent

        return block

    def tune(budget: float) -> TuningResult:
        with tempfile.TemporaryDirectory() as folder:
            return tune_trainer(make(folder, CURRENT, []), budget=budget).training

    return Loop(num_samples=len(data), open=open_loop, tune=tune)
