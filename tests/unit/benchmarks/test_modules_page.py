"""The table of PyTorch modules' memory is what the result says."""

from __future__ import annotations

from benchmarks.pages import modules

MIB = 2**20


def row(module, error, most):
    """A module of which two sizes ran."""
    sizes = [{"batch_size": 1, "said": MIB, "took": MIB}, {"batch_size": 8, "said": 90 * MIB, "took": 100 * MIB}]
    return {"module": module, "mode": "training", "batch_size": 8, "sizes": sizes, "error": error,
            "walked_error": -0.5, "most": most}  # fmt: skip


def test_each_module_has_its_largest_size_and_the_caption_counts():
    """Within a tenth, and above the limit, each by its own figure."""
    about = {"device": "a CPU", "threads": 2, "date": "2026-01-01", "commit": "c0ffee", "image": [3, 64, 64]}
    text = modules.memory({**about, "rows": [row("near", -0.1, 0.9), row("far", -0.11, 1.01), row("over", 0.0, 1.2)]})
    assert "inputs of 3x64x64; 2 of 3 within 10 %, 2 with a size that took more" in text
    assert "| `far` | training | 8 | 90.00 MiB | 100.00 MiB | -11.0 % | -50.0 % | 101 % |" in text
