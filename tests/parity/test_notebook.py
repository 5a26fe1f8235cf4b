"""A notebook as users write one: it is executed by Jupyter's own kernel, and its outputs hold the answers."""

from __future__ import annotations

import os
import re

import pytest

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")

CELLS = {
    "result": (
        "import cubatch as cb\n"
        'result = cb.autotune("mnist-cnn", device="cpu", batch_sizes=[4, 8], budget=5, store=False)\n'
        "result"
    ),
    "forecast": 'cb.predict("mnist-cnn", device="titan-x-pascal", batch_sizes=[8, 16])',
    "footprint": 'cb.footprint("mnist-cnn", batch_size=8, mode="training")',
    "candidates": 'cb.candidates("mnist-cnn", device="titan-x-pascal", batch_sizes=[8, 16])',
    "answer": "print(result.batch_size)",
}


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """Execute the cells in one kernel, and give the outputs of each by its name."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code) for code in CELLS.values()])
    folder = tmp_path_factory.mktemp("notebook")
    environment = {**os.environ, "JUPYTER_CONFIG_DIR": str(folder), "IPYTHONDIR": str(folder), "HOME": str(folder)}
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").execute(cwd=str(folder), env=environment)
    nbformat.validate(notebook)
    return dict(zip(CELLS, (cell.outputs for cell in notebook.cells), strict=True))


@pytest.mark.parametrize("name", ["result", "forecast", "footprint", "candidates"])
def test_an_answer_is_shown_as_a_table_and_as_text(outputs, name):
    """The last line of a cell: HTML for the browser, the text of a terminal beside it."""
    (shown,) = [one for one in outputs[name] if one.output_type == "execute_result"]
    assert '<div class="cubatch">' in shown.data["text/html"]
    assert "<table><thead>" in shown.data["text/html"]
    assert "8" in shown.data["text/plain"]


def test_the_answer_is_in_the_output(outputs):
    """The size that Python has is the one that the page names."""
    answer = outputs["answer"][0].text.strip()
    (shown,) = [one for one in outputs["result"] if one.output_type == "execute_result"]
    assert answer in ("4", "8")
    assert re.search(rf'<tr class="mark"><td class="">→</td><td class="n">{answer}</td>', shown.data["text/html"])


def test_progress_was_shown_and_is_gone(outputs):
    """One display, updated while measuring, empty in what is kept of the notebook; nothing on the error stream."""
    (bar,) = [one for one in outputs["result"] if one.output_type == "display_data"]
    assert (bar.data["text/html"], bar.data["text/plain"]) == ("", "")
    assert not [one for one in outputs["result"] if one.output_type == "stream"]
