"""Register-bank conflicts: counted in machine code that is encoded here, and as recorded of every variant."""

from __future__ import annotations

import struct

import attrs
import pytest

from benchmarks.kernel_budget import budget as budgets
from benchmarks.kernel_budget.banks import BankConflicts, bank_conflicts
from cubatch.kernels import resources, survey, variant

OTHER = None


def maxwell(*instructions: tuple[int, int, int, int] | None) -> bytes:
    """Encode multiply-adds of registers a, b, c with reuse flags for sm_61, three after each control word."""
    groups = [instructions[at : at + 3] for at in range(0, len(instructions), 3)]
    text = b""
    for group in groups:
        fields = [one or (0, 0, 0, 0) for one in group]
        words = [
            0x5980 << 48 | a << 8 | b << 20 | c << 39 if one else 0x5C98 << 48
            for one, (a, b, c, _) in zip(group, fields, strict=True)
        ]
        control = sum(reuse << 21 * k + 17 for k, (_, _, _, reuse) in enumerate(fields))
        text += struct.pack("<4Q", control, *words, *[0] * (3 - len(words)))
    return text


def volta(*instructions: tuple[int, int, int, int] | None) -> bytes:
    """Encode the same for sm_70: 16 bytes each."""
    return b"".join(
        struct.pack("<2Q", 0x223 | one[0] << 24 | one[1] << 32, one[2] | one[3] << 58)
        if one
        else struct.pack("<2Q", 0x202, 0)
        for one in instructions
    )


def test_four_banks_give_one_register_a_clock() -> None:
    """Registers 0, 1, 2 lie in three banks; 0, 4 and 8 in one: two more clocks; the zero register lies in none."""
    code = maxwell((0, 1, 2, 0), (0, 4, 8, 0), (0, 4, 255, 0))
    assert bank_conflicts(code, 61) == BankConflicts(0 + 2 + 1, 3)


def test_two_banks_give_two_registers_a_clock() -> None:
    """Of three even registers one waits; of two even ones and an odd one none does."""
    assert bank_conflicts(volta((0, 2, 4, 0), (0, 2, 5, 0)), 70) == BankConflicts(1, 2)


@pytest.mark.parametrize(("encode", "arch"), [(maxwell, 61), (volta, 70)])
def test_an_operand_in_the_reuse_cache_is_not_read(encode, arch) -> None:
    """The flag of slot 0 keeps register 0 for the next multiply-add, unless another instruction comes between."""
    products = (0, 1, 2, 1), (0, 4, 8, 0)
    kept = bank_conflicts(encode(*products, OTHER), arch)
    lost = bank_conflicts(encode(products[0], OTHER, products[1]), arch)
    assert lost.clocks - kept.clocks == 1


@pytest.mark.parametrize(
    ("arch", "most", "mean"), [(52, 0.1, 0.06), (61, 0.1, 0.06), (70, 0.05, 0.01), (90, 0.05, 0.01)]
)
def test_recorded_conflicts_are_few(arch, most, mean) -> None:
    """Each tiled variant without tensor cores is recorded; sm_61 had 38 % on average when the epilogue stored rows."""
    banks = budgets.read(variant.kernels_path() / "resources.toml").banks
    tiled = [
        k for k in variant.kernels() if k.tile is not None and k.family in {"simt", "winograd"} and k.runs_on(arch)
    ]
    shares = [banks[kernel.name][arch].share for kernel in tiled]
    assert len(shares) > 50
    assert max(shares) < most
    assert sum(shares) / len(shares) < mean


def test_more_conflicts_than_recorded_are_a_problem() -> None:
    """An edit that brings conflicts back is reported with both counts, as is a variant that nothing is recorded of."""
    budget = budgets.read(variant.kernels_path() / "resources.toml")
    name = "gemm_nn_implicit_gemm_f32_simt_128x128x8_v4"
    (kernel,) = resources.named(name)
    row = survey.Row(kernel, "sm_61", "ok", budget.recorded.nvrtc, budget.recorded.figures[name][61])
    checked = budgets.Checked(row, conflicts=BankConflicts(449, 512))
    (more,) = budgets.excesses([checked], budget)
    assert any("449 bank conflicts" in problem for problem in more.problems)
    same = attrs.evolve(checked, conflicts=budget.banks[name][61])
    assert budgets.excesses([same], budget)[0].problems == ()
    (missing,) = budgets.excesses([checked], attrs.evolve(budget, banks={}))
    assert missing.problems == ("the budget has no bank conflicts of it",)
