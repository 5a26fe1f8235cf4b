"""README.md and docs/ as a newcomer reads them: each snippet works as printed, each link, path and extra exists."""

from __future__ import annotations

import inspect
import json
import re
import shutil
import subprocess
import tomllib

import pytest

import cubatch
from cubatch.cli.app import app
from cubatch.kernels import variant
from cubatch.tuning.results import DECIDED_BY, STATUSES
from tests.unit.commands import get_command
from tests.unit.snippets import JUDGE, PAGES, README, ROOT, SNIPPETS, run, snippets

OTHERS = [ROOT / "cubatch/README.md", ROOT / "kernels/README.md", *sorted((ROOT / "benchmarks").rglob("README.md"))]
DOOR = [ROOT / name for name in ("CONTRIBUTING.md", "SECURITY.md")]
ALL = [*PAGES, *OTHERS, *DOOR]
HERE = [one for one in SNIPPETS if not one.marker and not one.needs]
MOST_LINES = 150


def of(page):
    """Return the name of a page."""
    return str(page.relative_to(ROOT))


def text_of(name):
    """Return the text of a page of docs/."""
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("snippet", HERE, ids=str)
def test_a_snippet_works_as_printed(snippet, tmp_path):
    """Those that need only cubatch; `mnist` is the sample that the tests have."""
    run(snippet, tmp_path)


@pytest.mark.parametrize("snippet", [one for one in SNIPPETS if one.marker == "mpi"], ids=str)
def test_a_snippet_of_several_ranks_works_as_printed(snippet, tmp_path):
    """As two ranks on the CPU."""
    if shutil.which("mpiexec") is None:
        pytest.skip("MPI is not installed")
    run(snippet, tmp_path)


@pytest.mark.parametrize("snippet", [one for one in SNIPPETS if one.language == "sh"], ids=str)
def test_the_commands_of_a_snippet_exist(snippet):
    """Also of those that only a GPU runs: shell syntax, and each option of a cubatch command."""
    subprocess.run(["bash", "-n", "-c", snippet.text], check=True)
    for words in snippet.commands:
        command = get_command(app)
        depth = 0
        while words[depth] in getattr(command, "commands", {}):
            command, depth = command.commands[words[depth]], depth + 1
        with command.make_context("cubatch", words[depth:]):
            pass


def test_every_snippet_is_run_somewhere():
    """Here, in tests/parity, by people with a GPU, or by .ci/run, which knows README's two commands by their marks."""
    judge = (ROOT / ".ci/run").read_text(encoding="utf-8")
    marks = {one.marker for one in SNIPPETS}
    assert marks == {"", "gpu", "mpi", "torchrun", "torchvision", "heap", *JUDGE}
    assert {one.marker for one in snippets(README)} == {"", *JUDGE}
    assert all(f"readme_command {mark}" in judge for mark in JUDGE)
    assert len(HERE) > 15


def test_the_readme_is_short():
    """A newcomer reads it in five minutes; docs/ has the rest."""
    assert len(README.read_text(encoding="utf-8").splitlines()) <= MOST_LINES


@pytest.mark.parametrize("page", ALL, ids=of)
def test_links_lead_somewhere(page):
    """To a file of the repository, and to a heading of it."""
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        goal = page.parent / path if path else page
        assert goal.exists(), target
        assert not anchor or anchor in anchors(goal), target


def anchors(page):
    """Return the headings of a page as GitHub and MkDocs name them in links."""
    titles = re.findall(r"^#+ (.*)", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", [*PAGES, *DOOR], ids=of)
def test_files_that_a_page_names_exist(page):
    """In backticks, by their whole path; x.py and x.cu stand for new files."""
    named = re.findall(r"`((?:\.ci|benchmarks|cubatch|docs|kernels|tests)/[\w./-]+)`", page.read_text(encoding="utf-8"))
    new = re.compile(r"/(test_)?x\.\w+$")
    assert [name for name in named if not new.search(name) and not (ROOT / name).exists()] == []


def test_files_that_the_map_names_exist():
    """Of the package, in whose folder the map is."""
    page = ROOT / "cubatch/README.md"
    named = re.findall(r"`([\w/]+(?:\.py|/))`", page.read_text(encoding="utf-8"))
    assert len(named) > 10
    assert [name for name in named if not (page.parent / name).exists() and not (ROOT / name).exists()] == []


@pytest.mark.parametrize("page", ALL, ids=of)
def test_extras_that_a_page_names_exist(page):
    """In `pip install '.[extra]'`, or the bare `'.[extra]'`; no page installs from an index, where nothing is."""
    text = page.read_text(encoding="utf-8")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    named = {extra for group in re.findall(r"'\.\[([\w,]+)\]'", text) for extra in group.split(",")}
    assert named <= set(extras)
    assert not re.search(r"pip install '?cubatch", text)


def test_no_message_installs_from_an_index():
    """Nothing is published: a message names the command for a checkout."""
    sources = [path for path in (ROOT / "cubatch").rglob("*.py") if "pip install" in path.read_text(encoding="utf-8")]
    assert sources
    assert [str(path) for path in sources if re.search(r"pip install [^\n]*cubatch\[", path.read_text("utf-8"))] == []


def test_the_reference_has_every_public_name():
    """Functions, classes, layers and errors: the hook of the site lists them by kind, from `cubatch.__all__`."""
    hook = {}
    exec((ROOT / "docs/config/hooks.py").read_text(encoding="utf-8"), hook)  # noqa: S102 - our own file
    page = text_of("reference/python.md")
    kinds = re.findall(r"<!-- names: (\w+) -->", page)
    listed = [name for kind in kinds for name in hook["public_names"](kind)]
    assert sorted([*listed, "__version__", "models"]) == sorted(cubatch.__all__)
    rendered = hook["on_page_markdown"](page)
    assert "::: cubatch.tuning.tune.autotune\n" in rendered
    assert [name for name in listed if not re.search(rf"^::: cubatch\.\S*\.{name}$", rendered, re.MULTILINE)] == []
    assert "--memory-limit" in hook["on_page_markdown"](text_of("reference/commands.md"))


def json_of(kind):
    """Return an example of JSON of the API page, parsed."""
    (text,) = re.findall(rf"<!-- schema: {kind} -->\n```json\n(.*?)```", text_of("reference/api.md"), re.DOTALL)
    return json.loads(text)


def test_the_json_of_a_result_is_as_documented():
    """Every key in its order, and the example reads as a result."""
    example = json_of("result")
    result = cubatch.TuningResult.from_json(json.dumps(example))
    written = json.loads(result.to_json())
    assert list(example) == list(written)
    assert list(example["measurements"][0]) == list(written["measurements"][0])


def test_the_words_of_a_result_are_as_documented():
    """All statuses, and all that may end a search."""
    text = text_of("reference/api.md")
    assert re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE) == list(STATUSES)
    assert re.findall(r"`(\w+)`", text.partition("`decided_by` is one of ")[2].partition("\n")[0]) == list(DECIDED_BY)


def test_the_json_of_kernels_is_as_documented(tmp_path):
    """As `cubatch kernels --json` writes it, of recorded figures."""
    path = tmp_path / "kernels.json"
    command = ["--arch", "sm_70", "--family", "naive", "--operation", "gemm_nt", "--json", str(path)]
    with pytest.raises(SystemExit) as ended:
        app(["kernels", *command], prog_name="cubatch")
    assert not ended.value.code
    written, example = json.loads(path.read_text(encoding="utf-8")), json_of("kernels")
    assert list(example) == list(written)
    assert list(example["kernels"][0]) == list(written["kernels"][0])
    assert list(example["kernels"][0]["variants"][0]) == list(written["kernels"][0]["variants"][0])


@pytest.mark.parametrize(
    ("row", "command"),
    [
        ("`predict --device`", "predict mlp --device t4 --batch-sizes 8"),
        ("`predict --devices`", "predict mlp --devices t4,a40 --batch-sizes 8"),
        ("`memory`, one device", "memory mlp --device t4"),
        ("`memory`, several devices", "memory mlp --device t4,a40"),
        ("`cubatch serving`", "serving tuned.json --arrival-rate 1 --p99 1"),
        ("`cubatch profile`", "profile mlp --device cpu --budget 0.1"),
        ("`study list`", "study list"),
        ("`cubatch candidates`", "candidates mlp --device t4"),
        ("`cubatch occupancy`", "occupancy --device t4 --threads 64 --registers 32"),
        ("`cubatch bench`", "bench gemm --m 64 --n 64 --k 64 --device t4 --dry-run"),
        ("`devices`, `models`, `layers`", "devices"),
        ("`devices`, `models`, `layers`", "layers relu"),
        ("`store list`, `show`, `clear`", "store list --store empty.db"),
        ("`store list`, `show`, `clear`", "store clear --all --store empty.db"),
    ],
)
def test_the_json_of_a_command_has_the_documented_keys(row, command, tmp_path, monkeypatch):
    """Each key at the top of what it writes is in its row of the table."""
    monkeypatch.chdir(tmp_path)
    example = json_of("result") | {"mode": "inference"}
    (tmp_path / "tuned.json").write_text(json.dumps(example), encoding="utf-8")
    (tmp_path / "empty.db").touch()
    with pytest.raises(SystemExit) as ended:
        app([*command.split(), "--json", "out.json"], prog_name="cubatch")
    assert not ended.value.code
    (cells,) = re.findall(rf"^\| {row} \|(.*)", text_of("reference/api.md"), re.MULTILINE)
    written = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert set(written) - {"schema"} <= set(re.findall(r"`(\w+)`", cells))


def test_a_kernel_that_a_page_names_exists():
    """By the name of its variant."""
    names = {kernel.name for kernel in variant.kernels()}
    for snippet in SNIPPETS:
        for words in snippet.commands:
            if words[0] == "occupancy" and not words[1].startswith("-"):
                assert words[1] in names


def test_functions_of_the_reference_have_examples():
    """Each public function shows a call in its docstring."""
    functions = [getattr(cubatch, name) for name in cubatch.__all__ if inspect.isfunction(getattr(cubatch, name))]
    assert len(functions) > 10
    assert [function.__name__ for function in functions if ">>>" not in (function.__doc__ or "")] == []
