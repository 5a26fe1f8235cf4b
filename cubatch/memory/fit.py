"""The largest batch size that fits some memory."""

from __future__ import annotations

import bisect
from collections.abc import Callable

from cubatch.checks import MAX_BATCH_SIZE, check_batch_size
from cubatch.errors import DoesNotFit, InvalidArgument
from cubatch.hardware import memory_limit as hardware_memory
from cubatch.hardware.facts import Device
from cubatch.memory.plan import buffer_sizes, bytes_alive, fixed_bytes, plan, schedule_for, shards
from cubatch.units import parse_bytes
from cubatch.workload import Workload, accumulating, divisors

_REACH = 16


def cuts(work: Workload, target: int, limit: int) -> list[int]:
    """
    Return the divisors of `target`, the samples of an optimizer step, whose memory plan fits `limit` bytes, ascending.

    Gradients of batches below `target` are added up.  Raises DoesNotFit if no divisor fits.
    """
    sizes = divisors(check_batch_size(target, "target_batch_size"))
    works = {size: accumulating(work, size, target) for size in sizes}
    fitting = [size for size, each in works.items() if plan(each, size).total <= limit]
    if not fitting:
        raise DoesNotFit(str(work.spec), str(work.device), plan(works[1], 1).total, limit, work.mode)
    return fitting


def largest(work: Workload, limit: int, target: int | None = None) -> int:
    """
    Return the largest batch size whose memory plan fits `limit` bytes.

    If `target`, the samples of an optimizer step, is not None, the result is the largest divisor of it that fits.
    Raises DoesNotFit if not even one sample fits.
    """
    if target is not None:
        return cuts(work, target, limit)[-1]
    program = schedule_for(work)

    def bound(size: int) -> int:
        members, shard = shards(program, size, work.device)
        sizes = buffer_sizes(program, shard, work.dtype, work.device, work.library)
        return sum(fixed_bytes(program, work, members).values()) + members * int(bytes_alive(sizes, program).max())

    def fits(size: int) -> bool:
        return bound(size) <= limit and plan(work, size).total <= limit

    if not fits(1):
        single = plan(work, 1)
        raise DoesNotFit(str(work.spec), str(work.device), single.total, limit, work.mode, single.largest_tensor)
    # The bytes alive are a cheap lower bound of any placement: bisect on those, then step down.
    size = _bisect(bound, limit)
    while size > 1:
        laid_out = plan(work, size)
        if laid_out.total <= limit:
            break
        fixed = laid_out.fixed_bytes
        size = max(1, min(size - 1, int(size * (limit - fixed) / (laid_out.total - fixed))))
    return size if size == MAX_BATCH_SIZE else _climb(fits, size)


def limit_bytes(memory: int | str, device: Device) -> int:
    """
    Return a size in bytes from a number or text; a percentage refers to the free memory of the device.

    InvalidArgument is raised for other text, for a size of 0 or less, and for more than 100 %.
    """
    is_share = isinstance(memory, str) and memory.strip().endswith("%")
    free = hardware_memory.memory_limit(device).free_bytes if is_share else None
    try:
        size = parse_bytes(memory, free_bytes=free)
    except (ValueError, OverflowError):
        size = 0
    if size <= 0 or (free is not None and size > free):
        raise InvalidArgument("memory", memory, "a positive size: bytes, '12GiB', or '80%', at most '100%'")
    return size


def _bisect(cost: Callable[[int], int], limit: int) -> int:
    """Return the largest batch size whose cost is at most the limit; it must hold for 1, and the cost never fall."""
    high = 1
    while high < MAX_BATCH_SIZE and cost(high) <= limit:
        high = min(2 * high, MAX_BATCH_SIZE)
    return bisect.bisect_right(range(high + 1), limit, high // 2, key=cost) - 1


def _climb(fits: Callable[[int], bool], size: int) -> int:
    """
    Return a batch size that fits, at least `size`, such that no slightly larger size fits.

    The proportional step down may have skipped larger sizes that fit.  A step up doubles after a size that fits, and
    halves after one that does not.  Placement is greedy, so a size can fit although a slightly smaller one does not.
    So the sizes just above the last one are tried too.
    """
    following: int | None = size
    while following is not None:
        size, stride = following, _REACH
        while stride >= _REACH:
            if size + stride <= MAX_BATCH_SIZE and fits(size + stride):
                size, stride = size + stride, 2 * stride
            else:
                stride //= 2
        beyond = range(min(size + _REACH, MAX_BATCH_SIZE), size, -1)
        following = next((larger for larger in beyond if fits(larger)), None)
    return size
