"""Loops of public bug reports around a module: batches, losses and inputs in the forms that these loops pass on."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
import pytest

import cubatch as cb

torch = pytest.importorskip("torch")

from cubatch.frameworks.torch_inputs import Call, Inputs  # noqa: E402
from cubatch.frameworks.torch_module import TorchModule  # noqa: E402
from cubatch.frameworks.torch_step import StepKind  # noqa: E402

nn = torch.nn
F = nn.functional


def stepped(module, batches, **kind):
    """Run three steps of 6 samples and of 2; return the codes of the remarks."""
    subject = TorchModule(module, batches, **{"mode": "training", **kind})
    with subject:
        runner = subject.runner(2**30, 0)
        for size in (6, 2):
            runner.prepare(size)
            runner.step()
            runner.step()
        codes = {remark["code"] for remark in runner.remarks}
        runner.close()
    return codes


def pairs(n):
    return torch.rand(n, 8), torch.arange(n) % 3


class Masked(nn.Linear):
    """A layer with an optional mask, which must not be the labels."""

    def forward(self, x, mask=None):
        assert mask is None
        return super().forward(x)


class Wrapper(nn.Module):
    """Takes any arguments, as wrappers of adapters do."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 3)

    def forward(self, *arguments, **options):
        return self.inner(*arguments, **options)


class Speech(nn.Linear):
    """Log-probabilities with time first."""

    def forward(self, x):
        return super().forward(x).log_softmax(2).transpose(0, 1)


def speech(n):
    return torch.rand(n, 9, 8), torch.ones(2 * n).long(), torch.full((n,), 9), torch.full((n,), 2)


def mixed(n):
    x, y = pairs(n)
    return x, y, y.flip(0), 0.5


def of_any_targets(output, *targets):
    return F.cross_entropy(output, targets[0])


def of_optional_targets(output, labels=None, weight=None):
    assert weight is None
    return F.cross_entropy(output, labels)


@pytest.mark.parametrize(
    ("module", "batches", "loss", "targets"),
    [
        (Masked(8, 3), pairs, nn.CrossEntropyLoss(), 1),
        (Masked(8, 3), pairs(4), F.cross_entropy, 1),
        (Wrapper(), pairs, F.cross_entropy, 1),
        (nn.DataParallel(nn.Linear(8, 3)), pairs, nn.CrossEntropyLoss(), 1),
        (Speech(8, 5), speech, nn.CTCLoss(), 3),
        (nn.Linear(8, 3), mixed, lambda o, a, b, k: k * F.cross_entropy(o, a) + (1 - k) * F.cross_entropy(o, b), 3),
        (nn.Linear(8, 3), pairs, lambda output: output.mean(), 1),
        (Masked(8, 3), pairs, of_any_targets, 1),
        (Wrapper(), pairs, of_any_targets, 1),
        (nn.Linear(8, 3), mixed, of_any_targets, 3),
        (Masked(8, 3), pairs, of_optional_targets, 1),
    ],
    ids=[
        "optional mask", "example", "wrapper", "DataParallel", "CTC", "mixup", "loss of the output", "any targets",
        "any arguments and targets", "several of any targets", "optional targets",
    ],
)  # fmt: skip
def test_the_loss_shows_which_items_are_its_targets(module, batches, loss, targets):
    """conformer#36: labels went into the module where it takes any or optional arguments, and three targets failed."""
    inputs = Inputs.of(batches, torch.float32, module=module, loss=loss)
    assert len(inputs.call.targets) == targets
    stepped(module, batches, loss=loss)


class Pair(nn.Linear):
    """Takes two mappings, by position or by name."""

    def forward(self, left, right):
        return super().forward(left["x"] + right["x"])


def of_names(n):
    x, y = pairs(n)
    return {"left": {"x": x}, "right": {"x": x}}, y


@pytest.mark.parametrize(
    ("module", "batches", "loss"),
    [
        (Pair(8, 3), of_names, nn.CrossEntropyLoss()),
        (Pair(8, 3), of_names(4), F.cross_entropy),
        (Pair(8, 3), lambda n: (*of_names(n), torch.ones(n)), lambda o, y, w: (w * o[:, 0]).mean() + y.sum()),
        (Masked(8, 3), lambda n: ({"x": pairs(n)[0]}, pairs(n)[1]), F.cross_entropy),
        (Masked(8, 3), lambda n: ({"x": pairs(n)[0]}, pairs(n)[1]), of_any_targets),
    ],
)
def test_a_mapping_of_arguments_before_targets_is_passed_by_name(module, batches, loss):
    """As `loss(model(**batch), *targets)` of a loop."""
    example, *targets = batches(4) if callable(batches) else batches
    call = Inputs.of(batches, torch.float32, module=module, loss=loss).call
    assert (call.positional, call.keyword.keys(), len(call.targets)) == ((), example.keys(), len(targets))
    stepped(module, batches, loss=loss)


class OfMapping(nn.Linear):
    """Takes the whole batch, removes its labels and adds its output."""

    def forward(self, batch):
        labels = batch.pop("labels")
        assert "logits" not in batch
        batch["logits"] = super().forward(batch["x"])
        return {"loss": F.cross_entropy(batch["logits"], labels)}


def of_keys(n):
    return dict(zip(("x", "labels"), pairs(n), strict=True))


@pytest.mark.parametrize(
    "batches", [of_keys, of_keys(4), lambda n: (of_keys(n),)], ids=["function", "example", "tuple"]
)
def test_a_module_that_takes_the_mapping_gets_a_new_one_in_each_step(batches):
    """lerobot#323: it was passed on as keywords, or without the labels from the second step on."""
    stepped(OfMapping(8, 3), batches)


class Graph:
    """A batch of graphs, as of PyG."""

    def __init__(self, x):
        self.x = x

    def to(self, device):
        return Graph(self.x.to(device))


class OfGraph(nn.Linear):
    def forward(self, graph):
        graph.x = super().forward(graph.x)
        return graph.x


def test_a_batch_object_is_as_it_was_made_in_each_step():
    """A layer assigned its output to the object: the next step had inputs of another width."""
    stepped(OfGraph(8, 3), lambda n: Graph(torch.rand(5 * n, 8)))


def test_items_without_a_receiver_are_refused_with_the_way_on():
    """lightly#1279: (image, label, file name), or a mapping with keys that the loop leaves out."""
    three = lambda n: (*pairs(n), ["name"] * n)  # noqa: E731
    with pytest.raises(cb.InvalidArgument, match="a batch of 3 items"):
        stepped(nn.Linear(8, 3), three, loss=F.cross_entropy)
    named = lambda n: {"x": torch.rand(n, 8), "path": ["name"] * n}  # noqa: E731
    with pytest.raises(cb.InvalidArgument, match="'path', which Masked does not take"):
        stepped(Masked(8, 3), named, mode="inference")


class Fields(NamedTuple):
    """A batch whose fields have names."""

    x: Any
    weight: Any


@pytest.mark.parametrize(("takes", "count"), [(lambda x, weight: x, 2), (lambda batch: batch.x, 1)])
def test_a_named_tuple_is_one_argument_only_of_a_module_that_takes_one(takes, count):
    """A loop passes its fields to any other, which would lack arguments."""
    module = nn.Module()
    module.forward = takes
    inputs = Inputs.of(lambda n: Fields(torch.rand(n, 8), torch.ones(n)), torch.float32, module=module)
    assert len(inputs.call.positional) == count


class Shifted(nn.Module):
    """Writes to its ids: after two steps on the same ones they would lie beyond the table."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(20, 4)

    def forward(self, ids, scale):
        scale.mul_(0.5)
        assert isinstance(scale, torch._subclasses.FakeTensor) or (scale == 0.5).all()
        ids += 10
        return self.table(ids) * scale[:, None]


@pytest.mark.parametrize("mode", ["inference", "training"])
@pytest.mark.parametrize("as_example", [True, False])
def test_each_step_gets_inputs_that_no_step_has_written_to(mode, as_example):
    """transformers#47741: models write into what the caller passes, and a loop passes a new batch in each step."""
    batches = lambda n: (torch.arange(n) % 10, torch.ones(n))  # noqa: E731
    module = Shifted()
    if as_example:
        module.forward = lambda ids: nn.functional.embedding(ids.add_(10), module.table.weight)
    stepped(module, torch.arange(4) if as_example else batches, mode=mode)


class Scaled(nn.Linear):
    """Writes to a table that is the same in every batch; `reads` a value, so that no trace shows it."""

    def __init__(self, *, reads):
        super().__init__(8, 3)
        self.reads = reads

    def forward(self, x, table):
        if self.reads:
            float(x.sum().numpy())
        table.mul_(2)
        assert isinstance(table, torch._subclasses.FakeTensor) or (table == 2).all()
        return super().forward(x) * table


@pytest.mark.parametrize("reads", [False, True], ids=["traced", "not traced"])
@pytest.mark.parametrize("mode", ["inference", "training"])
def test_a_constant_input_that_steps_write_to_is_as_before_in_each_step_and_afterwards(mode, reads):
    """A step would see what the one before it wrote, and the user's table would be another."""
    table = torch.ones(3)
    batches = lambda n: (torch.rand(n, 8), table)  # noqa: E731
    assert "inputs_written" in stepped(Scaled(reads=reads), batches, mode=mode, constant_inputs=["table"])
    assert (table == 1).all()


class Weighted(nn.Linear):
    """Writes to an array of NumPy, which no tensor shows."""

    def forward(self, x, weights):
        assert (weights == 1).all()
        weights *= 0.5
        return super().forward(x) * torch.from_numpy(weights)


@pytest.mark.parametrize("mode", ["inference", "training"])
@pytest.mark.parametrize("as_example", [True, False])
def test_an_array_that_steps_write_to_is_as_before_in_each_step_and_afterwards(mode, as_example):
    """A step would see what the one before it wrote, and the user's array would be another."""
    weights = np.ones(3, "float32")
    batches = (torch.rand(4, 8), weights) if as_example else lambda n: (torch.rand(n, 8), weights)
    assert "inputs_written" in stepped(Weighted(8, 3), batches, mode=mode)
    assert TorchModule(Weighted(8, 3), batches, mode=mode).walk(4).peak_bytes > 0, "a trace of two steps ends"
    assert (weights == 1).all()


def test_inputs_that_no_trace_shows_to_be_written_are_as_they_were_made_in_each_step():
    """As those that a trace shows; the first real step does."""

    class Read(Shifted):
        def forward(self, ids, scale):
            float(scale.sum().numpy())
            return super().forward(ids, scale)

    subject = TorchModule(Read(), lambda n: (torch.arange(n) % 10, torch.ones(n)), mode="inference")
    with subject:
        runner = subject.runner(2**30, 0)
        runner.prepare(6)
        runner.step()
        assert runner.history[0]["batch_size"] == 2, "the size of the very first step was measured"
        runner.close()


def test_a_size_for_which_a_function_makes_fewer_rows_is_refused():
    """keras#1561: slices of 300 rows; the rate of a larger size would count rows that are not there."""
    x, y = torch.rand(300, 8), torch.arange(300) % 3
    subject = TorchModule(nn.Linear(8, 3), lambda n: (x[:n], y[:n]), mode="training", loss=F.cross_entropy)
    with subject:
        runner = subject.runner(2**30, 0)
        runner.prepare(300)
        with pytest.raises(cb.InvalidArgument, match="made 300 rows of input for 301 samples"):
            runner.prepare(301)
        runner.close()


def test_the_losses_of_a_detector_are_all_trained():
    """Its loop sums them; a backward pass through the first alone is another one."""
    module = nn.Linear(8, 3)
    second = nn.Linear(8, 3)
    module.second = second
    module.register_forward_hook(lambda _, x, output: {"a": output.mean(), "b": second(x[0]).square().mean()})
    kind = StepKind(training=True, loss=None, optimizer="sgd", autocast=None)
    kind.step(module, list(module.parameters()), "cpu", Call((torch.rand(4, 8),), {}))()
    assert all(each.grad is not None for each in module.parameters())


class Potential(nn.Linear):
    """Forces are gradients of an energy, in evaluation too."""

    def forward(self, positions):
        positions = positions.detach().requires_grad_()
        energy = super().forward(positions).square().sum()
        return torch.autograd.grad(energy, positions, create_graph=self.training)[0]


@pytest.mark.parametrize("mode", ["inference", "training"])
def test_a_module_that_computes_gradients_runs(mode):
    """torchmd-net#211: inference mode records none, so that every size raised."""
    stepped(Potential(8, 4), (8,), mode=mode)


def test_inference_mode_stays_where_a_module_runs_in_it():
    """The first step decides, and later ones run as it did."""
    seen = []

    class Seen(nn.Linear):
        def forward(self, x):
            seen.append(torch.is_inference_mode_enabled())
            return super().forward(x)

    stepped(Seen(8, 3), (8,), mode="inference")
    assert all(seen)


class Bank(nn.Module):
    """A memory of embeddings and a weight, in the loss."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 3))
        self.register_buffer("rows", torch.zeros(12, 3))
        self.sizes = []

    def forward(self, output, labels):
        self.sizes.append(len(output))
        assert len(set(self.sizes)) == 1, "the memory of another batch size"
        self.rows[: len(output)] = output.detach()
        return F.cross_entropy(output @ self.weight @ self.rows.T, labels)


def test_the_state_of_a_loss_is_that_of_the_start_at_each_size_and_afterwards():
    """pytorch-metric-learning#534: sizes shared the memory, and weights were left with gradients without data."""
    loss = Bank()
    stepped(nn.Linear(8, 3), pairs, loss=loss, optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1))
    assert (loss.sizes, loss.weight.grad) == ([], None)
    assert torch.equal(loss.rows, torch.zeros(12, 3))
    assert torch.equal(loss.weight, torch.ones(3, 3))


def test_networks_that_a_loss_function_uses_are_as_before():
    """A teacher kept statistics of the batches, and gradients without data of the memory trace."""
    teacher = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 3))
    before = {name: value.clone() for name, value in teacher.state_dict().items()}
    batches = lambda n: (x := torch.rand(n, 8), x)  # noqa: E731
    counts = []
    make = lambda parameters: counts.append(len(parameters)) or torch.optim.SGD(parameters, 0.1)  # noqa: E731
    stepped(nn.Linear(8, 3), batches, loss=lambda o, x: (o - teacher(x)).square().mean(), optimizer=make)
    assert set(counts) == {2}, "the loop trains the student alone"
    assert all(torch.equal(value, before[name]) for name, value in teacher.state_dict().items())
    assert all(parameter.grad is None for parameter in teacher.parameters())


class Criterion:
    """An object with a network, a weight, a memory and counts."""

    def __init__(self):
        self.norm, self.weight = nn.BatchNorm1d(3), nn.Parameter(torch.ones(3))
        self.rows, self.last, self.counts = torch.zeros(12, 3), None, {"sizes": []}

    def __call__(self, output, labels):
        self.counts["sizes"].append(len(output))
        assert len(set(self.counts["sizes"])) == 1, "the counts of another batch size"
        output = self.norm(output) * self.weight
        self.last = output.detach()
        self.rows[: len(output)] = self.last
        return F.cross_entropy(output, labels)

    def loss(self, output, labels):
        return self(output, labels)


def call(criterion, output, labels):
    return criterion(output, labels)


def call_by_helper(criterion):
    helper = [lambda output, labels: call(criterion, output, labels)]
    return lambda output, labels: helper[0](labels=labels, output=output)


@pytest.mark.parametrize(
    "form",
    [
        lambda criterion: criterion,
        lambda criterion: criterion.loss,
        lambda criterion: functools.partial(call, criterion),
        lambda criterion: functools.partial(criterion.loss),
        call_by_helper,
        lambda criterion: lambda output, labels, criterion=criterion: criterion(output, labels),
    ],
    ids=["object", "method", "partial", "partial of a method", "helper", "default"],
)
def test_what_a_loss_refers_to_is_that_of_the_start_at_each_size_and_afterwards(form):
    """A method, a partial and an object have no variables of a function; sizes shared their state."""
    criterion, expected = Criterion(), Criterion()
    TorchModule(nn.Linear(8, 3), pairs, mode="training", loss=form(criterion)).walk(4)
    assert criterion.weight.grad is None
    remarks = stepped(nn.Linear(8, 3), pairs, loss=form(criterion))
    assert (criterion.last, criterion.counts, criterion.weight.grad) == (None, {"sizes": []}, None)
    assert torch.equal(criterion.rows, expected.rows)
    assert all(torch.equal(a, b) for a, b in zip(criterion.norm.buffers(), expected.norm.buffers(), strict=True))
    assert "state_remains" not in remarks


def test_parameters_of_a_loss_are_trained():
    """As in its loop: its classes have gradients and optimizer states, which take time and memory."""
    received = []

    def make_optimizer(parameters):
        received.append({tuple(each.shape) for each in parameters})
        return torch.optim.Adam(torch.nn.ParameterList(parameters), 0.0)

    stepped(nn.Linear(8, 3), pairs, loss=Bank(), optimizer=make_optimizer)
    assert all((3, 3) in shapes for shapes in received)


@pytest.mark.parametrize(
    ("reduce", "kind"),
    [
        (lambda loss: loss, r"tensor of shape \(2,\)"),
        (lambda loss: (loss.mean(), {}), "tuple"),
        (lambda loss: loss.mean().detach(), r"tensor of shape \(\)"),
    ],
    ids=["samples", "tuple", "detached"],
)
def test_a_loss_that_is_no_scalar_is_refused_before_sizes_are_tried(reduce, kind):
    """Bailando#15: a loss of each sample passed at one sample, and every larger size raised."""
    with pytest.raises(cb.InvalidArgument, match=f"^loss must be .*one that returns a {kind}"):
        stepped(nn.Linear(8, 3), pairs, loss=lambda o, y: reduce(F.cross_entropy(o, y, reduction="none")))


class Required(torch.optim.SGD):
    def step(self, closure):
        return super().step(closure)


class Asserted(torch.optim.SGD):
    def step(self, closure=None):
        assert closure is not None, "it requires a closure"
        return super().step(closure)


@pytest.mark.parametrize("kind", [Required, Asserted])
def test_an_optimizer_that_needs_a_closure_is_refused_by_name(kind):
    """davda54/sam#8: each size raised that its argument is missing."""
    with pytest.raises(cb.InvalidArgument, match=f"without a closure, got '{kind.__name__}'"):
        stepped(nn.Linear(8, 3), (8,), optimizer=lambda parameters: kind(parameters, 0.1))


class Two:
    """Two optimizers as one, as for a generator and a discriminator."""

    def __init__(self, parameters):
        weight, bias = parameters
        self.both = torch.optim.Adam([weight]), torch.optim.Adam([bias])

    def zero_grad(self):
        for each in self.both:
            each.zero_grad()

    def step(self):
        for each in self.both:
            each.step()


def test_an_optimizer_without_states_of_its_own_runs_and_is_traced():
    """Its two optimizers have Adam's two states of each parameter, as one for all has."""
    stepped(nn.Linear(8, 3), (8,), optimizer=Two)
    asked = {"mode": "training", "batches": (8,)}
    one = TorchModule(nn.Linear(8, 3), **asked, optimizer="adam").walk(4)
    assert TorchModule(nn.Linear(8, 3), **asked, optimizer=Two).walk(4).parts == one.parts


class Pooled(nn.Linear):
    def forward(self, x):
        return torch.nested.to_padded_tensor(super().forward(x), 0.0).sum(1)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_a_function_makes_nested_tensors(layout):
    """lightning#21588: an axis of unequal lengths has no size that is a number."""
    batches = lambda n: torch.nested.nested_tensor([torch.rand(2 + k % 3, 8) for k in range(n)], layout=layout)  # noqa: E731
    assert "inputs_stay" not in stepped(Pooled(8, 3), batches)


class Packed(nn.LSTM):
    def forward(self, packed):
        return super().forward(packed)[1][0][-1]


def test_a_packed_sequence_grows_by_its_counts():
    """lightning#437: its sizes of each time step keep their length; the largest one is the number of samples."""
    batches = lambda n: nn.utils.rnn.pack_sequence([torch.rand(3, 8)] * n)  # noqa: E731
    assert "inputs_stay" not in stepped(Packed(8, 3), batches)
    other = Inputs.of(lambda n: (torch.rand(n, 8), torch.full((3,), 4)), torch.float32)
    assert [remark["code"] for remark in other.remarks()] == ["inputs_stay"]


@pytest.mark.parametrize(
    ("batches", "change"),
    [
        ((8,), lambda y: y.reshape(-1, 4).T),
        ((8,), lambda y: y.reshape(-1, 2).T.reshape(2, -1)[None]),
        (lambda n: torch.rand(5, n, 8), lambda y: torch.cat([y, y], 1)),
    ],
    ids=["transposed", "strided", "time first"],
)
def test_several_rows_of_a_sample_in_axis_1_are_no_fixed_batch(batches, change):
    """In memory, or as in the input, the rows are ordered by samples."""
    module = nn.Linear(8, 8)
    module.register_forward_hook(lambda _, __, output: change(output))
    assert "output_stays" not in stepped(module, batches)
