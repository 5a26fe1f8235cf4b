"""Memory is known beforehand also of modules that look into their data: what that gives is taken for something."""

from __future__ import annotations

from collections import UserList

import numpy as np
import pytest

import cubatch as cb

torch = pytest.importorskip("torch")

from cubatch.frameworks.memory_meter import HostMeter  # noqa: E402
from cubatch.frameworks.torch_module import TorchModule  # noqa: E402

nn = torch.nn
FLOATS = 1 << 12  # of a sample


class Looks(nn.Module):
    """Looks at its input in one of many ways, and keeps what it gets until the end."""

    def __init__(self, way):
        super().__init__()
        self.way = way

    def forward(self, x):
        found = getattr(self, self.way)(x)
        return x * 2, found

    def number(self, x):
        return x * x.sum().item()

    def whole(self, x):
        return x.new_ones(len(x), x.argmax().item() * 0 + 7)

    def truth(self, x):
        if torch.isnan(x).any():
            raise ValueError("not a number")
        return x + 1

    def equal(self, x):
        return x + int(torch.equal(x, x + 1))

    def masked(self, x):
        return x[x < 9]

    def masked_rows(self, x):
        return x[torch.isfinite(x[:, 0])]

    def selected(self, x):
        return torch.masked_select(x, x < 9)

    def places(self, x):
        return torch.nonzero(x < 9)

    def classes(self, x):
        if len(torch.unique((x > 9).long())) > 2:
            raise ValueError("too many classes")
        return x + 1

    def repeated(self, x):
        return torch.repeat_interleave(torch.ones_like(x[:, 0], dtype=torch.int64))

    def counted(self, x):
        return torch.bincount((x[:, 0] > 9).long(), minlength=3)


WAYS = {
    "number": 4, "whole": 0, "truth": 4, "equal": 4, "masked": 4, "masked_rows": 4, "selected": 4, "places": 2 * 8,
    "classes": 4, "repeated": 0, "counted": 0,
}  # fmt: skip
"""Bytes that are kept of each number of the input: nothing to speak of where it is a few of a sample."""


def walked(module):
    """What steps take by a walk."""
    kind = {"loss": None, "optimizer": "sgd", "autocast": None, "channels_last": False, "compiled": False}
    return TorchModule(module, (FLOATS,), mode="inference", **kind).peaks(2**40)


@pytest.mark.parametrize("way", WAYS)
def test_what_depends_on_data_is_taken_for_all_that_there_may_be(way):
    """Two arrays of the input's extents, and what was found: by the bytes of a number, masks beside."""
    peaks = walked(Looks(way))
    kept = FLOATS * (4 + 4 + WAYS[way])
    slope = (peaks.at(1000) - peaks.at(500)) / 500
    assert kept <= slope <= kept + FLOATS * 10  # a mask or what was compared, while it was looked for
    assert peaks.guessed


def test_a_module_that_looks_into_nothing_is_walked_through_as_it_is():
    """Nothing is told of it."""
    assert walked(nn.ReLU()).guessed == frozenset()


def test_a_result_says_what_was_guessed_and_the_limit_holds():
    """It needs no max_batch_size any more; no size that takes more is an answer."""
    result = cb.autotune_module(Looks("masked"), (FLOATS,), memory_limit="256MiB", budget=3)
    assert result.largest_batch_size > 1
    assert all(m.peak_bytes <= 256 * 2**20 for m in result.measurements if m.status == "ok" and m.peak_bytes)
    assert any("aten.index.Tensor depend on data" in reason for reason in result.reasons)


class Searches(nn.Module):
    """Goes on until something is true of its data."""

    def forward(self, x):
        while not (x > 9).all():
            x = x + 1
        return x


def test_a_loop_that_ends_with_its_data_is_not_walked_through_for_ever():
    """Without data nothing ever is true: real steps alone bound its memory, and a note says so."""
    result = cb.autotune_module(Searches(), (4,), memory_limit="256MiB", budget=1)
    assert result.largest_batch_size is None or 1 < result.largest_batch_size < 2**28 / 16  # steps take little
    assert any("from measured steps alone" in reason for reason in result.reasons)


class EachRow(nn.Module):
    """Decides for each sample, in a loop whose end does not depend on data."""

    def forward(self, x):
        return torch.stack([row * 2 if row.sum() > 9 else row for row in x])


def test_a_loop_over_samples_ends_and_one_until_something_is_true_is_refused():
    """A hundred decisions in a `for` loop are traced; `while` loops may have 64, after which none ends."""
    assert cb.footprint(EachRow(), (4,), batch_size=100).total == 2 * 100 * 4 * 4
    with pytest.raises(cb.InvalidArgument, match="fixed number of rounds"):
        cb.footprint(Searches(), (4,), batch_size=2)


class Guarded(nn.Module):
    """Raises an error unless all elements pass a check, as losses of detection models do."""

    def forward(self, x):
        if not (x <= x + 1).all():
            raise ValueError("not a number")
        return x * 2


class Converging(nn.Module):
    """Ends a `for` loop as soon as all elements pass a check."""

    def forward(self, x):
        kept = []
        for _ in range(3):
            kept.append(x * 2)
            if (kept[-1][:1] > 9).all():
                break
        return kept


def test_a_check_holds_only_where_the_step_would_raise_an_error_otherwise():
    """By arithmetic: an input and a result of each round, of which a loop until a check holds has all."""
    size = 1000 * FLOATS * 4
    guarded = cb.footprint(Guarded(), (FLOATS,), batch_size=1000)
    assert 2 * size <= guarded.total <= 2.25 * size  # the check has a mask
    assert guarded.data_dependent == ("aten._local_scalar_dense.default",)
    assert "aten._local_scalar_dense.default depend" in " ".join(guarded.table().split())
    assert cb.footprint(Converging(), (FLOATS,), batch_size=1000).total == pytest.approx(4 * size, rel=0.001)
    assert cb.footprint(nn.ReLU(), (FLOATS,), batch_size=1000).data_dependent == ()


class Measuring(nn.Module):
    """Makes as many elements as its data say, as text-to-speech models do."""

    def forward(self, x):
        return torch.arange(x.long().max()) + x[:, :1]


def test_a_module_whose_data_decide_how_large_tensors_are_is_refused():
    """No trace knows the number of elements; the error names the remedy."""
    with pytest.raises(cb.InvalidArgument, match=r"numbers that depend on data .*opaque=") as caught:
        cb.footprint(Measuring(), (4,), batch_size=8)
    assert caught.value.field == "module"


class Routed(nn.Module):
    """Has the number of an expert in a text, as Switch Transformers have."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleDict({f"expert_{place}": nn.Linear(8, 8) for place in range(4)})

    def forward(self, x):
        chosen = x[:, :4].sum(0).argmax()
        return self.experts[f"expert_{chosen}"](x)


class Assigned(nn.Module):
    """Has an array of NumPy made of a tensor by a function of NumPy, as SciPy's assignment does."""

    def forward(self, x):
        order = torch.from_numpy(np.argsort(np.asarray(x[:, 0].detach())))
        return x[order] * 2


@pytest.mark.parametrize(("make", "features"), [(Routed, 8), (Assigned, 8)])
def test_a_number_in_a_text_and_an_array_of_numpy_are_assumed(make, features):
    """Some expert, and some order of the samples; the result says that both depend on data."""
    found = cb.footprint(make(), (features,), batch_size=1000)
    assert found.data_dependent
    assert found.inputs == 1000 * features * 4


class Blind(nn.Module):
    """Reads its data by NumPy, which a walk cannot follow, and keeps the sizes of its calls."""

    def __init__(self):
        super().__init__()
        self.layer, self.sizes = nn.Linear(4, 4), UserList()  # a list would get its old items back

    def forward(self, x):
        self.sizes.append(len(x))
        return self.layer(x) * float(x.numpy()[0, 0])


def test_where_memory_is_neither_traced_nor_measured_two_steps_are_held_to_the_limit(monkeypatch):
    """The second of a size finds the optimiser's state and the gradient of the first; no other look comes later."""
    monkeypatch.setattr(HostMeter, "peak", lambda self: None)
    module = Blind()
    kind = {"loss": None, "optimizer": "adam", "autocast": None, "channels_last": False, "compiled": False}
    runner = TorchModule(module, (4,), mode="training", **kind).ready().runner(2**40, 0)
    runner.prepare(3)
    runner.prepare(5)
    assert module.sizes.count(5) == 2


def test_a_module_without_a_trace_is_bounded_by_its_smaller_steps():
    """It reads its input's memory: a size that would take more than the limit is refused before it runs."""

    class Opaque(nn.Module):
        """Makes arrays by NumPy, which a walk cannot follow."""

        def forward(self, x):
            return torch.from_numpy(x.numpy().repeat(200, axis=0) + 1)

    result = cb.autotune_module(Opaque(), (FLOATS,), batch_sizes=[1, 2, 200], memory_limit="256MiB", budget=20)
    assert result.measurements[-1].status == "over_limit"
    unknown, known, _ = (m.predicted_peak_bytes for m in result.measurements)
    assert unknown is None
    assert known > 0
    assert any("unknown below the smallest" in reason for reason in result.reasons)
