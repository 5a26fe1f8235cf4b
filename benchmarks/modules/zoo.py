"""
Modules by name: ten of torchvision's and two transformers, without weights, for "benchmarks.modules.zoo:resnet18".

Images are small, so that a CPU comes to an end.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import nn

IMAGE = (3, 64, 64)
_TOKENS, _WORDS, _WIDTH = 64, 5000, 192
VISION = (
    "alexnet", "vgg11", "googlenet", "resnet18", "resnet50", "mobilenet_v3_large", "densenet121", "efficientnet_b0",
    "convnext_tiny", "vit",
)  # fmt: skip
TRANSFORMERS = ("encoder", "decoder")
NAMES = (*VISION, *TRANSFORMERS)


class Encoder(nn.Module):
    """Words to one of ten classes, as BERT does it."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(_WORDS, _WIDTH)
        self.places = nn.Parameter(torch.zeros(1, _TOKENS, _WIDTH))
        layer = nn.TransformerEncoderLayer(_WIDTH, 4, 4 * _WIDTH, batch_first=True, activation="gelu")
        self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(_WIDTH, 10)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.words(words) + self.places).mean(1))


class Decoder(Encoder):
    """Words to the next word at each place, as GPT does it: a causal mask, a large softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(_WIDTH, _WORDS)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(_TOKENS))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.words(words) + self.places, mask=self.mask, is_causal=True))


def example(name: str) -> Any:
    """Return example inputs of a module."""
    return IMAGE if name in VISION else torch.tensor([[0, _WORDS - 1] * (_TOKENS // 2)])


def build(name: str) -> nn.Module:
    """Make a module by its name here."""
    if name in TRANSFORMERS:
        return {"encoder": Encoder, "decoder": Decoder}[name]()
    models = torchvision_package().models
    if name == "vit":
        return models.VisionTransformer(
            image_size=IMAGE[1], patch_size=8, num_layers=6, num_heads=4, hidden_dim=_WIDTH, mlp_dim=4 * _WIDTH
        )
    options = {"init_weights": False, "aux_logits": False} if name == "googlenet" else {}
    return getattr(models, name)(**options)


def __getattr__(name: str) -> Callable[[], nn.Module]:
    if name not in NAMES:
        raise AttributeError(name)
    return functools.partial(build, name)


def torchvision_package() -> ModuleType:
    """
    Import torchvision, also with a PyTorch without CUDA.

    The registry's wheel is built for CUDA.  Without CUDA its own operators such as `nms` are missing, and describing a
    missing operator is an error.  Classifiers do not use them.
    """
    described = torch.library.register_fake

    def describe(operator: Any, *arguments: Any, **options: Any) -> Any:
        if str(operator).startswith("torchvision::"):
            return lambda function: function
        return described(operator, *arguments, **options)

    torch.library.register_fake = describe
    try:
        import torchvision
    finally:
        torch.library.register_fake = described
    return torchvision
