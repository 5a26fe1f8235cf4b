"""The shape of the code behind `autotune`: how often a network is handed on, import circles, and codes of notes."""

from __future__ import annotations

import ast
import sys
import tomllib
from graphlib import TopologicalSorter
from pathlib import Path

import attrs
import pytest

import cubatch as cb
from cubatch.network import models
from cubatch.tuning import notes

PACKAGE = Path(cb.__file__).parent
MOST_STOPS, MOST_CLIMBS = 60, 3
LIBRARIES = ("cubatch.",)


def holds(value, spec, depth=2):
    """Return whether a value is the spec, or a record of the package that has it as a field, two levels deep."""
    if value is spec:
        return True
    kind = type(value)
    if not depth or not kind.__module__.startswith(LIBRARIES) or not attrs.has(kind):
        return False
    return any(holds(getattr(value, field.name, None), spec, depth - 1) for field in attrs.fields(kind))


def handovers(call, spec):
    """
    Return every pair (caller, callee) of the package's functions in which an argument holds the spec, each once.

    A function is (module, qualified name); `self` is no argument. Where a library calls back, the caller is the
    function of the package that called the library.
    """
    pairs = {}

    def function(frame):
        return frame.f_globals.get("__name__", ""), frame.f_code.co_qualname

    def see(frame, event, _):
        code = frame.f_code
        if event != "call" or code.co_name.startswith("<") or not function(frame)[0].startswith(LIBRARIES):
            return
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        if not any(holds(frame.f_locals.get(name), spec) for name in names if name != "self"):
            return
        caller = frame.f_back
        while caller is not None and not function(caller)[0].startswith(LIBRARIES):
            caller = caller.f_back
        pairs[function(caller) if caller else ("", ""), function(frame)] = None

    sys.setprofile(see)
    try:
        call()
    finally:
        sys.setprofile(None)
    return list(pairs)


def contract():
    """Return the import contract of the packages."""
    contracts = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    return next(each for each in contracts if each.get("containers") == ["cubatch"])


def floors():
    """Return the depth of each package below `cubatch`, from the import contract."""
    return {name.strip(): depth for depth, layer in enumerate(contract()["layers"]) for name in layer.split("|")}


def test_a_network_is_handed_on_at_most_60_times(tmp_path):
    """From `autotune` to the result: few handovers, hardly any to a package above that of the caller."""
    network, depth = models.build("mlp"), floors()

    def tune():
        cb.autotune(network, device="cpu", max_batch_size=8, budget=2.0, isolate=True, store=tmp_path / "kept")

    pairs = handovers(tune, network)

    def is_climb(caller, callee):
        above, below = (depth.get(module.split(".")[1], 0) for module in (callee, caller))
        return above < below

    climbs = [(caller, callee) for (caller, _), (callee, _) in pairs if caller and is_climb(caller, callee)]
    assert ("cubatch.tuning.session", "tune") in {callee for _, callee in pairs}
    assert len(pairs) <= MOST_STOPS, pairs
    assert len(climbs) <= MOST_CLIMBS, climbs


def imports(package):
    """Return which modules of a package each of them imports, also within functions and for types only."""
    files = {
        ".".join((package.name, *path.relative_to(package).with_suffix("").parts)): path
        for path in package.rglob("*.py")
        if path.name != "__init__.py"
    }
    graph = {}
    for name, path in files.items():
        froms = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
        asked = {node.module for node in froms}
        asked |= {f"{node.module}.{each.name}" for node in froms for each in node.names}
        graph[name] = (asked & files.keys()) - {name}
    return graph


def test_no_modules_import_each_other_in_a_circle():
    """
    Of the whole package, but for imports that the contract allows: of what shows a record, when it is shown.

    `prepare` raises CycleError with the circle.
    """
    graph = imports(PACKAGE)
    assert "cubatch.tuning.session" in graph["cubatch.tuning.tune"]
    for importer, imported in (line.split(" -> ") for line in contract()["ignore_imports"] if "*" not in line):
        graph[importer].remove(imported)
    TopologicalSorter(graph).prepare()


def codes():
    """Return the codes of all notes and remarks that the package makes."""
    trees = (ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py"))
    for call in (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call)):
        name = getattr(call.func, "id", None)
        given = call.args[:1] if name == "note" else []
        if name == "Remark":
            given = [keyword.value for keyword in call.keywords if keyword.arg == "code"]
        yield from (each.value for each in given if isinstance(each, ast.Constant))


def test_every_code_of_a_note_has_a_text_and_every_text_is_used():
    """A code that only one side knows would fail when it is needed, or never be seen."""
    assert set(codes()) == notes._TEXT.keys()
    assert notes._TEXT.keys() >= notes.WARNINGS


@pytest.mark.parametrize("wrong", [("memory_lowered", {"limit_bytes": 1}), ("nonsense", {}), ("host_clock", {"x": 1})])
def test_a_note_that_its_text_does_not_fit_is_rejected(wrong):
    """A missing value, an unknown code, a value too many: when it is made, not when it is shown."""
    code, values = wrong
    with pytest.raises(ValueError, match=code):
        notes.note(code, **values)
