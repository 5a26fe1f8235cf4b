"""The `my_project` of the snippets for Lightning: a module whose loader reads its batch size."""

from __future__ import annotations

import warnings
from unittest import mock

import torch

# Lightning's metrics import torchvision, of which a build for GPUs cannot register shapes beside a PyTorch for CPUs.
with (
    warnings.catch_warnings(),
    mock.patch.object(torch.library, "register_fake", return_value=lambda function: function),
):
    warnings.simplefilter("ignore")
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
