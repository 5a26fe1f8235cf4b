"""
Prove that a rewriting changed words and names only.

    python -m tests.language.proof HEAD cubatch/search [old/path.py=new/path.py ...]

Each Python file is compared with the revision: without docstrings, the trees must be equal but for identifiers and
string constants.  Variables must correspond one to one in every scope.  Renamed attributes, keywords, modules and
changed strings are printed for review.  Exits with 1 where a file differs in more than that.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator

import attrs

from tests.language.findings import ROOT, docstrings

SCOPES = (
    ast.Module, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda, ast.ListComp, ast.SetComp,
    ast.DictComp, ast.GeneratorExp,
)  # fmt: skip
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


class Difference(Exception):
    """Two trees differ in more than names and strings."""


@attrs.define
class Scope:
    """The names that a pair of scopes binds, and which of them were seen to correspond."""

    before: set[str]
    after: set[str]
    is_class: bool
    forward: dict[str, str] = attrs.field(factory=dict)
    backward: dict[str, str] = attrs.field(factory=dict)


@attrs.define
class Comparison:
    """
    Compare two modules.

    Attributes:
        names: Pairs (before, after) of attributes, keywords and global names that differ, counted.
        strings: Pairs of string constants that differ.
    """

    names: Counter[tuple[str, str]] = attrs.field(factory=Counter)
    strings: list[tuple[str, str]] = attrs.field(factory=list)

    def compare(self, before: str, after: str) -> None:
        """Compare two sources; raises `Difference`."""
        first, second = _prepared(before), _prepared(after)
        self._compare(first, second, [])

    def _compare(self, a: object, b: object, scopes: list[Scope]) -> None:
        if isinstance(a, list) and isinstance(b, list):
            if len(a) != len(b):
                raise Difference(f"{len(a)} and {len(b)} parts: {_shown(a)} | {_shown(b)}")
            for x, y in zip(a, b, strict=True):
                self._compare(x, y, scopes)
        elif isinstance(a, ast.AST) and isinstance(b, ast.AST):
            if type(a) is not type(b):
                raise Difference(f"{_shown(a)} | {_shown(b)}")
            self._compare_nodes(a, b, scopes)
        elif a != b:
            raise Difference(f"{a!r} | {b!r}")

    def _compare_nodes(self, a: ast.AST, b: ast.AST, scopes: list[Scope]) -> None:
        if isinstance(a, ast.Constant) and isinstance(b, ast.Constant) and a.value != b.value:
            if not isinstance(a.value, str) or not isinstance(b.value, str):
                raise Difference(f"{a.value!r} | {b.value!r}")
            self.strings.append((a.value, b.value))
            return
        inner = scopes
        if isinstance(a, SCOPES):
            inner = [*scopes, Scope(set(_bound(a)), set(_bound(b)), isinstance(a, ast.ClassDef))]
        for field in a._fields:
            x, y = getattr(a, field), getattr(b, field)
            if field in ("id", "arg", "name") and isinstance(x, str) and isinstance(y, str):
                if isinstance(a, ast.keyword):
                    self._rename(x, y)
                else:
                    self._match(x, y, scopes if isinstance(a, SCOPES) else inner)
            elif field == "attr":
                self._rename(str(x), str(y))
            elif field in ("decorator_list", "returns"):
                self._compare(x, y, scopes)
            else:
                self._compare(x, y, inner)

    def _match(self, x: str, y: str, scopes: list[Scope]) -> None:
        """Hold that two names are bound by the same scope, and correspond to each other and no others there."""
        visible = [scope for place, scope in enumerate(scopes) if not scope.is_class or place == len(scopes) - 1]
        before = next((scope for scope in reversed(visible) if x in scope.before), None)
        after = next((scope for scope in reversed(visible) if y in scope.after), None)
        if before is not after or (before is None and x != y):
            raise Difference(f"{x} and {y} are bound in different scopes")
        if before is not None:
            if before.forward.setdefault(x, y) != y or before.backward.setdefault(y, x) != x:
                raise Difference(f"{x} -> {y}, but {x} -> {before.forward[x]} and {before.backward.get(y)} -> {y}")
            if before is scopes[0] or before.is_class:
                self._rename(x, y)

    def _rename(self, x: str, y: str) -> None:
        if x != y:
            self.names[x, y] += 1


def _prepared(source: str) -> ast.Module:
    """Parse without docstrings and imports, which are compared apart: renamed modules sort elsewhere."""
    tree = ast.parse(source)
    removed = {id(constant) for constant, _ in docstrings(ast.walk(tree))}
    statements = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    tree.imported = {item.asname or item.name.split(".")[0] for node in statements for item in node.names}
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            code = [s for s in body if not (isinstance(s, ast.Expr) and id(s.value) in removed)]
            body[:] = [s for s in code if not isinstance(s, ast.Import | ast.ImportFrom)] or [ast.Pass()]
    return tree


def imports(source: str) -> Counter[str]:
    """Return the imported names of a source, as `module.name` or `module.name as alias`."""
    names: Counter[str] = Counter()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            prefix = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            names.update(f"{prefix}{item.name}" + (f" as {item.asname}" if item.asname else "") for item in node.names)
    return names


def _bound(scope: ast.AST) -> Iterator[str]:
    """Yield the names that a scope binds."""
    if isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        rest = [argument for argument in (scope.args.vararg, scope.args.kwarg) if argument is not None]
        yield from (
            argument.arg for argument in (*scope.args.posonlyargs, *scope.args.args, *scope.args.kwonlyargs, *rest)
        )
    yield from getattr(scope, "imported", ())
    pending = list(ast.iter_child_nodes(scope))
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store | ast.Del):
            yield node.id
        elif isinstance(node, ast.ExceptHandler) and node.name:
            yield node.name
        if isinstance(node, COMPREHENSIONS):
            yield from (n.target.id for n in ast.walk(node) if isinstance(n, ast.NamedExpr))
        elif not isinstance(node, SCOPES):
            pending += ast.iter_child_nodes(node)


def _shown(node: object) -> str:
    nodes = node if isinstance(node, list) else [node]
    return "; ".join(ast.unparse(part)[:80] for part in nodes if isinstance(part, ast.AST))[:200]


def main(arguments: list[str]) -> int:
    """Compare the files of some directories with a revision; returns the exit status."""
    revision, *places = arguments
    moved = dict(place.split("=") for place in places if "=" in place)
    directories = [place for place in places if "=" not in place]
    listed = subprocess.run(
        ["git", "ls-tree", "-r", "--name-only", revision, *directories],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    total, failed = Comparison(), 0
    for path in (name for name in listed if name.endswith(".py")):
        before = subprocess.run(
            ["git", "show", f"{revision}:{path}"], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout
        after = (ROOT / moved.get(path, path)).read_text(encoding="utf-8")
        try:
            total.compare(before, after)
        except Difference as difference:
            failed += 1
            print(f"{path}: {difference}")
        gone, new = imports(before) - imports(after), imports(after) - imports(before)
        if gone or new:
            print(f"{path}: imports {sorted(gone)} -> {sorted(new)}")
    print(*(f"{old} -> {new} ({count})" for (old, new), count in sorted(total.names.items())), sep="\n")
    print(*(f"{old!r}\n    -> {new!r}" for old, new in dict.fromkeys(total.strings)), sep="\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
