"""Attention and layers of transformers: imported, and run."""

from __future__ import annotations

import collections

import numpy as np
import pytest

from cubatch import from_torch
from cubatch.network.importers.refusal import UnsupportedOperator
from cubatch.network.layers import Attention
from tests.parity import torchvision_models as zoo

torch, nn = zoo.torch, zoo.torch.nn
F = nn.functional
BOUND = 1e-10  # of the largest output: both in float64 on float32 weights
TOKENS, C, HEADS = 7, 12, 3


def heads_of(x):
    """(n, tokens, c) -> (n, heads, tokens, channels of a head)."""
    return x.unflatten(-1, (HEADS, C // HEADS)).transpose(1, 2)


class OneProjection(nn.Module):
    """Queries, keys and values from one linear layer, cut as `mixed` says."""

    def __init__(self, cut, *, bias=True):
        super().__init__()
        self.qkv, self.out, self.cut = nn.Linear(C, 3 * C, bias=bias), nn.Linear(C, C), cut

    def forward(self, x):
        mixed = F.scaled_dot_product_attention(*self.cut(self.qkv(x)))
        return self.out(mixed.transpose(1, 2).flatten(2))


class Apart(nn.Module):
    """A linear layer for each, as in Hugging Face's models; `more` comes between mixing and projecting."""

    def __init__(self, more=lambda x: x, keys_of=lambda x: x, **options):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(C, C, bias=i != 1) for i in range(4))
        self.more, self.keys_of, self.options = more, keys_of, options

    def forward(self, x):
        k = heads_of(self.k(self.keys_of(x)))
        mixed = F.scaled_dot_product_attention(heads_of(self.q(x)), k, heads_of(self.v(x)), **self.options)
        return self.out(self.more(mixed.transpose(1, 2).reshape(-1, TOKENS, C)))


def by_five_axes(y):
    """As timm cuts: (3, n, heads, tokens, channels of a head)."""
    return y.reshape(-1, TOKENS, 3, HEADS, C // HEADS).permute(2, 0, 3, 1, 4).unbind(0)


def interleaved(y):
    """Each head has its query, key and value side by side."""
    return y.reshape(-1, TOKENS, HEADS, 3, C // HEADS).permute(3, 0, 2, 1, 4)


class Own(nn.Module):
    """nn.MultiheadAttention, which cuts in its own way."""

    def __init__(self):
        super().__init__()
        self.mha = nn.MultiheadAttention(C, HEADS, batch_first=True)

    def forward(self, x):
        return self.mha(x, x, x, need_weights=False)[0]


FORMS = {
    "by five axes": OneProjection(by_five_axes),
    "interleaved": OneProjection(interleaved),
    "in chunks": OneProjection(lambda y: [heads_of(part) for part in y.chunk(3, -1)], bias=False),
    "in slices": OneProjection(lambda y: [heads_of(y[..., i * C : (i + 1) * C]) for i in range(3)]),
    "apart": Apart(),
    "turned before it is projected": Apart(
        more=lambda y: y.unflatten(-1, (HEADS, C // HEADS)).transpose(2, 3).flatten(2)
    ),
    "PyTorch's": Own(),
}


@pytest.mark.parametrize("form", FORMS)
def test_attention_is_one_layer_whichever_way_it_is_cut(form):
    """One layer with the weights in its order: it gives what the module gives."""
    torch.manual_seed(2)
    module = FORMS[form]
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    network = from_torch(module, (TOKENS, C))
    assert [type(layer) for layer in network.layers] == [Attention]
    assert network.layers[0].heads == HEADS
    x = zoo.images((TOKENS, C))
    with torch.no_grad():
        want = module.double()(torch.tensor(x)).numpy()
    module.float()
    np.testing.assert_allclose(zoo.outputs(network, x)[:, :, 0], want, rtol=0, atol=BOUND * np.abs(want).max())


REFUSED = {
    "a mask": (Apart(is_causal=True), "a mask"),
    "dropout that stays": (Apart(dropout_p=0.5), "drops some of its weights, in evaluation"),
    "keys of something else": (Apart(keys_of=torch.relu), "of one input"),
    "something in between": (Apart(more=torch.relu), "not complete"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_attention_of_another_kind_is_refused_or_kept_as_it_is(case):
    """Masked, dropped, across two inputs, or not projected: no layer of ours; opaque, all its FLOP are there."""
    module, told = REFUSED[case]
    with pytest.raises(UnsupportedOperator, match=told):
        from_torch(module, (TOKENS, C))
    network = from_torch(module, (TOKENS, C), opaque=True)
    assert network.flops() == 4 * 2 * TOKENS * C * C + 4 * TOKENS * TOKENS * C
    assert "aten.scaled_dot_product_attention" in {getattr(layer, "operator", "") for layer in network.layers}


class Pooled(nn.Module):
    """Attention pooling with a learned query, as SigLIP's head has: the query does not depend on the input."""

    def __init__(self):
        super().__init__()
        self.query, self.q, self.kv = nn.Parameter(torch.randn(1, 1, C)), nn.Linear(C, C), nn.Linear(C, 2 * C)

    def forward(self, x):
        q = heads_of(self.q(self.query.expand(len(x), -1, -1)))
        k, v = (heads_of(part) for part in self.kv(x).chunk(2, -1))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(1)


def test_attention_with_a_learned_query_is_refused_or_kept():
    """It reads fewer values than the layer; as an opaque layer it has the parameters of its query."""
    module = Pooled()
    with pytest.raises(UnsupportedOperator, match="does not depend on the network's input") as caught:
        from_torch(module, (TOKENS, C))
    assert caught.value.operator == "aten.scaled_dot_product_attention"
    network = from_torch(module, (TOKENS, C), opaque=True)
    assert network.parameters == sum(parameter.numel() for parameter in module.parameters())


class Headless(Apart):
    """Attention without an axis of heads."""

    def forward(self, x):
        return self.out(F.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x)))


@pytest.mark.parametrize("tokens", [1, TOKENS])
def test_attention_without_heads_is_refused(tokens):
    """Also of one token, whose axes could be those of anything."""
    with pytest.raises(UnsupportedOperator, match="its axes are not batch, heads, tokens and channels"):
        from_torch(Headless(), (tokens, C))


class Prefixed(nn.Module):
    """A constant in front of 16 patches, or of the pixels that they are made of."""

    def __init__(self, *shape, dim, patches=True):
        super().__init__()
        self.patch, self.dim, self.patches = nn.Conv2d(3, C, 2, 2), dim, patches
        self.constant = nn.Parameter(torch.ones(1, *shape))

    def forward(self, x):
        y = self.patch(x).flatten(2).transpose(1, 2) if self.patches else self.patch(x)
        return torch.cat([self.constant.expand(len(x), *self.constant.shape[1:]), y], self.dim)


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (Prefixed(2, C, dim=1), rf", 2, {C}\) along axis 1; a class token has shape \(1, 1, {C}\)"),
        (Prefixed(16, 3, dim=2), r", 16, 3\) along axis 2; .* joins along axis 1"),
        (Prefixed(1, 4, 4, dim=1, patches=False), ", 1, 4, 4.* no sequence of pixels"),
    ],
)
def test_a_constant_in_front_that_is_no_class_token_is_refused_with_its_shape_and_axis(module, reason):
    """Two tokens, other channels, and another channel of an image: each has its own reason."""
    with pytest.raises(UnsupportedOperator, match=reason):
        from_torch(module, (3, 8, 8))


def test_a_vision_transformer_has_its_layers_and_numbers():
    """torchvision's: class token, positions, attention and all that is around it."""
    module = zoo.vision_transformer()
    network = from_torch(module, (3, 32, 32))
    assert network.parameters == sum(parameter.numel() for parameter in module.parameters())
    assert collections.Counter(layer.type for layer in network.layers) == {
        "conv2d": 1, "tokens": 1, "layer_norm": 5, "attention": 2, "add": 4, "linear": 5, "gelu": 2, "class_token": 1,
        "dropout": 7,
    }  # fmt: skip
    x = zoo.images((3, 32, 32))
    with torch.no_grad():
        want = module.double()(torch.tensor(x)).numpy()
    np.testing.assert_allclose(
        zoo.outputs(network, x).reshape(want.shape), want, rtol=0, atol=BOUND * np.abs(want).max()
    )


def test_convnext_has_its_numbers():
    """torchvision's: norms of channels that were permuted to the end, linear layers on pixels, layer scale."""
    module, x = zoo.build("convnext_tiny"), zoo.images((3, 32, 32))
    network = from_torch(module, (3, 32, 32))
    with torch.no_grad():
        want = module.double()(torch.tensor(x)).numpy()
    np.testing.assert_allclose(
        zoo.outputs(network, x).reshape(want.shape), want, rtol=0, atol=BOUND * np.abs(want).max()
    )
