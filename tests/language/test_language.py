"""The language of the project: packages that are done have no findings, elsewhere their number only falls."""

from __future__ import annotations

import pytest

from tests.language import findings
from tests.language.proof import Comparison, Difference


@pytest.fixture(scope="module")
def by_package():
    return findings.check_all()


def test_packages_that_are_done_have_no_findings(by_package):
    done, _ = findings.load_counts()
    assert [str(finding) for name in done for finding in by_package.get(name, [])] == []


def test_findings_only_fall(by_package):
    """List the new ones by `python -m tests.language.findings PACKAGE`; lower the numbers by `--update`."""
    done, most = findings.load_counts()
    counts = {name: len(rows) for name, rows in by_package.items() if name not in done}
    assert {name: count for name, count in counts.items() if count > most.get(name, 0)} == {}


@pytest.mark.parametrize(
    ("source", "finding"),
    [
        ('def f():\n    """Give a number."""\n', "opens with Give"),
        ('def f():\n    """Return what nobody needs."""\n', "nobody"),
        ("# measured anew\n", "anew"),
        ('raise ValueError(f"{n} was told of")\n', "told"),
        ("found = 1\n", "name found"),
        ("def f(kept): pass\n", "name kept"),
        ("self._asked = 1\n", "name _asked"),
        ("def f(a, b, c, d, e, g): pass\n", "6 positional"),
        (f'"""{"word " * 26}."""\n', "26 words"),
        (f'def f():\n    """\n    Do it.\n\n    Args:\n        a: {"word " * 25}.\n    """\n', "26 words"),
        ('def f() -> int | None:\n    """Return it."""\n', "f may return None"),
        (
            'def f() -> int | None:\n    """\n    Do it.\n\n    Returns:\n        int | None: It.\n    """\n',
            "f may return",
        ),
        ('def f(*, a: int | None):\n    """Return twice `a`."""\n', "parameter a"),
        ('class A:\n    x: int = 0  # None\n    """None"""\n    a: int | None = None  # text\n', "attribute a"),
        (
            'class A:\n    """\n    It.\n\n    Keys:\n        x: None.\n        a: It.\n    """\n    a: int | None\n',
            "attribute a",
        ),
        ('def f():\n    """Compare it."""\n    return 1\n', "f returns something"),
        ('def f(n):\n    """Return it."""\n    return [n] if n else []\n', "f may return []"),
        ('def f(n):\n    """Return it."""\n    return math.inf\n', "f may return inf"),
        ('def f() -> dict[str, int]:\n    """Return ab."""\n    return {"a": 1}\n', "the key a"),
    ],
)
def test_each_rule_is_checked(tmp_path, source, finding):
    path = _written(tmp_path, source)
    assert [row for row in findings.check(path, tmp_path) if finding in row.text]


@pytest.mark.parametrize(
    "source",
    [
        "def f(self, a, b, c, d, e): pass\n",
        f'"""{"word " * 25}.  {"Word " * 25}."""\n',
        'def f():\n    """\n    Return it.\n\n    Example:\n        >>> f("told anew")\n    """\n'.replace(
            "told anew", "x " * 30
        ),
        'x = {"told": 1}\n',
        'def f() -> None:\n    """Do it."""\n',
        'def f() -> int | None:\n    """Return it; None if absent."""\n',
        'def f(\n    a: int | None,  # None for none\n):\n    """Return it."""\n',
        'class A:\n    """It; None if unknown."""\n    a: int | None = None\n',
        'class A:\n    """\n    It.\n\n    Keys:\n        x, a: It, or None.\n    """\n    a: int | None\n',
        "class A:\n    # x, a: both\n    # or None\n    x: int | None\n    a: int | None\n",
        'class A:\n    a: int | None\n    """None if unknown."""\n',
        'def f():\n    """Do it."""\n\n    def g():\n        return 1\n',
        '@functools.cached_property\ndef f():\n    """The number."""\n    return 1\n',
        'def f():\n    """Return the numbers; empty without any."""\n    return []\n',
        'def f() -> dict[str, int]:\n    """Return "a"."""\n    return {"a": 1}\n',
        'def f() -> dict[str, int]:\n    """Return the JSON form."""\n    return {"a": 1}\n',
        'def f() -> TypedDict:\n    """Return it."""\n    return {"a": 1}\n',
    ],
)
def test_plain_code_has_no_findings(tmp_path, source):
    assert findings.check(_written(tmp_path, source), tmp_path) == []


def _written(folder, source):
    path = folder / "cubatch" / "module.py"
    path.parent.mkdir()
    path.write_text(source)
    return path


def test_markdown_is_checked_outside_code(tmp_path):
    path = tmp_path / "page.md"
    path.write_text("It is measured anew.\n\n```\nnobody\n```\n\n- " + "word " * 26 + ".\n")
    assert [row.line for row in findings.check(path, tmp_path)] == [1, 7]


def test_module_names_are_unique_except_for_presenters():
    paths = ["cubatch/a/watch.py", "cubatch/b/watch.py", "cubatch/cli/watch.py", "cubatch/b/other.py"]
    assert [finding.path for finding in findings._check_stems(paths)] == paths[:2]


BEFORE = 'def f(told, n):\n    """Say it."""\n    return [told[one] for one in range(n)]\n'


@pytest.mark.parametrize(
    "after",
    [
        "def f(values, n):\n    return [values[i] for i in range(n)]\n",
        'def f(n, m):\n    """Return it."""\n    return [n[i] for i in range(m)]\n',
    ],
)
def test_renamed_code_is_proved_equal(after):
    Comparison().compare(BEFORE, after)


def test_renamed_imports_are_proved_equal():
    comparison = Comparison()
    comparison.compare("from a import b\n\nb.c(told=1)\n", "from a import z\n\nz.c(n=1)\n")
    assert dict(comparison.names) == {("b", "z"): 1, ("told", "n"): 1}


@pytest.mark.parametrize(
    "after",
    [
        "def f(values, n):\n    return [values[i] for i in range(values)]\n",  # another variable
        "def f(values, n):\n    return [n[n] for n in range(n)]\n",  # captured
        "def f(values, n):\n    return [values[i] for i in range(n + 1)]\n",
        "def f(values, n):\n    return {values[i] for i in range(n)}\n",
        "def f(values, n):\n    return [values[i] for i in reversed(n)]\n",
        "def f(values, n):\n    print(n)\n    return [values[i] for i in range(n)]\n",
    ],
)
def test_changed_code_is_not_proved_equal(after):
    with pytest.raises(Difference):
        Comparison().compare(BEFORE, after)
