"""
Which batch sizes a workload accepts, learned from sizes that ran and sizes that raised an error.

Some workloads take multiples of a number only, or divisors of one: a queue of 512 keys takes batches that divide it.
An error that is not about memory closes one size.  Sizes that share its property are not tried.
"""

from __future__ import annotations

import math
from collections.abc import Collection


def is_likely(n: int, ran: Collection[int], failed: Collection[int], *, is_new: bool = False) -> bool:
    """
    Return whether a size may run, by what sizes that ran have in common and the failed ones lack.

    Two rules are considered: all accepted sizes are multiples of one number, or all divide one number.  A rule that
    contradicts the failures is ignored.  Only a failure between sizes that ran is a sign of a rule: others may be the
    end of what the workload takes.

    Args:
        n: The size.
        ran, failed: Sizes that ran, and sizes that raised an error.
        is_new: Whether the size was made up by the search; it then has no prime factor that no accepted size has.

    Example:
        >>> is_likely(16, [1, 2, 8], [3]), is_likely(12, [1, 2, 8], [3]), is_likely(10, [1, 2, 8], [3], is_new=True)
        (True, False, False)
        >>> is_likely(24, [8, 16], [1, 2, 4, 12]), is_likely(20, [8, 16], [1, 2, 4, 12])
        (True, False)
    """
    if not any(min(ran, default=0) < size < max(ran, default=0) for size in failed):
        return True
    common = math.gcd(*ran)
    divisors = (d for d in range(2, common + 1) if common % d == 0 and all(size % d for size in failed))
    if (divisor := next(divisors, None)) is not None:
        return n % divisor == 0
    multiple = math.lcm(*ran)
    if any(multiple % size == 0 for size in failed):
        return True
    if is_new and multiple % _odd(n):
        return False
    together = math.lcm(multiple, n)
    return all(together % size for size in failed)


def _odd(n: int) -> int:
    return n // (n & -n)
