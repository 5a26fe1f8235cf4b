"""Loops on sequences: padded, masked, shifted, recurrent, and bags with offsets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - PyTorch's own abbreviation
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset, TensorDataset

from benchmarks.loops.plain_loop import Loop, module_loop, supervised

WORDS, CLASSES = 2000, 5


class Sentences(Dataset):
    """Labeled lists of 5 to 60 words."""

    def __init__(self, count: int) -> None:
        self.texts = [torch.randint(1, WORDS, (int(length),)) for length in torch.randint(5, 61, (count,))]
        self.labels = torch.randint(CLASSES, (count,))

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, place: int) -> Any:
        return self.texts[place], self.labels[place]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4)


def classification(
    data: Dataset, build: Callable[[], nn.Module], *, collate: Callable[[list[Any]], Any] | None = None
) -> Loop:
    """Return a loop over batches whose last item are the labels; `collate` None: the data loader's own."""
    return module_loop(data, build, adamw, supervised, collate=collate, loss=nn.CrossEntropyLoss(), optimizer="adamw")


def pad(samples: list[Any]) -> Any:
    texts, labels = zip(*samples, strict=True)
    return pad_sequence(list(texts), batch_first=True), torch.stack(labels)


class Convolved(nn.Module):
    """Word vectors, a convolution along the text, and its maximum."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 64, padding_idx=0)
        self.body = nn.Sequential(nn.Conv1d(64, 128, 5, padding=2), nn.ReLU(), nn.Conv1d(128, 128, 5, padding=2))
        self.head = nn.Linear(128, CLASSES)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.words(words).transpose(1, 2)).amax(2))


def text() -> Loop:
    return classification(Sentences(8192), Convolved, collate=pad)


def pad_with_mask(samples: list[Any]) -> Any:
    words, labels = pad(samples)
    return words, words != 0, labels


class Encoder(nn.Module):
    """A small BERT that attends to words only, not to padding."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, 64, padding_idx=0), nn.Embedding(64, 64)
        layer = nn.TransformerEncoderLayer(64, 4, 256, batch_first=True, activation="gelu")
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(64, CLASSES)

    def forward(self, words: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.words(words) + self.places(torch.arange(words.shape[1]))
        return self.head(self.layers(x, src_key_padding_mask=~mask)[:, 0])


def encoder() -> Loop:
    return classification(Sentences(8192), Encoder, collate=pad_with_mask)


class Recurrent(nn.Module):
    """A class for a series, by the last state of an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.LSTM(8, 64, num_layers=2, batch_first=True), nn.Linear(64, CLASSES)

    def forward(self, series: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(series)[0][:, -1])


def lstm() -> Loop:
    return classification(TensorDataset(torch.rand(8192, 32, 8), torch.randint(CLASSES, (8192,))), Recurrent)


class Bags(nn.Module):
    """The mean of the vectors of a text's words."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(WORDS, 128)
        self.head = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, CLASSES))

    def forward(self, words: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return self.head(self.words(words, offsets))


def join(samples: list[Any]) -> Any:
    """Return all words in a row, the place where each text begins, and the labels."""
    texts, labels = zip(*samples, strict=True)
    lengths = torch.tensor([0, *(len(words) for words in texts[:-1])])
    return torch.cat(texts), lengths.cumsum(0), torch.stack(labels)


def embedding_bag() -> Loop:
    return classification(Sentences(16384), Bags, collate=join)


class Decoder(nn.Module):
    """A small GPT."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, 64), nn.Parameter(torch.zeros(length, 64))
        layer = nn.TransformerEncoderLayer(64, 4, 256, batch_first=True, activation="gelu", dropout=0.0)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(64, WORDS)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.words(words) + self.places, mask=self.mask, is_causal=True))


def next_word_loss(scores: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(scores.flatten(0, 1), words.flatten())


def causal_lm() -> Loop:
    length = 32

    def loss_of(call: Any, batch: Any) -> torch.Tensor:
        words, following = batch
        return next_word_loss(call(words), following)

    rows = torch.randint(WORDS, (4096, length + 1))
    data = TensorDataset(rows[:, :-1], rows[:, 1:])
    return module_loop(data, lambda: Decoder(length), adamw, loss_of, clip=1.0, loss=next_word_loss)
