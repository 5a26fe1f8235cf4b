"""`cubatch watch`."""

from __future__ import annotations

import json
import os
import pty
import select
import sys

import pynvml
import pytest

from cubatch.cli import watch
from tests.nvml import GIB, OTHER, Gpu, Library, a_slice


@pytest.fixture
def library(monkeypatch):
    """Put a library with a GPU in MIG mode and one that is lost in the place of NVML's."""
    lost = Gpu(uuid=OTHER, name="Tesla V100", compute=None)
    board = Gpu(slices=(a_slice(),), compute=((7, 30 * GIB),))
    found = Library(board, lost).install(monkeypatch)
    found.programs = {7: "/usr/bin/python3"}
    return found


def test_in_a_pipe_it_is_one_look(run, library):
    """A line a GPU and a line a slice, in figures of a person's; who holds memory stands beneath."""
    code, out, err = run("watch")

    assert (code, err) == (0, "")
    assert "one query" in out
    assert "40.00 GiB" in out
    assert out.count("NVIDIA H200") == 2
    assert "- GPU 0: python3 (pid 7) holds 30.00 GiB." in out


def test_json_holds_peaks_and_processes(run, library, monkeypatch):
    """As often as --seconds holds an interval, and once more: memory fell, its peak stays."""
    clock = [0.0]

    def sleep(seconds):
        clock[0] += seconds
        library.gpus[0].used -= GIB

    monkeypatch.setattr(watch.time, "sleep", sleep)
    monkeypatch.setattr(watch.time, "monotonic", lambda: clock[0])
    code, out, _ = run("watch", "--seconds", 2, "--interval", 1, "--json", "-")
    found = json.loads(out)

    assert (code, found["schema"], found["looks"], found["seconds"]) == (0, 1, 3, 2.0)
    board = found["gpus"][0]
    assert (board["now"]["used_bytes"], board["peaks"]["used_bytes"]) == (38 * GIB, 40 * GIB)
    assert board["processes"] == [{"pid": 7, "name": "python3", "used_bytes": 30 * GIB}]
    assert [gpu["gpu"]["uuid"][:3] for gpu in found["gpus"]] == ["GPU", "MIG", "GPU"]


def test_it_lasts_as_long_as_was_asked(run, library, monkeypatch):
    """A look takes its time, of which no interval is left out: with 60 s of both the second look is the last."""
    clock, slept = [0.0], []

    def monotonic():
        clock[0] += 0.01
        return clock[0]

    def sleep(seconds):
        slept.append(seconds)
        clock[0] += seconds

    monkeypatch.setattr(watch.time, "sleep", sleep)
    monkeypatch.setattr(watch.time, "monotonic", monotonic)
    code, out, _ = run("watch", "--seconds", 60, "--interval", 60, "--json", "-")
    found = json.loads(out)
    assert (code, found["looks"], len(slept)) == (0, 2, 1)
    assert 60 <= found["seconds"] < 61


def test_a_stdout_that_was_closed_is_one_look(library, monkeypatch, tmp_path):
    """As by `>&-`: nobody reads a table, and the file has what was seen."""
    monkeypatch.setattr(sys, "stdout", None)
    watch.watch(json=str(tmp_path / "peaks.json"))
    assert json.loads((tmp_path / "peaks.json").read_text())["looks"] == 1


def test_ctrl_c_keeps_what_was_seen(run, library, monkeypatch, tmp_path):
    """The table and the file are those of all looks; the exit code is that of an interruption."""
    slept = []

    def sleep(_):
        slept.append(None)
        if len(slept) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(watch.time, "sleep", sleep)
    file = tmp_path / "seen.json"
    code, out, err = run("watch", "--seconds", 1e9, "--json", file)

    assert (code, err) == (130, "cubatch: interrupted\n")
    assert "3 queries" in out
    assert json.loads(file.read_text())["looks"] == 3


def test_without_a_gpu_it_is_one_line(run, library):
    """What is missing and what to do about it."""
    library.failing["nvmlInitWithFlags"] = pynvml.NVML_ERROR_LIBRARY_NOT_FOUND
    code, out, err = run("watch")

    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "NVIDIA driver" in err


def test_a_gpu_that_is_lost_says_so_beneath_the_others(run, library):
    """Its row is there, empty."""
    library.failing["nvmlDeviceGetMemoryInfo"] = pynvml.NVML_ERROR_GPU_IS_LOST
    code, out, _ = run("watch")
    assert code == 0
    assert "GPU 0 (a slice): nvmlDeviceGetMemoryInfo failed with NVML status 15" in " ".join(out.split())


def test_on_a_terminal_each_look_takes_the_place_of_the_one_before(library, monkeypatch):
    """Live, and at the end the last one stays."""
    main, other = pty.openpty()
    with os.fdopen(other, "w") as terminal:
        monkeypatch.setenv("COLUMNS", "100")
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setattr(sys, "stdout", terminal)
        watch.watch(seconds=0.002, interval=0.001)
        terminal.flush()
        shown = ""
        while select.select([main], [], [], 0)[0]:
            shown += os.read(main, 10_000).decode()
    os.close(main)
    assert shown.count("GPUs of this machine") >= 2
    assert "\x1b[" in shown
    assert "NVIDIA H200" in shown.rpartition("GPUs of this machine")[2]
