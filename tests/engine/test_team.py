"""A team of threads: everyone works, meets, and fails together."""

from __future__ import annotations

import gc
import signal
import threading

import numpy as np
import pytest
from threadpoolctl import threadpool_info, threadpool_limits

from cubatch.engine.interrupts import Interrupts
from cubatch.engine.team import Team


def test_every_member_works_once_in_a_thread_of_its_own():
    """Rank 0 is the caller, so a team of three starts two threads."""
    seen = {}
    with Team(3) as team:
        team.run(lambda rank: seen.__setitem__(rank, threading.get_ident()))
    assert sorted(seen) == [0, 1, 2]
    assert seen[0] == threading.get_ident()
    assert len(set(seen.values())) == 3


def test_sum_gives_all_members_the_same_total():
    """The order of the sum is that of the ranks, so the bits agree."""
    parts = np.random.default_rng(0).standard_normal((3, 5))
    results = [part.copy() for part in parts]
    with Team(3) as team:
        team.run(lambda rank: team.sum(rank, results[rank]))
    for result in results:
        np.testing.assert_array_equal(result, parts[0] + parts[1] + parts[2])


def test_an_error_in_one_member_frees_the_others_and_is_raised():
    """A member that waits for one that has failed would wait forever."""

    def work(rank):
        if rank == 1:
            raise KeyError("boom")
        team.barrier(rank)

    with Team(2) as team:
        with pytest.raises(KeyError, match="boom"):
            team.run(work)
        done = []
        team.run(lambda rank: (team.barrier(rank), done.append(rank)))
        assert sorted(done) == [0, 1]


def test_blas_has_one_thread_per_member_while_the_team_is_open():
    """The members are the parallelism; the limit goes with the team."""

    def threads():
        return [pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"]

    before = threads()
    with Team(2):
        assert set(threads()) == {1}
    assert threads() == before


def test_blas_gets_its_threads_back_in_whatever_order_teams_end():
    """Two tuners in two threads: the first to begin ends first, and what the other found was its limit."""
    before = [pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"]
    with threadpool_limits(3, user_api="blas"):
        first, second = Team(2), Team(2)
        for team in (first, second):
            assert {pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"} == {1}
            team.close()
            team.close()
        assert {pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"} == {3}
    assert [pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"] == before


def test_a_team_that_nobody_closed_is_ended_with_its_last_name():
    """A model that is dropped without close leaves neither threads nor a limit behind."""
    others, before = set(threading.enumerate()), [pool["num_threads"] for pool in threadpool_info()]
    team = Team(3)
    members = set(threading.enumerate()) - others
    assert len(members) == 2
    del team
    gc.collect()
    for member in members:
        member.join(60)
        assert not member.is_alive()
    assert [pool["num_threads"] for pool in threadpool_info()] == before


def test_a_team_that_cannot_start_leaves_nothing_behind(monkeypatch):
    """The second of three threads fails, as where a limit on processes is reached."""
    before = [pool["num_threads"] for pool in threadpool_info()]
    start, started = threading.Thread.start, []

    def fail(thread):
        if started:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", fail)
    with pytest.raises(RuntimeError, match="new thread"):
        Team(4)
    started[0].join(60)
    assert not started[0].is_alive()
    assert [pool["num_threads"] for pool in threadpool_info()] == before


@pytest.mark.parametrize(("n", "size"), [(5, 2), (1, 3), (256, 7), (0, 2)])
def test_shards_cover_the_batch_once_and_evenly(n, size):
    """Sizes differ by one at most; some may be empty."""
    with Team(size) as team:
        shards = [team.shard(n, rank) for rank in range(size)]
    assert [i for shard in shards for i in range(n)[shard]] == list(range(n))
    sizes = [shard.stop - shard.start for shard in shards]
    assert max(sizes) - min(sizes) <= 1


def test_ctrl_c_waits_until_the_members_have_met():
    """A signal in the middle of a region comes out after it, and the team still works."""
    done, usual = [], signal.getsignal(signal.SIGINT)

    def work(rank):
        if rank == 0:
            signal.raise_signal(signal.SIGINT)
        done.append(rank)

    with Team(2) as team:
        with pytest.raises(KeyboardInterrupt):
            team.run(work)
        assert sorted(done) == [0, 1]
        team.run(done.append)
    assert sorted(done) == [0, 0, 1, 1]
    assert signal.getsignal(signal.SIGINT) is usual


def test_a_second_ctrl_c_comes_through_whoever_holds_the_first():
    """Also where a run of training waits for its step to end; an error of the step does not hide the first."""
    usual = signal.getsignal(signal.SIGINT)

    def work(rank):
        if rank == 0:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            pytest.fail("the second was held back too")

    with Team(2) as team, pytest.raises(KeyboardInterrupt), Interrupts():
        team.run(work)

    def failing():
        with Interrupts():
            signal.raise_signal(signal.SIGINT)
            raise MemoryError

    with pytest.raises(KeyboardInterrupt):
        failing()
    assert signal.getsignal(signal.SIGINT) is usual
