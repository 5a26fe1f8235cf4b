"""What a family of tiled kernels defines is listed, and an error names what is missing."""

from __future__ import annotations

import re

import pytest

from cubatch.errors import MissingDependency
from cubatch.kernels.toolchain import nvrtc
from cubatch.kernels.variant import kernels_path

HEADER = (kernels_path() / "common" / "product_kernel.cuh").read_text()
MACROS = re.findall(r"^#ifndef (\w+)\n#error \"a family defines \1\b", HEADER, re.MULTILINE)
VALUES = {"CB_ELEMENT": "float"}


def log_of(text):
    """What the compiler says of a source."""
    try:
        compiler = nvrtc.for_arch(80)
    except MissingDependency as error:
        pytest.skip(str(error))
    return compiler.compile(text, "family.cu", ("-arch=sm_80", "-std=c++17", f"-I{kernels_path()}")).log


def test_the_macros_that_are_needed_are_listed():
    """Every one with a line in the list that opens the header."""
    listed, _, _ = HEADER.partition("#pragma once")
    assert len(MACROS) == 8
    assert all(re.search(rf"^//   .*\b{macro}\b", listed, re.MULTILINE) for macro in MACROS)


@pytest.mark.parametrize("missing", MACROS)
def test_an_error_names_the_macro_that_is_missing(missing):
    """And no other."""
    given = [f"#define {macro} {VALUES.get(macro, 8)}" for macro in MACROS if macro != missing]
    log = log_of("\n".join([*given, '#include "common/product_kernel.cuh"']))
    assert set(re.findall(r"a family defines (\w+)", log)) == {missing}


def test_an_operation_is_needed():
    """One of the table."""
    given = [f"#define {macro} {VALUES.get(macro, 8)}" for macro in MACROS]
    assert "one -DOPERATION_" in log_of("\n".join([*given, '#include "common/product_kernel.cuh"']))
