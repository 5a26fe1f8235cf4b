"""Figures of tables are those of planted numbers; `render --check` compares all tables with committed results."""

from __future__ import annotations

from benchmarks.pages import kernel_means, modules, search
from benchmarks.pages.gpu_rows import OURS

MIB = 2**20
ABOUT = {"device": "a CPU", "threads": 2, "date": "2026-01-01", "commit": "c0ffee"}


def cells(text):
    """Return the rows of the tables in a text, without heads and rules."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    rules = {n for n, line in enumerate(lines) if set(line) <= set("|-: ")}
    rows = [line for n, line in enumerate(lines) if n not in rules and n + 1 not in rules]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


# --- modules and memory ---


def finder(name, lost, seconds, failures):
    return {"finder": name, "lost": lost, "seconds": seconds, "failures": failures}


def test_finders_are_averaged_over_all_modules():
    cases = [
        {"module": "a", "mode": "training", "finders": [finder("cubatch", 0.01, 4.0, 0), finder("other", 1.0, 9.0, 2)]},
        {"module": "b", "mode": "training", "finders": [finder("cubatch", 0.05, 6.0, 0), finder("other", 0.0, 1.0, 3)]},
    ]
    facts = {"environment": {"torch": "2"}, "budget_seconds": 20.0, "max_batch_size": 64}
    text = modules.answers({**ABOUT, **facts, "rows": cases})
    assert text.startswith("a CPU, 2 threads, 2026-01-01, commit c0ffee")
    assert cells(text) == [
        ["**cubatch**", "3.0 %", "5.0 %", "1 of 2", "5.0", "0"],
        ["other", "50.0 %", "100.0 %", "1 of 2", "5.0", "5"],
    ]


def module(name, error, most):
    """Return a module of which two sizes ran."""
    sizes = [
        {"batch_size": 1, "said": MIB, "took": MIB},
        {"batch_size": 8, "said": (1 + error) * 100 * MIB, "took": 100 * MIB},
    ]
    return {"module": name, "mode": "training", "batch_size": 8, "sizes": sizes, "error": error, "most": most,
            "walked_error": -0.5}  # fmt: skip


def test_memory_errors_are_of_the_largest_size_of_each_module():
    """Errors of -10, -11 and 0 %: their median is 10 %, the worst -11 %; two of three are within a tenth."""
    result = {
        **ABOUT, "benchmark": "module_memory", "image": [3, 64, 64],
        "rows": [module("a", -0.1, 0.9), module("b", -0.11, 1.01), module("c", 0.0, 1.2)],
    }  # fmt: skip
    ((*_, median, worst, verdict),) = cells(modules.memory_errors(result))
    assert (median, worst) == ("10.0 %", "-11.0 %")
    assert verdict == "2 of 3 within 10 %, 2 with a size above the limit"
    assert cells(modules.memory(result))[1][3:] == ["89.00 MiB", "100.00 MiB", "-11.0 %", "-50.0 %", "101 %"]


def test_memory_of_a_gpu_pass_is_of_the_steps_that_ran():
    items = [{"status": "ok", "planned_bytes": planned, "held_bytes": 100} for planned in (99, 100, 104)]
    items.append({"status": "failed", "planned_bytes": 1, "held_bytes": 100})
    result = {**ABOUT, "device": {"name": "a GPU"}, "stages": [{"name": "memory", "items": items}]}
    ((_, origin, median, worst, verdict),) = cells(modules.memory_errors(result))
    assert (origin, median, worst, verdict) == ("a GPU, 2026-01-01, commit c0ffee", "1.0 %", "+4.0 %", "3 steps")


# --- search, kernels ---


def test_classes_of_the_search_have_a_row_with_the_default_budget():
    summary = [
        {"kind": kind, "finder": name, "budget": budget, "regret": {"mean": regret}}
        for kind, name, budget, regret in (
            ("all classes", "cubatch", 60.0, 0.1), ("all classes", "cubatch", 2.0, 0.9),
            ("all classes", "rival", None, 0.2), ("plateau", "cubatch", 60.0, 0.01), ("plateau", "cubatch", 2.0, 0.5),
            ("latency", "cubatch", 60.0, 0.03), ("plateau", "rival", None, 0.04),
        )
    ]  # fmt: skip
    text = search.search_classes({**ABOUT, "summary": summary})
    assert cells(text) == [["plateau", "1.0 %", "4.0 %"], ["latency", "3.0 %", ""]]


def gpu_pass(commit, date, *cases):
    """Return a pass with a stage for each case: its name, type, ratios."""
    stages = [
        {"name": name, "items": [{"result": {
            "case": {"dtype": dtype, "pass": "dgrad", "flops": 1}, "bound": "compute",
            "entries": [{"side": OURS, "status": "ok", "seconds": 1.0, "ratio": ratio, "ratio_interval": None}],
        }} for ratio in ratios]}
        for name, dtype, ratios in cases
    ]  # fmt: skip
    return {**ABOUT, "device": {"name": "a GPU"}, "commit": commit, "date": date, "stages": stages}


def test_kernel_means_are_of_the_run_with_most_cases_and_of_the_latest_among_equals():
    """In float16 0.5 and 2 are 1.00, in float32 4 is 4.00; a step of wide interval is left out."""
    early = gpu_pass("a", "2026-01-01", ("gemm", "float16", [0.5, 2.0]), ("layers", "float16", [0.5]))
    late = gpu_pass(
        "b", "2026-01-02", ("gemm", "float16", [9.0]), ("gemm", "float32", [4.0]), ("layers", "float16", [1.5])
    )
    steps = [(early, "bfloat16", 1.5, [1.45, 1.55]), (early, "float16", 2.0, [1.0, 3.0])]
    for result, dtype, ratio, interval in steps:
        step = {"network": "net", "batch_size": 8, "dtype": dtype, "ratio": ratio, "ratio_interval": interval}
        result["stages"].append({"name": "training", "items": [{"status": "ok", **step}]})
    assert cells(kernel_means.means(late, early)) == [
        ["matrix products, cuBLAS", "1.00 (2)", "", "", "4.00 (1)", "a, b"],
        ["convolutions, input gradient, cuDNN", "1.50 (1)", "", "", "", "b"],
        ["training step of net, batch 8, PyTorch eager", "", "1.50 (1)", "", "", "a"],
    ]
