"""What lies on a module beside parameters is there as before once steps were taken, whatever kind of module it is."""

from __future__ import annotations

import collections
import queue

import numpy as np
import pytest

torch = pytest.importorskip("torch")
# PyTorch advises against TorchScript; who has a module of it still asks for its batch size.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")

from cubatch.frameworks.attributes import Snapshot, kept_attributes  # noqa: E402
from cubatch.frameworks.torch_state import SavedState  # noqa: E402


class Frozen(collections.OrderedDict):
    """A mapping that refuses changes by most of its methods, as the configurations of diffusers do."""

    def update(self, *_, **__):
        raise TypeError("frozen")

    def __setitem__(self, key, value):
        raise TypeError("frozen")


class Scripted(torch.nn.Module):
    """Writes to attributes of every type in its steps, and replaces a buffer by another."""

    def __init__(self):
        super().__init__()
        self.calls, self.sum = 0, torch.zeros(2)
        self.sizes = torch.jit.Attribute([], list[int])
        self.layer = torch.nn.Linear(2, 2)
        self.register_buffer("last", torch.zeros(2))

    def forward(self, x):
        """Count the call, note its batch size, and add what it gives to a sum."""
        self.calls += 1
        self.sizes.append(x.shape[0])
        given = self.layer(x)
        self.sum += given.detach().sum(0)
        self.last = given.detach()[0]
        return given


def test_attributes_of_every_part_are_put_back_also_after_an_error():
    """Lists, dicts, sets and tensors hold their old items, by identity; what was added is gone."""
    part = torch.nn.Linear(2, 2)
    part.rows, part.names, part.kinds, part.count, part.word = [1], {"a": 1}, {3}, torch.ones(2), "old"
    module, objects = torch.nn.Sequential(part), (part.rows, part.names, part.kinds, part.count)
    with pytest.raises(ZeroDivisionError), kept_attributes(module):  # noqa: PT012 - what a step may do
        part.rows.append(2)
        part.names["b"] = 2
        part.kinds.clear()
        part.count += 1
        part.word, part.more, part.rows = "new", True, [5]
        raise ZeroDivisionError
    assert (part.rows, part.names, part.kinds, part.count.tolist()) == ([1], {"a": 1}, {3}, [1.0, 1.0])
    assert all(a is b for a, b in zip((part.rows, part.names, part.kinds, part.count), objects, strict=True))
    assert part.word == "old"
    assert not hasattr(part, "more")


def test_a_mapping_that_nothing_may_change_is_left_alone():
    """It was neither emptied nor written to, so what it forbids does not keep other attributes from being put back."""
    module, config = torch.nn.Linear(2, 2), Frozen()
    collections.OrderedDict.__setitem__(config, "width", [2])
    module.config, module.last = config, "old"
    with kept_attributes(module):
        module.last, module.config = "new", None
    assert (module.last, module.config is config, list(config.items())) == ("old", True, [("width", [2])])


class Refusing(list):
    """A list of which no item can be set, though some can be added."""

    def __setitem__(self, *_):
        raise TypeError("frozen")


def test_a_list_that_nothing_may_change_is_left_alone():
    """It was not written to, and refuses nothing."""
    module = torch.nn.Linear(2, 2)
    module.sizes, module.last = Refusing([1, 2]), "old"
    with kept_attributes(module):
        module.last = "new"
    assert (module.last, module.sizes) == ("old", [1, 2])


def test_parameters_are_put_back_where_an_attribute_refuses(caplog):
    """The attribute is named; weights are the ones before training all the same."""
    module = torch.nn.Linear(2, 2)
    module.sizes, before = Refusing([1]), module.weight.clone()
    with SavedState(module, training=True):
        module.sizes.append(2)
        module.weight.data.zero_()
    assert torch.equal(module.weight, before)
    assert "attribute sizes of the module refuses to be restored: frozen" in caplog.messages


def test_the_order_of_a_mapping_is_put_back():
    """What had been the first key is the first again."""
    module = torch.nn.Linear(2, 2)
    module.names = {"a": 1, "b": 2}
    with kept_attributes(module):
        module.names["a"] = module.names.pop("a")
    assert list(module.names) == ["a", "b"]


def test_attributes_of_scripts_are_put_back():
    """Numbers, lists, tensors, a buffer that was replaced, train flags, also of its parts: TorchScript holds them."""
    module = torch.jit.script(Scripted())
    module(torch.ones(3, 2))
    buffer, held = module.last, module.sum.clone()
    with kept_attributes(module):
        module.eval()
        module(torch.ones(4, 2))
        assert (module.calls, module.sizes, module.layer.training) == (2, [3, 4], False)
    assert (module.calls, module.sizes, module.training, module.layer.training) == (1, [3], True, True)
    assert module.last is buffer
    assert torch.equal(module.sum, held)
    module(torch.ones(1, 2))
    assert module.calls == 2


def test_tensors_written_to_past_their_version_are_put_back():
    """Through `data` autograd notes no change: the values tell, to the bit, in which 0 is not -0 and a NaN is one."""
    module, nan = torch.nn.Linear(2, 2), float("nan")
    module.count, module.zero, module.none = torch.ones(2), torch.zeros(2), torch.full((2,), nan)
    with kept_attributes(module):
        module.count.data.add_(1)
        module.zero.data.neg_()
        module.none.data.zero_()
    assert module.count.tolist() == [1.0, 1.0]
    assert not module.zero.signbit().any()
    assert module.none.isnan().all()


def test_a_deque_gets_its_old_items_back():
    """Also those that new ones pushed out of it, and it holds as many at most as before."""
    module, recent = torch.nn.Linear(2, 2), collections.deque([1, 2], maxlen=2)
    module.recent = recent
    with kept_attributes(module):
        recent.append(3)
    assert module.recent is recent
    assert (list(recent), recent.maxlen) == ([1, 2], 2)


def test_what_refuses_to_be_put_back_keeps_nothing_else_from_it():
    """Whichever comes first: attributes of the same part and of others are as before, and what refuses is named."""
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    for part in module:
        part.first, part.sizes, part.last = [1], Refusing([1]), [1]
    snapshot = Snapshot(module)
    for part in module:
        for held in (part.first, part.sizes, part.last):
            held.append(2)
    assert snapshot.restore() == {"0.sizes", "1.sizes"}
    assert [(part.first, part.last) for part in module] == [([1], [1])] * 2


def changed(held, change):
    """Return what a snapshot names after a change of an attribute."""
    module = torch.nn.Linear(2, 2)
    module.held = held
    snapshot = Snapshot(module)
    assert snapshot.restore() == set()
    change(held)
    return snapshot.restore()


class Slotted:
    __slots__ = ("__rows",)

    def __init__(self):
        self.__rows = []

    def grow(self):
        self.__rows.append(1)


def test_what_refers_to_the_module_is_no_state_of_it():
    """A trainer changes with each step, and is an attribute of what it trains."""
    module = torch.nn.Linear(2, 2)
    module.trainer = collections.UserDict({"strategy": collections.UserList([module])})
    snapshot = Snapshot(module)
    module.trainer["steps"] = 1
    assert snapshot.restore() == set()


DEEP = [[[[[1]]]]]


@pytest.mark.parametrize(
    ("held", "change"),
    [
        (collections.UserList([torch.zeros(2)]), lambda held: held.append(torch.ones(3))),
        (collections.UserList([torch.zeros(2)]), lambda held: held[0].add_(1)),
        (collections.UserDict({"a": 1}), lambda held: held.update(b=2)),
        ([torch.zeros(2)], lambda held: held[0].add_(1)),
        (np.zeros(3), lambda held: held.__setitem__(0, 1.0)),
        (Slotted(), Slotted.grow),
        (queue.Queue(), lambda held: held.put(3)),
        (DEEP, lambda _: DEEP[0][0][0][0].append(2)),
    ],
    ids=["more", "written to", "a key", "in a list", "an array", "slots", "a queue", "deep"],
)
def test_what_is_not_restored_is_noticed(held, change):
    """Objects of libraries and with slots, arrays, tensors in collections, and what lies deep inside of them."""
    assert changed(held, change) == {"held"}


def test_parts_and_parameters_that_a_step_replaced_are_put_back():
    """Also one that it took away: the module has the parts and parameters that it had, in their order."""
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    before, parts = list(module.parameters()), list(module)
    with kept_attributes(module):
        module[1].weight, module[0] = torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Identity()
        del module[1].bias
    assert all(a is b for a, b in zip(module.parameters(), before, strict=True))
    assert all(a is b for a, b in zip(module, parts, strict=True))


@pytest.mark.parametrize("mode", ["inference", "training"])
def test_scripts_are_tuned_and_left_as_they_were(mode):
    """Steps of a script run, those of training too, whose parameters are the same afterwards."""
    import cubatch as cb

    module = torch.jit.script(Scripted())
    before = {name: value.clone() for name, value in module.state_dict().items()}
    result = cb.autotune_module(module, (2,), mode=mode, batch_sizes=[2, 4], budget=1.0)
    assert {m.batch_size for m in result.measurements} == {2, 4}
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert (module.calls, module.sizes, module.training) == (0, [], True)
