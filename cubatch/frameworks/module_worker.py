"""The runner of a module that is built by name, in a worker process."""

from __future__ import annotations

import base64
import hashlib
import io
import json
from collections.abc import Sequence
from typing import Any

from cubatch import user_code
from cubatch.errors import InvalidArgument
from cubatch.frameworks import batch_sources, garbage, module_source
from cubatch.frameworks.lazy_torch import torch
from cubatch.frameworks.module_runner import ModuleRunner
from cubatch.frameworks.torch_inputs import DRAWN_SIZES, draw_batches, is_shape, without_floats
from cubatch.frameworks.torch_module import TorchModule
from cubatch.hardware import probe
from cubatch.units import first_line

CALLABLE = "a function that can be imported and called without arguments"


def examples(batches: Any, sizes: Sequence[int] = DRAWN_SIZES) -> tuple[Any, int]:
    """
    Return two batches of a data loader or data set, and the number of which it takes multiples only (1: it takes all).

    They have the first sizes in `sizes` that it can make. Other inputs are returned as they are, with 1.
    """
    if isinstance(batches, str) or not isinstance(source := batch_sources.find(batches), batch_sources.DataSetBatches):
        return batches, 1
    drawn = draw_batches(source, sizes)
    first, *_, last = drawn.batches.values()
    return [tuple(batch) if isinstance(batch, list) else batch for batch in (first, last)], drawn.multiple


def pack(example_inputs: Any) -> Any:
    """
    Return inputs for JSON: a shape as a list, a name as {"name": ...}, others as base64 text of `torch.save`.

    Raises:
        InvalidArgument: If `torch.save` cannot write them.
    """
    if is_shape(example_inputs):
        return list(example_inputs)
    if isinstance(example_inputs, str):
        return {"name": example_inputs}
    saved = io.BytesIO()
    try:
        torch.save(example_inputs, saved)
    except Exception as error:
        allowed = (
            "what torch.save can write, or the name of a function, 'package.module:function', since the module runs in "
            "a process of its own"
        )
        raise InvalidArgument(batch_sources.FIELD, example_inputs, allowed) from error
    return base64.b64encode(saved.getvalue()).decode()


def unpack(packed: Any) -> Any:
    """
    Return the inputs that `pack` wrote; only for data of the same user, since unpickling can run code.

    Raises:
        InvalidArgument: If `torch.load` fails, as for an object of a class that cannot be imported here.
    """
    if isinstance(packed, list):
        return tuple(packed)
    if isinstance(packed, dict):
        return batch_sources.load(packed["name"])
    saved = io.BytesIO(base64.b64decode(packed))
    try:
        return torch.load(saved, weights_only=False, map_location="cpu")
    except Exception as error:  # such as a class of the user's main program
        given = f"inputs that the process of the module cannot read: {first_line(error)}"
        allowed = "tensors, or objects of a class that it can import"
        remedy = "Name what makes them: batches='package.module:name'."
        raise InvalidArgument(batch_sources.FIELD, given, allowed, remedy) from error


def digest(packed: Any) -> str:
    """Return the SHA-256 of packed inputs as hex text; values of floats, drawn for each batch, do not count."""
    identity = packed if isinstance(packed, list | dict) else pack(without_floats(unpack(packed)))
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()  # what torch.save writes of equal ones is equal


def example(name: str) -> Any:
    """Return the example inputs that the function "package.module:function" makes; PyTorch is seeded with 0 first."""
    with user_code.users("example_inputs", name, CALLABLE):
        torch.manual_seed(0)
        return module_source.load(name, "example_inputs")()


def place_of(device: str) -> str:
    """
    Return PyTorch's name of a device, "cpu" or "cuda:N": PyTorch takes the GPU's number in this process, not its UUID.

    Raises:
        DeviceNotAvailable: If CUDA does not show the GPU to this process.

    Example:
        >>> place_of("cpu")
        'cpu'
    """
    resolved = probe.resolve(device)
    return "cpu" if resolved.kind == "cpu" else f"cuda:{resolved.index}"


def runner(
    *, build: str, inputs: Any, device: str, memory_limit: int, seed: int, untraced: str | None = None, **options: Any
) -> ModuleRunner:  # fmt: skip
    """
    Build the module, move it to its device (`Device.address`), and return a runner of its steps.

    `build` is "package.module:build", a function without arguments or a module, and `inputs` are as `pack` wrote them.
    The seed is that of PyTorch before the build, and of random inputs. `untraced` is why no step may be traced; None:
    steps may be. `options` are those of `TorchModule`.
    """
    torch.manual_seed(seed)
    with user_code.users("module", build, CALLABLE):
        module = module_source.make(build)
    if not isinstance(module, torch.nn.Module):
        raise InvalidArgument(
            "module", f"{build}, which returns {type(module).__name__}", "a function that returns a torch.nn.Module"
        )
    place = place_of(device)
    subject = TorchModule(module.to(place), unpack(inputs), place=place, **options)
    subject.ready()
    garbage.freeze_objects()
    made = subject.runner(memory_limit, seed)
    if untraced is not None:
        made.skip_trace(untraced)
    return made
