"""Batches that `autotune_module` draws are such as the module takes, whatever its example inputs are."""

from __future__ import annotations

import collections
import collections.abc
import threading

import pytest

import cubatch as cb

torch = pytest.importorskip("torch")

from cubatch.errors import InvalidArgument  # noqa: E402
from cubatch.frameworks.input_objects import tensors_in  # noqa: E402
from cubatch.frameworks.torch_inputs import Inputs, random_like  # noqa: E402

nn = torch.nn
ASKED = {"device": "cpu", "batch_sizes": [2, 4], "budget": 60.0}


def drawn(example, batch_size):
    return random_like(torch.Generator().manual_seed(0), "cpu")(example, (batch_size, *example.shape[1:]))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.uint8, torch.uint16, torch.bool])
def test_integers_and_booleans_are_the_examples_samples_in_its_order(dtype):
    """Of two samples the first half of a batch is the first one, and an odd one more of the first."""
    example = torch.tensor([[1, 1, 0], [0, 1, 1]]).to(dtype)
    made = drawn(example, 5)
    assert (made.dtype, made.tolist()) == (dtype, example[[0, 0, 0, 1, 1]].tolist())
    assert drawn(example, 2).tolist() == example.tolist()
    assert drawn(example[:1], 3).tolist() == example[[0, 0, 0]].tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool])
def test_inputs_without_elements_have_none_in_any_batch(dtype):
    """They have no least element, and are drawn all the same: a network without side inputs has such."""
    made = drawn(torch.zeros(2, 0, dtype=dtype), 5)
    assert (made.shape, made.dtype) == ((5, 0), dtype)


def test_floats_of_a_byte_are_drawn_within_their_range():
    """PyTorch finds no minimum of float8, and every one of them is a float32."""
    made = drawn(torch.tensor([[-2.0], [4.0]]).to(torch.float8_e4m3fn), 1000).float()
    assert -2 <= made.min() < -1.5
    assert 3.5 < made.max() <= 4


@pytest.mark.parametrize(
    "example",
    [torch.zeros(2, 3), torch.arange(6).reshape(2, 3), torch.ones(2, 3).bool(), torch.ones(2, 3).cfloat(), (3,)],
    ids=["floats", "integers", "booleans", "complex numbers", "a shape"],
)
def test_a_default_device_of_the_process_is_not_drawn_on(example):
    """A generator of the CPU draws on the CPU alone, wherever what is made without a device goes."""
    module = nn.Flatten()
    with torch.device("meta"):
        found = cb.autotune_module(module, example, **ASKED)
    assert {m.status for m in found.measurements} <= {"ok", "dropped"}


class Batch(collections.UserDict):
    """A mapping whose items are attributes too, as a tokenizer's BatchEncoding."""

    def __getattr__(self, name):
        try:
            return self.data[name]
        except KeyError:
            raise AttributeError(name) from None


class Boxes(list):
    """A list that knows the size of its image."""

    size = (3, 4)


class Frozen(dict):
    def __setitem__(self, name, value):
        raise TypeError("frozen")


def test_collections_of_inputs_keep_their_classes():
    """Mappings, also in each other, and lists, with what else they hold; the example's own items are as before."""
    ordered = collections.OrderedDict(b=torch.zeros(2, 3), a="note")
    boxes = Boxes([torch.zeros(2, 4)])
    boxes.size = (5, 6)
    example = Batch(x=torch.zeros(2, 3), more=ordered, many=collections.defaultdict(list, y=torch.zeros(2, 1)))
    inputs = Inputs.of((example, boxes), torch.float32)
    (batch, found), *_ = inputs.batch(7, lambda tensor, shape: tensor.new_ones(shape[0]))
    assert (type(batch), type(batch.more), type(found)) == (Batch, collections.OrderedDict, Boxes)
    assert (batch.x.shape, batch.more["b"].shape, batch.many["y"].shape, found[0].shape) == ((7,),) * 4
    assert (list(batch.more), batch.more["a"], batch.many["new"], found.size) == (["b", "a"], "note", [], (5, 6))
    assert (example.x.shape, ordered["b"].shape, boxes[0].shape) == ((2, 3), (2, 3), (2, 4))


class Shared(collections.abc.MutableMapping):
    """A mapping of which a copy holds the very items."""

    def __init__(self, items):
        self.items_ = items

    def __getitem__(self, name):
        return self.items_[name]

    def __setitem__(self, name, value):
        self.items_[name] = value

    def __delitem__(self, name):
        del self.items_[name]

    def __iter__(self):
        return iter(self.items_)

    def __len__(self):
        return len(self.items_)


@pytest.mark.parametrize("kind", [Frozen, Shared])
def test_a_mapping_that_takes_no_other_items_becomes_a_dict(kind):
    """One that refuses them, or whose copy would write into the example."""
    example = kind({"x": torch.zeros(2, 3)})
    (batch,), *_ = Inputs.of((example,), torch.float32).batch(7, lambda tensor, shape: tensor.new_ones(shape[0]))
    assert (type(batch), batch["x"].shape, example["x"].shape) == (dict, (7,), (2, 3))


class Force(nn.Linear):
    """Gives the derivative of an energy by positions, as force fields do, and notes what it was called with."""

    def __init__(self):
        super().__init__(3, 1)
        self.called, self.gradients = collections.UserList(), collections.UserList()

    def forward(self, positions, box):
        self.called.append((positions, box))
        self.gradients.append((positions.grad, box.grad))
        energy = (super().forward(positions).tanh() * box.sum()).sum()
        return torch.autograd.grad(energy, positions, create_graph=self.training)[0]


@pytest.mark.parametrize("mode", ["inference", "training"])
def test_inputs_require_a_gradient_where_those_of_the_example_do(mode):
    """In the walk without data too, and each step finds them without one; the example's own are left without."""
    module, positions, box = Force(), torch.randn(2, 3, requires_grad=True), torch.ones(1, 3, requires_grad=True)
    found = cb.autotune_module(module, (positions, box), mode=mode, **ASKED)
    assert {m.status for m in found.measurements} <= {"ok", "dropped"}
    assert found.measurements[0].predicted_peak_bytes is not None
    assert all(tensor.requires_grad and tensor.is_leaf for called in module.called for tensor in called)
    assert set(module.gradients) == {(None, None)}
    assert positions.grad is box.grad is None


class Layer:
    """Keys of a batch, as a cache has them of each layer."""

    def __init__(self, keys):
        self.keys = keys


class Cache:
    """No container that is known."""

    def __init__(self, *keys):
        self.layers = [Layer(each) for each in keys]


class Caching(nn.Linear):
    """Writes to the cache that it is given."""

    def forward(self, x, cache):
        for layer in cache.layers:
            layer.keys = torch.cat([layer.keys, layer.keys])
        return super().forward(x)


def test_an_object_that_holds_the_examples_batch_is_drawn_anew_and_left_alone():
    """Each step finds tensors of its own size, and none writes to the user's object."""
    keys = torch.ones(2, 4)
    cache, lengths = Cache(keys), set()

    class Watched(Caching):
        def forward(self, x, cache):
            lengths.add((len(x), len(cache.layers[0].keys)))
            return super().forward(x, cache)

    found = cb.autotune_module(Watched(4, 2), {"x": keys, "cache": cache}, **ASKED)
    assert {m.status for m in found.measurements} <= {"ok", "dropped"}
    assert {n for n, _ in lengths} >= {2, 4}
    assert all(n == length for n, length in lengths)
    assert cache.layers[0].keys is keys


@pytest.mark.parametrize("held", ["text", None, 2, torch.float32, nn.Linear(2, 2), Layer(None)])
def test_an_object_without_tensors_is_handed_on_as_it_is(held):
    """As a setting is: it is the same in every batch."""
    _, keyword, _ = Inputs.of({"x": torch.ones(2, 4), "held": held}, torch.float32).batch(
        5, lambda x, shape: x.new_empty(shape[0])
    )
    assert keyword["held"] is held


class Normalizer:
    """Holds the mean of each channel, for as many samples as there are."""

    def __init__(self):
        self.mean = torch.zeros(1, 3, 1, 1)


class Normalizing(nn.Module):
    def forward(self, x, normalizer):
        return x - normalizer.mean


class Past(Cache):
    """Is called a cache by what it is made of."""


def test_of_one_sample_only_the_tensors_of_a_cache_grow():
    """A mean of extent 1 looks as if it held the batch."""
    example = {"x": torch.randn(1, 3, 2, 2), "normalizer": Normalizer()}
    found = cb.autotune_module(Normalizing(), example, **ASKED)
    assert {m.status for m in found.measurements} <= {"ok", "dropped"}
    made, past = drawn_at(5, torch.ones(1, 4), Past(torch.ones(1, 4)))
    assert (len(made), len(past.layers[0].keys)) == (5, 5)
    made, mean = drawn_at(5, torch.ones(1, 4), Normalizer())
    assert (len(made), len(mean.mean)) == (5, 1)


def drawn_at(batch_size, *example):
    return Inputs.of(example, torch.float32).batch(batch_size, lambda x, shape: x.new_empty(shape)).positional


class Slotted:
    __slots__ = ("__keys",)

    def __init__(self, keys):
        self.__keys = keys


class MoreSlots(Slotted):
    """Its keys are in a slot of the class that it is made of."""

    __slots__ = ("more",)


@pytest.mark.parametrize(
    "hold",
    [MoreSlots, lambda keys: collections.deque([keys]), lambda keys: Cache(frozenset([keys])),
     lambda keys: Cache(*map(Slotted, [torch.ones(3)] * 9), MoreSlots(Slotted(keys)))],
    ids=["slots", "deque", "frozenset", "slots of slots"],
)  # fmt: skip
def test_the_batch_is_replaced_wherever_an_object_holds_it(hold):
    """In slots and collections too."""
    _, holder = drawn_at(5, torch.ones(2, 4), Cache(hold(torch.ones(2, 4))))
    assert [len(each) for each in tensors_in(holder) if each.shape != (3,)] == [5]


class Moving:
    """A batch of its own class, as those of graphs: it has tensors, and more that is theirs."""

    def __init__(self, keys):
        self.keys, self.locked = keys, threading.Lock()


class MovingItself(Moving):
    def to(self, device):
        return self


@pytest.mark.parametrize(("kind", "match"), [(Moving, "cannot be copied"), (MovingItself, "cannot be replaced")])
def test_an_object_whose_tensors_cannot_be_replaced_is_refused(kind, match):
    """With what to do; batches of every size would have the example's."""
    with pytest.raises(InvalidArgument, match=rf"(?s)batches.*a {kind.__name__}.*{match}.*Wrap the module"):
        drawn_at(5, torch.ones(2, 4), kind(torch.ones(2, 4)))
    constant = kind(torch.ones(3, 4))
    assert drawn_at(5, torch.ones(2, 4), constant)[1] is constant


def test_a_long_chain_of_objects_is_searched_for_tensors():
    """Longer than Python's limit of recursion."""
    chain = Layer(torch.zeros(3))
    for _ in range(5000):
        chain = Layer(chain)
    assert [each.shape for each in tensors_in(chain)] == [(3,)]


class Lazy(Shared):
    def values(self):
        raise OSError("no such file")


def test_an_error_of_an_object_names_the_batches():
    """It is raised by the user's class."""
    message = r"(?s)batches.*a Layer with a Lazy that raised OSError: no such file.*Wrap the module"
    with pytest.raises(InvalidArgument, match=message):
        drawn_at(5, torch.ones(2, 4), Layer(Lazy({})))


class Scaled(nn.Linear):
    def forward(self, x, scale):
        return super().forward(x) * scale.keys


def test_an_object_that_cannot_be_copied_may_hold_what_is_the_same_in_every_batch():
    """A number, for example, also one that requires a gradient."""
    for keys in (torch.tensor(3.0), torch.tensor(3.0, requires_grad=True)):
        found = cb.autotune_module(Scaled(2, 2), (torch.ones(4, 2), Moving(keys)), **ASKED)
        assert {m.status for m in found.measurements} <= {"ok", "dropped"}


class Standardizing(nn.Linear):
    def forward(self, stats, x):
        return super().forward(x - stats.keys)


def test_an_object_in_front_of_the_batch_does_not_give_its_size():
    """The first tensor outside of objects does."""
    inputs = Inputs.of((Layer(torch.zeros(64)), torch.ones(8, 64)), torch.float32)
    assert inputs.batch_size == 8
    found = cb.footprint(Standardizing(64, 2), (Layer(torch.zeros(64)), torch.ones(8, 64)), batch_size=1000)
    assert found.inputs == (1000 + 1) * 64 * 4  # the statistics count too


def test_an_object_may_hold_a_sparse_tensor_that_is_the_same_in_every_batch():
    """Only those that grow are drawn, for which they must be dense."""
    sparse = torch.eye(64).to_sparse()
    made, held = drawn_at(5, torch.ones(8, 64), Layer(sparse))
    assert (len(made), held.keys.shape) == (5, (64, 64))
    with pytest.raises(InvalidArgument, match="a sparse_coo tensor"):
        drawn_at(5, torch.ones(64, 64), Layer(sparse))
