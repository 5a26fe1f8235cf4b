"""The GPU pass where there is no GPU: how it survives items that hang, crash and run out of time."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from benchmarks.gpu import conformance, items as gpu_items, probes, process
from benchmarks.gpu.process import Position
from cubatch.errors import DeviceFailed, InvalidArgument
from tests.unit.benchmarks.passes import H200, lines_of, ran, stage_of


def test_a_stage_that_goes_well_has_all_its_items():
    """Each is kept as it comes."""
    run, saved = ran("for index in range(start, 3): do(index, value=index)")
    assert (run.status, run.message, run.skipped) == ("ok", "", [])
    assert [item["value"] for item in run.items] == [0, 1, 2]
    assert saved[:3] == [1, 2, 3]


def test_an_item_that_hangs_is_noted_and_the_next_goes_on():
    """After its own limit the process is killed, and a new one begins behind it."""
    run, _ = ran(
        """
        for index in range(start, 4):
            if index == 1:
                say(begins=1, name="item 1", limit=0.3)
                time.sleep(60)
            do(index)
        """
    )
    assert [item["status"] for item in run.items] == ["ok", "hung", "ok", "ok"]
    assert run.status == "ok"
    assert "1 processes ended early" in run.message
    assert "item 1 took longer than 0.3 s" in run.message
    assert run.seconds < 10


def test_a_stage_that_only_crashes_is_given_up():
    """A GPU that fell off the bus is not asked a thousand times."""
    run, _ = ran("say(begins=start, name=f'item {start}', limit=5); sys.exit('gone')")
    assert run.status == "failed"
    assert len(run.items) == process.MAX_RESTARTS + 1


@pytest.mark.parametrize(
    ("falls", "reason"),
    [
        ("sys.exit('Traceback\\nCUDARuntimeError: an illegal address')", "CUDARuntimeError: an illegal address"),
        ("time.sleep(60)", "item 1 took longer than 0.3 s"),
    ],
)
def test_a_kernel_that_ends_its_process_is_left_out_of_the_same_item(falls, reason):
    """The item's other variants are checked and timed all the same, and the file says which kernel it was and why."""
    skipped = {}
    run, _ = ran(
        f"""
        for index in range(start, 3):
            say(begins=index, name=f"item {{index}}", limit=0.3)
            for kernel in ("good", "bad"):
                if kernel not in skipped:
                    say(tries=kernel)
                    if kernel == "bad" and index == 1:
                        {falls}
                    say(tries="")
            say(ends=index, item={{"name": f"item {{index}}", "status": "ok", "without": skipped}})
        """,
        skipped=skipped,
    )
    assert [(item["status"], item["without"]) for item in run.items] == [("ok", []), ("ok", ["bad"]), ("ok", ["bad"])]
    assert skipped == {"bad": f"stage, item 1: {reason}"}
    assert run.status == "ok"
    assert reason in run.message


def test_a_stage_in_which_many_kernels_fall_goes_on():
    """Each ends one process and no more, so that they are all found; a stage is given up for what has no name."""
    skipped, count = {}, process.MAX_RESTARTS + 3
    run, _ = ran(
        f"""
        say(begins=0, name="item 0", limit=5)
        for kernel in map(str, range({count})):
            if kernel not in skipped:
                say(tries=kernel)
                sys.exit("an illegal address")
        do(0)
        """,
        skipped=skipped,
    )
    assert (run.status, [item["status"] for item in run.items]) == ("ok", ["ok"])
    assert list(skipped) == [str(number) for number in range(count)]


@pytest.mark.parametrize("tried", ["say(tries='good'); say(tries='')", "say(tries='named before')"])
def test_a_fall_that_is_no_new_kernels_is_the_items(tried):
    """What was through is not blamed, and what is left out already is not left out again and again."""
    skipped = {"named before": "why"}
    run, _ = ran(
        f"""
        if start == 0:
            say(begins=0, name="item 0", limit=5)
            {tried}
            sys.exit("torn")
        do(1)
        """,
        skipped=skipped,
    )
    assert [item["status"] for item in run.items] == ["crashed", "ok"]
    assert skipped == {"named before": "why"}


class Stream:
    """A stream, which reports what a kernel did when it is waited for."""

    def __init__(self, said, error):
        self.said, self.error = said, error

    def synchronize(self):
        self.said.append("waited")
        if self.error:
            raise self.error


def session_that(said, error=None, **options):
    """A session whose kernels end in an error, or well."""
    session = gpu_items.Session(H200, 0.0, lambda **facts: said.append(facts), **options)
    stream = Stream(said, error)
    session.target = SimpleNamespace(synchronize=stream.synchronize, trying=session.trying)
    return session


def test_a_session_says_which_kernel_it_tries_until_it_is_through():
    """A launch returns before its kernel ran, so what it did to the GPU shows when it is waited for."""
    found, said = gpu_items.units(90)[0], []
    with session_that(said).trying(found):
        said.append("launched")
    assert said == [{"tries": found.name}, "launched", "waited", {"tries": ""}]
    said.clear()
    with pytest.raises(InvalidArgument), session_that(said).trying(found):
        raise InvalidArgument("tile", 1, "at least 2")
    assert said[-1] == {"tries": ""}
    said.clear()
    with (
        pytest.raises(RuntimeError, match="illegal"),
        session_that(said, RuntimeError("an illegal address")).trying(found),
    ):
        said.append("launched")
    assert said == [{"tries": found.name}, "launched", "waited"]


def test_a_kernel_that_is_left_out_is_not_launched():
    """It is an error of that variant or probe, and nothing is told of it."""
    said, probe = [], probes.probes(90)[0]
    session = session_that(said, skipped={probe.kernel.name})
    with pytest.raises(
        DeviceFailed, match=f"kernel {probe.kernel.name} failed with the end of an earlier process"
    ) as no:
        conformance.conforms(probe, session)
    assert not no.value.is_fatal
    assert said == []


def test_a_start_that_takes_long_is_no_hang_and_one_without_end_is(monkeypatch):
    """It has minutes, not the seconds between items."""
    assert Position().limit_seconds == process.READY_SECONDS > 4 * process.NEXT_SECONDS
    script = "time.sleep(0.6); say(count=1); do(0)"
    monkeypatch.setattr(process, "NEXT_SECONDS", 0.3)
    assert ran(script)[0].status == "ok"
    monkeypatch.setattr(process, "READY_SECONDS", 0.3)
    run, _ = ran(script)
    assert (run.status, run.message) == ("failed", "the start of the process took longer than 0.3 s")


def test_what_did_not_fit_the_time_is_listed():
    """The stage keeps what it had."""
    run, _ = ran("do(0)", planned=["item 0", "item 1", "item 2"])
    assert run.status == "timeout"
    assert run.skipped == ["item 1", "item 2"]
    assert len(run.items) == 1


def test_a_child_says_what_begins_and_what_came_of_it(monkeypatch, tmp_path):
    """An error of an item is its result, and the next item runs."""

    def fail(_):
        raise InvalidArgument("tile", 1, "at least 2")

    said = lines_of(stage_of(lambda _: {"value": 7}, fail, lambda _: {"status": "wrong"}), monkeypatch, tmp_path)
    ends = [line["item"] for line in said if "ends" in line]
    assert said[0] == {"count": 3}
    assert [line["begins"] for line in said if "begins" in line] == [0, 1, 2]
    assert [item["status"] for item in ends] == ["ok", "error", "wrong"]
    assert ends[0]["value"] == 7
    assert "tile must be at least 2" in ends[1]["message"]
    assert all(item["took_seconds"] >= 0 for item in ends)


def test_a_child_lives_on_where_the_driver_refuses_a_call(monkeypatch, tmp_path):
    """Only an error that breaks the context ends it: a new process takes seconds that others have work for."""

    def failed(status):
        def run(_):
            raise DeviceFailed.by_driver("encoding a tensor map", status)

        return run

    said = lines_of(stage_of(failed(1), lambda _: {}), monkeypatch, tmp_path)
    assert [line["item"]["status"] for line in said if "ends" in line] == ["error", "ok"]
    with pytest.raises(DeviceFailed):
        lines_of(stage_of(failed(719)), monkeypatch, tmp_path)


def test_a_child_begins_where_it_is_told_and_ends_with_its_time(monkeypatch, tmp_path):
    """What is left is not begun."""
    stage = stage_of(*[lambda _: {}] * 5)
    said = lines_of(stage, monkeypatch, tmp_path, start=1, questions=3)
    assert [line["begins"] for line in said if "begins" in line] == [1, 2]
    assert said[-1]["ends"] == 2
