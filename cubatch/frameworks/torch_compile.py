"""Observe torch.compile: what it compiled, and steps that it left uncompiled."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from cubatch.errors import InvalidArgument

REMEDY = (
    "Its code depends on the batch size beyond shapes, as by a loop over samples. Rewrite that part, or name few sizes "
    "in batch_sizes."
)


def num_graphs() -> int:
    """Return the number of graphs that torch.compile has made in this process."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def check_graphs(module: Any) -> None:
    """
    Raise InvalidArgument if torch.compile runs a module by CUDA graphs, as mode="reduce-overhead" and others do.

    Each batch size keeps a graph with memory of its own, which would count for the sizes after it.
    """
    for part in module.modules():
        for each in (part, getattr(part, "_compiled_call_impl", None)):  # the latter where it was compiled in place
            find = getattr(each, "get_compiler_config", None)
            if find is not None and (find() or {}).get("triton.cudagraphs"):
                given, allowed = "compiled with CUDA graphs, as by mode='reduce-overhead'", "one compiled without them"
                raise InvalidArgument("module", given, allowed, "Use mode='max-autotune-no-cudagraphs' for tuning.")


@contextlib.contextmanager
def compiled_only() -> Iterator[None]:
    """
    Turn PyTorch's silent fallback to uncompiled steps, after too many compilations, into an error in the block.

    Raises:
        InvalidArgument: If PyTorch's recompile limit is reached in the block.
    """
    from torch._dynamo import config, exc

    name = "recompile_limit" if hasattr(config, "recompile_limit") else "cache_size_limit"  # before PyTorch 2.7
    option = f"fail_on_{name}_hit" if name == "recompile_limit" else "fail_on_cache_limit_hit"
    failures = tuple(
        kind
        for kind in (getattr(exc, each, None) for each in ("FailOnRecompileLimitHit", "FailOnCacheLimitHit"))
        if kind
    )
    try:
        with config.patch({option: True}):
            yield
    except failures as error:
        limit = getattr(config, name)
        given = f"True, but PyTorch compiles this module for each batch size and stops after {limit} ({name})"
        raise InvalidArgument(
            "compile", given, "used with a module that compiles once for all batch sizes", REMEDY
        ) from error
