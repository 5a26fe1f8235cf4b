"""What a model says when preparing it fails."""

from __future__ import annotations

import pytest

from cubatch.engine.network import Model
from cubatch.errors import OutOfMemory
from cubatch.hardware import probe
from cubatch.network import models


class Fault(RuntimeError):
    """What a library raises of a GPU whose context is broken."""


@pytest.mark.parametrize(("first", "told"), [(Fault("illegal address"), Fault), (MemoryError(), OutOfMemory)])
def test_the_first_error_is_told_where_giving_back_fails_too(monkeypatch, first, told):
    """After a fault every call fails, that which frees memory as well; which says less."""
    model = Model(models.build("mlp"), device=probe.device("cpu"))

    def fail(plan):
        del plan
        monkeypatch.setattr(model, "release", lambda: (_ for _ in ()).throw(Fault("cannot free")))
        raise first

    monkeypatch.setattr(model, "_lay_out", fail)
    with pytest.raises(told) as caught:
        model.prepare(4)
    assert "cannot free" not in str(caught.value)
    assert first in {caught.value, caught.value.__cause__}
