"""The check of kernels against their budget: it fails on what exceeds it, and records new figures when asked."""

from __future__ import annotations

import attrs
import pytest

from benchmarks.kernel_budget import __main__ as command, budget as budgets
from benchmarks.kernel_budget.banks import BankConflicts
from benchmarks.kernel_budget.budget import Budget
from benchmarks.kernel_budget.loops import Loop
from cubatch.errors import InvalidArgument, InvalidData
from cubatch.kernels import resources, survey, variant
from cubatch.kernels.resources import Figures, Recorded
from tests.unit import kernel_tree


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """Replace the real kernels by small ones, with a cache of their own."""

    def make(configs=kernel_tree.CONFIGS, **sources):
        return kernel_tree.make(tmp_path / "kernels", configs, **sources)

    monkeypatch.setattr(variant, "_PACKAGE", tmp_path / "cubatch")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return make


@pytest.fixture
def check(capsys):
    """Run the command and return its exit status and its output in one line."""

    def run(*, update=False):
        code = command.run(family=None, update=update)
        return code, " ".join(capsys.readouterr().out.split())

    return run


def changed(root, name, figures):
    """Replace the recorded figures of a variant."""
    budget = budgets.read(root / "resources.toml")
    recorded = attrs.evolve(budget.recorded, figures={**budget.recorded.figures, name: figures})
    budgets.write(root / "resources.toml", attrs.evolve(budget, recorded=recorded))


def test_what_an_update_records_passes_on_every_architecture(check, tree):
    """2 variants on each surveyed architecture; the digest of the sources is recorded too."""
    root, count = tree(), len(survey.ARCHS)
    code, out = check(update=True)
    assert (code, f"2 variants, {2 * count} compiled by NVRTC 12.9.86: 0 problems." in out) == (0, True)
    code, out = check()
    assert (code, "0 problems." in out) == (0, True)
    budget = budgets.read(root / "resources.toml")
    figures = budget.recorded.figures["sums_f32"]
    assert [f"sm_{number}" for number in sorted(figures)] == [*survey.ARCHS]
    assert {each.shared_bytes for each in figures.values()} == {1024}
    assert budget.sources == budgets.digest(root)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda limit: attrs.evolve(limit, registers=limit.registers - 1), "registers, the budget allows"),
        (lambda limit: attrs.evolve(limit, shared_bytes=1023), "1024 bytes of static shared memory, the budget allows"),
        (lambda _: None, "the budget has no figures of it"),
    ],
    ids=["registers", "shared memory", "missing"],
)
def test_a_figure_that_exceeds_the_budget_or_is_missing_fails(check, tree, change, problem):
    """One architecture is enough, and it is named."""
    root = tree()
    check(update=True)
    figures = dict(budgets.read(root / "resources.toml").recorded.figures["sums_f32"])
    limit = change(figures.pop(86))
    changed(root, "sums_f32", figures if limit is None else figures | {86: limit})
    code, out = check()
    assert (code, "1 problems." in out, "(sm_86)" in out, problem in out) == (1, True, True, True)


def test_a_budget_that_is_higher_than_needed_passes_and_is_named(check, tree):
    """Registers that fell are no fault; nothing else would show them."""
    root = tree()
    check(update=True)
    figures = budgets.read(root / "resources.toml").recorded.figures["sums_f32"]
    changed(root, "sums_f32", {arch: attrs.evolve(limit, registers=64) for arch, limit in figures.items()})
    code, out = check()
    assert (code, "1 variants take less than the budget allows, such as sums_f32" in out) == (0, True)


def test_a_budget_of_another_nvrtc_is_not_compared(check, tree):
    """Builds differ by a few registers.  An update by another build is refused."""
    root = tree()
    (root / "resources.toml").write_text('nvrtc = "12.9.41"\n[figures]\nsums_f32 = "80=1/1"\ndoubled_f32 = "80=1"\n')
    code, out = check()
    assert (code, "the budget is of NVRTC 12.9.41" in out) == (0, True)
    with pytest.raises(InvalidArgument, match=r"12\.9\.41"):
        check(update=True)


def test_a_spill_fails_unless_the_budget_allows_it(check, tree):
    """The reason, written by hand, survives an update; more spilled bytes than recorded fail again."""
    root = tree(kernel_tree.SPILLING + "min_arch = 80\nmax_arch = 80\n", spills=kernel_tree.SPILLS)
    code, out = check(update=True)
    assert (code, "bytes of registers spilled per thread" in out, "wrote" in out) == (1, True, False)
    (root / "resources.toml").write_text('nvrtc = "12.9.86"\n[may_spill]\nspills_f32 = "it is made to"\n[figures]\n')
    assert (check(update=True)[0], check()[0]) == (0, 0)
    recorded = budgets.read(root / "resources.toml").recorded
    assert recorded.may_spill == {"spills_f32": "it is made to"}
    figures = recorded.figures["spills_f32"][80]
    assert figures.spill_bytes > 0
    changed(root, "spills_f32", {80: attrs.evolve(figures, spill_bytes=figures.spill_bytes - 4)})
    code, out = check()
    assert (code, "bytes spilled, the budget allows" in out) == (1, True)


def test_a_budget_reads_back_as_it_was_written(tmp_path):
    """The package reads the same figures; the text of an exemption's reason does not matter."""
    recorded = Recorded(
        "12.9.86", {"a_f32": 'a "reason" \\ here'}, {"a_f32": {80: Figures(20, 1024, 8), 52: Figures(21)}}
    )
    budget = Budget(recorded, "5eed", {"a_f32": {80: Loop(126, 64, 16)}}, {"a_f32": {52: BankConflicts(51, 512)}})
    path = tmp_path / "resources.toml"
    budgets.write(path, budget)
    assert budgets.read(path) == budget
    assert resources.read(path) == recorded


@pytest.mark.parametrize("table", ['[loops]\na = "80=x"', '[banks]\na = "80=1/0"'])
def test_a_table_that_cannot_be_read_is_an_error_with_its_path(tmp_path, table):
    """Not a budget without limits."""
    path = tmp_path / "resources.toml"
    path.write_text(f'nvrtc = "1"\n[figures]\n{table}\n')
    with pytest.raises(InvalidData, match=r"resources\.toml"):
        budgets.read(path)
