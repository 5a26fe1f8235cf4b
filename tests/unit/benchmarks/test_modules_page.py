"""The tables of PyTorch modules are what the results say."""

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


def test_a_gpu_has_no_threads_to_tell():
    """They are of a CPU."""
    about = {"device": "a GPU", "threads": None, "date": "2026-01-01", "commit": "c0ffee", "image": [3, 64, 64]}
    assert modules.memory({**about, "rows": [row("near", 0.0, 0.9)]}).startswith("a GPU, 2026-01-01, commit c0ffee, ")


def finder(name, lost, seconds, failures):
    """What a finder did in one case."""
    return {"finder": name, "lost": lost, "seconds": seconds, "failures": failures}


def test_finders_are_summed_up_over_all_cases():
    """Means over cases, the worst, how many are close, and every out-of-memory; ours in bold."""
    cases = [
        {"module": "a", "mode": "training", "finders": [finder("cubatch", 0.01, 4.0, 0), finder("other", 1.0, 9.0, 2)]},
        {"module": "b", "mode": "training", "finders": [finder("cubatch", 0.05, 6.0, 0), finder("other", 0.0, 1.0, 3)]},
    ]
    about = {"device": "a CPU", "threads": 2, "date": "2026-01-01", "commit": "c0ffee", "environment": {"torch": "2"}}
    text = modules.answers({**about, "budget_seconds": 20.0, "max_batch_size": 64, "rows": cases})
    assert "training of `a`, `b`; sizes up to 64" in text
    assert "| **cubatch** | 3.0 % | 5.0 % | 1 of 2 | 5.0 | 0 |" in text
    assert "| other | 50.0 % | 100.0 % | 1 of 2 | 5.0 | 5 |" in text
