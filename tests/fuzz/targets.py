"""
What is fuzzed: of each a strategy that draws inputs, and a function that may raise nothing but `CubatchError`.

A target goes on with what was accepted: it is planned, predicted, printed and drawn.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import attrs
import typer
from hypothesis import strategies as st

import cubatch as cb
from cubatch import array_file
from cubatch.cli import app
from cubatch.engine import checkpoint, data
from cubatch.errors import CubatchError
from cubatch.hardware import device_file
from cubatch.network import models
from cubatch.network.specfile import load_spec
from cubatch.tuning.candidate_layers import explain
from cubatch.tuning.results import TuningResult
from tests.fuzz.edits import CORPUS, WORDS, bitten, documents, edited
from tests.unit.commands import get_command

SAMPLE = Path(__file__).parents[1] / "data" / "mnist-sample"
SEEN = {"drawn": 0}  # pictures are slow: only one in so many is drawn
EVERY = 20


@attrs.frozen
class Target:
    """Something that is fuzzed, and what was there when it began is still there."""

    inputs: st.SearchStrategy[Any]
    run: Callable[[Any], object]


def ours(call, *arguments, **options):
    """Call, and let errors of ours pass, whose text can be read."""
    try:
        return call(*arguments, **options)
    except CubatchError as error:
        text = str(error)
        assert len(text) < 20_000, f"{len(text)} characters"
        return None


# --- specs ---------------------------------------------------------------------------------------------------


def use_spec(spec):
    """Plan, predict and print a network or layer."""
    assert str(spec)
    again = ours(models.resolve, spec.to_mapping())
    assert again == spec
    for options in ({"device": "t4"}, {"device": "cpu", "mode": "training", "recompute": True}):
        planned = ours(cb.footprint, spec, batch_size=3, **options)
        assert planned is None or str(planned)
        ours(cb.max_batch_size, spec, "1GiB", **options)
    ours(cb.candidates, spec, device="t4", max_batch_size=64)
    ours(explain, spec, [cb.Candidate(8)], device="t4")
    for library in ("vendor", "cubatch"):
        predicted = ours(cb.predict, spec, device="t4", batch_sizes=[1, 8], library=library, mode="training")
        assert predicted is None or str(predicted)


def try_spec(mapping):
    """Read a mapping as a spec, and use it."""
    spec = ours(models.resolve, mapping)
    if spec is not None:
        use_spec(spec)


def try_spec_file(given):
    """Read bytes as a spec file, or as a device's."""
    suffix, content = given
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"a{suffix}"
        path.write_bytes(content)
        spec = ours(load_spec, path)
        device = ours(device_file.read, str(path))
    if spec is not None:
        use_spec(spec)
    if device is not None:
        assert str(device)
        assert json.dumps(device.to_mapping())
        for library in ("vendor", "cubatch"):
            ours(cb.predict, "mlp", device=device, batch_sizes=[1, 8], library=library)
        ours(cb.candidates, "mlp", device=device)


# --- results -------------------------------------------------------------------------------------------------


def try_result(document):
    """Read a document as a result, and print, draw, write and learn from it."""
    text = json.dumps(document)
    result = ours(TuningResult.from_json, text)
    if result is None:
        return
    assert TuningResult.from_json(result.to_json()) == result
    assert "\x1b" not in result.table()
    ours(result.choices)
    with tempfile.TemporaryDirectory() as folder:
        result.report(Path(folder) / "a.html")
        SEEN["drawn"] += 1
        if SEEN["drawn"] % EVERY == 0:
            result.plot(Path(folder) / "a.svg")
            assert result._repr_html_()
    ours(cb.predict, "mlp", device="t4", batch_sizes=[1, 8], anchors=[result])


# --- files ---------------------------------------------------------------------------------------------------


def try_file(given):
    """Read bytes as a data set, as weights and as a checkpoint."""
    suffix, content = given
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"a{suffix}"
        path.write_bytes(content)
        ours(data.read_idx, path)
        if suffix:
            ours(array_file.read, path)
            ours(checkpoint.read, path)


BINARY = {path: path.read_bytes() for path in sorted((CORPUS / "files").iterdir())}
FILE = st.sampled_from(list(BINARY)).flatmap(
    lambda path: st.tuples(st.just(path.suffix if path.suffix in array_file.ENDINGS else ""), bitten([BINARY[path]]))
)
TEXTS = {path: path.read_bytes() for path in sorted((CORPUS / "spec-files").iterdir())}
SPEC_FILE = st.sampled_from(list(TEXTS)).flatmap(
    lambda path: st.tuples(st.sampled_from([path.suffix, path.suffix, ".toml", ".json"]), bitten([TEXTS[path]]))
)


# --- the command line ----------------------------------------------------------------------------------------

# What each command is given besides: nothing is measured, compiled, fetched or forgotten.
ABSENT = ["--device", "t4"]
COMMANDS = {
    ("models",): [], ("layers",): [], ("devices",): [], ("memory",): [], ("candidates",): [], ("predict",): [],
    ("occupancy",): [], ("tune",): [*ABSENT, "--no-store"], ("train",): [*ABSENT, "--data", str(SAMPLE)],
    ("profile",): ABSENT, ("bench", "conv"): [*ABSENT, "--dry-run"], ("bench", "gemm"): [*ABSENT, "--dry-run"],
    ("store", "list"): [], ("store", "show"): [],
}  # fmt: skip
RIGHT = ["1", "8", "0.5", "training", "float16", "cubatch", "vendor", "latency", "adam", "t4", "v100-sxm2-16gb",
         "a.json", "a.svg", "8,16", "28,28,1", "8GiB", "80%"]  # fmt: skip
LEFT_OUT = {"--download", "--store", "--fresh", "--help", "--out", "--dry-run", "--no-store", "--data"}
MODELS = ["mlp", "lenet5", "go-net", "resnet5", "net.toml", "a:b", "none.onnx", "w.pt", *WORDS]


@functools.cache
def _parameters(command):
    found = get_command(app.app)
    for word in command:
        found = found.commands[word]
    return found.params


@st.composite
def command_lines(draw):
    """Draw a command with some of its options, of which few have the value that they should."""
    command = draw(st.sampled_from(list(COMMANDS)))
    line = list(command)
    parameters = _parameters(command)
    arguments = [one for one in parameters if one.param_type_name == "argument" and draw(st.integers(0, 9))]
    line += [draw(st.sampled_from(MODELS)) for _ in arguments]
    options = [one for one in parameters if one.param_type_name == "option" and not LEFT_OUT & {*one.opts}]
    for one in draw(st.lists(st.sampled_from(options), max_size=5)) if options else []:
        line.append(draw(st.sampled_from([*one.opts, *one.secondary_opts])))
        if not getattr(one, "is_flag", False):
            line.append(draw(st.sampled_from(RIGHT) | st.sampled_from(WORDS) | st.integers(-9, 300).map(str)))
    # What is no argument of a process cannot be given to one.
    return [word.replace("\0", "").encode("utf-8", "replace").decode() for word in [*line, *COMMANDS[command]]]


def try_command(line):
    """Run a command, in an empty folder: it ends with a code of its own, and no traceback."""
    out, err, before, code = io.StringIO(), io.StringIO(), Path.cwd(), None
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            (Path(folder) / "net.toml").write_bytes(next(iter(TEXTS.values())))
            with (
                mock.patch.object(sys, "argv", ["cubatch", *line]), mock.patch.dict(os.environ, XDG_CACHE_HOME=folder),
                mock.patch.object(typer.main, "get_command", get_command),
                contextlib.redirect_stdout(out), contextlib.redirect_stderr(err),
            ):  # fmt: skip
                app.main()
        except SystemExit as ended:
            code = ended.code
        finally:
            os.chdir(before)
    assert code in {None, 0, 1, 2}
    assert "Traceback" not in err.getvalue()
    for text in (out.getvalue(), err.getvalue()):
        assert "\x1b[2J" not in text, text[:500]
        assert len(text) < 4_000_000, len(text)


TARGETS = {
    "specs": Target(edited(documents("specs")), try_spec),
    "spec-files": Target(SPEC_FILE, try_spec_file),
    "results": Target(edited(documents("results")), try_result),
    "files": Target(FILE, try_file),
    "commands": Target(command_lines(), try_command),
}


def run(target, value):
    """Run a target on one input, as quietly as a program that turns warnings off."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        target.run(value)
