"""
Check the language of the project: words, sentence length, docstring openings, names, results, and what None means.

Run `python -m tests.language.findings cubatch/search docs` to list what is found in folders or files, without arguments
in all of them. A test asserts that there is nothing.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
import tomllib
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import attrs

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
RULES = tomllib.loads((HERE / "words.toml").read_text(encoding="utf-8"))
CUDA = (".cu", ".cuh", ".h")
SECTIONS = ("Args:", "Attributes:", "Keys:", "Returns:", "Raises:", "Yields:", "Note:", "Warning:")
MESSAGE_WORDS = 3  # strings of fewer words are keys and labels

_PHRASES = [(re.compile(rf"\b(?:{key})\b", re.IGNORECASE), use) for key, use in RULES["phrases"].items()]
_ANY_PHRASE = re.compile("|".join(RULES["phrases"]).lower())  # of lower-case text: most lines have none
_FIRST = [(re.compile(rf"(?:{key})\b"), use) for key, use in RULES["first_words"].items()]
_NAMES_RESULT = re.compile(r"\b(Return|return|Returns|Yields?|Whether)\b|^(Compute|Format|Join|List|Parse)\b")
_SAYS_WHEN = re.compile(r"\b(any|empty|if|no|none|nothing|only|unless|without)\b|\"\"|\(\)", re.IGNORECASE)
_SAYS_INFINITE = re.compile(r"\b(inf|infinite|infinity|nan)\b", re.IGNORECASE)
_WORD = re.compile(r"[A-Za-z0-9][\w'/%.-]*")
_ABBREVIATION = re.compile(r"\b(e\.g|i\.e|et al|vs|cf|approx|no|[A-Z])\.", re.ASCII)


@attrs.frozen(order=True)
class Finding:
    """A place that breaks a rule."""

    path: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text}"


def files(root: Path = ROOT) -> list[Path]:
    """Return the checked files: all Markdown, Python of the package and the benchmarks, CUDA sources."""
    paths = [*root.glob("*.md"), *root.glob("docs/**/*.md"), *root.glob("tests/**/*.md")]
    paths += [
        path for top in ("cubatch", "benchmarks") for path in (root / top).rglob("*") if path.suffix in (".py", ".md")
    ]
    paths += [path for path in (root / "kernels").rglob("*") if path.suffix in (*CUDA, ".md")]
    # Generated pages of results hold tables only.
    return sorted(path for path in paths if "results" not in path.parts and "data" not in path.parts)


def check(path: Path, root: Path = ROOT) -> list[Finding]:
    """Return the findings in one file."""
    name, text = path.relative_to(root).as_posix(), path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return [Finding(name, *row) for row in _check_markdown(text)]
    if path.suffix in CUDA:
        return [Finding(name, *row) for row in _check_cuda(text)]
    nodes = list(ast.walk(ast.parse(text)))  # walking takes most of the time
    rows = [*_check_python(text, nodes), *_check_nones(text, nodes), *_check_names(nodes)]
    if name.startswith("cubatch/"):
        rows += _check_results(nodes, are_commands=name.startswith("cubatch/cli/"))
    return sorted(Finding(name, *row) for row in rows)


def check_all(root: Path = ROOT) -> list[Finding]:
    """Return the findings in all files."""
    paths = files(root)
    modules = [path.relative_to(root).as_posix() for path in paths if path.suffix == ".py"]
    return [*(finding for path in paths for finding in check(path, root)), *_check_stems(modules)]


# --- prose ---


def banned(text: str) -> list[str]:
    """Return the banned phrases in a text, each with its replacement."""
    if not _ANY_PHRASE.search(text.lower()):
        return []
    prose = re.sub(r"`[^`]*`", "`", text)
    return [f'"{hit.group()}": use {use}' for phrase, use in _PHRASES for hit in phrase.finditer(prose)]


def long_sentences(paragraph: str) -> list[str]:
    """Return the sentences of a paragraph that have too many words; inline code counts as one word."""
    prose = re.sub(r"`[^`]*`", "Code", re.sub(r"\]\([^)]*\)", "]", paragraph))
    prose = _ABBREVIATION.sub(lambda hit: hit.group(1).replace(".", ""), prose)
    sentences = re.split(r"(?<=[.!?])[\"')*_]*\s+(?=[\"'(*`A-Z0-9_\[])", prose)
    most = RULES["sentences"]["most_words"]
    return [
        f"{count} words: {' '.join(sentence.split())[:60]}..."
        for sentence in sentences
        if (count := len(_WORD.findall(sentence))) > most
    ]


def paragraphs(docstring: str) -> list[tuple[int, str]]:
    """Return (line offset, text) of each paragraph of a docstring; examples and indented blocks are left out."""
    lines = docstring.splitlines()
    base = min((len(line) - len(line.lstrip()) for line in lines[1:] if line.strip()), default=0)
    blocks: list[tuple[int, list[str]]] = [(0, [])]
    in_section, in_example = False, False
    for offset, raw in enumerate(lines):
        line, indent = raw.strip(), (len(raw) - len(raw.lstrip()) - base if offset else 0)
        if not line:
            in_example = False
            blocks.append((offset + 1, []))
        elif line.startswith(">>>") or in_example:
            in_example = True
        elif indent <= 0 and line in (*SECTIONS, "Example:", "Examples:"):
            in_section = line in SECTIONS
            blocks.append((offset + 1, []))
        elif indent > 0 and not in_section:
            continue
        else:
            if (in_section and 0 < indent <= 4) or line.startswith(("- ", "* ")):  # a new entry
                blocks.append((offset, []))
            blocks[-1][1].append(line)
    return [(offset, " ".join(block)) for offset, block in blocks if block]


def _check_markdown(text: str) -> list[tuple[int, str]]:
    rows, block, start, fenced = [], list[str](), 1, False
    text = re.sub(r"<!--.*?-->", lambda hit: "\n" * hit.group().count("\n"), text, flags=re.DOTALL)
    for number, raw in enumerate([*text.split("\n"), ""], 1):
        is_fence = raw.lstrip().startswith("```")
        fenced ^= is_fence
        if (fenced and not is_fence) or raw.startswith("    "):
            continue
        line = "" if is_fence else raw
        rows += [(number, hit) for hit in banned(line)]
        is_entry = re.match(r"\s*([-*+]|\d+\.)\s|#|\||!\[|<", line)
        if (not line.strip() or is_entry) and block:
            rows += [(start, hit) for hit in long_sentences(" ".join(block))]
            block = []
        if line.strip() and not re.match(r"#|\||!\[|<", line):
            start = start if block else number
            block.append(re.sub(r"^\s*([-*+]|\d+\.)\s", "", line).strip())
    return rows


def _check_cuda(text: str) -> list[tuple[int, str]]:
    rows = []
    for comment in re.finditer(r"//[^\n]*|/\*.*?\*/", text, re.DOTALL):
        line = text.count("\n", 0, comment.start()) + 1
        rows += [(line, hit) for hit in banned(comment.group())]
    return rows


def _check_python(text: str, nodes: Sequence[ast.AST]) -> list[tuple[int, str]]:
    rows = []
    docs = {id(node): owner for node, owner in docstrings(nodes)}
    joined = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            value = node.value
            if id(node) in docs:
                rows += [(node.lineno + at, hit) for at, line in enumerate(value.split("\n")) for hit in banned(line)]
                rows += [(node.lineno + at, hit) for at, part in paragraphs(value) for hit in long_sentences(part)]
                if isinstance(docs[id(node)], ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                    first = value.strip().split("\n")[0]
                    rows += [
                        (node.lineno, f"opens with {first.split()[0]}: use {use}")
                        for word, use in _FIRST
                        if word.match(first)
                    ]
            elif id(node) in joined or len(value.split()) >= MESSAGE_WORDS:
                rows += [(node.lineno, hit) for hit in banned(value)]
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            rows += [(token.start[0], hit) for hit in banned(token.string)]
    return rows


def docstrings(nodes: Iterable[ast.AST]) -> list[tuple[ast.Constant, ast.AST]]:
    """Return the docstrings of nodes, those after assignments included, each with the node that it describes."""
    return [
        (statement.value, node if place == 0 else body[place - 1])
        for node in nodes
        if isinstance(body := getattr(node, "body", None), list)
        for place, statement in enumerate(body)
        if isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    ]


# --- None ---


def _check_nones(text: str, nodes: Sequence[ast.AST]) -> list[tuple[int, str]]:
    rows, lines = [], text.split("\n")
    for node in nodes:
        if isinstance(node, ast.ClassDef):
            rows += [(at, f"attribute {name} may be None: say when") for at, name in _silent_attributes(node, lines)]
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (prose := ast.get_docstring(node)):
            prose += _comments(lines[node.lineno - 1 : node.body[0].lineno - 1])
            if "None" in prose.replace("| None", ""):  # a repeated type explains nothing
                continue
            if isinstance(node.returns, ast.BinOp) and _may_be_none(node.returns):
                rows.append((node.lineno, f"{node.name} may return None: say when"))
            rows += [
                (each.lineno, f"parameter {each.arg} may be None: say what it means")
                for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
                if _may_be_none(each.annotation)
            ]
    return rows


def _silent_attributes(node: ast.ClassDef, lines: list[str]) -> list[tuple[int, str]]:
    """Return the attributes that may be None, unless the class, their entry, comment or docstring mentions None."""
    entries = [part for _, part in paragraphs(ast.get_docstring(node, clean=False) or "") if "None" in part]
    if not all(map(_subjects, entries)):
        return []
    explained, optional = {name for part in entries for name in _subjects(part)}, []
    below = {constant.lineno - 1: constant.value for constant, _ in docstrings([node])}
    for part in node.body:
        if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
            first = part.lineno - 1
            while lines[first - 1].lstrip().startswith("#"):
                first -= 1
            prose = _comments(lines[first : part.end_lineno]) + str(below.get(part.end_lineno or 0, ""))
            if "None" in prose:
                explained |= {part.target.id, *_subjects(prose)}
            if _may_be_none(part.annotation):
                optional.append((part.lineno, part.target.id))
    return [(at, name) for at, name in optional if name not in explained]


def _subjects(prose: str) -> set[str]:
    """Return the names before the colon of an entry such as "low, high: bounds"; empty for any other text."""
    head = re.match(r"(`?\w+`?(, `?\w+`?)*):", prose)
    return set(re.findall(r"\w+", head[1])) if head else set()


def _comments(lines: list[str]) -> str:
    return " ".join(re.findall(r"# (.*)", "\n".join(lines)))


def _may_be_none(annotation: ast.expr | None) -> bool:
    if isinstance(annotation, ast.BinOp):
        return _may_be_none(annotation.left) or _may_be_none(annotation.right)
    return isinstance(annotation, ast.Constant) and annotation.value is None


# --- results ---


def _check_results(nodes: Sequence[ast.AST], *, are_commands: bool) -> list[tuple[int, str]]:
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    results: dict[ast.FunctionDef | ast.AsyncFunctionDef, list[ast.expr]] = {node: [] for node in functions}
    for node in nodes:
        if isinstance(node, ast.Return) and node.value is not None:
            around = [each for each in functions if each.lineno <= node.lineno <= (each.end_lineno or 0)]
            innermost, value = max(around, key=lambda each: each.lineno), node.value
            results[innermost] += [value.body, value.orelse] if isinstance(value, ast.IfExp) else [value]
    rows = []
    for function, values in results.items():
        if not (prose := ast.get_docstring(function)) or not values:
            continue
        gaps: set[str] = set()
        # The docstring of a property describes its value, that of a command is its help.
        is_value = are_commands or any(ast.unparse(each).endswith("property") for each in function.decorator_list)
        if not is_value and not _NAMES_RESULT.search(prose):
            gaps.add("returns something: say what")
        for value in values:
            if (text := ast.unparse(value)) in {"[]", "{}", "()", "''"} and not _SAYS_WHEN.search(prose):
                gaps.add(f"may return {text}: say when")
            if isinstance(value, ast.Attribute) and value.attr in {"inf", "nan"} and not _SAYS_INFINITE.search(prose):
                gaps.add(f"may return {value.attr}: say when")
            gaps |= {f"returns the key {key}: name it, or its JSON page" for key in _keys(value, function)}
        rows += [(function.lineno, f"{function.name} {gap}") for gap in gaps]
    return rows


def _keys(value: ast.expr, function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """Return the keys of a returned mapping that the docstring does not name; none if it says that it is JSON."""
    prose = ast.get_docstring(function) or ""
    is_mapping = function.returns is not None and re.search(r"\b(dict|Mapping)\b", ast.unparse(function.returns))
    if not isinstance(value, ast.Dict) or not is_mapping or "JSON" in prose:
        return []
    keys = [key.value for key in value.keys if isinstance(key, ast.Constant) and isinstance(key.value, str)]
    return [key for key in keys if not re.search(rf"\b{re.escape(key)}\b", prose)]


# --- names ---


def _check_names(nodes: Sequence[ast.AST]) -> list[tuple[int, str]]:
    rows, most = [], RULES["names"]["most_positional"]
    of_errors = {
        id(part)
        for node in nodes
        if isinstance(node, ast.ClassDef) and node.name in RULES["names"]["errors"]
        for part in node.body
    }
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            rows += _banned_name(node.name, node)
            names = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args)]
            count = len(names) - (names[:1] in (["self"], ["cls"]))
            if count > most and id(node) not in of_errors:
                rows.append((node.lineno, f"{node.name} has {count} positional parameters"))
        elif isinstance(node, ast.arg):
            rows += _banned_name(node.arg, node)
        elif isinstance(node, ast.ClassDef):
            rows += _banned_name(node.name.lower(), node)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            rows += _banned_name(node.id, node)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            rows += _banned_name(node.attr, node)
    return rows


def _banned_name(name: str, node: ast.expr | ast.stmt | ast.arg) -> list[tuple[int, str]]:
    return [(node.lineno, f"name {name}")] if name.strip("_") in RULES["names"]["banned"] else []


def _check_stems(paths: list[str]) -> list[Finding]:
    presenters = tuple(RULES["names"]["presenters"])
    modules = [path for path in paths if path.startswith("cubatch/") and "/__" not in path]
    shared = Counter(Path(path).stem for path in modules if not path.startswith(presenters))
    return [
        Finding(path, 1, f"module name {Path(path).stem} is used {shared[Path(path).stem]} times")
        for path in modules
        if not path.startswith(presenters) and shared[Path(path).stem] > 1
    ]


def main(arguments: list[str]) -> None:
    """Print the findings in the named folders and files, or in all."""
    print(*(finding for finding in check_all() if finding.path.startswith(tuple(arguments or [""]))), sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
