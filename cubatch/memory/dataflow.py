"""
The readers of each layer's output, which decide where memory is reused and which layers a neighbor's operation fuses.

A layer may be fused into its neighbor if no other layer reads the value between the two.
"""

from __future__ import annotations

from collections.abc import Sequence

from cubatch.network.graph import INPUT, Network, Node
from cubatch.network.layer import Layer
from cubatch.network.layers import MaxPool2d, ReLU

_PRODUCT_CURVES = frozenset({"gelu"})  # types of activations with whose slopes kernels/hopper is compiled


def is_relu(layer: Layer) -> bool:
    """Return whether a layer is a ReLU."""
    return isinstance(layer, ReLU)  # the only elementwise function that every epilogue has


def _is_pooled_relu(node: Node, readers: Sequence[Node]) -> bool:
    # The largest of clamped values is the clamped largest; a max pool's argmax then masks the gradient too.
    return is_relu(node.layer) and len(readers) == 1 and isinstance(readers[0].layer, MaxPool2d)


class Dataflow:
    """
    The graph of a network without the layers that are no operation: flatten, dropout in inference.

    Args:
        network: The network.
        training: Whether gradients are computed.

    Attributes:
        nodes: Nodes by name.
        pooled: Names of the ReLUs that are fused into the max pool after them.
        origin: For each layer, the name of the layer whose memory holds its output.
        readers: Readers of that memory by origin; a layer that reads it twice is listed twice.
        trained: Names of the layers whose output depends on a parameter.
    """

    def __init__(self, network: Network, *, training: bool) -> None:
        self._training = training
        self._place = {node.name: place for place, node in enumerate(network.nodes)}
        self.nodes = {node.name: node for node in network.nodes}
        self._named: dict[str, list[Node]] = {}
        for node in network.nodes:
            for name in node.inputs:
                self._named.setdefault(name, []).append(node)
        self.pooled = {node.name for node in network.nodes if _is_pooled_relu(node, self._named.get(node.name, []))}
        self.origin = {INPUT: INPUT}
        self.trained: set[str] = set()
        self.readers: dict[str, list[Node]] = {}
        for node in network.nodes:
            if self.is_alias(node):
                self.origin[node.name] = self.origin[node.inputs[0]]
            else:
                self.origin[node.name] = node.name
                for name in node.inputs:
                    self.readers.setdefault(self.origin[name], []).append(node)
            if node.layer.parameters or self.trained.intersection(node.inputs):
                self.trained.add(node.name)

    def is_alias(self, node: Node) -> bool:
        """Return whether a node has no operation of its own: its output is in the memory of its input."""
        idle = node.layer.idle_in_inference and not self._training
        return node.layer.aliases_input or node.name in self.pooled or idle

    def is_done_with(self, name: str, node: Node) -> bool:
        """
        Return whether no other operation (of the backward pass either) needs `name`'s output after a node read it.

        False for the network's input, which the step must not change.
        """
        origin = self.origin[name]
        if origin == INPUT or self.readers[origin] != [node]:
            return False
        return not (self._training and "y" in self.nodes[origin].layer.backward_reads)

    def awaits_range(self, node: Node) -> bool:
        """
        Return whether the gradient of a node's input is still incomplete after the node's backward operation.

        It is if the node reads a range of the input's channels, and so does an earlier node: its part is added later.
        """
        if node.layer.channel_range is None:
            return False
        return next(each for each in self._named[node.inputs[0]] if each.layer.channel_range is not None) is not node

    def undoing(self, node: Node) -> Node | None:
        """Return the batch norm before activation `node` that can apply the activation's slope; None if none can."""
        name = node.inputs[0]
        if not node.layer.slope_of_input or name == INPUT:
            return None
        norm = self.nodes[name]
        return norm if norm.layer.can_activate and self.is_done_with(name, node) else None

    def pooled_norm(self, node: Node) -> Node | None:
        """
        Return the batch norm whose backward operation can add the gradient of a global pool; None if there is none.

        The pool reads the norm's result, or an activation that the norm undoes. The pool must be the first
        reader: a product that reads a ReLU first applies its slope to the whole gradient.
        """
        name = node.inputs[0]
        is_pool = node.layer.adds_gradients and not node.layer.parameters  # a layer norm has parameters
        if name == INPUT or not is_pool or self._named[name][0] is not node:
            return None
        source = self.nodes[name]
        return source if source.layer.has_statistics else self.undoing(source)

    def is_of_product(self, node: Node) -> bool:
        """Return whether a node reads the result of a convolution or linear layer whose kernels have an epilogue."""
        return node.inputs[0] != INPUT and self.nodes[node.inputs[0]].layer.has_epilogue

    def slope(self, node: Node, *, curves: bool = False) -> Node | None:
        """
        Return the ReLU whose slope a node can apply to the gradient of its only input; None if there is none.

        The ReLU is the input itself or the input under another shape.  The node must be its first reader: the backward
        pass runs in reverse order, so the node's part of the gradient is the last one.

        With `curves` the result may also be a GELU of a product's result, which is stored.
        """
        reader, name = node, node.inputs[0]
        if not node.layer.has_epilogue:
            return None
        while name != INPUT and self._named[name][0] is reader:
            source = self.nodes[name]
            if is_relu(source.layer) and not self.is_alias(source):
                return source
            if curves and source.layer.type in _PRODUCT_CURVES and self.is_of_product(source):
                return source
            if not source.layer.aliases_input:
                return None
            reader, name = source, source.inputs[0]
            if len(self._named[name]) > 1:  # gradients of other readers are added between the two
                return None
        return None
