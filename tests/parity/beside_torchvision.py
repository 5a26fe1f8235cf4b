"""Importing what imports torchvision, of which a build for GPUs cannot register shapes beside a PyTorch for CPUs."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from unittest import mock

import pytest

torch = pytest.importorskip("torch")


@contextlib.contextmanager
def registering_nothing() -> Iterator[None]:
    """Let torchvision be imported without the shapes of operators that are not there, which no test here needs."""
    with (
        warnings.catch_warnings(),
        mock.patch.object(torch.library, "register_fake", return_value=lambda function: function),
    ):
        warnings.simplefilter("ignore")
        yield
