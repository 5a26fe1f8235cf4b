"""The language of the project: no text breaks a rule, and each rule would be seen to be broken."""

from __future__ import annotations

import pytest

from tests.language import findings


def test_nothing_breaks_a_rule():
    """`python -m tests.language.findings` lists the same."""
    assert [str(finding) for finding in findings.check_all()] == []


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
