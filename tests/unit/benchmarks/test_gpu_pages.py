"""What is made of the results of a GPU pass."""

from __future__ import annotations

import json

from benchmarks import render
from benchmarks.pages import gpu, gpu_step
from cubatch.bench import cases, measure
from cubatch.bench.contest import Contest
from cubatch.network import layers as kinds
from cubatch.network.passes import Pass
from tests.unit.bench_fakes import DEVICE
from tests.unit.benchmarks.passes import conv_case, entry, item_of, result_of

SYNTHETIC = result_of(
    gemm=(
        [
            item_of(cases.gemm(64, 64, 64), [entry(2e-3, ratio=0.5), entry(1e-3, side="vendor")]),
            item_of(cases.gemm(16, 64, 64), [entry(1e-9, status="wrong", ratio=99.0)]),
        ],
        3,
    ),
    layers=(
        [
            item_of(conv_case(1), [entry(1e-3, ratio=0.8, fill=0.3), entry(8e-4, side="vendor")]),
            item_of(conv_case(5, layers=("other/a",)), [entry(1e-3, ratio=5.0), entry(5e-3, side="vendor")]),
        ],
        0,
    ),
    misc=([item_of(cases.of_layer(kinds.Add(h=8, w=8, c=4), Pass.FPROP, 2), [entry(1e-3, copy=0.7)], "memory")], 0),
)


def test_a_caption_names_the_commits_that_a_resumed_pass_kept_cases_of():
    """Two of three products were timed before it was resumed, by code of another commit; convolutions were not."""
    result = result_of(
        gemm=(
            [item_of(cases.gemm(n, 8, 8), [entry(1e-3, ratio=1.0), entry(1e-3, side="vendor")]) for n in (8, 16, 32)],
            0,
        ),
        layers=([item_of(conv_case(1), [entry(1e-3, ratio=1.0)])], 0),
    )
    before, _ = result["stages"]
    for item in before["items"][:2]:
        item["commit"] = "1111111"
    assert "commit 0000000 (but 2 of the cases: 1111111), " in gpu.gemm(result)
    assert "commit 0000000, " in gpu.convolutions(result)


def test_sections_of_a_page_are_written_from_a_pass(monkeypatch, tmp_path):
    """Every kind has its marker; a page without markers stays as it is."""
    (tmp_path / "pass.json").write_text(json.dumps(SYNTHETIC))
    monkeypatch.setattr(render, "ROOT", tmp_path)
    monkeypatch.setattr(gpu_step, "STEPS", gpu_step.STEPS[:1])
    page = "".join(f"<!-- results: {kind} pass.json -->\nold\n<!-- end -->\n" for kind in gpu.KINDS)
    written = render.rendered(page, render.ROOT)
    assert "old" not in written
    assert written.count("Imaginary GPU") == len(gpu.KINDS)
    assert render.rendered("no markers", render.ROOT) == "no markers"


def test_a_real_result_is_what_the_tables_read(world):
    """The JSON that measuring gives has every key that they look up."""
    result = measure.time_case(cases.gemm(70, 50, 30), world.target(), Contest(world), seconds=10.0)
    facts = {"name": "x", "status": "ok", "result": json.loads(json.dumps(result.to_mapping()))}
    passed = result_of(gemm=([facts], 0))
    assert "gemm nt 70 x 50 x 30" in gpu.gemm(passed)
    assert "| gemm | float32 | fake | 1 |" in gpu.families(passed)
    assert gpu.limit_of(gpu.rows_of(passed, "gemm")[0])
    assert DEVICE.num_sms == 10
