"""Layers that take the batch for time are named, and those that are handed the right axes are not."""

from __future__ import annotations

import pytest

import cubatch as cb
from cubatch.frameworks import torch_memory

torch = pytest.importorskip("torch")
nn = torch.nn


class Last(nn.Module):
    """Gives the last output of a recurrent layer, maybe with its axes turned before."""

    def __init__(self, layer, *, turned=False):
        super().__init__()
        self.rnn, self.turned = layer, turned

    def forward(self, x):
        """Give (batch, features)."""
        return self.rnn(x.transpose(0, 1) if self.turned else x)[0][-1]


class Attention(nn.Module):
    """Attends from tokens to themselves."""

    def __init__(self, **options):
        super().__init__()
        self.mix = nn.MultiheadAttention(8, 2, **options)

    def forward(self, x):
        """Give (batch, tokens, features)."""
        return self.mix(x, x, x, need_weights=False)[0]


def told(module, shape, mode="inference", sizes=(2, 4)):
    """What the answer for a module says of axes."""
    loss = (lambda output: output.square().sum()) if mode == "training" else None
    result = cb.autotune_module(module, shape, mode=mode, loss=loss, batch_sizes=sizes, budget=0.5)
    return [reason for reason in result.reasons if "batch_first" in reason]


@pytest.mark.parametrize("mode", ["inference", "training"])
@pytest.mark.parametrize(
    ("module", "named"),
    [
        (Last(nn.LSTM(8, 6)), "rnn (LSTM)"), (Last(nn.GRU(8, 6)), "rnn (GRU)"), (Last(nn.RNN(8, 6)), "rnn (RNN)"),
        (Attention(), "mix (MultiheadAttention)"),
    ],
)  # fmt: skip
def test_a_layer_that_takes_the_batch_for_time_is_named(module, named, mode):
    """One note, in both modes; the module is measured all the same, and has no hook afterwards."""
    [note] = told(module, (5, 8), mode)
    assert note.startswith(f"{named} reads axis 0 of its input as time, ")
    assert not torch.nn.modules.module._global_forward_pre_hooks


@pytest.mark.parametrize("length", [2, 16, 64])
def test_a_sequence_as_long_as_a_batch_of_the_walk_is_told_of_too(length):
    """Of the batch sizes that are walked through, one alone looks as if the axes were right."""
    [note] = told(Last(nn.LSTM(8, 6)), (length, 8), sizes=(2, 64))
    assert note.startswith("rnn (LSTM) reads axis 0 of its input as time, ")


@pytest.mark.parametrize("batch_first", [True, False])
def test_rows_without_a_batch_are_steps_in_time(batch_first):
    """Two axes are one sequence to these layers, whatever the order of three would be."""
    [note] = told(Last(nn.LSTM(8, 6, batch_first=batch_first)), (8,))
    assert note.startswith("rnn (LSTM) reads axis 0 of its input as time, ")


def test_of_several_layers_the_first_is_named():
    """And how many more do so: a stack of layers would fill the page."""
    [note] = told(nn.Sequential(Attention(), Attention(), Attention()), (5, 8))
    assert note.startswith("0.mix (MultiheadAttention) reads axis 0 of its input as time, ")
    assert "such parts: 3" in note


class Windows(nn.Module):
    """Attends within windows of 64 tokens, which lie beside the batch."""

    def __init__(self):
        super().__init__()
        self.mix = nn.MultiheadAttention(8, 2)

    def forward(self, x):
        """Give (batch, tokens, features)."""
        rows = x.reshape(-1, 64, 8).transpose(0, 1)
        return self.mix(rows, rows, rows, need_weights=False)[0].transpose(0, 1).reshape(x.shape)


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (Windows(), (192, 8)),  # as long as the largest batch that is walked through is large
        (Last(nn.LSTM(8, 6, batch_first=True)), (5, 8)),
        (Last(nn.LSTM(8, 6), turned=True), (5, 8)),
        (Last(nn.LSTM(8, 6), turned=True), (2, 8)),  # as long as the smallest batch is large
        (Last(nn.LSTM(8, 6), turned=True), (1, 8)),
        (Attention(batch_first=True), (5, 8)),
    ],
)  # fmt: skip
def test_nothing_is_said_of_layers_that_have_the_batch_where_they_look_for_it(module, shape):
    """Also where a sequence is as long as a batch is large, or of one step alone."""
    assert told(module, shape, sizes=(2, 64)) == []


class OneByOne(nn.Module):
    """Runs its layer for each sample."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x):
        """Give (batch, features)."""
        return torch.stack([self.layer(sample) for sample in x])


@pytest.mark.parametrize("module", [Last(nn.GRU(8, 6)), Last(nn.LSTM(8, 6)), OneByOne()])
def test_a_step_that_goes_from_sample_to_sample_is_not_walked_through_at_a_large_size(module, monkeypatch):
    """It would take as many operations as samples fit into the memory; what a few samples took is what is known."""
    sizes, walk = [], torch_memory.walked

    def walked(module, inputs, kind, device, batch_size, **limit):
        sizes.append(batch_size)
        return walk(module, inputs, kind, device, batch_size, **limit)

    monkeypatch.setattr(torch_memory, "walked", walked)
    result = cb.autotune_module(module, (5, 8), memory_limit="4GiB", budget=0.5)
    assert sizes == [2, 16, 64]
    assert max(result.sizes) > 64
