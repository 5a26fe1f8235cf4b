"""Pages are made of results, and every kept result has a page; `render --check` compares them all, a stage of CI."""

from __future__ import annotations

import json
import re

from benchmarks import render

RESULTS = render.ROOT / "benchmarks/results"


def test_every_device_has_a_page_and_every_result_is_shown():
    """A result counts as shown if a page renders it or links to it; studies are shown by their page's picture."""
    text = "".join(path.read_text(encoding="utf-8") for path in (render.ROOT / "benchmarks").rglob("README.md"))
    files = {path.relative_to(RESULTS).as_posix() for path in RESULTS.rglob("*.json")}
    hidden = {name for name in files if name.rpartition("/")[2] not in text and "/study-" not in name}
    assert hidden == set()
    shown = {path.parent.name for path in RESULTS.glob("*/README.md")}
    devices = {name.partition("/")[0] for name in files if "/" in name} - {"predictor", "simulated-h100"}
    assert devices == shown


def test_readme_is_short_and_names_the_commit_of_each_table():
    text = (render.ROOT / "benchmarks/README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 250
    sections = re.findall(r"<!-- results: .*?<!-- end -->", text, re.DOTALL)
    assert len(sections) >= 7
    for section in sections:
        assert re.search(r"\d{4}-\d\d-\d\d", section), section[:80]
        assert "commit" in section, section[:80]


def test_a_section_is_made_of_its_files_in_order(tmp_path, monkeypatch):
    """Only the text between the markers changes."""
    for name in "ab":
        (tmp_path / f"{name}.json").write_text(json.dumps({"name": name}))
    monkeypatch.setitem(render.KINDS, "both", lambda *results: " and ".join(each["name"] for each in results))
    marker = "<!-- results: both b.json a.json -->\n"
    page = f"x\n{marker}old\n<!-- end -->\ny"
    assert render.rendered(page, tmp_path) == f"x\n{marker}\nb and a\n\n<!-- end -->\ny"


def test_a_figure_of_another_result_is_stale(monkeypatch, tmp_path):
    """It is replaced where that is asked for."""
    (name,) = render.FIGURES
    other = "benchmarks/results/amd-epyc-2-threads/mnist-cnn-training.json"
    for path in (name, other):
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).write_bytes((render.ROOT / path).read_bytes())
    monkeypatch.setitem(render.FIGURES, name, other)
    assert render.stale_figures(tmp_path, mend=True) == [name]
    assert render.stale_figures(tmp_path, mend=False) == []


def test_check_names_a_stale_page_and_changes_nothing(tmp_path, monkeypatch, capsys):
    page = "<!-- results: name a.json -->\nold\n<!-- end -->"
    (tmp_path / "README.md").write_text(page)
    (tmp_path / "a.json").write_text('{"name": "new"}')
    monkeypatch.setattr(render, "ROOT", tmp_path)
    monkeypatch.setattr(render, "FIGURES", {})
    monkeypatch.setitem(render.KINDS, "name", lambda result: result["name"])
    assert run(monkeypatch, "--check") == 1
    assert "README.md" in capsys.readouterr().err
    assert (tmp_path / "README.md").read_text() == page
    assert [run(monkeypatch), run(monkeypatch, "--check")] == [0, 0]
    assert (tmp_path / "README.md").read_text() == page.replace("old", "\nnew\n")


def run(monkeypatch, *words):
    """Return the exit status of the command."""
    monkeypatch.setattr("sys.argv", ["render", *words])
    return render.main()
