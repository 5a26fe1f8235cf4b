"""The `my_project` of the snippets: a Lightning module that reads its batch size, and a Hugging Face Trainer."""

from __future__ import annotations

import tempfile

import torch

from tests.parity.beside_torchvision import registering_nothing

with registering_nothing():  # Lightning's metrics import torchvision
    import lightning as L  # noqa: N812 - as Lightning's own pages have it

NUM_SAMPLES = 256


class Model(L.LightningModule):
    """One linear layer, on random vectors."""

    def __init__(self):
        super().__init__()
        self.net, self.batch_size = torch.nn.Linear(32, 4), 2

    def training_step(self, batch):
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

    def train_dataloader(self):
        vectors = torch.utils.data.TensorDataset(torch.randn(NUM_SAMPLES, 32))
        return torch.utils.data.DataLoader(vectors, batch_size=self.batch_size)


model = Model()


def make_trainer():
    """Return a Trainer of a small text classifier on 64 sequences."""
    with registering_nothing():
        from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments
    ids = torch.arange(64 * 8).reshape(64, 8) % 32
    data = [{"input_ids": row, "labels": torch.tensor(place % 2)} for place, row in enumerate(ids)]
    config = BertConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(), use_cpu=True, report_to=[], save_strategy="no", max_steps=2, disable_tqdm=True
    )
    return Trainer(BertForSequenceClassification(config), arguments, train_dataset=data)


def __getattr__(name):
    """Make the Trainer on first use: Lightning's snippets do not need it."""
    if name != "trainer":
        raise AttributeError(name)
    return make_trainer()
