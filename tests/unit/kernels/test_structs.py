"""What the host hands to kernels by value has one layout on both sides, and neither changes alone."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

from cubatch.errors import MissingDependency
from cubatch.kernels import structs
from cubatch.kernels.survey import survey
from cubatch.kernels.toolchain import nvrtc
from cubatch.kernels.variant import find, kernels_path

ARCH = "sm_80"
HEADER = (kernels_path() / structs.HEADER).read_text()
CHANGES = [
    ("tiles_m, tiles_n;", "tiles_n, tiles_m;", "Product::tiles_m is field"),
    ("int batch; ", "i64 batch; ", "Product has 40 bytes"),
    ("int slices; ", "int slices, more; ", "Output has 24 bytes"),
    (
        "i64 elements;    // rows * columns, of all groups\n  int columns; ",
        "int elements; i64 columns; ",
        "Output has 24 bytes",
    ),
    ("u32 divisor, multiplier, shift;", "u32 multiplier, divisor, shift;", "Divisor::divisor is field 0"),
    ("int p, q, k; ", "int q, p, k; ", "Conv::p is field 3"),
    ("int group_c, group_k; ", "int group_c; ", "Conv has 128 bytes"),
]


@pytest.fixture(autouse=True, scope="module")
def _with_a_compiler():
    try:
        nvrtc.for_arch(80)
    except MissingDependency as error:
        pytest.skip(str(error))


def changed(folder, before, after):
    """A copy of the header and what it includes, with one change."""
    assert HEADER.count(before) == 1
    shutil.copytree(kernels_path() / "common", folder / "common")
    (folder / structs.HEADER).write_text(HEADER.replace(before, after))
    return folder


@pytest.mark.parametrize("arch", ["sm_52", "sm_80", "sm_120"])
def test_both_sides_are_the_same(arch):
    """On every architecture: sizes, fields and their order."""
    assert structs.mismatch(kernels_path(), arch) == ""


@pytest.mark.parametrize(("before", "after", "said"), CHANGES, ids=str)
def test_a_change_of_one_side_is_found(before, after, said, tmp_path):
    """Fields swapped, added, taken away or of another type: the message names the field, or the size as it was."""
    assert said in structs.mismatch(changed(tmp_path, before, after), ARCH)


def test_a_change_of_the_other_side_is_found_too():
    """A record with a field that the struct does not have."""
    record = np.dtype([*((name, structs.OUTPUT[name]) for name in structs.OUTPUT.names), ("more", np.int64)])
    assert "Output has 32 bytes" in structs.mismatch(kernels_path(), ARCH, {"Output": record})


def test_a_survey_says_it_of_every_kernel_that_is_handed_them(monkeypatch, tmp_path):
    """So that `cubatch kernels --check` fails; kernels with arguments of their own have nothing to do with it."""
    monkeypatch.setattr(structs, "mismatch", lambda *_: "structs differ")
    chosen = [find("split_k_reduce", "float32"), find("gemm_nt", "float32", family="naive")]
    reduce, naive = survey(chosen, [ARCH], folder=tmp_path)
    assert reduce.problems == ("structs differ",)
    assert naive.problems == ()
