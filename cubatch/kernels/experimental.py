"""The dtypes and devices for which the names of `experimental` of `Model` have kernels."""

from __future__ import annotations

from cubatch.hardware.facts import BYTES_PER_ELEMENT, Device

_FIRST_BY_SUMS = 8, 0
_HOPPER = 9, 0


def runnable(experimental: frozenset[str], dtype: str, device: Device) -> frozenset[str]:
    """
    Return the names of `experimental` of `Model` without those that have no kernels for a dtype on a device.

    Attention that stores logarithms of sums needs elements of 16 bits and a GPU of sm_80 or newer. Products that
    apply the slope of GELU need 16 bits and sm_90. A device of unknown compute capability counts as sm_90.

    Example:
        >>> ampere, volta = (Device(name="card", compute_capability=(major, 0)) for major in (8, 7))
        >>> [sorted(runnable(frozenset({"flash_attention"}), "float16", device)) for device in (ampere, volta)]
        [['flash_attention'], []]
    """
    is_narrow = BYTES_PER_ELEMENT[dtype] < BYTES_PER_ELEMENT["float32"]
    capability = device.compute_capability or _HOPPER
    runs = {"flash_attention": capability >= _FIRST_BY_SUMS, "gelu_products": capability == _HOPPER}
    return frozenset(name for name in experimental if name not in runs or (is_narrow and runs[name]))
