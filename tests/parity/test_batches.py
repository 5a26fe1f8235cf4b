"""Batches that a user's function, loader or pair of batches makes: what grows with the size is read from them."""

from __future__ import annotations

import re
import sys

import pytest

import cubatch as cb

torch = pytest.importorskip("torch")

from cubatch.errors import InvalidArgument  # noqa: E402
from cubatch.frameworks import batch_sources, loader_rate, module_worker  # noqa: E402
from cubatch.frameworks.batch_sources import DataSetBatches  # noqa: E402
from cubatch.frameworks.torch_inputs import Inputs  # noqa: E402
from cubatch.frameworks.torch_module import TorchModule  # noqa: E402
from cubatch.tuning.request import Request  # noqa: E402
from cubatch.tuning.subjects.module_subject import NamedModuleSubject  # noqa: E402
from tests.parity import named_modules  # noqa: E402

nn, data = torch.nn, torch.utils.data
ASKED = {"device": "cpu", "batch_sizes": [2, 6], "budget": 60.0}


def shapes(call):
    """Return the shapes of the positional arguments and of the targets."""
    return [tuple(each.shape) for each in (*call.positional, *call.targets)]


def at(inputs, batch_size):
    return inputs.batch(batch_size, lambda tensor, shape: tensor.new_zeros(shape))


class Seen(nn.Module):
    """Notes the shapes that real steps get."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(6, 2)

    def note(self, *values):
        if not any(isinstance(each, torch._subclasses.FakeTensor) for each in values):
            named_modules_seen.add(tuple(len(each) for each in values))


named_modules_seen: set[tuple[int, ...]] = set()


@pytest.fixture(autouse=True)
def _nothing_seen():
    named_modules_seen.clear()


class Match(Seen):
    """Labelled and unlabelled samples, 1 to 7."""

    def forward(self, labelled, unlabelled):
        self.note(labelled, unlabelled)
        return self.net(torch.cat([labelled, unlabelled])).square().mean()


def two(n):
    return torch.rand(n, 6), torch.rand(7 * n, 6)


@pytest.mark.parametrize("batches", [two, [two(4), two(8)], [two(8), two(4)]], ids=["function", "pair", "descending"])
def test_inputs_grow_in_the_proportion_of_two_sizes(batches):
    """Seven unlabelled samples for each labelled one, at every size that is timed."""
    result = cb.autotune_module(Match(), batches, mode="training", **ASKED)
    assert result.recommended
    assert named_modules_seen >= {(2, 14), (6, 42)}
    assert {b / a for a, b in named_modules_seen} == {7.0}


def test_of_one_example_an_input_that_stays_prevents_a_recommendation():
    """Nine times too fast was what was said; the first sentence names the input and what to pass."""
    result = cb.autotune_module(Match(), (*two(4),), mode="training", **ASKED)
    assert (result.batch_size, result.recommended) == (None, False)
    assert (result.fastest_batch_size, result.decided_by, result.tied_with) == (None, None, ())
    assert re.search(r"unlabelled of shape \(28, 6\).*function.*constant_inputs=\['unlabelled'\]", result.reasons[0])
    named = cb.autotune_module(Match(), two(4), mode="training", constant_inputs=["unlabelled"], **ASKED)
    assert named.recommended
    with pytest.raises(cb.InvalidArgument, match="labelled, unlabelled"):
        cb.autotune_module(Match(), two(4), constant_inputs=["images"], **ASKED)


class Graph(nn.Module):
    """Sums features over edges, then over the nodes of each graph."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(5, 8), nn.Linear(8, 1)

    def forward(self, x, edges, batch):
        h = self.one(x).relu()
        h = torch.zeros_like(h).index_add_(0, edges[1], h[edges[0]])
        return self.two(torch.zeros(int(batch.max()) + 1, 8).index_add_(0, batch, h))


def graphs(n):
    edges = torch.cat([torch.randint(0, 10, (2, 30)) + 10 * place for place in range(n)], 1)
    return torch.rand(10 * n, 5), edges, torch.arange(n).repeat_interleave(10)


def test_a_function_makes_batches_of_graphs():
    """Nodes, edges along axis 1 and offsets inside grow with the number of graphs."""
    inputs = Inputs.of(graphs, torch.float32, module=Graph())
    assert shapes(at(inputs, 100)) == [(1000, 5), (2, 3000), (1000,)]
    assert cb.autotune_module(Graph(), graphs, **ASKED).recommended
    refused = cb.autotune_module(Graph(), graphs(4), device="cpu", batch_sizes=[40, 60], budget=20.0)
    assert "edges of shape (2, 120)" in refused.reasons[0]


class Detector(nn.Module):
    """One dictionary of targets for each sample."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(6, 4)

    def forward(self, x, targets):
        assert len(targets) == len(x)
        return {"loss": sum((a - b["boxes"].mean(0)).abs().sum() for a, b in zip(self.net(x), targets, strict=True))}


def detections(n):
    return torch.rand(n, 6), [{"boxes": torch.rand(1 + place % 3, 4)} for place in range(n)]


@pytest.mark.parametrize("batches", [detections, detections(4)], ids=["function", "example"])
def test_a_list_of_targets_grows_with_the_batch(batches):
    """It kept the length of the example, and each other size raised."""
    result = cb.autotune_module(Detector(), batches, mode="training", **ASKED)
    assert result.recommended
    assert {m.status for m in result.measurements} <= {"ok", "dropped"}


def test_strings_numbers_and_offsets_grow_too():
    """A list of names, the number of samples, and a row more than samples; a constant list stays."""
    batches = lambda n: {"x": torch.zeros(n, 3), "names": ["a"] * n, "n": n, "mask": torch.zeros(n + 1), "kinds": ["b"]}  # noqa: E731
    keyword = at(Inputs.of(batches, torch.float32), 100).keyword
    assert (len(keyword["names"]), keyword["n"], keyword["mask"].shape, keyword["kinds"]) == (100, 100, (101,), ["b"])
    example = at(Inputs.of({"x": torch.zeros(2, 3), "names": ["a", "b"]}, torch.float32), 5).keyword
    assert example["names"] == ["a", "a", "a", "b", "b"]


def test_padded_lengths_do_not_grow():
    """The longest text of a batch is longer in larger batches by chance: the trace has the longest seen."""
    lengths = {4: 11, 8: 17, 16: 18}
    inputs = Inputs.of(lambda n: torch.zeros(n, lengths[n]).long(), torch.float32)
    assert shapes(at(inputs, 1000)) == [(1000, 18)]


class Texts(data.Dataset):
    """Texts of unequal lengths with a label; more are read than needed only once."""

    def __init__(self):
        self.read = 0

    def __len__(self):
        return 40

    def __getitem__(self, place):
        self.read += 1
        return torch.full((3 + place % 5,), place), place % 2


def padded(samples):
    texts, labels = zip(*samples, strict=True)
    return nn.utils.rnn.pad_sequence(texts, batch_first=True), torch.tensor(labels)


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.EmbeddingBag(50, 2)

    def forward(self, ids):
        if not isinstance(ids, torch._subclasses.FakeTensor):
            named_modules_seen.add(tuple(ids.shape))
        return self.net(ids)


def test_a_function_that_rejects_some_sizes_is_called_at_later_ones_and_no_more_than_needed():
    """Three batches suffice: that of 8192 samples is not made."""
    made = []

    def sevens(n):
        if n % 7:
            raise ValueError("no multiple of 7")
        made.append(n)
        return torch.zeros(n, 6)

    Inputs.of(sevens, torch.float32, sizes=(4, 8, 28, 14, 7, 8192))
    assert made == [28, 14, 7]


def test_a_loader_is_used_as_a_training_loop_does(monkeypatch):
    """The last item of (ids, labels) is the target of the loss; sizes up to the data set are made of its samples."""
    texts = Texts()
    loader = data.DataLoader(texts, batch_size=4, collate_fn=padded)
    monkeypatch.setattr(loader_rate, "measurable", lambda _: None)  # its rate is measured by reading samples again
    result = cb.autotune_module(Words(), loader, mode="training", loss=nn.CrossEntropyLoss(), device="cpu", budget=10.0)
    assert result.recommended
    assert max(m.batch_size for m in result.measurements) == 40
    assert {length for n, length in named_modules_seen if n > 4} == {7}
    assert texts.read == 40
    assert any("samples in it: 40" in reason for reason in result.reasons)


@pytest.mark.parametrize("size", [32, 512])
def test_a_batch_of_unequal_texts_is_of_typical_length(size):
    """The first samples alone, padded to the longest of them, would be off by 38 and 25 % on average."""
    errors = []
    for seed in range(6):
        draws = torch.Generator().manual_seed(seed)
        lengths = (30 * torch.randn(3000, generator=draws).mul(0.7).exp()).long() + 1
        usual = sum(int(lengths[torch.randperm(3000, generator=draws)[:size]].max()) for _ in range(100)) / 100
        ids, labels = DataSetBatches([(torch.zeros(int(each)), 0) for each in lengths], padded)(size)
        assert len(ids) == len(labels) == size
        errors.append(abs(ids.shape[1] / usual - 1))
    assert sum(errors) / len(errors) < 0.12


def test_a_few_long_texts_make_the_typical_batch_long():
    """Three of eight batches are 16 times as long: their mean is 6.6 times the short ones, and 0.4 of the long ones."""
    texts = [(torch.zeros(64 if place in {8, 24, 40} else 4), 0) for place in range(64)]
    assert DataSetBatches(texts, padded)(8)[0].shape == (8, 64)


def test_a_function_whose_batches_differ_in_length_makes_a_typical_one(monkeypatch):
    """Lengths are 1 to 64, of a batch as a whole: 32.5 on average; a single draw is off by 16 on average."""
    monkeypatch.setattr(batch_sources, "_DRAW_SECONDS", 60.0)  # a busy machine makes as many draws
    draws = torch.Generator().manual_seed(1)
    buckets = Inputs.of(lambda n: torch.zeros(n, int(torch.randint(1, 65, (), generator=draws))), torch.float32)
    assert buckets.is_uneven
    for size in (2, 16, 32, 300):
        assert abs(buckets.source(size).shape[1] - 32.5) < 8


class AnyArguments(nn.Module):
    """A wrapper without names of its own, as of AveragedModel."""

    def forward(self, *args, **kwargs):
        return sum(args) + kwargs["bias"]


def test_a_module_of_any_arguments_gets_keywords_beside_positional_ones():
    made = lambda n: ((torch.zeros(n, 3),), {"bias": torch.zeros(n, 3)})  # noqa: E731
    call = Inputs.of(made, torch.float32, module=AnyArguments()).call
    assert (len(call.positional), list(call.keyword), call.targets) == (1, ["bias"], ())


def test_a_function_whose_batches_are_of_equal_length_is_called_once():
    made = []
    inputs = Inputs.of(lambda n: made.append(n) or torch.zeros(n, 6), torch.float32)
    made.clear()
    inputs.source(24)
    assert made == [24]
    assert not inputs.is_uneven


def test_samples_of_equal_extents_are_joined_once_and_in_order():
    joined = []
    source = DataSetBatches(data.TensorDataset(torch.arange(1000.0)), lambda samples: joined.append(len(samples)))
    for size in (4, 16, 4):
        source(size)
    assert joined == [4, 16, 4]


def test_a_data_set_with_a_collate_fn_is_used_as_well():
    """Its own `collate_fn`, or PyTorch's."""
    texts = Texts()
    texts.collate_fn = padded
    assert shapes(Inputs.of(texts, torch.float32, module=Words()).call) == [(16, 7), (16,)]
    pairs = data.TensorDataset(torch.rand(20, 6), torch.rand(20, 2))
    assert shapes(at(Inputs.of(pairs, torch.float32, module=nn.Linear(6, 2)), 50)) == [(50, 6), (50, 2)]


@pytest.mark.parametrize("batches", [f"{named_modules.__name__}:batches", f"{named_modules.__name__}:loader"])
def test_a_worker_makes_batches_by_name(batches):
    """Of a function of the size, and of one without parameters that returns a loader."""
    result = cb.autotune_module(f"{named_modules.__name__}:small", batches, store=False, **ASKED)
    assert result.recommended


@pytest.mark.parametrize(
    "collate", [padded, lambda samples: dict(zip(("ids", "labels"), padded(samples), strict=True))]
)
def test_batches_of_a_named_module_are_like_those_of_a_loader(collate):
    """The loader stays in this process: the worker gets two of its batches, of texts of unequal length."""
    loader = data.DataLoader(Texts(), batch_size=4, collate_fn=collate)
    name = f"{named_modules.__name__}:of_words"
    result = cb.autotune_module(name, loader, mode="training", store=False, **ASKED)
    assert result.recommended
    assert result.loader.num_samples == 40


def triplets(samples):
    """Join samples that lie in threes."""
    assert len(samples) % 3 == 0
    return data.default_collate(samples)


@pytest.fixture
def of_threes():
    pairs = data.TensorDataset(torch.rand(50, 3), torch.arange(50) % 2)
    return data.DataLoader(pairs, batch_size=6, collate_fn=triplets)


def test_a_loader_shows_by_its_batch_size_which_batches_it_makes(of_threes, monkeypatch):
    """pytorch-metric-learning#259: it makes none of 4, 8 and 16 samples; sizes that it does not make are no ceiling."""
    monkeypatch.setattr(loader_rate, "measurable", lambda _: None)
    asked = {"mode": "training", "loss": nn.CrossEntropyLoss(), "device": "cpu", "max_batch_size": 24, "budget": 10.0}
    result = cb.autotune_module(nn.Linear(3, 2), of_threes, **asked)
    assert all(m.batch_size % 3 == 0 for m in result.measurements)
    assert result.largest_measured == 24


def test_memory_is_learned_first_from_the_smallest_batch_that_a_loader_makes(of_threes):
    """A batch of one sample cannot be made."""
    with TorchModule(nn.Linear(3, 2), of_threes, mode="training", loss=nn.CrossEntropyLoss()) as subject:
        runner = subject.runner(2**30, 0)
        runner.look(seconds=10.0, top=24, trace_seconds=60.0)
        assert runner.history[0]["batch_size"] == 3
        runner.close()


def test_batches_of_a_named_module_have_sizes_that_the_loader_makes(of_threes):
    """The worker gets two of them, and no size is proposed that is no multiple of 3."""
    kind = {"mode": "inference", "loss": None, "optimizer": "sgd", "autocast": None, "sizes": [4, 8, 16]}
    name = f"{named_modules.__name__}:small"
    subject = NamedModuleSubject.of(name, of_threes, {**kind, "accumulate": 1}, "cpu", Request.of())
    assert [len(batch[0]) for batch in module_worker.unpack(subject.inputs)] == [6, 18]
    assert subject.multiple == 3


@pytest.mark.parametrize(
    ("takes", "multiple"),
    [(lambda n: n % 3 == 0, 3), (lambda n: n % 8 == 0, 8), (lambda n: n > 4, 1), (lambda n: n > 16, 1), (bool, 1)],
)
def test_the_number_of_which_a_function_takes_multiples_is_learned(takes, multiple):
    """Only a size that is refused between others that are made shows one: small sizes may be too few."""

    def batches(n):
        assert takes(n)
        return torch.rand(n, 3)

    inputs = Inputs.of(batches, torch.float32)
    assert inputs.multiple == multiple
    assert all(map(takes, inputs.sizes[:2]))


def test_a_loader_that_makes_no_batch_is_named_with_the_argument_for_multiples():
    """7, the batch size of the loader, is as wrong as 4, 8 and 16."""

    def tens(samples):
        raise ValueError(f"{len(samples)} is no multiple of 10")

    loader = data.DataLoader(torch.ones(50, 3), batch_size=7, collate_fn=tens)
    with pytest.raises(cb.InvalidArgument, match="multiple_of"):
        cb.autotune_module(nn.Linear(3, 2), loader, **ASKED)


class Once(data.IterableDataset):
    """Has an iterator when it is made; `restarts` makes another for each iteration."""

    def __init__(self, *, restarts):
        self.rows, self.restarts = iter(torch.rand(60, 6)), restarts

    def __iter__(self):
        return iter(torch.rand(60, 6)) if self.restarts else self.rows


@pytest.mark.parametrize("given", [lambda rows: rows, lambda rows: data.DataLoader(rows, batch_size=4)])
def test_a_data_set_that_can_be_read_only_once_is_refused_unread(given):
    """pytorch/text#1282: what is read for timing would be missing in the loop."""
    once = Once(restarts=False)
    with pytest.raises(cb.InvalidArgument, match="Once that can be read only once") as caught:
        cb.autotune_module(nn.Linear(6, 2), given(once), **ASKED)
    assert caught.value.field == "batches"
    assert len(list(once.rows)) == 60
    assert cb.autotune_module(nn.Linear(6, 2), given(Once(restarts=True)), **ASKED).recommended


class Continued(Once):
    """Makes an iterator for each iteration, which continues with the rows that are left."""

    def __iter__(self):
        if self.restarts:
            self.rows = iter(torch.rand(60, 6))
        yield from self.rows


def test_a_data_set_that_continues_where_it_was_is_refused():
    """Its second iteration begins with other samples, or has none."""
    with pytest.raises(cb.InvalidArgument, match="Continued that can be read only once"):
        Inputs.of(Continued(restarts=False), torch.float32)
    assert Inputs.of(Continued(restarts=True), torch.float32).batch_size == 16


class Own(data.IterableDataset):
    """Is its own iterator over numbered rows; `restarts` begins at the first one in each iteration."""

    def __init__(self, *, restarts, count):
        self.restarts, self.count, self.place, self.num_read = restarts, count, 0, 0

    def __iter__(self):
        self.place = 0 if self.restarts else self.place
        return self

    def __next__(self):
        if self.place == self.count:
            raise StopIteration
        self.place, self.num_read = self.place + 1, self.num_read + 1
        return torch.full((6,), float(self.place))


class Hidden(data.IterableDataset):
    """Makes an iterator for each iteration, over rows whose position Python does not show."""

    def __init__(self):
        self.rows = map(torch.ones, [6] * 20)

    def __iter__(self):
        yield from self.rows


@pytest.mark.parametrize("count", [20, 5000], ids=["at its end", "in the middle"])
def test_a_data_set_that_is_its_own_iterator_is_refused_if_it_goes_on_where_it_was(count):
    """datasets#3645: the second iteration has other rows, or none."""
    with pytest.raises(cb.InvalidArgument, match="Own that can be read only once"):
        Inputs.of(Own(restarts=False, count=count), torch.float32)
    again = Own(restarts=True, count=count)
    for _ in range(2):
        batch = Inputs.of(again, torch.float32).source(4)
        assert batch[:, 0].tolist() == [1.0, 2.0, 3.0, 4.0]


def test_a_data_set_without_rows_in_a_second_iteration_is_refused():
    """Nothing else shows that it can be read only once."""
    with pytest.raises(cb.InvalidArgument, match="Hidden that can be read only once"):
        Inputs.of(Hidden(), torch.float32)


class Image:
    """A class of the program that is run, which no other process imports."""

    __module__ = "__main__"
    __qualname__ = "Image"


def test_a_batch_that_the_worker_cannot_read_is_refused(monkeypatch):
    """The error names the class and the way on."""
    monkeypatch.setattr(sys.modules["__main__"], "Image", Image, raising=False)
    batches = {"ids": torch.zeros(4, 3).long(), "labels": [Image()] * 4}
    with pytest.raises(cb.InvalidArgument, match=r"attribute 'Image' .*batches='package\.module:name'"):
        cb.autotune_module(f"{named_modules.__name__}:of_words", batches, store=False, **ASKED)


def test_the_batch_of_a_loader_is_a_list_and_the_error_says_so():
    """It is one argument, which the module does not take; as a tuple its last item is the target."""
    batch = [torch.rand(4, 3), torch.arange(4) % 2]
    asked = {"mode": "training", "loss": nn.CrossEntropyLoss(), **ASKED}
    for given in ({}, asked):
        with pytest.raises(cb.CubatchError, match=r"tuple\(batch\)"):
            cb.autotune_module(nn.Linear(3, 2), batch, **{**ASKED, **given})
    assert cb.autotune_module(nn.Linear(3, 2), tuple(batch), **asked).recommended


class Causal(nn.Module):
    """Attention with a mask of [L, L] and a temperature."""

    def __init__(self):
        super().__init__()
        self.table, self.body = nn.Embedding(20, 8), nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, ids, mask, temperature):
        x = self.table(ids)
        return self.body(x, x, x, attn_mask=mask)[0] / temperature


@pytest.mark.parametrize("samples", [8, 1, 5])
def test_a_mask_as_long_as_the_batch_is_told_from_a_batch(samples):
    """Resized with the batch it failed at each size but one, which was then recommended."""
    mask = torch.triu(torch.full((8, 8), float("-inf")), 1)
    example = torch.randint(0, 20, (samples, 8)), mask, torch.tensor([0.7])
    result = cb.autotune_module(Causal(), example, **ASKED)
    assert "mask of shape (8, 8)" in result.reasons[0]
    assert {m.status for m in result.measurements} <= {"ok", "dropped"}
    named = cb.autotune_module(Causal(), example, constant_inputs=["mask"], **ASKED)
    assert named.recommended
    assert any("temperature of shape (1,)" in reason for reason in named.reasons)


class Ignores(nn.Module):
    """Computes with its weights alone."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))

    def forward(self, x):
        return self.weight @ self.weight


@pytest.mark.parametrize(
    ("batches", "match"),
    [
        (lambda n: (torch.ones(4, 3), torch.ones(4)), r"from batch size 4 to 16: input of shape \(4, 3\), the target"),
        (lambda _: None, r"from batch size 4 to 16: of type NoneType'. Make them of as many samples"),
        ([data.DataLoader(torch.ones(8, 3))] * 2, "several data loaders.*a function from a batch size"),
        ({"a": data.DataLoader(torch.ones(8, 3)), "b": torch.ones(4)}, "several data loaders"),
        (iter(data.DataLoader(torch.ones(8, 3))), r"an iterator, _Single.*Pass the object that it iterates over"),
        (data.DataLoader([torch.ones(n) for n in range(1, 9)]), "a data loader whose samples .*collate_fn that pads"),
        (lambda n: data.DataLoader(data.TensorDataset(torch.zeros(8, 3)), batch_size=n), "Pass a data loader itself"),
        (lambda _: 1 / 0, "ZeroDivisionError"),
        (lambda _: torch.zeros(4, 3), "that grow with the batch size"),
        (([torch.zeros(4, 3), torch.zeros(4, 3)],), r"a list of 2 tensors, which are the samples.*tuple\(batch\)"),
        (None, "batches must be a function"),
        (lambda n: torch.zeros(n, 3).numpy(), "from_numpy"),
        (torch.zeros(4, 3).numpy(), "from_numpy"),  # not a data set of four samples
    ],
)
def test_batches_that_cannot_be_used_are_named_with_a_remedy(batches, match):
    """A remedy about arrays, or the class in which cubatch reads samples, would mislead."""
    with pytest.raises(cb.InvalidArgument, match=match) as caught:
        cb.autotune_module(nn.Linear(3, 2), batches, mode="training", loss=nn.MSELoss(), **ASKED)
    assert caught.value.field == "batches"
    assert ("from_numpy" in str(caught.value)) == (match == "from_numpy")


@pytest.mark.parametrize("loss", [None, nn.CrossEntropyLoss()])
def test_targets_without_a_loss_are_reported(loss):
    """The step then trains on the mean of squares of the output, which the user did not ask for."""
    batches = lambda n: (torch.rand(n, 3), torch.zeros(n, dtype=torch.int64))  # noqa: E731
    result = cb.autotune_module(nn.Linear(3, 2), batches, mode="training", loss=loss, **ASKED)
    assert any("have targets, but no loss was given" in reason for reason in result.reasons) == (loss is None)
    assert not any("no loss" in reason for reason in cb.autotune_module(nn.Linear(3, 2), batches, **ASKED).reasons)


def test_a_step_that_does_not_grow_gets_no_recommendation():
    """Rates that rise with a number that changes nothing are none."""
    result = cb.autotune_module(Ignores(), (3,), **ASKED)
    assert (result.batch_size, result.recommended) == (None, False)
    assert "neither the output" in result.reasons[0]


class Reshaped(nn.Module):
    """A layer whose result a function changes."""

    def __init__(self, change):
        super().__init__()
        self.layer, self.change = nn.Linear(8, 8), change

    def forward(self, x):
        return self.change(self.layer(x))


@pytest.mark.parametrize(
    ("mode", "change", "shape"),
    [
        ("inference", lambda y: y.reshape(4, -1).mean(1), "(4,)"),
        ("inference", lambda y: y.mean(0), "(8,)"),
        ("training", lambda y: y.reshape(4, -1), "(4, 12)"),
        ("training", lambda y: y.reshape(4, -1, 2).mean(1), "(4, 2)"),
        ("training", lambda y: y.reshape(-1, 16), "(3, 16)"),
        ("training", lambda y: (y.mean(0), y.reshape(4, -1)), "(4, 12)"),
        ("training", lambda y: y, ""),
        ("training", lambda y: y[:, :3].T, ""),
        ("training", lambda y: y.reshape(1, -1, 4), ""),
        ("training", lambda y: [y[:4].mean(0, keepdim=True), y], ""),
        ("training", lambda y: list(y[:, None]), ""),
        ("training", lambda y: y.mean(0), ""),
        ("training", lambda y: {"loss": y.square().mean(), "centers": y.reshape(4, -1, 2).mean(1)}, ""),
        ("training", lambda y: (rows := y.reshape(4, -1))[rows[:, 0] < 99], ""),
    ],
    ids=[
        "fixed batch size", "mean over the batch", "fixed rows", "fixed rows and columns", "fewer rows",
        "several losses and fixed rows", "rows", "batch as axis 1", "packed", "rows and a mean", "a list of samples",
        "several losses", "its own loss", "rows that depend on data",
    ],
)  # fmt: skip
def test_an_output_without_a_row_for_each_sample_is_reported(mode, change, shape):
    """ICDICNet#33: reshape(opt.batchSize, -1) runs at other sizes too, on mixed samples."""
    result = cb.autotune_module(Reshaped(change), (8,), mode=mode, **ASKED)
    reported = [reason for reason in result.reasons if "without a row for each sample" in reason]
    assert [f"has shape {shape} for 6 samples" in reason for reason in reported] == [True] * bool(shape)
    assert not any("could not be traced" in reason for reason in result.reasons)


@pytest.mark.parametrize(
    ("field", "value"), [("constant_inputs", None), ("constant_inputs", [1.5]), ("accumulate", 2**31)]
)
@pytest.mark.parametrize(
    "function",
    [
        lambda **asked: cb.autotune_module(torch.nn.Linear(4, 3), (4,), mode="training", **ASKED | asked),
        lambda **asked: cb.footprint(torch.nn.Linear(4, 3), (4,), batch_size=2, mode="training", **asked),
    ],
    ids=["autotune_module", "footprint"],
)
def test_names_of_inputs_and_accumulated_batches_are_checked(function, field, value):
    """Each is rejected by its name before a step is run or traced; 2^31 batches of gradients fit no result."""
    with pytest.raises(InvalidArgument) as caught:
        function(**{field: value})
    assert caught.value.field == field
