"""
Numbers to text and back, and text made safe to show; the only module that formats numbers.

Stored numbers are bytes, seconds, FLOP and per-second rates. Users read GiB (2**30), GB/s (10**9), TFLOP/s,
microseconds and samples per second.
"""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Sequence
from numbers import Integral

_BYTE_UNITS = {
    "": 1, "b": 1,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40,
}  # fmt: skip
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([a-z]*|%)\s*", re.IGNORECASE)
_TOO_LARGE = 2**63  # bytes
_FRACTIONS_BELOW = 1000
_WHOLE_PERCENT = 0.9995
_ROUNDING = 1e-9
_METRIC = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))


def parse_bytes(value: int | str, *, free_bytes: int | None = None) -> int:
    """
    Return a size in bytes, given as an int of bytes, "8GiB", "500 MB", or "80%" of the free memory.

    Binary units (KiB, MiB, GiB, TiB, and bare K, M, G, T) are powers of 1024, decimal ones
    (kB, MB, GB, TB) powers of 1000.

    Args:
        value: The size as the user wrote it.
        free_bytes: The free memory, for percentages; None: unknown.

    Returns:
        Whole bytes.

    Raises:
        ValueError: If the text is no size, the size is not positive or not below 2^63 bytes, or a percentage is given
            without `free_bytes`.
        OverflowError: If the number in the text is too large for a float.

    Example:
        >>> parse_bytes("8GiB")
        8589934592
        >>> parse_bytes("80%", free_bytes=1000)
        800
    """
    if isinstance(value, bool) or not isinstance(value, Integral | str):
        raise ValueError(  # noqa: TRY004 - callers translate one type
            f"a size is an int of bytes or text such as '8GiB' or '80%', got {shown(value)}"
        )
    if isinstance(value, Integral):
        size = int(value)
    else:
        match = _SIZE.fullmatch(value)
        if not match:
            raise ValueError(f"{shown(value)} is no size; write bytes, '8GiB', '500MB' or '80%'")
        number, unit = float(match[1]), match[2].lower()
        if unit == "%":
            if free_bytes is None:
                raise ValueError(
                    f"{shown(value)} is a share of free memory, which is not known here; write bytes or '8GiB'"
                )
            size = int(free_bytes * number / 100)
        elif unit in _BYTE_UNITS:
            size = int(number * _BYTE_UNITS[unit])
        else:
            raise ValueError(f"{shown(value)} has the unknown unit {shown(match[2])}; use KiB, MiB, GiB, TiB or %")
    if not 0 < size < _TOO_LARGE:
        raise ValueError(f"a size must be positive and below 8 EiB, got {shown(value)}")
    return size


def format_bytes(size: float) -> str:
    """
    Format a number of bytes in binary units; from 1 KiB on with two decimals.

    Example:
        >>> format_bytes(8589934592), format_bytes(1536), format_bytes(12)
        ('8.00 GiB', '1.50 KiB', '12 B')
    """
    for factor, unit in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if abs(size) >= factor:
            return f"{size / factor:.2f} {unit}"
    return f"{size:.0f} B"


def format_seconds(seconds: float) -> str:
    """
    Format seconds as s, ms, µs or ns with three significant figures.

    Example:
        >>> format_seconds(0.00123), format_seconds(75.0), format_seconds(2.5e-6)
        ('1.23 ms', '75.0 s', '2.50 µs')
    """
    for factor, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if abs(seconds) >= factor:
            return f"{_three_figures(seconds / factor)} {unit}"
    return f"{_three_figures(seconds / 1e-9)} ns" if seconds else "0 s"


def format_metric(value: float, unit: str = "") -> str:
    """
    Format a count or rate with a metric prefix and three significant figures.

    Example:
        >>> format_metric(9.02e12, "FLOP/s"), format_metric(897e9, "B/s"), format_metric(12.0)
        ('9.02 TFLOP/s', '897 GB/s', '12.0')
    """
    for factor, prefix in _METRIC:
        if abs(value) >= factor:
            return f"{_three_figures(value / factor)} {prefix}{unit}".rstrip()
    return f"{value:.3g} {unit}".rstrip()


def format_count(value: float) -> str:
    """
    Format a number with spaces between groups of three digits; a fraction below 1000 with three significant digits.

    Example:
        >>> format_count(465920), format_count(0.1234), format_count(63.25)
        ('465 920', '0.123', '63.2')
    """
    if value != int(value) and abs(value) < _FRACTIONS_BELOW:
        return _three_figures(value)
    return f"{round(value):,}".replace(",", " ")


def format_counted(number: float, noun: str) -> str:
    """
    Format a number with its noun, which is in the plural unless the number is one.

    Example:
        >>> format_counted(1, "sample"), format_counted(1200, "sample")
        ('1 sample', '1 200 samples')
    """
    return f"{format_count(number)} {noun}{'' if number == 1 else 's'}"


def format_percent(fraction: float) -> str:
    """
    Format a fraction as a percentage with three significant digits, from 99.95 % on without decimals.

    Example:
        >>> format_percent(0.934), format_percent(1.0), format_percent(0.09999)
        ('93.4 %', '100 %', '10.0 %')
    """
    return f"{_three_figures(100 * fraction)} %" if fraction < _WHOLE_PERCENT else f"{100 * fraction:.0f} %"


def format_tenths(fraction: float) -> str:
    """
    Format a fraction, such as a relative uncertainty, as a percentage with one decimal; above 0.5 as "over 50 %".

    Example:
        >>> format_tenths(0.0232), format_tenths(1.37)
        ('2.3 %', 'over 50 %')
    """
    return f"{100 * fraction:.1f} %" if fraction <= 0.5 else "over 50 %"  # noqa: PLR2004


def format_whole_percent(fraction: float, *, at_most: bool = False) -> str:
    """
    Format a fraction as a whole percentage: rounded to nearest, or rounded up with `at_most`.

    Example:
        >>> format_whole_percent(0.034), *(format_whole_percent(share, at_most=True) for share in (0.034, 0.07))
        ('3 %', '4 %', '7 %')
    """
    percent = 100 * fraction
    # 100 * 0.07 is a little more than 7.
    return f"{math.ceil(percent - _ROUNDING) if at_most else round(percent)} %"


def _three_figures(value: float) -> str:
    if value == 0 or not math.isfinite(value):
        return str(value)
    rounded = float(f"{value:.2e}")  # 9.999 is 10.0, and has one digit behind the point
    digits = max(0, 2 - math.floor(math.log10(abs(rounded))))
    return f"{value:.{min(digits, 9)}f}"


def format_value(value: float, objective: str) -> str:
    """
    Format a value of the objective for an axis: latency (in seconds) with its unit, samples/s and samples/J without.

    Example:
        >>> format_value(20000, "throughput"), format_value(3.2e6, "throughput"), format_value(0.005, "latency")
        ('20 000', '3.20 M', '5.00 ms')
    """
    if objective == "latency":
        return format_seconds(value)
    return format_metric(value) if value >= 1e6 else format_count(value)  # noqa: PLR2004 - seven digits are too wide


def format_objective(value: float, objective: str) -> str:
    """
    Format a value of the objective, in seconds (latency), samples/s or samples/J, with its unit.

    Example:
        >>> format_objective(27462.3, "throughput"), format_objective(0.005, "latency")
        ('27 462 samples/s', '5.00 ms')
    """
    return format_seconds(value) if objective == "latency" else f"{format_count(value)} {OBJECTIVE_UNITS[objective]}"


def format_price(price: float) -> str:
    """
    Format an amount of money with three significant digits.

    Example:
        >>> format_price(0.0123), format_price(1.2), format_price(123.4), format_price(12345)
        ('0.0123', '1.20', '123', '12345')
    """
    return f"{price:#.3g}".rstrip(".") if price < 1000 else f"{price:.0f}"  # noqa: PLR2004


def join_words(words: Sequence[str]) -> str:
    """
    Join words with commas and a final "and", as in a sentence.

    Example:
        >>> join_words(["8", "16", "32"]), join_words(["8"])
        ('8, 16 and 32', '8')
    """
    return f"{', '.join(words[:-1])} and {words[-1]}" if len(words) > 1 else "".join(words)


OBJECTIVE_UNITS = {"throughput": "samples/s", "latency": "time of one batch", "energy": "samples/J"}

_MOST_SHOWN = 300  # characters of a value in an error
# Control characters, those that turn the direction of what follows, other line ends, and halves of UTF-16 pairs.
_HIDDEN = re.compile(r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def is_visible(text: str) -> bool:
    r"""
    Return whether a text has no characters that control a terminal.

    Example:
        >>> is_visible("größe 1"), is_visible("\x1b[2J"), is_visible("a\nb"), is_visible("\u202e")
        (True, False, False, False)
    """
    return not _HIDDEN.search(text)


def visible(text: str, keep: str = "\n\t") -> str:
    r"""
    Return a text with characters that control a terminal replaced by escapes, as in `repr`.

    Args:
        keep: Characters that stay.

    Example:
        >>> print(visible("ok \x1b[31m\nnext"), visible("a\nb", keep=""))
        ok \x1b[31m
        next a\nb
    """
    return _HIDDEN.sub(lambda hit: hit[0] if hit[0] in keep else hit[0].encode("unicode_escape").decode(), text)


class _Short(reprlib.Repr):
    """`repr` with a maximum of items, characters and depth."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxstring, self.maxother = 4, 200, 200
        self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = self.maxdict = self.maxdeque = 12

    repr_bytes = repr_bytearray = reprlib.Repr.repr_str


_SHORT = _Short()


def shown(value: object) -> str:
    r"""
    Return the `repr` of a value for an error's text, at most 300 characters; the type's name if `repr` fails.

    Example:
        >>> shown("8 GB"), len(shown([1] * 10**6)), shown("\x1b[2J")
        ("'8 GB'", 41, "'\\x1b[2J'")
    """
    try:
        text = visible(_SHORT.repr(value), keep="")
    except Exception:  # noqa: BLE001 - a repr may raise anything
        text = f"<{type(value).__name__}>"
    return text if len(text) <= _MOST_SHOWN else f"{text[: _MOST_SHOWN - 3]}..."


def message_of(error: BaseException) -> str:
    r"""
    Return the message of an exception, with characters that control a terminal escaped.

    Example:
        >>> message_of(ValueError("no \x1b[31mred")), message_of(OSError(2, "No such file"))
        ('no \\x1b[31mred', '[Errno 2] No such file')
    """
    try:
        return visible(str(error))
    except Exception:  # noqa: BLE001 - a user's exception may raise anything
        return f"<{type(error).__name__} without a message>"


def first_line(error: BaseException) -> str:
    r"""
    Return the type and the first line of an exception as text, without the final period.

    Example:
        >>> first_line(ValueError("No.\nAnd a second line."))
        'ValueError: No'
        >>> first_line(AssertionError())
        'AssertionError'
    """
    first = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {first}".removesuffix(".").removesuffix(": ")
