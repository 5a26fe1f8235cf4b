"""Fake hosts that switch between two states: what their clocks read, and how answers are judged."""

from __future__ import annotations

from benchmarks import bench_hosts


def test_the_same_seed_gives_the_same_search_and_the_best_size_loses_nothing(monkeypatch):
    """A finder that knows the truth has no regret, in every run."""
    best = {}

    def know(host, session, seed, budget):
        size = max(range(1, host.max_batch_size + 1), key=host.rate)
        return best.setdefault(session.host.max_batch_size, size), None

    monkeypatch.setitem(bench_hosts.FINDERS, "knows", know)
    rows = [bench_hosts.search(bench_hosts.Search(0, 1, 0.05, seed, "knows", 5.0)) for seed in (0, 0, 1)]
    assert [row["loss"] for row in rows] == [0.0, 0.0, 0.0]
    twice = [bench_hosts.search(bench_hosts.Search(0, 1, 0.05, 0, bench_hosts.OURS, 2.0)) for _ in range(2)]
    assert twice[0] == twice[1]


def test_figures_are_spreads_over_seeds_and_means_over_hosts():
    """Two hosts answered 8 and 16, 4 and 16: spreads of 2 and 4; a mean regret of 1 % misses no goal."""
    rows = [
        {"spread": 0.05, "finder": bench_hosts.OURS, "host": host, "batch_size": size, "regret": regret, "loss": regret,
         "seconds": 10.0, "rate_error": 0.1}
        for host, size, regret in ((0, 8, 0.02), (0, 16, 0.0), (1, 4, 0.02), (1, 16, 0.0))
    ]  # fmt: skip
    (row,) = bench_hosts.summarize(rows)
    assert (row["regret"], row["spread_median"], row["seconds"], row["rate_error"]) == (0.01, 3.0, 10.0, 0.1)
    met = {goal["what"]: goal["met"] for goal in bench_hosts.judge([row])}
    assert met == {"regret": True, "spread_median": False, "spread_90": True, "seconds": True}
