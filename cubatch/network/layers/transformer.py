"""Layers of vision transformers: tokens, class token, attention."""

from __future__ import annotations

import attrs
from attrs import field

from cubatch.errors import InvalidSpec
from cubatch.network.extents import Extents, at_least, check_flag, whole
from cubatch.network.layer import Layer
from cubatch.network.layers.product_layers import Linear
from cubatch.network.passes import Gemm, Pass


@attrs.frozen(kw_only=True)
class Tokens(Layer, type="tokens"):
    """
    Pixels to tokens: (h, w, c) -> (h w + 1, 1, c).

    A learned class token is put in front, and a learned position embedding is added.
    """

    @property
    def output_shape(self) -> Extents:
        """(h w + 1, 1, c)."""
        h, w, c = self.input_shape
        return h * w + 1, 1, c

    @property
    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the class "token", (c,), and of the "position" embedding, (h w + 1, c)."""
        tokens, _, c = self.output_shape
        return {"token": (c,), "position": (tokens, c)}


@attrs.frozen(kw_only=True)
class ClassToken(Layer, type="class_token"):
    """The first token: (tokens, 1, c) -> (1, 1, c)."""

    @property
    def output_shape(self) -> Extents:
        """(1, 1, c)."""
        return 1, 1, self.input_shape[2]


@attrs.frozen(kw_only=True)
class Attention(Layer, type="attention", products_in_turn=True, backward_reads=frozenset("x")):
    """
    Multi-head self-attention over the h w positions, with its input and output projections.

    Attributes:
        heads: Number of heads; divides c.
        bias: Whether the projections have a bias.
    """

    heads: int = field(converter=whole, validator=at_least(1))
    bias: bool = field(default=True, validator=check_flag)

    def check(self) -> None:
        """Raise InvalidSpec unless the number of heads divides c."""
        if self.input_shape[2] % self.heads:
            raise InvalidSpec("heads", self.heads, f"a divisor of c={self.input_shape[2]}")

    @property
    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the projections "w_in", (3c, c), and "w_out", (c, c), and of any biases "b_in" and "b_out"."""
        c = self.input_shape[2]
        shapes: dict[str, tuple[int, ...]] = {"w_in": (3 * c, c), "w_out": (c, c)}
        return shapes | {"b_in": (3 * c,), "b_out": (c,)} if self.bias else shapes

    @property
    def projections(self) -> tuple[Linear, ...]:
        """Two linear layers: from the input to queries, keys and values, and from sums of the values to the output."""
        h, w, c = self.input_shape
        return tuple(Linear(h=h, w=w, c=c, k=k, bias=self.bias) for k in (3 * c, c))

    def gemms(self, pass_: Pass, batch_size: int) -> tuple[Gemm, ...]:
        """
        Return the matrix products of one pass over a batch: those of both projections, then those between tokens.

        Between tokens there are two products forward and four in the input gradient; the weight gradient has none.
        """
        h, w, c = self.input_shape
        tokens, head, count = h * w, c // self.heads, batch_size * self.heads
        projected = tuple(gemm for linear in self.projections for gemm in linear.gemms(pass_, batch_size))
        scores, mixed = Gemm(tokens, tokens, head, count), Gemm(tokens, head, tokens, count)
        if pass_ is Pass.WGRAD:
            return projected
        if pass_ is Pass.FPROP:
            return *projected, scores, mixed
        # Gradients of queries, keys and values are products like `mixed`, that of the weights is one like `scores`.
        return *projected, scores, mixed, mixed, mixed

    def saved_elements(self) -> dict[str, tuple[int, int]]:
        """
        Return {name: (elements per sample, 0)}, where 0 stands for the bytes of the dtype.

        "qkv" are queries, keys and values, "weights" those of the attention, and "mixed" the weighted sums of values.
        """
        h, w, c = self.input_shape
        tokens = h * w
        return {"qkv": (3 * tokens * c, 0), "weights": (self.heads * tokens * tokens, 0), "mixed": (tokens * c, 0)}
