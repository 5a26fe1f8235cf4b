"""Figures of the tables are those of planted numbers, worked out by hand."""

from __future__ import annotations

from benchmarks.pages import cpu, kernel_means, modules, predictor, search
from benchmarks.pages.gpu_rows import OURS
from benchmarks.pages.trust import trust

MIB = 2**20
ABOUT = {"device": "a CPU", "threads": 2, "date": "2026-01-01", "commit": "c0ffee"}
MACHINE = {"name": "a CPU", "threads": 2}


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


def test_memory_of_the_engine_is_within_two_percent_or_four_mebibytes():
    """Of 100 MiB 103 is near by bytes, of 1000 MiB 1021 is not; a failed size counts as that."""
    sizes = [(1, 100, 103), (8, 1000, 1021), (64, 1000, 981)]
    rows = [
        {"model": "net", "mode": "inference", "batch_size": n, "planned": MIB, "said": said * MIB, "took": used * MIB}
        for n, used, said in sizes
    ]
    rows.append({"model": "other", "mode": "inference", "batch_size": 1, "error": "no memory"})
    facts = {"benchmark": "memory", "environment": {"blas": "b"}, "optimizer": "sgd"}
    text = modules.engine_memory({**ABOUT, **facts, "rows": rows})
    assert "2 of 3 sizes within 2 % or 4.00 MiB, 1 used more than predicted, 1 failed" in text
    assert [row[-1] for row in cells(text)] == ["-19.0 to +21.0 MiB"]


def test_memory_of_a_gpu_pass_is_of_the_steps_that_ran():
    items = [{"status": "ok", "planned_bytes": planned, "held_bytes": 100} for planned in (99, 100, 104)]
    items.append({"status": "failed", "planned_bytes": 1, "held_bytes": 100})
    result = {**ABOUT, "device": {"name": "a GPU"}, "stages": [{"name": "memory", "items": items}]}
    ((_, origin, median, worst, verdict),) = cells(modules.memory_errors(result))
    assert (origin, median, worst, verdict) == ("a GPU, 2026-01-01, commit c0ffee", "1.0 %", "+4.0 %", "3 steps")


def process(size, rate, faults, peak=10, share=0.25):
    visit = {"batch_size": size, "seconds": size / rate, "page_faults": faults, "system_share": share}
    return {"peak_bytes": peak, "visits": [visit]}


def test_page_faults_are_medians_and_gains_are_ratios_of_medians():
    alone = {
        "given_back": [process(16, 100.0, 9e3, 10, 0.5), process(16, 120.0, 1e4, 12), process(16, 80.0, 2e4, 9, 0.1)],
        "raised": [process(16, 110.0, 5, 10), process(16, 115.0, 9, 9), process(16, 90.0, 1, 11)],
        "kept": [process(16, 150.0, 0, 11), process(16, 130.0, 1, 15), process(16, 140.0, 2, 20)],
    }
    turns = {"given_back": [process(16, 105.0, 10), process(16, 125.0, 30)], "raised": [process(16, 50.0, 7)]}
    row = {"module": "a", "mode": "inference", "alone": alone, "in_turns": turns}
    rates, gains = cells(modules.page_faults({**ABOUT, "raised": "Y=2", "kept": "X=1", "rows": [row]}))
    assert rates[3:7] == ["100 (80 to 120; 3)", "10 000", "115 (105 to 125; 2)", "20"]
    assert rates[7:] == ["110 (90 to 115; 3)", "5", "50 (1)", "7"]
    assert gains[3:] == ["25 %", "1.10", "1.00", "1.40", "1.50"]


# --- search, engine, kernels, predictions ---


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


def test_engine_means_are_geometric():
    """Of 0.5 and 2 the mean is 1, of 1 and 4 it is 2."""
    networks = [
        {"network": name, "mode": mode, "mean_ratio": ratio, "rows": [{"ratio": ratio}, {"ratio": least}]}
        for name, mode, ratio, least in (
            ("a", "training", 0.5, 0.4), ("b", "training", 2.0, 3.0), ("a", "inference", 1.0, 0.9),
            ("b", "inference", 4.0, 1.5),
        )
    ]  # fmt: skip
    facts = {"device": MACHINE, "environment": {"torch": "2", "blas": "b"}, "rounds": 5, "networks": networks}
    assert cells(cpu.engine_cpu_means({**ABOUT, **facts})) == [
        ["a", "1.00", "0.50", "0.40"],
        ["b", "4.00", "2.00", "1.50"],
        ["**geometric mean**", "**2.00**", "**1.00**", ""],
    ]


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


def test_goals_of_predictions_name_the_worst_gpu_and_the_share_of_knees():
    scores = {
        "neusight, unseen GPU": {"mean": 8.0, "median": 6.0, "rows": 1200},
        "neusight, unseen GPU, x": {"mean": 7.0, "bias": 1.0},
        "neusight, unseen GPU, y": {"mean": 9.0, "bias": -3.0},
        "deepbench conv, unseen GPU, knee": {"exact": 75.0, "exact_of_largest": 78.0, "sweeps": 10},
        "cliffs": {"pairs": 4, "named_and_measured": ["p"], "only_measured": ["q"], "only_named": []},
    }
    result = {"date": "2026-01-01", "commit": "c", "scores": scores, "goals": {"neusight, unseen GPU": [11, None]}}
    assert [row[1] for row in cells(predictor.goals(result))] == [
        "8.0 % / 6.0 %", "9.0 %", "-3.0 %", "75 % (“the largest”: 78 %)", "1 of 2, 1 of 1",
    ]  # fmt: skip


def test_the_short_table_has_the_figures_of_each_file():
    """The largest error of memory is 195 / 200 - 1; recommendations spread by 2 and 4."""
    searched = {"devices": 7, "summary": [
        {"kind": kind, "budget": budget, "regret": {"mean": mean, "p95": 5 * mean}, "seconds": {"mean": 6.5}}
        for kind, budget, mean in (("all classes", 60.0, 0.011), ("all classes", 2.0, 0.5), ("plateau", 60.0, 0.3))
    ]}  # fmt: skip
    rows = [
        {"finder": "cubatch", "spread": spread, "mean_loss": loss, "runs": 10}
        for spread, loss in ((2, 0.01), (4, 0.05))
    ]
    repeated = {"device": "a CPU", "workloads": [{"summary": [row]} for row in rows]}
    sizes = [{"peak_bytes": 100, "predicted_peak_bytes": 101}, {"peak_bytes": 200, "predicted_peak_bytes": 195},
             {"peak_bytes": None, "predicted_peak_bytes": 9}]  # fmt: skip
    planned = {"measurements": sizes, "spec": {"name": "net"}, "mode": "training", "device": MACHINE}
    scored = {"scores": {
        "neusight, unseen GPU": {"median": 6.3}, "deepbench conv, unseen GPU": {"median": 13.0},
        "networks, a": {"inside_interval": 90, "mean_error": 16.0},
        "networks, b": {"inside_interval": 80, "mean_error": 47.0},
    }}  # fmt: skip
    engine = {
        "networks": [{"mean_ratio": 0.76}, {"mean_ratio": 1.72}],
        "device": MACHINE,
        "environment": {"torch": "2"},
    }
    trained = {"epochs": [{"number": 2, "test_accuracy": 0.9888}], "model": "net", "batch_size": 64, "device": MACHINE}
    rows = cells(trust(searched, repeated, planned, scored, engine, trained))
    wanted = [
        ["1.1 %", "5.5 %", "6.5 s"], ["3.0", "4.0 at most", "1.0 % to 5.0 %"], ["2.50 %", "2 batch sizes"],
        ["6.3 %", "13.0 %", "16 to 47 %"], ["0.76 to 1.72"], ["98.88 %", "2 epochs"],
    ]  # fmt: skip
    assert len(rows) == len(wanted)
    assert [
        (row[0], figure) for row, found in zip(rows, wanted, strict=True) for figure in found if figure not in row[1]
    ] == []
