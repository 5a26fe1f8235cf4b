"""from_torch(): import a PyTorch module from the graph that torch.export makes of it."""

from __future__ import annotations

import contextlib
import operator
import warnings
from collections.abc import Iterator
from typing import Any

from cubatch.errors import CubatchError, InvalidArgument, MissingDependency
from cubatch.network.graph import Network
from cubatch.network.importers import fake_logs
from cubatch.network.importers.building import Builder
from cubatch.network.importers.layer_rules import RULES, keep_opaque
from cubatch.network.importers.source import Meaning, Parameters, Source, Step, single_input, united, unlike
from cubatch.network.importers.torch_operators import OPERATORS, Call, part
from cubatch.units import first_line

# Constants; their first argument decides only the type, or only type and shape.
_ONLY_TYPED_BY = frozenset({"aten.new_zeros", "aten.new_ones", "aten.new_full"})
_ONLY_SHAPED_BY = frozenset({"aten.zeros_like", "aten.ones_like", "aten.full_like"})
# Graphs within the graph: code of a module under no_grad() or autocast().
_WRAPS = frozenset({"wrap_with_set_grad_enabled", "wrap_with_autocast"})
EXAMPLE_BATCH = 2  # a batch of 1 would look like any axis of one position


class CannotTrace(InvalidArgument):
    """A module that cannot be traced: it rejects its input, or torch.export cannot make a graph of its code."""


def from_torch(module: Any, input_shape: tuple[int, ...] = (3, 224, 224), *, opaque: bool = False) -> Network:
    """
    Return a PyTorch module as a network, with its weights.

    The module is traced in eval mode by torch.export, and left unchanged. Operators without effect in eval mode are not
    imported, such as stochastic depth; dropout is.

    Permutations and reshapes make no layers. Activations of cubatch are (h, w, c), filters (k, r, s, c), and weights
    after a flatten are reordered to match. An output that ends in a flatten has cubatch's order too.

    Args:
        module: A torch.nn.Module with one input tensor and one output tensor.
        input_shape: Shape of one sample in PyTorch: (channels, height, width), (tokens, channels) or (features,).
        opaque: Import operators without a layer as layers of known extents, bytes and FLOP. Such a network can be
            planned and predicted, but not run.

    Returns:
        Network: Its `weights` are copies, in float32.

    Raises:
        UnsupportedOperator: If an operator has no layer, and opaque is False; it names the operator and its place.
        InvalidArgument: If `module` is no initialized module, cannot be traced, or has not exactly one output that
            depends on its input. Also if `input_shape` is no shape of a sample.
        MissingDependency: If PyTorch is not installed.
        InvalidSpec: If the module returns its input.

    Example:
        >>> import torch                                                              # doctest: +SKIP
        >>> net = from_torch(torch.nn.Conv2d(3, 8, 3), (3, 32, 32))                   # doctest: +SKIP
        >>> net.output_shape, net.parameters                                          # doctest: +SKIP
        ((30, 30, 8), 224)
    """
    try:
        import torch
    except ImportError as error:
        raise MissingDependency("PyTorch", "from_torch", "torch") from error
    if not isinstance(module, torch.nn.Module):
        raise InvalidArgument("module", module, "a torch.nn.Module")
    check_initialized(module)
    shape = _checked_shape(input_shape)
    with _in_eval_mode(module), _with_momenta(torch, module):
        program = _exported(torch, module, shape)
    source = _Reader(torch, program, type(module).__name__).source((EXAMPLE_BATCH, *shape))
    return Builder(source, RULES, keep_opaque if opaque else None).network()


def check_initialized(module: Any) -> None:
    """Raise InvalidArgument if the module holds a lazy module that was never called, whose parameters have no shape."""
    import torch

    tensors = [*module.named_parameters(), *module.named_buffers()]
    bare = [name for name, tensor in tensors if torch.nn.parameter.is_lazy(tensor)]
    if bare:
        remedy = f"{bare[0]} has no shape yet: call the module once on a batch."
        raise InvalidArgument("module", type(module).__name__, "initialized", remedy)


def _checked_shape(value: object) -> tuple[int, ...]:
    allowed = "(channels, height, width), (tokens, channels) or (features,), whole numbers of at least 1"
    if not isinstance(value, tuple | list) or not 1 <= len(value) <= 3:  # noqa: PLR2004
        raise InvalidArgument("input_shape", value, allowed)
    if not all(isinstance(extent, int) and not isinstance(extent, bool) and extent > 0 for extent in value):
        raise InvalidArgument("input_shape", value, allowed)
    return tuple(value)


@contextlib.contextmanager
def _in_eval_mode(module: Any) -> Iterator[None]:
    training = [part for part in module.modules() if part.training]
    module.eval()
    try:
        yield
    finally:
        for part in training:
            part.training = True


@contextlib.contextmanager
def _with_momenta(torch: Any, module: Any) -> Iterator[None]:
    """Set momentum None of batch norms to 0.1 during the block, with a warning; an exported graph has 0 for None."""
    norms = torch.nn.modules.batchnorm._BatchNorm  # noqa: SLF001 - its only name
    bare = {name: part for name, part in module.named_modules() if isinstance(part, norms) and part.momentum is None}
    if bare:
        named = f"batch norms with momentum=None ({', '.join(bare)})"
        warnings.warn(f"{named} average all batches alike; here they are trained with a momentum of 0.1", stacklevel=4)
    try:
        for part in bare.values():
            part.momentum = 0.1
        yield
    finally:
        for part in bare.values():
            part.momentum = None


def _exported(torch: Any, module: Any, shape: tuple[int, ...]) -> Any:
    like = next((tensor for tensor in module.parameters() if tensor.is_floating_point()), torch.empty(0))
    example = torch.zeros((EXAMPLE_BATCH, *shape), dtype=like.dtype, device=like.device)
    try:
        with warnings.catch_warnings(action="ignore"), fake_logs.silent():  # the traced operators do not run
            return torch.export.export(module, (example,), strict=False)
    except CubatchError:
        raise
    except Exception as error:
        raise CannotTrace(
            "module",
            type(module).__name__,
            f"one that torch.export can trace on {EXAMPLE_BATCH} samples of shape {shape}",
            f"torch.export: {first_line(error)}.",
        ) from error


class _Reader:
    """Reads an exported graph into steps, in order, and computes nodes that depend on constants alone."""

    def __init__(self, torch: Any, program: Any, name: str) -> None:
        self._torch, self._program, self._name = torch, program, name
        self._known: dict[Any, Any] = {}  # tensors of the nodes that do not depend on the input
        self._values: dict[Any, str] = {}  # current value names of the nodes that depend on it
        self._trained: dict[Any, Parameters] = {}  # parameters that a node depends on
        self._steps: list[Step] = []
        self._several: dict[Any, tuple[Call, str, tuple[str, ...]]] = {}  # nodes with several results, and their reads
        self._within: dict[Any, tuple[Any, ...]] = {}  # nodes that run a graph, and the output nodes of that graph
        self._same: dict[Any, Any] = {}  # inputs and outputs of such graphs, and the nodes that they stand for
        self._begun: set[Any] = set()  # nodes that were read, or are being read
        self._sharing: dict[Any, dict[Any, None]] = {}  # nodes by the storage of their tensors, in order
        graphs = [part.graph for part in program.graph_module.modules() if isinstance(part, torch.fx.GraphModule)]
        stacks = [(node.meta.get("nn_module_stack") or {}).values() for graph in graphs for node in graph.nodes]
        paths = {str(entry[0]).partition("@")[0] for stack in stacks for entry in stack}
        self._live = {node for graph in graphs for node in _live(graph)}
        self._changed = {_storage(node.args[0]) for graph in graphs for node in graph.nodes if _writes(node)}
        self._parents = {path.rpartition(".")[0] for path in paths}  # paths of modules with submodules
        self._input = ""

    def source(self, input_shape: tuple[int, ...]) -> Source:
        signature = self._program.graph_signature
        held = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
        for node in self._program.graph.nodes:
            if node.op == "placeholder":
                if node.name in held:
                    self._known[node] = self._tensor(node, held[node.name])
                    if node.name in signature.inputs_to_parameters:
                        self._trained[node] = frozenset({(held[node.name], self._known[node].numel())})
                elif node.name in signature.inputs_to_lifted_tensor_constants:
                    self._known[node] = self._tensor(node, signature.inputs_to_lifted_tensor_constants[node.name])
                else:
                    self._input = self._values[node] = node.name
                self._begin(node)
            elif node.op == "call_function":
                self._read(node)
            elif node.op == "output":
                output = self._output(node)
        return Source(
            name=self._name, input=self._input, input_shape=input_shape, steps=tuple(self._steps), output=output
        )

    def _tensor(self, node: Any, name: str) -> Any:
        """Return a parameter, buffer or constant by name; a copy unless it is a parameter never changed in place."""
        tensor = self._program.state_dict.get(name)
        if tensor is None:
            tensor = self._program.constants[name]
        is_constant = isinstance(tensor, self._torch.nn.Parameter) and _storage(node) not in self._changed
        return tensor.detach() if is_constant else tensor.detach().clone()

    def _output(self, node: Any) -> str:
        signature = self._program.graph_signature
        names = list(signature.user_outputs)
        outputs = [each for each in node.all_input_nodes if each.name in names]
        if len(outputs) == 1 and outputs[0] in self._known:
            raise InvalidArgument("module", self._name, "a module whose output depends on its input")
        if len(names) != 1 or len(outputs) != 1 or outputs[0] not in self._values:
            remedy = "Wrap it in a module that returns that tensor alone."
            raise InvalidArgument("module", self._name, "one whose only output is a tensor that it computes", remedy)
        return self._values[outputs[0]]

    def _read(self, node: Any) -> None:
        """Compute a node that depends on constants alone; append the steps of any other."""
        self._begin(node)
        if str(node.target) in _WRAPS:
            self._read_within(node)
        elif node.target is operator.getitem and node.args[0] in self._within:
            self._stand_for(node, self._within[node.args[0]][node.args[1]])
        elif not self._fold(node):
            self._append(node)

    def _fold(self, node: Any) -> bool:
        """Compute a node if it neither depends on the input nor is random; return whether it was computed."""
        result = node.meta.get("val")
        if isinstance(result, self._torch.Tensor) and not result.numel():  # an empty tensor depends on nothing
            self._known[node] = self._torch.empty(result.shape, dtype=result.dtype, device=result.device)
            return True
        stand_in = {node.args[0]: self._torch.empty(0)} if _operator(node) in _ONLY_TYPED_BY else {}
        is_known = all(each in self._known or each in stand_in for each in node.all_input_nodes)
        if not is_known or Call(self._torch, node, self._known).is_random:
            return False
        arguments = self._torch.fx.node.map_arg((node.args, node.kwargs), (self._known | stand_in).__getitem__)
        value = self._known[node] = node.target(*arguments[0], **arguments[1])
        if not isinstance(value, self._torch.Tensor) or value.is_floating_point():
            counted = set() if _operator(node) in _ONLY_SHAPED_BY else set(node.all_input_nodes) - stand_in.keys()
            self._trained[node] = united(self._trained, counted)
        return True

    def _append(self, node: Any) -> None:
        """
        Append the step of a node, and update the nodes whose memory it changes in place.

        A node with several results is only recorded: each result that is read later becomes a step.
        """
        base, name = _operator(node), f"{node.name}.{len(self._steps)}"
        call, is_counted = Call(self._torch, node, self._known), True
        reads = tuple(self._values[each] for each in call.values if each in self._values)
        if not isinstance(node.meta.get("val"), self._torch.Tensor):
            self._several[node] = call, base, reads  # each result becomes a step
            return
        meaning: Meaning = ("", {}, {})
        if base in OPERATORS:
            meaning = single_input(OPERATORS[base](call), len(reads))
        kind, constants, options = meaning
        if not reads:  # and could not be computed
            reason = "it draws random numbers" if call.is_random else "it depends on the input by numbers, not tensors"
            kind, constants, options = unlike(reason)
        shape = call.result_shape
        written = self._written(node)
        if written and not _is_all_of(node.args[0], written[0]):
            kind, constants, options = unlike("it changes in place a tensor that is also read in another shape")
            shape = tuple(written[0].meta["val"].shape)
        if node.target is operator.getitem:
            origin, number = node.args
            (call, base, reads), is_counted = self._several[origin], node is self._counted(origin)
            kind, constants, options = part(call, base, number)
            base = f"{base}[{number}]"
        constants = {key: array for key, array in constants.items() if array is not None}
        self._steps.append(
            Step(
                kind=kind, operator=base, place=self._place(node), reads=reads, result=name, shape=shape,
                constants={key: call.array(array) for key, array in constants.items()}, options=options,
                flop=call.flop if is_counted else 0,
                weights=sum(size for _, size in united(self._trained, call.read)) if is_counted else 0,
            )
        )  # fmt: skip
        self._values[node] = name
        for each in written:  # later steps read the new contents
            self._known.pop(each, None)
        if written:
            self._values[written[0]] = name
        for each in written[1:]:
            self._read_again(each)

    def _read_within(self, node: Any) -> None:
        """Read the graph that a node runs on its last arguments as if its nodes were part of this one."""
        place = next(index for index, argument in enumerate(node.args) if getattr(argument, "op", "") == "get_attr")
        given = iter(node.args[place + 1 :])
        for each in getattr(node.graph.owning_module, node.args[place].target).graph.nodes:
            if each.op == "placeholder":
                self._stand_for(each, next(given))
            elif each.op == "call_function":
                self._read(each)
            elif each.op == "output":
                self._within[node] = each.args[0]

    def _stand_for(self, node: Any, other: Any) -> None:
        """Copy tensor, value name and parameters of `other` to a node that equals it in an outer or inner graph."""
        self._begin(node)
        self._same[node] = other
        tables: tuple[dict[Any, Any], ...] = (self._known, self._values, self._trained)
        for held in tables:
            if other in held:
                held[node] = held[other]

    def _counted(self, node: Any) -> Any:
        """
        Return the first result of a node on which the output depends; None if there is none.

        The FLOP and parameters of the node are attributed to this result.
        """
        return next((each for each in node.users if each in self._live), None)

    def _begin(self, node: Any) -> None:
        self._begun.add(node)
        if (storage := _storage(node)) is not None:
            self._sharing.setdefault(storage, {})[node] = None

    def _written(self, node: Any) -> list[Any]:
        """
        Return the nodes that share the memory which a node writes in place.

        The list is empty if it writes nothing, or no later node reads another node of that memory.
        """
        if not _writes(node):
            return []
        sharing: list[Any] = next((list(each) for each in self._sharing.values() if node in each), [])
        is_seen = any(user not in self._begun for each in sharing if each is not node for user in each.users)
        return sharing if is_seen else []

    def _read_again(self, node: Any) -> None:
        """Update the value of a node whose storage was modified in place."""
        if node in self._same:
            self._stand_for(node, self._same[node])
        elif _writes(node):
            self._values[node] = self._values[node.args[0]]
        else:
            if node.target is operator.getitem:
                self._known.pop(node.args[0], None)
                self._read(node.args[0])
            self._read(node)

    def _place(self, node: Any) -> str:
        """Return the path of a node's module; with the name of the operation if the module has submodules."""
        stack = list((node.meta.get("nn_module_stack") or {}).values())
        path = str(stack[-1][0]).partition("@")[0] if stack else ""
        short: str = node.name.rstrip("_0123456789") or node.name
        if not path:
            return short
        return f"{path}.{short}" if path in self._parents else path


def _live(graph: Any) -> set[Any]:
    live: set[Any] = set()
    due = [node for node in graph.nodes if node.op == "output"]
    while due:
        node = due.pop()
        if node not in live:
            live.add(node)
            due += node.all_input_nodes
    return live


def _storage(node: Any) -> int | None:
    """Return the identity of the storage of a node's tensor; None where its result is not a tensor."""
    value: Any = getattr(node, "meta", {}).get("val")
    return value.untyped_storage()._cdata if hasattr(value, "untyped_storage") else None  # noqa: SLF001 - its only name


def _writes(node: Any) -> bool:
    """Return whether a node changes its first argument in place."""
    name = _operator(node)
    return name.endswith("_") and not name.endswith("__") and bool(node.args)


def _is_all_of(node: Any, other: Any) -> bool:
    """Return whether two nodes that share a storage have the same elements in the same order."""
    first, second = (
        (each.shape, each.stride(), each.storage_offset()) for each in (node.meta["val"], other.meta["val"])
    )
    return bool(first == second)


def _operator(node: Any) -> str:
    return str(node.target).rpartition(".")[0]
