"""A module's values, its gradients and the random generators are as before, whatever kinds of tensors it holds."""

from __future__ import annotations

import collections
import functools
import gc
import logging

import pytest

import cubatch as cb

torch = pytest.importorskip("torch")

from cubatch.errors import InvalidArgument  # noqa: E402
from cubatch.frameworks import garbage, loader_rate  # noqa: E402
from cubatch.frameworks.torch_module import TorchModule  # noqa: E402
from cubatch.frameworks.torch_state import SavedState  # noqa: E402

nn = torch.nn


class Scaled(nn.Linear):
    """Multiplies by a buffer of which all places are the same memory."""

    def __init__(self):
        super().__init__(2, 2)
        self.register_buffer("scale", torch.ones(1).expand(2))

    def forward(self, x):
        return super().forward(x) * self.scale


@pytest.fixture
def nothing_set_aside():
    """Take back what tests/conftest.py has set aside of the garbage collector, and set it aside again."""
    gc.unfreeze()
    yield
    gc.freeze()


@pytest.mark.usefixtures("nothing_set_aside")
def test_collections_pass_over_what_was_there_before_and_over_nothing_afterwards():
    """To read memory is to collect garbage, and to go through all of PyTorch's objects takes a tenth of a second."""

    class Counts(nn.Module):
        """Notes how many objects a collection goes through."""

        def __init__(self):
            super().__init__()
            self.met = collections.UserList()  # a list would get its old items back

        def forward(self, x):
            self.met.append(len(gc.get_objects()))
            return 2 * x

    for _ in range(2):  # the first call imports modules
        module, before = Counts(), (gc.get_freeze_count(), len(gc.get_objects()))
        cb.autotune_module(module, (2,), device="cpu", batch_sizes=[2, 4], budget=5.0)
    assert before[0] < 1000 < before[1]
    assert max(module.met) < before[1] / 2
    assert gc.get_freeze_count() == 0
    assert len(gc.get_objects()) > before[1] / 2


def frozen_while_loading():
    """Return the numbers of objects that are set aside while a loader makes batches, by itself and in a loop."""
    met = []

    def collate(samples):
        met.append(gc.get_freeze_count())
        return torch.stack(samples)

    loader = torch.utils.data.DataLoader(torch.rand(64, 2), 4, collate_fn=collate)
    loader_rate.measure(loader, 4, seconds=0.01)
    loader_rate.run_loops(loader, [4], lambda _: len, seconds=0.01)
    return met


@pytest.mark.usefixtures("nothing_set_aside")
def test_a_loader_is_timed_with_the_collections_of_its_users_loop():
    """A loader makes objects, so that garbage is collected; that goes through all objects there are."""
    undo = garbage.freeze_objects()
    assert gc.get_freeze_count() > 1000
    assert set(frozen_while_loading()) == {0}
    assert gc.get_freeze_count() > 1000
    undo()
    assert set(frozen_while_loading()) == {gc.get_freeze_count()} == {0}


def test_a_loader_is_timed_without_what_a_process_has_set_aside_itself():
    """As in its own loop: tests/conftest.py has set aside all objects of this process."""
    assert min(frozen_while_loading()) > 1000


def test_what_a_process_has_set_aside_itself_stays_so():
    """A server that forks does so, to share its pages, as does tests/conftest.py."""
    cb.autotune_module(nn.Linear(2, 2), (2,), device="cpu", batch_sizes=[2, 4], budget=5.0)
    assert gc.get_freeze_count() > 1000


class Frozen(nn.Module):
    """Has a part whose statistics are to stay, and notes in which mode its parts were when steps ran."""

    def __init__(self):
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(4), nn.Linear(4, 2)
        self.met = collections.UserList()

    def forward(self, x):
        self.met.append((self.training, self.norm.training))
        return self.head(self.norm(x))


@pytest.mark.parametrize(("is_training", "met"), [(True, (True, False)), (False, (True, True))])
def test_parts_in_evaluation_mode_stay_so_in_a_module_that_trains(is_training, met):
    """As in a loop that keeps a backbone's statistics; one that evaluates as a whole, as if just loaded, trains."""
    module = Frozen().train(is_training)
    module.norm.eval()
    result = cb.autotune_module(module, (4,), mode="training", device="cpu", batch_sizes=[2, 4], budget=5.0)
    assert set(module.met) == {met}
    said = "norm was in evaluation mode and stayed so (parts in evaluation mode: 1)"
    assert any(reason.startswith(said) for reason in result.reasons) == is_training
    assert (module.training, module.norm.training) == (is_training, False)


def test_gradients_of_the_step_before_are_there_until_the_backward_pass():
    """As in loops that accumulate: weights of 128 MiB, as much of gradient, of each sample five results of 16."""

    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4096, 8192, bias=False)

        def forward(self, x):
            y = self.layer(x).repeat(1, 512)
            for _ in range(4):
                y = y.exp()
            return y

    found = TorchModule(Wide(), (4096,), mode="training")
    assert found.peaks(2**40).at(2) >= (2 * 128 + 2 * 5 * 16) * 2**20


def test_an_expanded_buffer_that_a_step_wrote_to_is_put_back():
    """Through one place, all others follow; it is expanded afterwards as before."""
    module = Scaled()
    with SavedState(module, training=False):
        module.scale[0] = 5
        assert module.scale.tolist() == [5.0, 5.0]
    assert (module.scale.tolist(), module.scale.stride()) == ([1.0, 1.0], (0,))


class Observed(nn.Linear):
    """Resizes a buffer in its first step, as observers of quantization do."""

    def __init__(self):
        super().__init__(2, 2)
        self.register_buffer("least", torch.tensor([]))

    def forward(self, x):
        made = super().forward(x)
        if not self.least.numel():
            self.least.resize_(2)
        self.least.copy_(made.detach().amin(0))
        return made


def test_a_buffer_that_a_step_resized_is_put_back():
    module = Observed()
    cb.autotune_module(module, (2,), mode="training", device="cpu", batch_sizes=[2, 4], budget=5.0)
    assert not module.least.numel()


def test_a_buffer_made_in_inference_mode_is_put_back():
    """Steps in that mode write to it, as to any other buffer."""
    module = nn.Linear(2, 2)
    with torch.inference_mode():
        module.register_buffer("calls", torch.zeros(2))
    with SavedState(module, training=False), torch.inference_mode():
        module.calls += 1
    assert module.calls.tolist() == [0.0, 0.0]


class Sealed(torch.Tensor):
    """A tensor whose values nobody puts back."""

    def copy_(self, *_):
        raise TypeError("sealed")


def test_what_refuses_to_be_put_back_keeps_nothing_else_from_it():
    """Other buffers, parameters, gradients and the random generator are as before, and the refusal is told."""
    module = nn.Linear(2, 2)
    for name in ("first", "sealed", "last"):
        module.register_buffer(name, torch.zeros(2).as_subclass(Sealed if name == "sealed" else torch.Tensor))
    module.weight.grad = torch.ones(2, 2)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    gradient, random = module.weight.grad, torch.get_rng_state()
    with pytest.raises(TypeError, match="sealed"), SavedState(module, training=True):  # noqa: PT012 - a step
        for tensor in (module.first, module.last, module.weight.data):
            tensor.add_(1)
        module.weight.grad = torch.rand(2, 2)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert module.weight.grad is gradient
    assert torch.equal(torch.get_rng_state(), random)


@functools.cache
def scale_of(features):
    """A table that is made when it is first needed, and kept beside the module."""
    return torch.ones(features)


class Cached(nn.Module):
    """Reads such a table."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x) * scale_of(4)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # PyTorch's, as it mixes them
@pytest.mark.parametrize("mode", ["inference", "training"])
def test_a_cache_beside_the_module_that_kept_tensors_without_data_is_told_of(mode):
    """Steps with these compute nothing: no size has a timing, and the reason says what to change."""
    scale_of.cache_clear()
    with pytest.raises(cb.InvalidArgument, match="a cache that is not restored kept"):
        cb.autotune_module(Cached(), (4,), mode=mode, max_batch_size=4, budget=5)


class Late(nn.Module):
    """Makes layers in its first forward pass: one beside another, or all it has."""

    def __init__(self, *, has_another):
        super().__init__()
        self.first = nn.Linear(4, 4) if has_another else nn.Identity()

    def forward(self, x):
        if not hasattr(self, "late"):
            self.late = nn.Linear(4, 2)
        return self.late(self.first(x))


@pytest.mark.parametrize("has_another", [True, False])
def test_layers_made_in_the_first_forward_pass_cannot_be_trained_unseen(has_another):
    """An optimiser that was made before does not know of them: the steps of one that was called are other ones."""
    module = Late(has_another=has_another)
    with pytest.raises(InvalidArgument, match="called once on a batch before"):
        cb.autotune_module(module, (4,), mode="training", max_batch_size=4, budget=1)
    assert cb.autotune_module(module, (4,), batch_sizes=[2], budget=5).batch_size == 2
    assert not hasattr(module, "late")
    module(torch.zeros(1, 4))
    assert cb.autotune_module(module, (4,), mode="training", batch_sizes=[2], budget=5).batch_size == 2


class Clamped(nn.Linear):
    """Writes to its weights past their version."""

    def forward(self, x):
        self.weight.data.clamp_(-0.1, 0.1)
        return super().forward(x)


class Zeroed(nn.Linear):
    """Writes to them by NumPy, which no walk without data sees."""

    def forward(self, x):
        self.weight.detach().numpy()[:] = 0
        return super().forward(x)


class Shadowed(nn.Linear):
    """Writes to them by a reference of its own."""

    def __init__(self):
        super().__init__(4, 2)
        self.shadow = [self.weight]

    def forward(self, x):
        self.shadow[0].data.clamp_(-0.1, 0.1)
        return super().forward(x)


class Rare(Clamped):
    """Writes to them in large batches only."""

    def forward(self, x):
        return super().forward(x) if len(x) > 100 else nn.Linear.forward(self, x)


class Started(nn.Linear):
    """Sets its weights by the first batch, where data say that it is the first."""

    def __init__(self):
        super().__init__(4, 2)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x):
        if self.calls < 1:
            self.weight.data.fill_(x.mean())
        self.calls += 1
        return super().forward(x)


@pytest.mark.parametrize(
    ("module", "example"),
    [
        (nn.Embedding(10, 4, max_norm=0.1), torch.arange(8).view(4, 2)),
        (Clamped(4, 2), (4,)),
        (Zeroed(4, 2), (4,)),
        (Started(), (4,)),
        (Shadowed(), (4,)),
        (Rare(4, 2), (4,)),
    ],
    ids=["embedding", "clamped", "zeroed", "started", "shadowed", "rare"],
)
def test_parameters_that_a_forward_pass_changes_in_place_are_put_back(module, example):
    """To the bit, in inference as in training, and in the same memory."""
    before = [(each.data_ptr(), each.detach().clone()) for each in module.parameters()]
    cb.autotune_module(module, example, batch_sizes=[256], device="cpu", budget=1.0)
    after = list(module.parameters())
    assert [each.data_ptr() for each in after] == [place for place, _ in before]
    assert all(torch.equal(each, values) for each, (_, values) in zip(after, before, strict=True))


def test_parameters_that_nothing_writes_to_are_not_copied_in_inference(monkeypatch):
    """A copy of a large model's might not fit beside it."""
    kept = []
    monkeypatch.setattr(SavedState, "keep", lambda self, parameters: kept.extend(parameters))
    cb.autotune_module(nn.Linear(4, 2), (4,), max_batch_size=2, device="cpu", budget=1.0)
    assert kept == []


def test_a_copy_of_parameters_that_fails_ends_the_run(monkeypatch):
    """Steps would change what nobody puts back; it is no reason why the walk without data failed either."""

    def refused(self, parameters):
        raise MemoryError("injected")

    monkeypatch.setattr(SavedState, "keep", refused)
    with pytest.raises(MemoryError, match="injected"):
        cb.autotune_module(Zeroed(4, 2), (4,), max_batch_size=2, device="cpu", budget=1.0)


class Memory:
    """An object of the user's own, with the state of the last batch."""

    rows = None


class Remembers(nn.Module):
    """Keeps its hidden state for the next call: in an attribute, a dictionary in a list, or an object."""

    def __init__(self, where):
        super().__init__()
        self.where, self.net = where, nn.Linear(4, 4)
        self.h, self.held, self.memory = None, [{}], Memory()

    def forward(self, x):
        before = {"attribute": self.h, "list": self.held[0].get("h"), "object": self.memory.rows}[self.where]
        h = torch.tanh(self.net(x) + (0 if before is None else before))
        if self.where == "attribute":
            self.h = h.detach()
        elif self.where == "list":
            self.held[0]["h"] = h.detach()
        else:
            self.memory.rows = h.detach()
        return h


@pytest.mark.parametrize("where", ["attribute", "list", "object"])
def test_each_size_starts_from_the_same_module(where):
    """The rows of the first size made every other one fail; a reference of another size would do so too."""
    module = Remembers(where)
    found = cb.autotune_module(module, (4,), mode="training", device="cpu", batch_sizes=[2, 4, 6], budget=20.0)
    assert {m.status for m in found.measurements} <= {"ok", "dropped"}
    assert found.recommended
    assert module.h is None


class Remote(nn.Module):
    """Keeps its hidden state in a list of a library, as arrays or as tensors."""

    def __init__(self, *, has_arrays):
        super().__init__()
        self.net, self.inner, self.has_arrays = nn.Linear(4, 4), nn.Identity(), has_arrays
        self.inner.kept = collections.UserList()

    def forward(self, x):
        before = torch.as_tensor(self.inner.kept[-1]) if self.inner.kept else 0
        h = torch.tanh(self.net(x) + before)
        self.inner.kept.append(h.detach().numpy() if self.has_arrays else h.detach())
        return h


def test_an_attribute_that_cannot_be_restored_is_named():
    """The rows of one batch are added to those of the next, so that other sizes fail."""
    module = Remote(has_arrays=True)
    found = cb.autotune_module(module, (4,), mode="training", device="cpu", batch_sizes=[2, 4, 6], budget=20.0)
    assert any(
        "Steps changed inner.kept of the module, which cannot be restored" in each for each in found.reasons[1:3]
    )
    assert not found.recommended


def test_an_attribute_that_keeps_all_sizes_from_running_is_named():
    """The memory trace left a tensor without data in it."""
    with pytest.raises(cb.NothingMeasured, match=r"Steps changed inner\.kept of the module"):
        cb.autotune_module(Remote(has_arrays=False), (4,), mode="training", device="cpu", batch_sizes=[4], budget=20.0)


class Settings(collections.UserDict):
    """Has an attribute of its own."""

    kind = None


class Configured(nn.Sequential):
    """Writes a setting when it is first called, as models of transformers do, and logs."""

    def forward(self, x):
        self.kept[-1].kind = "regression"
        self.log.getChild(f"of {len(x)} samples").debug("called")
        return super().forward(x)


def test_objects_that_hold_no_batch_are_not_named():
    """Tensors of the module that an object refers to are restored with the module; a logger knows all others."""
    module = Configured(nn.Linear(4, 4), nn.BatchNorm1d(4))
    module.log = logging.getLogger("tests of the state of a module")
    module.kept = collections.UserList([module[0], module[0].weight, module[1].running_mean, [1.0], Settings()])
    found = cb.autotune_module(module, (4,), mode="training", device="cpu", batch_sizes=[2, 4], budget=20.0)
    assert not any("cannot be restored" in reason for reason in found.reasons)
