"""The list of pending GPU work, and how it is run within a number of minutes."""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import inspect
import json
import math
import re
import shlex
import signal
import subprocess
import sys
import textwrap
import types

import attrs
import pytest

import cubatch
from benchmarks import gpu_pass
from benchmarks.gpu import items as gpu_items, pending
from benchmarks.gpu.pending import Item, Machine
from cubatch.cli import app
from cubatch.errors import InvalidData
from cubatch.hardware import catalogue, probe
from tests.pending_commands import IMPORT_PYTORCH, LISTED, parse_benchmark
from tests.unit.benchmarks.passes import H200
from tests.unit.commands import get_command
from tests.unit.processes import is_running, wait_until

HERE = Machine(H200)
FACTS = {"date": "2000-01-01", "commit": "abc1234", "device": {"name": "Test GPU"}}
FIELDS = {"command": "python -V", "minutes": 1, "expectation": "a figure", "decision": "a choice"}


# --- the list of the project -----------------------------------------------------------------------------------------


def parse_cubatch(arguments):
    """Parse a command line of `cubatch` down to its last command, without running it."""
    command, context = get_command(app.app), None
    while True:
        context = command.make_context(command.name or "cubatch", list(arguments), parent=context)
        if not hasattr(command, "resolve_command"):
            return
        rest = [*context._protected_args, *context.args]
        _, command, arguments = command.resolve_command(context, rest)


def check_code(code):
    """Check that code compiles, and that the functions of cubatch that it calls take its keywords."""
    compile(code, "-c", "exec")
    for call in ast.walk(ast.parse(code)):
        if isinstance(call, ast.Call) and ast.unparse(call.func).startswith("cb."):
            function = getattr(cubatch, ast.unparse(call.func).removeprefix("cb."))
            assert {keyword.arg for keyword in call.keywords} <= inspect.signature(function).parameters.keys()


def check_tests(arguments):
    """Check that the files of a run of tests exist, and that each word of -k is in names of their tests."""
    paths = [pending.ROOT / word for word in arguments if word.startswith("tests/")]
    assert "gpu" in arguments
    assert paths
    files = [file for path in paths for file in ([path] if path.is_file() else path.rglob("test_*.py"))]
    names = [f"{file.name} {name}" for file in files for name in re.findall(r"def (test_\w+)", file.read_text())]
    words = arguments[arguments.index("-k") + 1].split(" or ") if "-k" in arguments else [""]
    assert all(any(word in name for name in names) for word in words)


@pytest.mark.parametrize("item", LISTED, ids=lambda item: item.name)
def test_a_listed_command_exists_and_takes_its_options(item, monkeypatch, tmp_path):
    """Each listed module can be imported and its parser accepts the options; Python code compiles; test files exist."""
    option, value, *arguments = item.arguments(tmp_path / "out.json")
    if option == "-c":
        assert not arguments
        check_code(value)
        return
    assert option == "-m"
    if value == "cubatch":
        parse_cubatch(arguments)
    elif value.startswith("benchmarks."):
        assert importlib.util.find_spec(value)
        if value not in IMPORT_PYTORCH:
            parse_benchmark(value, arguments, monkeypatch)
    elif value == "pytest":
        check_tests(arguments)
    else:
        assert value == "torch.distributed.run"


def test_the_listed_items_can_be_told_apart_and_planned():
    """Names are parts of file names, limits are positive, and each need is known."""
    assert len({each.name for each in LISTED}) == len(LISTED)
    for each in LISTED:
        assert re.fullmatch("[a-z0-9]+(-[a-z0-9]+)*", each.name)
        assert each.minutes > 0
        assert each.command.startswith("python ")
        assert each.expectation.strip()
        assert each.decision.strip()
        for need in each.needs:
            assert need in pending.NEEDS or any(f"{slug}-".startswith(f"{need}-") for slug in catalogue.names())


def test_a_listed_pass_chooses_some_items():
    """The expression of each listed pass finds items in every stage that it names."""

    @functools.cache
    def stage_named(name):
        stage = gpu_pass.gpu_stages.stage_named(name)
        items = stage.items(H200)
        return attrs.evolve(stage, items=lambda _: items)

    for item in LISTED:
        words = shlex.split(item.command)
        if "benchmarks.gpu_pass" not in words or "--only" not in words:
            continue
        only = words[words.index("--only") + 1]
        stages = [words[number + 1] for number, word in enumerate(words) if word == "--stage"]
        for stage in stages:
            assert gpu_pass.gpu_stages.chosen(stage_named(stage), H200, only), item.name


def test_a_listed_pass_fits_its_limit():
    """The seconds of each listed pass leave at least half a minute of the item's limit for starting processes."""
    for item in LISTED:
        words = shlex.split(item.command)
        if "--seconds" in words and "benchmarks.gpu_pass" in words:
            assert 60 * item.minutes >= float(words[words.index("--seconds") + 1]) + 30, item.name


# --- reading a list --------------------------------------------------------------------------------------------------


def written(folder, *tables, head=""):
    """Write a list of items and return its path."""
    lines = [head]
    for table in tables:
        lines += ["[[item]]", *(f"{key} = {json.dumps(value)}" for key, value in table.items())]
    path = folder / "list.toml"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


@pytest.mark.parametrize("text", ["", "item = [1]", "[[item", "[[item]]\nname = 'a'", "[[item]]\nminute = 2"])
def test_a_file_that_is_no_list_is_refused(tmp_path, text):
    """The message names the file."""
    with pytest.raises(InvalidData, match=r"list\.toml"):
        pending.load(written(tmp_path, head=text))


# --- running ---------------------------------------------------------------------------------------------------------


def item(name, command="python -V", minutes=1.0, needs=()):
    """Return an item."""
    return Item(name, command, minutes, "a figure", "a choice", list(needs))


def script(folder, name, text, minutes=1.0):
    """Write a script and return the item that runs it."""
    head = "import os, pathlib, signal, subprocess, sys, time\n"
    path = folder / f"{name}.py"
    path.write_text(head + textwrap.dedent(text), encoding="utf-8")
    return item(name, f"python {path} {{out}}.txt", minutes)


def run(items, out, minutes=30.0, machine=HERE):
    """Run items and return their records by name, as the file holds them."""
    result = pending.run_items(items, out, machine, minutes, FACTS)
    assert json.loads(out.read_text()) == json.loads(json.dumps(result))
    return {record["name"]: record for record in result["items"]}


def statuses(records):
    """Return the status of each item."""
    return {name: record["status"] for name, record in records.items()}


def planted(folder):
    """Return items of which one is ok, one fails, one hangs, one is killed and one needs too much time."""
    return [
        script(folder, "good", "pathlib.Path(sys.argv[1]).open('a').write('x'); print('fine')"),
        script(folder, "failing", "print('bad', file=sys.stderr); sys.exit(3)"),
        script(
            folder, "hanging",
            """
            sleeper = subprocess.Popen(["sleep", "600"])
            pathlib.Path(sys.argv[1]).write_text(f"{os.getpid()} {sleeper.pid}")
            time.sleep(600)
            """,
            minutes=0.05,
        ),
        script(folder, "killed", "os.kill(os.getpid(), signal.SIGKILL)"),
        script(folder, "long", "", minutes=1000.0),
        script(folder, "last", "print('also fine')"),
    ]  # fmt: skip


def test_nothing_is_lost_when_items_fail(tmp_path):
    """Every item has its own outcome, later items still run, and no process of an item is left."""
    records = run(planted(tmp_path), tmp_path / "out.json")
    assert statuses(records) == {
        "good": "ok", "failing": "failed", "hanging": "timeout", "killed": "failed", "long": "skipped", "last": "ok",
    }  # fmt: skip
    assert (records["good"]["stdout"], records["failing"]["stderr"]) == ("fine\n", "bad\n")
    assert (records["failing"]["returncode"], records["killed"]["returncode"]) == (3, -signal.SIGKILL)
    assert "SIGKILL" in records["killed"]["reason"]
    assert "1000 minutes" in records["long"]["reason"]
    assert records["good"]["commit"] == "abc1234"
    wait_until(lambda: not any(map(is_running, (tmp_path / "out-hanging.txt").read_text().split())))


def test_a_second_run_does_only_what_is_missing(tmp_path):
    """An item that was ok is not run again, and the others are."""
    items, out = planted(tmp_path), tmp_path / "out.json"
    items = [each for each in items if each.name != "hanging"]
    run(items, out)
    for name in ("failing", "killed"):
        (tmp_path / f"{name}.py").write_text("print('mended')", encoding="utf-8")
    records = run(items, out)
    assert statuses(records) == dict.fromkeys(("good", "failing", "killed", "last"), "ok") | {"long": "skipped"}
    assert (tmp_path / "out-good.txt").read_text() == "x"
    assert records["killed"]["stdout"] == "mended\n"


def test_an_earlier_failure_stays_when_there_is_no_time(tmp_path):
    """A later run that cannot start an item keeps how it ended before."""
    failing, out = script(tmp_path, "failing", "sys.exit(3)"), tmp_path / "out.json"
    before = run([failing], out)
    assert before["failing"]["reason"] == "exit status 3"
    assert run([failing], out, minutes=0.5) == before


def test_a_worker_that_outlives_its_item_is_killed(tmp_path):
    """What an item leaves running would disturb the timings of the next one."""
    text = """
    sleeper = subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL)
    pathlib.Path(sys.argv[1]).write_text(str(sleeper.pid))
    """
    assert run([script(tmp_path, "leaving", text)], tmp_path / "out.json")["leaving"]["status"] == "ok"
    wait_until(lambda: not is_running((tmp_path / "out-leaving.txt").read_text()))


@pytest.fixture
def clock(monkeypatch):
    """Replace running an item by a clock that goes on by the item's minutes; return the names of the items run."""
    now, names = [0.0], []

    def spend(each, out, commit):
        now[0] += 60 * each.minutes
        names.append(each.name)
        return {"status": "ok", "reason": "", "seconds": 60 * each.minutes}

    monkeypatch.setattr(pending, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(pending, "_run", spend)
    return names


def test_an_item_starts_only_if_its_limit_fits(clock, tmp_path):
    """Of 12 minutes, 5 and 5 leave room for a later item of 2 and for none of 3."""
    items = [item(name, minutes=minutes) for name, minutes in (("a", 5), ("b", 5), ("c", 3), ("d", 2), ("e", 1))]
    records = run(items, tmp_path / "out.json", minutes=12.0)
    assert clock == ["a", "b", "d"]
    assert "3 minutes, and 2.0 are left" in records["c"]["reason"]
    assert "1 minutes, and 0.0 are left" in records["e"]["reason"]


def test_a_changed_command_runs_again(clock, tmp_path):
    """A result belongs to one command; that of the old command stays in the file."""
    out = tmp_path / "out.json"
    run([item("a", "python -V")], out)
    pending.run_items([item("a", "python -VV")], out, HERE, 12.0, FACTS)
    assert clock == ["a", "a"]
    assert [record["command"] for record in json.loads(out.read_text())["items"]] == ["python -VV", "python -V"]


def test_needs_are_compared_with_the_machine(monkeypatch):
    """An item is skipped where a GPU, a package or a second GPU is missing; an unknown GPU is given the benefit."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    unknown = Machine(attrs.evolve(H200, slug="", name="Prototype"), 2)

    def reason(need, machine=HERE):
        return item("a", needs=[need]).reason_to_skip(machine, 5.0)

    assert "torch is not installed" in reason("torch")
    assert "1 of 2 GPUs" in reason("two GPUs")
    assert reason("two GPUs", Machine(H200, 2)) == ""
    assert "2 of 4 GPUs" in reason("four GPUs", unknown)
    assert "Hopper" in reason("no Hopper")
    assert reason("no Hopper", Machine(catalogue.find("v100-sxm2-16gb"))) == ""
    assert "needs titan-x, and this is h200-sxm" in reason("titan-x")
    assert (reason("h200"), reason("h200-sxm"), reason("titan-x", unknown)) == ("", "", "")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"benchmark": "gpu_pass", "schema": 1, "device": {"name": "Test GPU"}, "items": []}, "gpu_pass on Test GPU"),
        ({"benchmark": "gpu_pending", "schema": 1, "device": {"name": "V100"}, "items": []}, "on V100, and this is"),
        ({"benchmark": "gpu_pending", "schema": 1, "device": {"name": "Test GPU"}, "items": [{}]}, "not a result"),
        ([], "not a result"),
    ],
)
def test_a_file_of_something_else_is_not_overwritten(tmp_path, content, message):
    """A results file of another benchmark or device stays as it is."""
    out = tmp_path / "out.json"
    out.write_text(json.dumps(content))
    with pytest.raises(InvalidData, match=f"{message}.*--out"):
        run([item("a")], out)
    assert json.loads(out.read_text()) == content


@pytest.mark.parametrize(
    ("sent", "reason"),
    [(signal.SIGINT, "interrupted with Ctrl-C"), (signal.SIGKILL, "the run ended before the item did")],
)
def test_an_ended_run_leaves_a_whole_file_and_no_process(tmp_path, sent, reason):
    """Ctrl-C, or SIGKILL, during an item ends that item, and the file names all items."""
    text = (
        f"pathlib.Path(sys.argv[1]).write_text(str(os.getpid())); os.kill(os.getppid(), {int(sent)}); time.sleep(600)"
    )
    script(tmp_path, "ending", text)
    tables = [
        {"name": name} | FIELDS | {"command": command}
        for name, command in (("first", "python -V"), ("ending", f"python {tmp_path / 'ending.py'} {{out}}.txt"),
                              ("later", "python -V"))
    ]  # fmt: skip
    program = f"""
    import pathlib
    from benchmarks.gpu import pending
    from cubatch.hardware import catalogue
    items, here = pending.load(pathlib.Path({str(written(tmp_path, *tables))!r})), catalogue.find("h200-sxm")
    pending.run_items(items, pathlib.Path({str(tmp_path / "out.json")!r}), pending.Machine(here), 30.0, {FACTS!r})
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], cwd=pending.ROOT, capture_output=True, check=False
    )
    assert done.returncode == -sent, done.stderr
    records = json.loads((tmp_path / "out.json").read_text())["items"]
    assert [(record["status"], record["reason"]) for record in records] == [
        ("ok", ""), ("failed", reason), ("skipped", "not reached"),
    ]  # fmt: skip
    wait_until(lambda: not is_running((tmp_path / "out-ending.txt").read_text()))


# --- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture
def gpu(monkeypatch):
    """Let the command see one GPU."""
    monkeypatch.setattr(probe, "devices", lambda: [H200])
    monkeypatch.setattr(probe, "device", lambda name=None: H200)
    monkeypatch.setattr(probe, "resolve", lambda name: H200)
    monkeypatch.setattr(gpu_items, "device_facts", lambda device: {"device": {"name": device.name}})


def test_the_command_runs_a_list(gpu, tmp_path, capsys):
    """It ends with 1 if an item failed, and writes provenance and results."""
    good, bad = {"name": "a"} | FIELDS, {"name": "b"} | FIELDS | {"command": "python -c 1/0"}
    out = tmp_path / "out.json"
    arguments = ["--pending", str(written(tmp_path, good, bad)), "--out", str(out), "--commit", "abc1234"]
    assert gpu_pass.main(arguments) == 1
    assert "1 ok, 1 failed" in capsys.readouterr().out
    result = json.loads(out.read_text())
    assert (result["commit"], result["minutes"], result["device"]["name"]) == ("abc1234", 12.0, H200.name)
    assert gpu_pass.main([*arguments, "--only", "^a$"]) == 1  # the other item's failure stays in the file


def test_the_dry_run_needs_no_gpu(tmp_path, capsys):
    """It lists every item of the project's list, and adds up those that the GPU can run."""
    assert gpu_pass.main(["--pending", "--dry-run", "--out", str(tmp_path / "none.json")]) == 0
    *lines, total = capsys.readouterr().out.splitlines()
    able = [each.minutes for each in LISTED if not each.reason_to_skip(Machine(H200), math.inf)]
    assert f"{H200.name} can run {len(able)} of {len(LISTED)} items, in at most {sum(able):g} minutes" in total
    assert re.match(r"[\d.]+ of 12 minutes are planned\. ", total)
    assert [line.split()[0] for line in lines] == [each.name for each in LISTED]
    assert not (tmp_path / "none.json").exists()
