"""Models made by hand in the place of those that cubatch comes with."""

from __future__ import annotations

import pytest

from cubatch.estimate.vendor import vendor_model
from tests.unit.estimate.steps import (
    model_of,
)


@pytest.fixture
def shipped(monkeypatch):
    """Models by hand in the place of those that come with cubatch; what was asked of which."""
    found = {
        name: model_of(name, sd)
        for name, sd in (
            ("neusight", 0.1), ("deepbench conv", 0.2), ("deepbench gemm", 0.4),
            ("deepbench conv tensor", 0.3), ("deepbench gemm tensor", 0.5),
        )
    }  # fmt: skip
    monkeypatch.setattr(vendor_model, "shipped", found.__getitem__)
    return found
