"""The submodule that runs: in the forward pass, and the one whose gradients the backward pass computes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from cubatch.frameworks.lazy_torch import torch


class Running:
    """
    Returns the qualified name of the submodule that runs at the moment.

    Autograd numbers its nodes in the order in which the forward pass makes them. The number of a node that runs in the
    backward pass therefore identifies the submodule that made it. Recomputed layers run in both passes.
    """

    def __init__(self) -> None:
        self.stack: list[str] = []
        self._of_nodes: dict[int, str] = {}

    def name(self) -> str:
        """Return the name of the submodule that runs; empty for the module itself, the loss and the optimizer."""
        if self.stack:
            self._of_nodes[torch.autograd._get_sequence_nr() - 1] = self.stack[-1]  # noqa: SLF001 - its only name
            return self.stack[-1]
        node = torch._C._current_autograd_node()  # noqa: SLF001 - its only name
        return "" if node is None else self._of_nodes.get(node._sequence_nr(), "")  # noqa: SLF001


@contextmanager
def watched(module: Any) -> Iterator[Running]:
    """Yield an object that names the submodule of a module which runs at the moment; valid in the block."""
    running = Running()
    names = {part: name for name, part in module.named_modules()}

    def enter(part: Any, _: Any) -> None:
        if part in names:
            running.stack.append(names[part])

    def leave(part: Any, *_: Any) -> None:
        if part in names:
            running.stack.pop()

    hooks = torch.nn.modules.module
    handles = [
        hooks.register_module_forward_pre_hook(enter),
        hooks.register_module_forward_hook(leave, always_call=True),
    ]
    try:
        yield running
    finally:
        for handle in handles:
            handle.remove()
