"""PyTorch as `torch`, imported at its first use: importing cubatch's modules that use it does not need PyTorch."""

from __future__ import annotations

from typing import Any

from cubatch.errors import MissingDependency


class _LazyTorch:
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # `inspect` and doctest ask every object of a module for such names
            raise AttributeError(name)
        try:
            import torch
        except ImportError as error:
            raise MissingDependency("PyTorch", "autotune_module", "torch") from error
        return getattr(torch, name)


torch: Any = _LazyTorch()
