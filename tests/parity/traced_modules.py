"""Modules of many kinds, most of which cannot be imported, with their batches."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from tests.parity.beside_torchvision import registering_nothing  # noqa: E402

with registering_nothing():
    transformers = pytest.importorskip("transformers")
    from transformers import (  # noqa: F401 - not imported without this
        BertModel,
        MambaModel,
        MixtralModel,
        T5Model,
        WhisperModel,
    )

WORDS = 100


class Unet(nn.Module):
    """Down, up and a skip; with a time step, as diffusion models have it."""

    def __init__(self):
        super().__init__()
        self.first, self.down = nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(32, 64, 3, stride=2, padding=1)
        self.up, self.last = nn.ConvTranspose2d(64, 32, 2, stride=2), nn.Conv2d(64, 3, 3, padding=1)
        self.norm, self.time = nn.GroupNorm(8, 64), nn.Embedding(WORDS, 64)

    def forward(self, image, time=None):
        high = torch.relu(self.first(image))
        low = self.norm(self.down(high))
        if time is not None:
            low = low + self.time(time)[:, :, None, None]
        return self.last(torch.cat([high, self.up(nn.functional.silu(low))], dim=1))


class Adapted(nn.Module):
    """A frozen layer with a trained layer of low rank, twice."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.ModuleList(nn.Linear(256, 256) for _ in range(2)).requires_grad_(False)
        self.low = nn.ModuleList(nn.Sequential(nn.Linear(256, 4), nn.Linear(4, 256)) for _ in range(2))

    def forward(self, x):
        for frozen, low in zip(self.frozen, self.low, strict=True):
            x = torch.tanh(frozen(x) + low(x))
        return x


class Checkpointed(nn.Module):
    """Four layers of attention that are computed again in the backward pass."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


class Tied(nn.Module):
    """The table of words is also the last layer."""

    def __init__(self):
        super().__init__()
        self.words, self.body, self.last = nn.Embedding(WORDS, 64), nn.Linear(64, 64), nn.Linear(64, WORDS, bias=False)
        self.last.weight = self.words.weight

    def forward(self, tokens):
        return self.last(torch.tanh(self.body(self.words(tokens))))


class TwoTower(nn.Module):
    """Texts and images side by side."""

    def __init__(self):
        super().__init__()
        self.text, self.image = nn.EmbeddingBag(WORDS, 64), nn.Sequential(nn.Conv2d(3, 16, 4, 4), nn.Flatten())
        self.joint = nn.LazyLinear(64)

    def forward(self, tokens, image):
        return self.text(tokens) @ self.joint(self.image(image)).T


class Detector(nn.Module):
    """A list of images, as torchvision's detection models take it."""

    def __init__(self):
        super().__init__()
        self.body, self.boxes = nn.Conv2d(3, 32, 3, 2, 1), nn.Conv2d(32, 4, 1)

    def forward(self, images):
        return self.boxes(torch.relu(self.body(torch.stack(images)))).flatten(2)


def two_tower():
    module = TwoTower()
    module(tokens(2), images(2))
    return module


def images(n):
    return torch.rand(n, 3, 32, 32)


def tokens(n, length=16):
    return torch.randint(WORDS, (n, length))


def small(name, **settings):
    """Make a model of Transformers with few and narrow layers."""
    config = getattr(transformers, f"{name}Config")(**settings)
    return getattr(transformers, f"{name}Model")(config)


def bert():
    return small(
        "Bert", vocab_size=WORDS, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128
    )


def t5():
    return small("T5", vocab_size=WORDS, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4)


def whisper():
    return small(
        "Whisper", vocab_size=WORDS, num_mel_bins=8, d_model=64, encoder_layers=1, decoder_layers=1,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=128, decoder_ffn_dim=128,
        max_source_positions=32, max_target_positions=32, pad_token_id=0, decoder_start_token_id=1,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip


def mamba():
    return small("Mamba", vocab_size=WORDS, hidden_size=32, state_size=8, num_hidden_layers=1)


def experts():
    return small(
        "Mixtral", vocab_size=WORDS, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4,
    )  # fmt: skip


MODULES = {
    "Mamba": (mamba, lambda n: {"input_ids": tokens(n, 8)}),
    "experts": (experts, lambda n: {"input_ids": tokens(n)}),
    "lstm": (lambda: nn.LSTM(32, 64, 2, batch_first=True), lambda n: (torch.rand(n, 16, 32),)),
    "text encoder": (bert, lambda n: {"input_ids": tokens(n)}),
    "U-Net": (Unet, lambda n: (images(n),)),
    "diffusion": (Unet, lambda n: (images(n), torch.randint(WORDS, (n,)))),
    "T5": (t5, lambda n: {"input_ids": tokens(n), "decoder_input_ids": tokens(n, 8)}),
    "Whisper": (whisper, lambda n: {"input_features": torch.rand(n, 8, 64), "decoder_input_ids": tokens(n, 8)}),
    "detection": (Detector, lambda n: ([torch.rand(3, 32, 32) for _ in range(n)],)),
    "adapters": (Adapted, lambda n: (torch.rand(n, 256),)),
    "checkpointed": (Checkpointed, lambda n: (torch.rand(n, 16, 64),)),
    "two towers": (two_tower, lambda n: (tokens(n), images(n))),
    "tied": (Tied, lambda n: (tokens(n),)),
}


class Reading(nn.Module):
    """Needs the data of its input."""

    def forward(self, x):
        return torch.from_numpy(x.numpy() * 2)
