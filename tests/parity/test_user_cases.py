"""Modules of public bug reports: the recommendation is right, or the first sentence says why there is none."""

from __future__ import annotations

import warnings

import pytest

import cubatch as cb

torch = pytest.importorskip("torch")

nn = torch.nn


class Head(nn.Module):
    """Normalizes over the batch, which PyTorch refuses in training for one sample."""

    def __init__(self):
        super().__init__()
        self.norm, self.out = nn.BatchNorm1d(4), nn.Linear(4, 2)

    def forward(self, x):
        return self.out(self.norm(x))


def test_a_batch_norm_leaves_out_one_sample():
    """ultralytics#26224: the failure at batch size 1 was taken for the memory limit, and 1 was the answer."""
    result = cb.autotune_module(Head(), (4,), mode="training", device="cpu", batch_sizes=[1, 2, 8], budget=30.0)
    assert result.batch_size in {2, 8}
    assert result.sizes[1].status == "error"
    assert any("1 (ValueError: Expected more than 1 value per channel" in reason for reason in result.reasons)


class Queue(nn.Module):
    """A queue of keys, into which batches go that divide its length."""

    def __init__(self, length):
        super().__init__()
        self.encoder = nn.Linear(8, 8)
        self.register_buffer("keys", torch.randn(length, 8))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    def forward(self, x):
        n, length = len(x), len(self.keys)
        assert length % n == 0, f"a queue of {length} takes no batches of {n}"
        key, start = self.encoder(x), int(self.place) % length
        score = key @ self.keys.clone().T
        with torch.no_grad():
            self.keys[start : start + n] = key[: length - start]
            self.place[0] = (start + n) % length
        return score


def test_sizes_that_do_not_divide_a_queue_close_no_others():
    """BLIP#101: sizes above the first that failed were not tried; the queue is as before."""
    module = Queue(64)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    result = cb.autotune_module(module, (8,), mode="training", device="cpu", max_batch_size=64, budget=20.0)
    assert 64 % result.batch_size == 0
    assert result.largest_measured == 64
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


class Experts(nn.Module):
    """One product with a matrix of its own for each group of rows."""

    def __init__(self):
        super().__init__()
        self.weights = nn.Parameter(torch.randn(4, 16, 16))

    def forward(self, x):
        ends = torch.arange(1, 5, dtype=torch.int32) * (len(x) // 4)
        return nn.functional.grouped_mm(x[: 4 * (len(x) // 4)], self.weights, offs=ends)


@pytest.mark.skipif(not hasattr(nn.functional, "grouped_mm"), reason="this PyTorch has no grouped product")
def test_grouped_products_are_bounded_by_the_memory_limit():
    """Models with a mixture of experts call it: a result for 8 samples takes 8 x 16 floats and the inputs."""
    example = torch.randn(8, 16)
    result = cb.autotune_module(Experts(), example, device="cpu", memory_limit="64MiB", budget=3.0)
    assert max(result.sizes) <= 2**26 / (2 * 4 * 16)


class Last(nn.Module):
    """Picks a row of its own for each sample."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return self.layer(x)[torch.arange(x.shape[0]), x[..., 0].argmax(1)]


def test_an_onnx_range_over_the_batch_is_bounded(tmp_path):
    """Without a value of the extent, the memory of the file was unknown; the limit holds."""
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    path = tmp_path / "last.onnx"
    example = torch.randn(2, 5, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's own
        torch.onnx.export(Last().eval(), (example,), str(path), dynamic_shapes=({0: "batch"},), verbose=False)
    result = cb.autotune(
        str(path), library="onnxruntime", device="cpu", memory_limit="64MiB", budget=3.0, store=False
    )  # fmt: skip
    assert result.recommended
    assert max(result.sizes) <= 2**26 / (4 * 5 * 8)
