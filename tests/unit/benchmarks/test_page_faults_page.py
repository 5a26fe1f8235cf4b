"""The tables of page faults are what the timings say."""

from __future__ import annotations

from benchmarks.pages import page_faults


def visited(size, rate, faults, peak=10, share=0.25):
    """A process with one visit."""
    visit = {"batch_size": size, "seconds": size / rate, "page_faults": faults, "system_share": share}
    return {"peak_bytes": peak, "visits": [visit]}


def test_page_faults_are_medians_and_gains_are_ratios():
    """Of processes alone and in turns, as glibc is and with raised bounds; kept memory by its gain only."""
    turns = visited(16, 105.0, 10)
    turns["visits"] += [*visited(32, 300.0, 70)["visits"], *visited(16, 125.0, 30)["visits"]]
    row = {
        "module": "a", "mode": "inference",
        "alone": {
            "given_back": [
                visited(16, 100.0, 9e3, 10, share=0.5), visited(16, 120.0, 1e4, 12),
                visited(16, 80.0, 2e4, 9, share=0.1), visited(32, 200.0, 5, 20),
            ],
            "raised": [
                visited(16, 110.0, 5, 10), visited(16, 115.0, 9, 9), visited(16, 90.0, 1, 11),
                visited(32, 260.0, 0, 30),
            ],
            "kept": [
                visited(16, 150.0, 0, 11), visited(16, 130.0, 1, 15), visited(16, 140.0, 2, 20),
                visited(32, 300.0, 0, 30),
            ],
        },
        "in_turns": {"given_back": [turns], "raised": [visited(16, 50.0, 7), visited(32, 260.0, 0)]},
    }  # fmt: skip
    about = {"device": "a CPU", "threads": 2, "date": "2026-01-01", "commit": "c0ffee", "raised": "Y=2", "kept": "X=1"}
    text = page_faults.page_faults({**about, "rows": [row]})
    assert "Raised by `Y=2`, kept by `X=1`." in text
    as_it_is = "100 (80 to 120; 3) | 10 000 | 115 (105 to 125; 2) | 20"
    assert f"| `a` | inference | 16 | {as_it_is} | 110 (90 to 115; 3) | 5 | 50 (1) | 7 |" in text
    assert "| `a` | inference | 32 | 200 (1) | 5 | 300 (1) | 70 | 260 (1) | 0 | 260 (1) | 0 |" in text
    assert "| `a` | inference | 16 | 25 % | 1.10 | 1.00 | 1.40 | 1.50 |" in text
    assert "| `a` | inference | 32 | 25 % | 1.30 | 1.50 | 1.50 | 1.50 |" in text
