"""Loops on images: classifiers, two views, lists of targets, and two optimizers."""

from __future__ import annotations

import itertools
import time
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - PyTorch's own abbreviation
from torch.utils.data import Dataset, TensorDataset

import cubatch as cb
from benchmarks.loops.plain_loop import Loop, MakeLoader, Train, epochs, module_loop, plain_loop, supervised

CLASSES = 10


class Augmented(Dataset):
    """Labeled images that are flipped and cropped at random when they are read."""

    def __init__(self, count: int, side: int) -> None:
        self.images, self.labels = torch.rand(count, 3, side, side), torch.randint(CLASSES, (count,))
        self.side = side

    def __len__(self) -> int:
        return len(self.images)

    def view(self, place: int) -> torch.Tensor:
        image = F.pad(self.images[place], (4, 4, 4, 4))
        if torch.rand(()) < 0.5:
            image = image.flip(-1)
        top, left = torch.randint(9, (2,)).tolist()
        return image[:, top : top + self.side, left : left + self.side]

    def __getitem__(self, place: int) -> Any:
        return self.view(place), self.labels[place]


class TwoViews(Augmented):
    """Two random views of each image."""

    def __getitem__(self, place: int) -> Any:
        return self.view(place), self.view(place)


class Pairs(Augmented):
    """Two images, and whether they are of one class."""

    def __getitem__(self, place: int) -> Any:
        other = int(torch.randint(len(self), ()))
        return self.images[place], self.images[other], (self.labels[place] == self.labels[other]).float()


class SlowImages(Augmented):
    """Images that take two milliseconds to read, as from a network."""

    def __getitem__(self, place: int) -> Any:
        time.sleep(0.002)
        return self.images[place], self.labels[place]


class Scenes(Dataset):
    """Images of unequal extents with one to five boxes."""

    def __init__(self, count: int) -> None:
        self.sides = torch.randint(32, 65, (count, 2))
        self.counts = torch.randint(1, 6, (count,))

    def __len__(self) -> int:
        return len(self.sides)

    def __getitem__(self, place: int) -> Any:
        generator = torch.Generator().manual_seed(place)
        height, width = self.sides[place].tolist()
        boxes = torch.rand(int(self.counts[place]), 4, generator=generator)
        target = {"boxes": boxes, "labels": torch.randint(CLASSES, (len(boxes),), generator=generator)}
        return torch.rand(3, height, width, generator=generator), target


class Residual(nn.Module):
    """Two convolutions and a shortcut."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inner, outer, 3, stride, 1, bias=False), nn.BatchNorm2d(outer), nn.ReLU(),
            nn.Conv2d(outer, outer, 3, 1, 1, bias=False), nn.BatchNorm2d(outer),
        )  # fmt: skip
        self.shortcut = nn.Conv2d(inner, outer, 1, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


class Separable(nn.Sequential):
    """A depthwise and a pointwise convolution, as in MobileNet."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__(
            nn.Conv2d(inner, inner, 3, stride, 1, groups=inner, bias=False), nn.BatchNorm2d(inner), nn.ReLU6(),
            nn.Conv2d(inner, outer, 1, bias=False), nn.BatchNorm2d(outer), nn.ReLU6(),
        )  # fmt: skip


def trunk(block: type[nn.Module], widths: tuple[int, ...]) -> nn.Sequential:
    """Return an image network that ends with a vector of the last width."""
    stem = [nn.Conv2d(3, widths[0], 3, 1, 1, bias=False), nn.BatchNorm2d(widths[0]), nn.ReLU()]
    blocks = [block(inner, outer, 2) for inner, outer in itertools.pairwise(widths)]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten())


def classifier(block: type[nn.Module], widths: tuple[int, ...]) -> nn.Module:
    return nn.Sequential(trunk(block, widths), nn.Linear(widths[-1], CLASSES))


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9, weight_decay=5e-4)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-4)


def classification(data: Dataset, block: type[nn.Module], widths: tuple[int, ...], workers: int) -> Loop:
    """Return a loop over images and labels with cross entropy."""
    return module_loop(
        data, lambda: classifier(block, widths), momentum, supervised, workers=workers, loss=nn.CrossEntropyLoss()
    )


def vision() -> Loop:
    return classification(Augmented(4096, 32), Residual, (16, 32, 64), workers=1)


def mobile() -> Loop:
    return classification(Augmented(2048, 48), Separable, (16, 32, 64, 128), workers=0)


def slow_loader() -> Loop:
    return classification(SlowImages(1024, 32), Residual, (16, 32), workers=1)


class Siamese(nn.Module):
    """Whether two images are of one class, by the distance of their vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = trunk(Residual, (8, 16, 32))
        self.head = nn.Linear(32, 1)

    def forward(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return self.head((self.trunk(first) - self.trunk(second)).abs()).squeeze(1)


def siamese() -> Loop:
    def loss_of(call: Any, batch: Any) -> torch.Tensor:
        first, second, same = batch
        return F.binary_cross_entropy_with_logits(call(first, second), same)

    return module_loop(Pairs(4096, 32), Siamese, adam, loss_of, loss=nn.BCEWithLogitsLoss(), optimizer="adam")


class Contrastive(nn.Module):
    """A vector of length 1 for each of two views."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(trunk(Residual, (8, 16, 32)), nn.Linear(32, 64))

    def forward(self, first: torch.Tensor, second: torch.Tensor) -> Any:
        return F.normalize(self.trunk(first)), F.normalize(self.trunk(second))


def in_batch_loss(vectors: Any) -> torch.Tensor:
    """Return the cross entropy of finding the other view of an image in the batch."""
    first, second = vectors
    return F.cross_entropy(first @ second.T / 0.1, torch.arange(len(first)))


def contrastive() -> Loop:
    def loss_of(call: Any, batch: Any) -> torch.Tensor:
        return in_batch_loss(call(*batch))

    return module_loop(TwoViews(4096, 32), Contrastive, adam, loss_of, loss=in_batch_loss, optimizer="adam")


class Detector(nn.Module):
    """Pads images to one extent and returns a dict of losses, as the detectors of torchvision do in training."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = trunk(Residual, (8, 16, 32))
        self.boxes, self.labels = nn.Linear(32, 4), nn.Linear(32, CLASSES)

    def forward(self, images: list[torch.Tensor], targets: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        height, width = (max(image.shape[axis] for image in images) for axis in (1, 2))
        padded = [F.pad(image, (0, width - image.shape[2], 0, height - image.shape[1])) for image in images]
        vectors = self.trunk(torch.stack(padded))
        repeats = torch.tensor([len(target["labels"]) for target in targets])
        vectors = vectors.repeat_interleave(repeats, 0)
        boxes, labels = (torch.cat([target[name] for target in targets]) for name in ("boxes", "labels"))
        return {
            "box": F.smooth_l1_loss(self.boxes(vectors), boxes),
            "label": F.cross_entropy(self.labels(vectors), labels),
        }


def to_lists(samples: list[Any]) -> Any:
    images, targets = zip(*samples, strict=True)
    return list(images), list(targets)


def sum_of_losses(losses: dict[str, torch.Tensor]) -> torch.Tensor:
    return sum(losses.values())


def detection() -> Loop:
    def loss_of(call: Any, batch: Any) -> torch.Tensor:
        return sum_of_losses(call(*batch))

    return module_loop(Scenes(2048), Detector, adam, loss_of, collate=to_lists, loss=sum_of_losses, optimizer="adam")


class Autoencoder(nn.Module):
    """A variational autoencoder that returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU(), nn.Flatten(),
            nn.Linear(32 * 49, 2 * 16),
        )  # fmt: skip
        self.decoder = nn.Sequential(
            nn.Linear(16, 32 * 49), nn.Unflatten(1, (32, 7, 7)), nn.ConvTranspose2d(32, 16, 4, 2, 1), nn.ReLU(),
            nn.ConvTranspose2d(16, 1, 4, 2, 1),
        )  # fmt: skip

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        mean, log_variance = self.encoder(images).chunk(2, 1)
        drawn = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        error = F.binary_cross_entropy_with_logits(self.decoder(drawn), images, reduction="sum")
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum()
        return (error + divergence) / len(images)


def vae() -> Loop:
    data = TensorDataset(torch.rand(8192, 1, 28, 28), torch.randint(CLASSES, (8192,)))
    return module_loop(
        data, Autoencoder, adam, lambda call, batch: call(batch[0]), loss=lambda value: value, optimizer="adam"
    )


def adversaries() -> Train:
    """Make a generator and a discriminator with an optimizer each; return what trains both on a batch."""
    generator = nn.Sequential(
        nn.Linear(32, 64 * 49), nn.Unflatten(1, (64, 7, 7)), nn.ConvTranspose2d(64, 32, 4, 2, 1), nn.BatchNorm2d(32),
        nn.ReLU(), nn.ConvTranspose2d(32, 1, 4, 2, 1), nn.Sigmoid(),
    )  # fmt: skip
    discriminator = nn.Sequential(
        nn.Conv2d(1, 16, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(16, 32, 4, 2, 1), nn.LeakyReLU(0.2), nn.Flatten(),
        nn.Linear(32 * 49, 1),
    )  # fmt: skip
    of_generator, of_discriminator = adam(generator.parameters()), adam(discriminator.parameters())

    def train(batch: Any) -> None:
        (real,) = batch
        ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
        fake = generator(torch.randn(len(real), 32))
        loss = F.binary_cross_entropy_with_logits(discriminator(real), ones)
        loss = loss + F.binary_cross_entropy_with_logits(discriminator(fake.detach()), zeros)
        of_discriminator.zero_grad()
        loss.backward()
        of_discriminator.step()
        loss = F.binary_cross_entropy_with_logits(discriminator(fake), ones)
        of_generator.zero_grad()
        loss.backward()
        of_generator.step()

    return train


def gan() -> Loop:
    def tune(make_loader: MakeLoader, budget: float) -> cb.TuningResult:
        train = adversaries()

        def make_step(batch_size: int) -> Any:
            batches = epochs(make_loader(batch_size))
            return lambda: train(next(batches))

        return cb.autotune_callable(make_step, max_batch_size=1024, budget=budget)

    return plain_loop(TensorDataset(torch.rand(8192, 1, 28, 28)), adversaries, tune)
