"""Main loops and counts of machine code, against NVIDIA's disassembler, and what the check says of them."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import Counter
from importlib import metadata
from pathlib import Path

import attrs
import pytest

from benchmarks.kernel_budget import budget as budgets, machine_code, sass
from benchmarks.kernel_budget.check import check
from benchmarks.kernel_budget.loops import Loop, main_loops
from cubatch.errors import InvalidData
from cubatch.kernels import survey, variant
from cubatch.kernels.toolchain import compile as compiler

NAMES = {
    "simt": "gemm_nt_implicit_gemm_f32_simt_64x64x16_v4", "mma": "gemm_nt_implicit_gemm_f16_mma_64x64x32_v8",
    "hopper": "conv2d_fprop_implicit_gemm_f16_hopper_128x64x64",
}  # fmt: skip
PRODUCTS = {"simt": "FFMA", "mma": "HMMA", "hopper": "HGMMA"}


def named(name):
    return next(one for one in variant.kernels() if one.name == name)


def listed(path, product):
    """Read all instructions and the shortest loop with the most products from a listing, whose branches name labels."""
    program = next(Path(file.locate()) for file in metadata.files("nvidia-cuda-nvdisasm") if file.name == "nvdisasm")
    listing = subprocess.run([program, "-c", path], capture_output=True, text=True, check=True).stdout
    names, branches, labels = [], [], {}
    for line in listing.splitlines():
        if label := re.match(r"(\.L_\w+):", line):
            labels[label[1]] = len(names)
        elif found := re.match(r"\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9]*)(.*)", line):
            if found[1] == "BRA":
                branches.append((len(names), re.search(r"\.L_\w+", found[2])[0]))
            names.append(found[1])
    spans = [names[labels[to] : at + 1] for at, to in branches if labels[to] < at]
    best = max(spans, key=lambda span: (span.count(product), -len(span)))
    return Counter(names), Loop(len(best), best.count(product), best.count("LDSM"), best.count("PRMT"))


@pytest.mark.parametrize(
    ("family", "arch"), [("simt", "sm_75"), ("mma", "sm_80"), ("mma", "sm_120"), ("hopper", "sm_90")]
)
def test_loops_and_counts_are_those_of_nvidias_disassembler(family, arch):
    """Branches of both encodings are followed; every instruction of the table and budget is counted, as often."""
    found = named(NAMES[family])
    path = compiler.compile_unit(found, arch).path
    counts, want = listed(path, PRODUCTS[family])
    loop = main_loops(path.read_bytes(), variant.arch_number(arch))[found.entry]
    assert attrs.evolve(loop, fences=0) == want
    assert loop.products >= 4
    counts = {opcode: count for opcode, count in counts.items() if opcode in sass.OPCODES.values()}
    assert counts.keys() >= set(machine_code.EXPECTED.get(family, ()))
    assert sass.count_opcodes(path.read_bytes()) == {found.entry: counts}


def test_a_fence_of_the_gpu_around_wgmma_is_a_problem(tmp_path):
    """What arriving at another block cost in each step before it was told to order nothing."""
    root = tmp_path / "kernels"
    shutil.copytree(variant.kernels_path(), root)
    header = root / "common" / "device_hopper.cuh"
    text = header.read_text()
    assert text.count("mbarrier.arrive.shared::cluster") == 1
    header.write_text(
        text.replace("mbarrier.arrive.shared::cluster", "mbarrier.arrive.release.cluster.shared::cluster")
    )
    found = named("gemm_nt_implicit_gemm_f16_hopper_128x256x64_c2")

    (checked,) = check([found], ["sm_90"], root=root, folder=tmp_path / "cubins")

    assert [
        problem for problem in checked.row.problems if "fences of more than the block in a loop around wgmma" in problem
    ]


def test_more_for_each_product_is_an_excess():
    """Twice the products may have twice the rest; a loop that the budget lacks is a problem too."""
    name, arch = next(iter(sorted(machine_code.watched(variant.kernels()))))
    budget = budgets.read(variant.kernels_path() / "resources.toml")
    limit = budget.loops[name][variant.arch_number(arch)]
    twice = Loop(*(2 * getattr(limit, field.name) for field in attrs.fields(Loop)))
    row = next(row for row in survey.recorded([named(name)], budget.recorded, [arch]))

    def problems(loop, known=budget):
        return budgets.excesses([budgets.Checked(row, loop)], known)[0].problems

    assert problems(limit) == problems(twice) == ()
    assert len(problems(attrs.evolve(twice, instructions=twice.instructions + 1))) == 1
    assert len(problems(attrs.evolve(limit, permutations=limit.permutations + 1))) == 1
    assert len(problems(attrs.evolve(limit, matrix_loads=limit.matrix_loads + 1))) == 1
    assert problems(limit, attrs.evolve(budget, loops={})) == ("the budget has no main loop of it",)


def test_the_budget_has_every_loop_that_is_watched():
    """After a change of kernels: `python -m benchmarks.kernel_budget --update`, and look at the difference."""
    budget = budgets.read(variant.kernels_path() / "resources.toml")
    recorded = {(name, f"sm_{arch}") for name, loops in budget.loops.items() for arch in loops}
    assert recorded == machine_code.watched(variant.kernels())


def test_what_is_no_machine_code_is_an_error():
    """A file that was cut short says so, instead of having no loop."""
    with pytest.raises(InvalidData, match="cubin"):
        main_loops(b"\x7fELF" + bytes(20), 80)
