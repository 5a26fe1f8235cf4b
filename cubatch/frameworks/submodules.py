"""Watch the submodules of a traced step: which one runs, and which read the batch axis as time."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from cubatch.frameworks.lazy_torch import torch

_UNBATCHED, _BATCHED = 2, 3  # axes of a sequence of features, and of a batch of them


class Running:
    """
    Has a method `name` for the qualified name of the submodule that runs at the moment; `watched` fills its `stack`.

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


@contextmanager
def watch_time_axis(module: Any, batch_size: int) -> Iterator[list[str]]:
    """
    Yield a list of texts "name (class)": recurrent and attention layers that get the batch on their time axis.

    Without `batch_first` these layers read (time, batch, features), and always read two axes as (time, features). With
    the batch on that axis they run from sample to sample, and a batch size has no meaning. The list is filled while the
    block runs; only positional arguments are seen.
    """
    seen: list[str] = []
    kinds = torch.nn.RNNBase, torch.nn.MultiheadAttention
    names = {part: name for name, part in module.named_modules() if isinstance(part, kinds)}

    def see(part: Any, arguments: tuple[Any, ...]) -> None:
        x = arguments[0] if arguments else None
        if part not in names or not isinstance(x, torch.Tensor):
            return
        description = f"{names[part] or 'module'} ({type(part).__name__})"
        is_turned = x.ndim == _BATCHED and not part.batch_first and x.shape[1] != batch_size
        if (is_turned or x.ndim == _UNBATCHED) and len(x) == batch_size and description not in seen:
            seen.append(description)

    handle = torch.nn.modules.module.register_module_forward_pre_hook(see)
    try:
        with warnings.catch_warnings():  # of parts that are compiled, whose hooks are called twice
            warnings.filterwarnings("ignore", r"Using `torch\.compile\(module\)` when there are global hooks")
            yield seen
    finally:
        handle.remove()
