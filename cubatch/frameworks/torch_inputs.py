"""The inputs of a module at any batch size: from a function, a data loader, two batches, or one example."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import math
from collections import UserDict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import attrs
import numpy as np

from cubatch.errors import InvalidArgument
from cubatch.frameworks import batch_sources
from cubatch.frameworks.batch_sources import Source
from cubatch.frameworks.input_growth import ROWS, Growth, Path, by_difference, of_example
from cubatch.frameworks.input_objects import children, copied, is_holder, tensors_in
from cubatch.frameworks.lazy_torch import torch
from cubatch.frameworks.torch_state import kept_random_state
from cubatch.measure.runner import Remark
from cubatch.units import join_words
from cubatch.user_code import takes
from cubatch.workload import common_divisor

_ALLOWED = (
    "a tensor, or a tuple (positional arguments) or dict (keyword arguments) of tensors with the batch as axis 0, "
    "or the shape of one sample, such as (3, 224, 224)"
)
_TWO = "Pass two batches of different size in a list, or a function from a batch size to inputs."
_AS_IN_LOOP = "Pass a function from a batch size to (arguments, ..., targets), as your loop passes them on."
_ARRAYS = "torch.from_numpy() makes a tensor of an array."
_MULTIPLES = "If only multiples of a number are valid, state it with multiple_of."
FURTHER_SIZES = (12, 24, 48)
"""Batch sizes to try after errors at others, where only multiples of a number may be valid."""
DRAWN_SIZES = (4, 8, 16, *FURTHER_SIZES)
"""Batch sizes at which a source is called, to see what grows, until `_DRAWS` of the calls have returned batches."""
_DRAWS = 3
_WITH_TARGET = 2  # arguments of a loss: the output and a target
_ANY = 99  # arguments: a function that takes 99 takes any number


class Drawn(NamedTuple):
    """Batches that a source made, by batch size, and the batch sizes at which it raised an error."""

    batches: dict[int, Any]
    refused: list[int]

    @property
    def multiple(self) -> int:
        """The number of which the source takes multiples only, as far as the sizes show; 1: it takes all."""
        inside = [size for size in self.refused if size > min(self.batches)]  # smaller ones may be too small
        return common_divisor(self.batches, inside) if inside else 1


class Call(NamedTuple):
    """The positional and keyword arguments of a call of a module, and the targets that only the loss receives."""

    positional: tuple[Any, ...]
    keyword: Mapping[str, Any]
    targets: tuple[Any, ...] = ()


@attrs.frozen(eq=False)
class Inputs:
    """Inputs of a module at any batch size."""

    call: Call  # an example of arguments and targets. Values other than tensors are passed on unchanged
    batch_size: int  # samples of the example
    growth: Mapping[Path, Growth]  # how values grow with the batch size, by their path in `call`
    source: Source | None = None  # makes the batches that are timed; None: they are drawn like the example
    # names or positions of arguments that are the same at all sizes, from `constant_inputs`
    constant: tuple[str | int, ...] = ()
    names: tuple[str, ...] = ()  # names of the positional parameters
    # whether `growth` was read from a single example, in which other extents may equal the batch size by chance
    is_guess: bool = False
    module: Any = None  # the module that gets the inputs, without wrappers; None if unknown
    loss: Any = None  # the loss that gets the output and the targets; None if unknown
    place: Any = None  # device of the module; None before `on`
    unpacks: bool = False  # whether a list that `source` makes holds arguments
    sizes: tuple[int, ...] = ()  # small batch sizes that the user allows, and `source` makes
    multiple: int = 1  # the batch sizes that `source` makes are multiples of it

    @classmethod
    def of(
        cls, given: Any, dtype: Any, *, module: Any = None, loss: Any = None, constant: Collection[str | int] = (),
        sizes: Sequence[int] = DRAWN_SIZES,
    ) -> Inputs:  # fmt: skip
        """
        Return the inputs that the argument `batches` of a public function stands for.

        `given` is a function, which is called at `sizes`, a loader, a data set, two batches in a list, one batch, or a
        shape. Elements then have the type `dtype`. Items beyond those that the module takes are targets of the loss, at
        most one if it is None. `constant` are names or positions of arguments that are the same at all sizes.
        InvalidArgument is raised if nothing grows, or an example does not show what grows.
        """
        known = {
            "constant": tuple(constant), "names": _parameters(module), "module": module, "loss": loss,
            "sizes": tuple(sizes),
        }  # fmt: skip
        source = batch_sources.find(given)
        if source is not None:
            drawn = draw_batches(source, sizes)
            known["sizes"] = tuple(n for n in {**drawn.batches, **dict.fromkeys(sizes)} if n not in drawn.refused)
            return cls._compared(drawn.batches, source, {**known, "multiple": drawn.multiple})
        if (pair := _pair(given, module)) is not None:
            return cls._compared(pair, None, known)
        return cls._of_one(given, dtype, known)

    @classmethod
    def _compared(cls, batches: Mapping[int, Any], source: Source | None, known: Mapping[str, Any]) -> Inputs:
        lengths = {len(batch) for batch in batches.values() if isinstance(batch, list)}
        unpacks = source is not None and len(lengths) == 1  # a longer list of a larger batch holds its samples
        calls = {n: _call(batch, known["module"], known["loss"], is_batch=unpacks) for n, batch in batches.items()}
        growth = by_difference(calls)
        if any(each.most for each in growth.values()) and not isinstance(source, batch_sources.DataSetBatches):
            source = source and batch_sources.TypicalBatches(source)
        largest = max(calls)
        inputs = cls(calls[largest], largest, growth, source, unpacks=unpacks, **known)
        if not any(each.lines for each in growth.values()):
            values = [value for _, part in children(tuple(inputs.call)) or () for _, value in children(part) or ()]
            words = ", ".join(
                f"{inputs.name(path)} of shape {tuple(tensor.shape)}" for path, tensor in inputs._tensors()
            )
            kinds = words or join_words([f"of type {type(value).__name__}" for value in values])
            given = f"inputs that do not grow from batch size {min(calls)} to {largest}: {kinds}"
            allowed = "tensors, lists or whole numbers that grow with the batch size"
            is_array = any(hasattr(value, "__array_interface__") for value in values)
            remedy = _ARRAYS if is_array else "Make them of as many samples as the batch size asks for."
            raise InvalidArgument(batch_sources.FIELD, given, allowed, remedy)
        inputs._check()
        return inputs

    @classmethod
    def _of_one(cls, example: Any, dtype: Any, known: Mapping[str, Any]) -> Inputs:
        if is_shape(example):
            example = torch.randn(1, *example, dtype=dtype, generator=torch.Generator().manual_seed(0), device="cpu")
        call = _call(example, known["module"], known["loss"], is_batch=False)

        def detached(tensor: Any) -> Any:
            return tensor.detach().requires_grad_() if tensor.requires_grad else tensor  # the example gets no gradient

        _check_lists(call)
        call = Call(*_mapped(tuple(call), detached, may_share=True))
        tensors = tensors_at(call)
        is_list = (size := _samples_of(call)) is not None
        if not is_list and (not tensors or not tensors[0][1].ndim or not len(tensors[0][1])):
            parts = example if isinstance(example, tuple) else (example,)
            remedy = _ARRAYS if any(hasattr(part, "__array_interface__") for part in parts) else ""
            raise InvalidArgument(batch_sources.FIELD, example, _ALLOWED, remedy)
        size = len(tensors[0][1]) if size is None else size
        growth = of_example(call, size)
        if is_list:
            at: Path = (0, 0) if call.positional else (1, next(iter(call.keyword)))
            growth = {path: each for path, each in growth.items() if path[:2] != at} | {at: Growth({0: ROWS})}
        inputs = cls(call, size, growth, is_guess=True, **known)
        if (holder := inputs._opaque(tuple(call))) is not None:
            given = f"a {type(holder).__name__}, whose tensors cannot be replaced by those of another batch"
            remedy = (
                "Wrap the module in one that makes it of tensors; or, if these are the same in every batch, give an "
                "example of another number of samples."
            )
            raise InvalidArgument(batch_sources.FIELD, given, _ALLOWED, remedy)
        inputs._check()
        for path, tensor in tensors:
            is_drawn = inputs.grows(path) and not inputs._named(path)
            if is_drawn and (tensor.layout != torch.strided or tensor.is_nested):
                kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
                given, allowed = f"a {kind} tensor", "dense tensors, like which batches are drawn"
                remedy = "Pass a function from a batch size to inputs, and max_batch_size."
                raise InvalidArgument(batch_sources.FIELD, given, allowed, remedy)
        return attrs.evolve(inputs, growth={at: each for at, each in inputs.growth.items() if not inputs._named(at)})

    @property
    def num_samples(self) -> int | None:
        """Number of samples of the data set that batches are made of; None if unknown."""
        return getattr(self.source, "num_samples", None)

    def on(self, device: Any) -> Inputs:
        """
        Return a copy for a device: constant tensors move there, tensors that grow with the batch size to the CPU.

        Raises:
            InvalidArgument: If a tensor is on the "meta" device, so that it has no data.
        """

        def moved(tensor: Any, path: Path) -> Any:
            if tensor.is_meta:
                raise InvalidArgument(
                    batch_sources.FIELD, "a tensor on meta", "tensors with data, from which random batches are drawn"
                )
            there = (tensor.detach() if tensor.requires_grad else tensor).to("cpu" if self.grows(path) else device)
            return there.requires_grad_(tensor.requires_grad)

        is_there = all(each.device == device for path, each in self._tensors() if not self.grows(path))
        call = Call(*_mapped_at(tuple(self.call), moved, device=device, may_share=is_there))
        return attrs.evolve(self, call=call, place=device)

    @property
    def device(self) -> Any:
        """Device of the first tensor; tensors in objects, such as caches, count only if there are no others."""
        return self._tensors()[0][1].device

    def doubtful(self) -> list[Path]:
        """
        Return the paths of inputs that may be as long as the batch by chance; empty unless there is only one example.

        The first input that is as long as the batch does not count: it is taken as certain.
        """
        return [at for at, each in self.growth.items() if each.lines][1:] if self.is_guess else []

    def held(self, constant: Collection[Path]) -> Inputs:
        """Return a copy in which the values at the paths in `constant` are the same at all batch sizes."""
        return attrs.evolve(self, growth={at: each for at, each in self.growth.items() if at not in constant})

    def remarks(self, written: Collection[Path] = ()) -> list[Remark]:
        """
        Return remarks on input tensors that have the same shape at all batch sizes, and on those that steps write to.

        Shapes of tensors in objects do not count. The remark "inputs_stay" prevents a recommendation. It lists tensors
        of two rows or more that `constant_inputs` does not name and that are no parameters or buffers of the module.
        """
        own = {id(each) for each in (*self.module.parameters(), *self.module.buffers())} if self.module else set()
        allowed, others = list[tuple[str, str]](), list[tuple[str, str]]()
        for path, tensor in self._tensors():
            counts = path in self.growth and self.growth[path].counts
            if counts or self.grows(path) or is_holder(_value_at(self.call, path[:-1])):
                continue
            is_one = not tensor.ndim or len(tensor) == 1
            is_allowed = is_one or self._named(path) or id(tensor) in own
            (allowed if is_allowed else others).append((self.name(path), str(tuple(tensor.shape))))
        remarks: list[Remark] = []
        if others:
            words = ", ".join(f"{name} of shape {shape}" for name, shape in others)
            values = {"inputs": words, "names": str([name for name, _ in others])}
            remarks.append(Remark(code="inputs_stay", values=values))
        if allowed:
            words = ", ".join(f"{name} of shape {shape}" for name, shape in allowed)
            remarks.append(Remark(code="constant_inputs", values={"inputs": words}))
        if written:
            words = join_words(sorted({self.name(path) for path in written}))
            remarks.append(Remark(code="inputs_written", values={"inputs": words}))
        return remarks

    def name(self, path: Path) -> str:
        """Return the name of the value at a path, for messages: its parameter and the keys in it, as "mask[0]"."""
        part, *rest = path
        if not rest:
            return "the inputs"
        first, *below = rest
        if part == 0:
            first = self.names[first] if first < len(self.names) else f"argument {first}"
        elif part == 2:  # noqa: PLR2004 - see Call
            first = "the target"
        return f"{first}{''.join(f'[{key!r}]' for key in below)}"

    def _named(self, path: Path) -> bool:
        """Return whether `constant_inputs` names the value at a path, or the argument that contains it."""
        name = self.name(path)
        of_argument = self.name(path[:2])
        places = {path[1]} if path[0] == 0 and len(path) > 1 else set()
        return not {name, of_argument, *places}.isdisjoint(self.constant)

    def _check(self) -> None:
        """Raise InvalidArgument if `constant_inputs` names an input that does not exist."""
        known = {self.name((0, place)) for place in range(len(self.call.positional))}
        known |= {self.name(path) for path, _ in self._tensors()} | set(self.call.keyword)
        for each in self.constant:
            if each not in known and not (isinstance(each, int) and 0 <= each < len(self.call.positional)):
                raise InvalidArgument("constant_inputs", each, f"names of inputs: {', '.join(sorted(known))}")

    def _tensors(self) -> list[tuple[Path, Any]]:
        return tensors_at(self.call)

    def grows(self, path: Path) -> bool:
        """Return whether the value at a path, or a list that contains it, grows with the batch size."""
        return any((each := self.growth.get(path[:end])) and each.lines for end in range(1, len(path) + 1))

    def _opaque(self, tree: Any) -> Any:
        """Return an object whose tensors have `batch_size` rows and cannot be replaced; None if there is none."""
        if isinstance(tree, Mapping):
            tree = list(tree.values())
        elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
            tree = [getattr(tree, field.name) for field in dataclasses.fields(tree) if field.init]
        if isinstance(tree, tuple | list):
            return next((opaque for part in tree if (opaque := self._opaque(part)) is not None), None)
        if self.batch_size == 1 or isinstance(tree, torch.Tensor) or is_holder(tree):
            return None  # of one sample tensors that are the same in every batch may look the same
        return tree if any(each.ndim and len(each) == self.batch_size for each in tensors_in(tree)) else None

    def batch(self, batch_size: int, make: Callable[[Any, tuple[int, ...]], Any]) -> Call:
        """
        Return the arguments for another batch size, in the form of the example; values that do not grow are shared.

        `make(tensor, shape)` replaces a tensor of the example; the result requires a gradient where that does.
        """
        return Call(*self._at_size(tuple(self.call), (), batch_size, make))

    def drawn(
        self, batch_size: int, make: Callable[[Any, tuple[int, ...]], Any], move: Callable[[Any], Any]
    ) -> Call:  # fmt: skip
        """
        Return the arguments of a step: made by the user's source and moved, or else drawn like the example.

        `make` is as for `batch`, and `move` moves a tensor to the device. A user's function that makes fewer rows than
        samples raises InvalidArgument.
        """
        if self.source is None:
            return self.batch(batch_size, make)
        call = self.moved(self.source(batch_size), move)
        if not getattr(self.source, "repeats", False):
            self._check_rows(call, batch_size)
        return call

    def _check_rows(self, call: Call, batch_size: int) -> None:
        """Raise InvalidArgument if a tensor or list of a row for each sample has fewer, as a slice beyond the data."""
        for path, growth in self.growth.items():
            value = _value_at(call, path)
            axis = next((axis for axis, line in growth.lines.items() if line == ROWS), None)
            if axis is None or not isinstance(value, torch.Tensor | list | tuple):
                continue
            rows = int(value.size(axis)) if isinstance(value, torch.Tensor) else len(value)
            if rows < batch_size:
                given = f"one that made {rows} rows of {self.name(path)} for {batch_size} samples"
                allowed = "a function that makes as many samples as its argument states"
                raise InvalidArgument(batch_sources.FIELD, given, allowed, f"Or pass max_batch_size={rows}.")

    def with_copies(self, call: Call) -> Call:
        """Return a call with copies of arrays and of constant tensors, which may be the user's own."""
        constant = {path for path, _ in tensors_at(call) if not self.grows(path)}
        return with_copied_objects(call, {*constant, *arrays_at(call)})

    @property
    def is_uneven(self) -> bool:
        """Whether batches are made of samples of unequal length, so that batches of one size differ."""
        return not getattr(self.source, "is_even", True)

    def come_from(self, loader: Any) -> bool:
        """Return whether batches are those of this data loader, with the arguments of a step in each."""
        return getattr(self.source, "loader", None) is loader

    def moved(self, batch: Any, move: Callable[[Any], Any]) -> Call:
        """Return a batch that the user's source or loader made as arguments of a step; `move` is as for `drawn`."""

        def there(tensor: Any, _: Path) -> Any:
            placed = move(tensor.detach() if tensor.requires_grad else tensor)
            return placed.requires_grad_() if tensor.requires_grad else placed

        def other(value: Any, _: Path) -> Any:
            return value.to(self.place) if hasattr(value, "to") and not isinstance(value, type) else value

        call = _call(batch, self.module, self.loss, is_batch=self.unpacks)
        return Call(*_mapped_at(tuple(call), there, other, device=self.place))

    def check_traceable(self, batch_size: int) -> None:
        """
        Raise an error if inputs of this batch size cannot be traced.

        Raises:
            NotImplementedError: If tensors are in an object of an unknown class or not dense, or a list is too long.
        """
        lists = [
            each.lines[0].at(batch_size)
            for at, each in self.growth.items()
            if not isinstance(_value_at(self.call, at), torch.Tensor)
        ]
        if max(lists, default=0) > _LONGEST_LIST:
            raise NotImplementedError(
                f"a list of {max(lists)} samples is too long to trace, which takes at most {_LONGEST_LIST}"
            )
        for path, tensor in self._tensors():
            if tensor.layout != torch.strided or tensor.is_nested:
                raise NotImplementedError(
                    f"{self.name(path)} is a sparse or nested tensor; only dense ones can be traced"
                )
        if self.source is not None and (holder := _unknown(tuple(self.call))) is not None:
            raise NotImplementedError(
                f"inputs are in a {type(holder).__name__}, not in a tuple, list, dict or dataclass"
            )

    def _at_size(self, tree: Any, path: Path, batch_size: int, make: Callable[[Any, tuple[int, ...]], Any]) -> Any:
        growth = self.growth.get(path)
        if isinstance(tree, torch.Tensor):
            if growth is None:
                return tree
            made = make(tree, growth.shape(tree.shape, batch_size))
            return made.requires_grad_(tree.requires_grad) if tree.requires_grad else made
        if growth is not None and isinstance(tree, list | tuple):
            length = growth.lines[0].at(batch_size)
            samples = [tree[place * len(tree) // max(1, length)] for place in range(length)]
            made = [_mapped(sample, lambda tensor: make(tensor, tuple(tensor.shape))) for sample in samples]
            return tuple(made) if isinstance(tree, tuple) else _of_list(tree, made)
        if growth is not None and isinstance(tree, int):
            return growth.lines[0].at(batch_size)
        if is_holder(tree):
            return copied(tree, lambda each, place: self._at_size(each, (*path, place), batch_size, make))
        return _rebuilt(tree, lambda key, item: self._at_size(item, (*path, key), batch_size, make))


_LONGEST_LIST = 4096  # items, whose tensors take a trace seconds


def _parameters(module: Any) -> tuple[str, ...]:
    """Return the names of a module's positional parameters; none if unknown."""
    try:
        parameters = inspect.signature(getattr(module, "forward", module)).parameters.values()
    except (TypeError, ValueError):
        return ()
    return tuple(each.name for each in parameters if each.kind <= each.POSITIONAL_OR_KEYWORD)


def _call(given: Any, module: Any, loss: Any, *, is_batch: bool) -> Call:
    """
    Return a batch as arguments of a call: a mapping as keywords, a tuple as several, any other value as one.

    Args:
        given: The batch. A mapping is one argument if the module takes one and none of its keys; a named tuple is if
            the module takes one.
        module: The module that is called; items more than it takes are targets. None: there are no targets.
        loss: The loss, which shows how many items are its targets; None: one at most.
        is_batch: Whether a list holds arguments, as the batches of a data loader do.

    Raises:
        InvalidArgument: If module and loss do not take the items together.
    """
    if isinstance(given, Mapping):
        return _call_of_mapping(given, module)
    is_one = hasattr(given, "_fields") and (module is None or takes(module, 1))
    is_tuple = isinstance(given, tuple) and not is_one
    if not is_tuple and not (is_batch and isinstance(given, list)):
        return Call((given,), {})
    positional = tuple(given)
    if len(positional) == 2 and isinstance(positional[0], tuple | list):  # noqa: PLR2004
        first, second = positional
        if _is_keywords(second, module, len(first)):
            return Call(tuple(first), dict(second))
    is_loop = len(positional) > 1 and _fits(loss, len(positional))
    if is_loop and _is_keywords(positional[0], module):
        return Call((), dict(positional[0]), positional[1:])
    counts = [count for count in range(len(positional), 0, -1) if module is None or takes(module, count)]
    usual = [count for count in counts if count >= len(positional) - 1]
    fitting = [count for count in counts if _fits(loss, 1 + len(positional) - count)]
    if end := next(iter([*fitting[-1:], *usual]), 0):
        return Call(positional[:end], {}, positional[end:])
    if not is_tuple and (loss is None or takes(loss, 1)):
        return Call((given,), {})
    allowed = f"the arguments of {type(module).__name__}, then the targets of the loss"
    raise InvalidArgument(batch_sources.FIELD, f"a batch of {len(positional)} items", allowed, _AS_IN_LOOP)


def _fits(loss: Any, count: int) -> bool:
    """Return whether a loss may be meant for `count` arguments: it requires all, is of one target, or of any number."""
    if loss is None or not takes(loss, count):
        return False
    return count == _WITH_TARGET or takes(loss, _ANY) or not takes(loss, count - 1)


def _call_of_mapping(given: Mapping[Any, Any], module: Any) -> Call:
    """Return a mapping as keywords of a call, or as one argument; raise InvalidArgument if the module takes neither."""
    if module is None or takes(module, 0, given):
        return Call((), dict(given))
    names = _parameters(module)
    if takes(module, 1) and not set(names).intersection(given):
        return Call((given,), {})
    if not (others := [key for key in given if key not in names]):
        return Call((), dict(given))  # one is missing: the error of the call names it
    words = f"a mapping with {join_words(list(map(repr, others)))}, which {type(module).__name__} does not take"
    raise InvalidArgument(batch_sources.FIELD, words, f"keyword arguments: {', '.join(names)}", _AS_IN_LOOP)


def _is_keywords(value: Any, module: Any, count: int = 0) -> bool:
    """Return whether a value is a dict of keyword arguments of a module, after `count` positional ones."""
    if not isinstance(value, dict) or not value or module is None:
        return False
    return all(key in _parameters(module) for key in value) or takes(module, count, value)


def draw_batches(source: Source, sizes: Sequence[int] = DRAWN_SIZES) -> Drawn:
    """
    Return three batches of the first sizes that a source can make, or two if it makes no more, and the sizes refused.

    A data loader's own batch size and its multiples come after three others. Raises InvalidArgument if the source makes
    fewer, or data loaders.
    """
    batches, refused = dict[int, Any](), list[int]()
    raised: Exception | None = None
    own = getattr(getattr(source, "loader", None), "batch_size", None) or 0
    with torch.random.fork_rng(devices=[]):
        for n in dict.fromkeys([*sizes[:_DRAWS], *(own * count for count in (1, 2, 3) if own), *sizes[_DRAWS:]]):
            try:
                batches[n] = source(n)
            except InvalidArgument:
                raise
            except Exception as error:  # noqa: BLE001 - any error of a user's function
                raised = raised or error
                refused.append(n)
            if batch_sources.is_loader(batches.get(n)):
                remedy = "Pass a data loader itself: batches of any size are made of its samples."
                raise InvalidArgument(
                    batch_sources.FIELD, "a function that returns data loaders", "one of inputs", remedy
                )
            if len(batches) == _DRAWS:
                break
    if len(batches) > 1:
        return Drawn(dict(sorted(batches.items())), refused)
    name = getattr(source, "__name__", type(source).__name__)
    remedy = "" if raised is None else f"It raised {type(raised).__name__}: {str(raised).rstrip('.')}. {_MULTIPLES}"
    allowed = f"a function that makes inputs for {' and '.join(map(str, sizes[:_DRAWS]))} samples"
    if isinstance(source, batch_sources.DataSetBatches):
        kind = f"a data {'set' if source.loader is None else 'loader'}"
        name, allowed = f"{kind} whose samples cannot be joined", f"{kind} whose samples can be joined to a batch"
        remedy += " If samples differ in length, pass a data loader with a collate_fn that pads them."
    raise InvalidArgument(batch_sources.FIELD, name, allowed, remedy.strip()) from raised


def are_alike(sources: Sequence[Source], batch_size: int) -> bool:
    """
    Return whether two sources make equal batches from the same state of the random generators.

    It is False if a source fails, or if the batches cannot be compared.
    """

    def contents(tensor: Any) -> Any:  # lengths and masks of equal shape may be of other samples
        return tensor.shape, tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()

    made = []
    with contextlib.suppress(Exception):  # any error of a user's function
        for source in sources:
            with kept_random_state():
                made.append(_mapped(source(batch_size), contents))
        return bool(made[0] == made[1])
    return False


def _pair(given: Any, module: Any) -> dict[int, Any] | None:
    """Return two batches by their batch size if the argument is a list or tuple of two; None if it is one batch."""
    if not isinstance(given, list | tuple) or hasattr(given, "_fields") or len(given) != 2:  # noqa: PLR2004
        return None
    first, second = given
    if type(first) is not type(second) or not isinstance(first, torch.Tensor | tuple | list | Mapping):
        return None
    if isinstance(first, torch.Tensor):
        is_call = isinstance(given, tuple) and (module is None or takes(module, 2))
        if is_call or first.ndim != second.ndim or first.dtype != second.dtype or len(first) == len(second):
            return None
    elif isinstance(given, tuple) and module is not None and not isinstance(first, Mapping) and takes(module, 2):
        return None
    lengths = _lengths(first, second)
    if not lengths:
        return None
    small, large = min(lengths)
    return {small: first, large: second}


def _lengths(first: Any, second: Any) -> list[tuple[int, int]]:
    """Return (first, second) lengths along axis 0 of tensors and lists that differ in it, if any, in two batches."""
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        is_longer = bool(first.ndim) and bool(second.ndim) and 0 < len(first) != len(second)
        return [(len(first), len(second))] if is_longer else []
    left_parts, right_parts = children(first), children(second)
    if left_parts is None or right_parts is None:
        return []
    if [key for key, _ in left_parts] != [key for key, _ in right_parts]:
        return (
            [(len(left_parts), len(right_parts))]
            if isinstance(first, list) and isinstance(second, list) and left_parts
            else []
        )
    return [
        pair for (_, left), (_, right) in zip(left_parts, right_parts, strict=True) for pair in _lengths(left, right)
    ]


def tensors_at(call: Call) -> list[tuple[Path, Any]]:
    """Return the tensors of a call with their paths; last those in objects such as caches."""
    tensors: list[tuple[Path, Any]] = []

    def noted(tensor: Any, path: Path) -> Any:
        tensors.append((path, tensor))
        return tensor

    _mapped_at(tuple(call), noted)
    return sorted(tensors, key=lambda each: is_holder(_value_at(call, each[0][:-1])))


def arrays_at(call: Call) -> dict[Path, Any]:
    """Return the NumPy arrays of a call by their paths."""
    arrays: dict[Path, Any] = {}

    def noted(value: Any, path: Path) -> Any:
        if isinstance(value, np.ndarray):
            arrays[path] = value
        return value

    _mapped_at(tuple(call), lambda tensor, _: tensor, noted)
    return arrays


def _check_lists(call: Call) -> None:
    """Raise InvalidArgument for a list of tensors that may be the samples of a batch or several inputs."""
    argument = next(iter((*call.positional, *call.keyword.values())), None)
    if not isinstance(argument, list) or len(argument) < 2 or not all(isinstance(x, torch.Tensor) for x in argument):  # noqa: PLR2004
        return
    kinds = {(tensor.ndim, tensor.dtype) for tensor in argument}
    if len(kinds) == 1 and len({len(tensor) if tensor.ndim else 0 for tensor in argument}) == 1:
        given = f"a list of {len(argument)} tensors, which are the samples of a batch or several inputs"
        remedy = f"{_TWO} Several inputs go into a tuple: tuple(batch)."
        raise InvalidArgument(batch_sources.FIELD, given, "in a form that shows which of the two", remedy)


def _samples_of(call: Call) -> int | None:
    """Return the length of the first argument if it is a list of samples of unequal length; else None."""
    argument = next(iter((*call.positional, *call.keyword.values())), None)
    if not isinstance(argument, list) or not argument or not all(isinstance(each, torch.Tensor) for each in argument):
        return None
    kinds = {(tensor.ndim, tensor.dtype) for tensor in argument}
    lengths = {len(tensor) if tensor.ndim else 0 for tensor in argument}
    return len(argument) if len(kinds) == 1 and len(lengths) > 1 else None


def _value_at(tree: Any, path: Path) -> Any:
    """
    Return the value at a path in nested containers; None if a container lacks the key.

    In an object that is no container, the key is the number of a tensor in `tensors_in`.
    """
    for key in path:
        parts = children(tree)
        tree = tensors_in(tree)[key] if parts is None else dict(parts).get(key)
    return tree


def _unknown(tree: Any) -> Any:
    """Return an object that holds tensors and is of no known container class; None if there is none."""
    if isinstance(tree, torch.Tensor) or tree is None:
        return None
    if isinstance(tree, tuple | list | Mapping) or dataclasses.is_dataclass(tree):
        return next((unknown for _, part in children(tree) or () if (unknown := _unknown(part)) is not None), None)
    return tree if any(isinstance(part, torch.Tensor) for _, part in children(tree) or ()) else None


def random_like(generator: Any, device: Any) -> Callable[[Any, tuple[int, ...]], Any]:
    """
    Return a function (example tensor, shape) that draws a tensor: floats in the example's range, else normal.

    Integers and booleans repeat whole samples of the example in order, so that padding labels, the density of masks and
    sorted sequence lengths stay valid. Floats like a constant example are normal, never constant: the power of a GPU,
    and so its clock, depends on the data.
    """
    like: dict[str, Any] = {"generator": generator, "device": generator.device}  # a process may have a default device

    def make(tensor: Any, shape: tuple[int, ...]) -> Any:
        if not tensor.numel():
            return torch.empty(shape, dtype=tensor.dtype, device=device)
        if tensor.dtype.is_complex:  # which have no range
            return torch.randn(shape, dtype=tensor.dtype, **like).to(device)
        if not tensor.dtype.is_floating_point:
            repeated = tensor.cpu()
            for axis, (extent, old) in enumerate(zip(shape, tensor.shape, strict=True)):
                if extent != old:
                    places = torch.arange(extent, device=generator.device) * old // extent
                    repeated = repeated[(slice(None),) * axis + (places,)]
            return repeated.to(device)
        low, high = (bound.item() for bound in tensor.float().aminmax())  # the smallest types have none of their own
        drawn = torch.randn(shape, **like)
        if low < high and math.isfinite(low) and math.isfinite(high):
            drawn = torch.rand(shape, **like).mul_(high - low).add_(low)
        return drawn.to(device, tensor.dtype)

    return make


def without_floats(example: Any) -> Any:
    """Return (positional, keyword, targets) of an example with batched floats set to 0, to identify the workload."""

    def blank(tensor: Any, _: tuple[int, ...]) -> Any:
        return torch.zeros_like(tensor) if tensor.is_floating_point() or tensor.is_complex() else tensor

    inputs = Inputs.of(example, None)
    return tuple(inputs.batch(inputs.batch_size, blank))


def is_shape(example: Any) -> bool:
    """Return whether `example` is the shape of one sample: a non-empty list or tuple of positive ints."""
    return (
        isinstance(example, tuple | list)
        and len(example) > 0
        and all(isinstance(extent, int) and not isinstance(extent, bool) and extent > 0 for extent in example)
    )


def _mapped(tree: Any, change: Callable[[Any], Any], *, may_share: bool = False) -> Any:
    return _mapped_at(tree, lambda tensor, _: change(tensor), may_share=may_share)


def with_copied_objects(call: Call, written: Collection[Path]) -> Call:
    """
    Return arguments for another step: objects that hold tensors are copied if possible, as a step may extend a cache.

    Tensors and arrays are shared, but for those at the paths in `written`, and for scalars in objects, as a cache
    counts its tokens.
    """

    def copy_written(value: Any, path: Path) -> Any:
        return value.copy() if path in written else value

    def copy_changed(tensor: Any, path: Path) -> Any:
        is_shared = tensor.requires_grad or (tensor.ndim and path not in written)
        return tensor if is_shared else tensor.clone()

    return Call(*_mapped_at(tuple(call), copy_changed, copy_written, may_share=True))


def _mapped_at(
    tree: Any, change: Callable[[Any, Path], Any], other: Callable[[Any, Path], Any] = lambda value, _: value,
    path: Path = (), *, device: Any = None, may_share: bool = False,
) -> Any:  # fmt: skip
    """
    Return nested containers with each tensor replaced by `change(tensor, path)`, other values by `other(value, path)`.

    Containers are tuples, lists, mappings, dataclasses, and objects that hold tensors, which may record a `device`.
    `may_share` is as for `copied`.
    """
    if isinstance(tree, torch.Tensor):
        return change(tree, path)
    if is_holder(tree):
        return copied(tree, lambda each, place: change(each, (*path, place)), device, may_share=may_share)
    if not isinstance(tree, tuple | list | Mapping) and not dataclasses.is_dataclass(tree):
        return other(tree, path)
    return _rebuilt(
        tree, lambda key, item: _mapped_at(item, change, other, (*path, key), device=device, may_share=may_share)
    )


def _rebuilt(tree: Any, change: Callable[[Any, Any], Any]) -> Any:
    """Return a container with each item replaced by `change(key, item)`; any other value as it is."""
    if isinstance(tree, tuple):
        parts = [change(place, part) for place, part in enumerate(tree)]
        return type(tree)(*parts) if hasattr(tree, "_fields") else tuple(parts)
    if isinstance(tree, list):
        return _alike(tree, [change(place, part) for place, part in enumerate(tree)])
    if isinstance(tree, Mapping):
        return _alike(tree, {name: change(name, part) for name, part in tree.items()})
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        names = [field.name for field in dataclasses.fields(tree) if field.init]
        return dataclasses.replace(tree, **{name: change(name, getattr(tree, name)) for name in names})
    return tree


def _of_list(tree: Any, items: list[Any]) -> Any:
    """Return items, possibly more or fewer than in the list `tree`, as a list of its class."""
    if type(tree) is list:
        return items
    made = copy.copy(tree)
    made[:] = items
    return made


def _alike(tree: Any, parts: Any) -> Any:
    """Return a list or mapping as an object of the class of `tree`, or unchanged if that class rejects the items."""
    if type(tree) is type(parts):
        return parts
    if isinstance(tree, list | dict | UserDict) or hasattr(tree, "__copy__"):  # else a copy may share what it holds
        with contextlib.suppress(Exception):  # any error of a user's class
            made = copy.copy(tree)
            for place, part in enumerate(parts) if isinstance(parts, list) else parts.items():
                made[place] = part
            return made
    return parts
