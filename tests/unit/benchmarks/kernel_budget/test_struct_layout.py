"""What the host hands to kernels by value has one layout on both sides, and neither changes alone."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

from benchmarks.kernel_budget import struct_layout
from benchmarks.kernel_budget.check import check
from cubatch.errors import MissingDependency
from cubatch.kernels.toolchain import nvrtc
from cubatch.kernels.variant import find, kernels_path

ARCH = "sm_80"
# A header and records of the test's own, so that the real ones may change.
HEADER = """#pragma once
#include "common/device.cuh"
struct Pair { u32 first, second; };
struct Extents { i64 m; int rows, columns; Pair pair; };
"""
PAIR = np.dtype([("first", np.uint32), ("second", np.uint32)])
EXTENTS = np.dtype([("m", np.int64), ("rows", np.int32), ("columns", np.int32), ("pair", PAIR)])
RECORDS = {"Pair": PAIR, "Extents": EXTENTS}
CHANGES = [
    ("int rows, columns;", "int columns, rows;", "Extents::rows is field 1"),
    ("u32 first, second;", "u32 second, first;", "Pair::first is field 0"),
    ("i64 m; int rows,", "i64 m, rows; int", "Extents has 24 bytes"),
    ("i64 m; int rows, columns;", "int m, rows; i64 columns;", "Extents::m is field 0, of 8 bytes"),
    ("Pair pair;", "Pair pair; int more;", "Extents has 24 bytes"),
    ("u32 first, second;", "u32 first;", "Pair has 8 bytes"),
]


@pytest.fixture(autouse=True, scope="module")
def _with_a_compiler():
    try:
        nvrtc.for_arch(80)
    except MissingDependency as error:
        pytest.skip(str(error))


def folder_of(folder, header):
    """A folder of sources with a header of structs, and what it includes."""
    shutil.copytree(kernels_path() / "common", folder / "common")
    (folder / struct_layout.HEADER).write_text(header)
    return folder


@pytest.mark.parametrize("arch", ["sm_52", "sm_80", "sm_120"])
def test_both_sides_are_the_same(arch):
    """On every architecture: sizes, fields and their order."""
    assert struct_layout.mismatch(kernels_path(), arch) == ""


@pytest.mark.parametrize(("before", "after", "said"), CHANGES, ids=str)
def test_a_change_of_one_side_is_found(before, after, said, tmp_path):
    """Fields swapped, added, taken away or of another type: the message names the field, or the size as it was."""
    assert HEADER.count(before) == 1
    assert said in struct_layout.mismatch(folder_of(tmp_path, HEADER.replace(before, after)), ARCH, RECORDS)


def test_a_change_of_the_other_side_is_found_too(tmp_path):
    """A record with a field that the struct does not have; without it the two are the same."""
    root, more = (
        folder_of(tmp_path, HEADER),
        np.dtype([*((name, EXTENTS[name]) for name in EXTENTS.names), ("x", "i8")]),
    )
    assert struct_layout.mismatch(root, ARCH, RECORDS) == ""
    assert "Extents has 32 bytes" in struct_layout.mismatch(root, ARCH, RECORDS | {"Extents": more})


def test_a_check_reports_it_for_every_kernel_that_takes_them(monkeypatch, tmp_path):
    """Kernels with other arguments are not concerned."""
    monkeypatch.setattr(struct_layout, "mismatch", lambda *_: "structs differ")
    chosen = [find("split_k_reduce", "float32"), find("gemm_nt", "float32", family="naive")]
    reduce, naive = (each.row for each in check(chosen, [ARCH], folder=tmp_path))
    assert reduce.problems == ("structs differ",)
    assert naive.problems == ()
