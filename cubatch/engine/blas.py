"""
OpenBLAS takes the right kernels for CPUs that are newer than itself.

OpenBLAS chooses its kernels by the CPU's model number when NumPy loads it.  The one inside NumPy
2.4's wheels (0.3.31) does not know AMD's family 26 (Zen 5), whose cores have AVX-512 at full width,
and gives it AVX2 kernels: half the speed.  Its environment variable OPENBLAS_CORETYPE says better.
This module imports nothing that loads NumPy, and must have its say before anything does.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

_VARIABLE = "OPENBLAS_CORETYPE"
_NEEDED = {"avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl"}
_FIRST_UNKNOWN_FAMILY = 26
_FIRST_PROCESSOR = 1 << 13


def choose_kernels() -> str | None:
    """
    Tell OpenBLAS to use AVX-512 kernels where this CPU has them and OpenBLAS would not know.

    Sets OPENBLAS_CORETYPE for this process and its children.  Does nothing if the variable is set
    already, if NumPy is loaded already, or on any CPU that OpenBLAS knows.

    Returns:
        The kernels chosen, or None if nothing was done.
    """
    if "numpy" in sys.modules or _VARIABLE in os.environ:
        return None
    try:
        with Path("/proc/cpuinfo").open(encoding="ascii", errors="replace") as file:
            kernels = kernels_for(file.read(_FIRST_PROCESSOR))
    except OSError:
        return None
    if kernels:
        os.environ[_VARIABLE] = kernels
    return kernels


def kernels_for(cpuinfo: str) -> str | None:
    r"""
    Name the OpenBLAS kernels to ask for on a CPU, from the first processor in /proc/cpuinfo.

    Returns:
        A value for OPENBLAS_CORETYPE, or None where OpenBLAS's own choice is right.

    Example:
        >>> kernels_for("vendor_id : AuthenticAMD\ncpu family : 25\nflags : fpu avx2\n") is None
        True
    """
    facts = dict(re.findall(r"^(vendor_id|cpu family|flags)\s*: (.*)$", cpuinfo, re.MULTILINE))
    if facts.get("vendor_id") != "AuthenticAMD" or int(facts.get("cpu family", 0)) < _FIRST_UNKNOWN_FAMILY:
        return None
    return "SkylakeX" if _NEEDED.issubset(facts.get("flags", "").split()) else None
