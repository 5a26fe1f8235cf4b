"""`autotune_module` on modules of PyTorch: what is run, what is refused, and that nothing of the module is changed."""

from __future__ import annotations

import dataclasses
import functools
import math
import shutil
from collections import UserList

import pytest

import cubatch as cb

torch = pytest.importorskip("torch")  # first: a module that was skipped before is there in part only

from cubatch.frameworks import torch_memory, torch_module  # noqa: E402
from cubatch.frameworks.memory_meter import HostMeter  # noqa: E402
from cubatch.frameworks.torch_inputs import Inputs, random_like  # noqa: E402

nn = torch.nn
SHORT = {"device": "cpu", "budget": 0.5}


class Recorder(nn.Module):
    """A small network with whatever steps may change, that keeps the sizes it was called with."""

    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(4 * 8 * 8, 5)
        self.register_buffer("calls", torch.zeros(()))
        self.sizes = UserList()  # a list would get its old items back

    def forward(self, x):
        if not isinstance(x, torch._subclasses.FakeTensor):
            self.sizes.append(len(x))
        self.calls = self.calls + 1  # another tensor each time
        return self.head(self.dropout(self.norm(self.convolution(x)).relu().flatten(1)))


def everything(module):
    """All that a step may change of a module and of PyTorch, to the bit and by identity."""
    return {
        "values": {name: value.clone() for name, value in module.state_dict().items()},
        "strides": [parameter.stride() for parameter in module.parameters()],
        "places": [parameter.data_ptr() for parameter in module.parameters()],
        "gradients": [parameter.grad for parameter in module.parameters()],
        "required": [parameter.requires_grad for parameter in module.parameters()],
        "training": [part.training for part in module.modules()],
        "random": torch.get_rng_state(),
    }


def assert_unchanged(module, before):
    """Compare with what `everything` gave."""
    after = everything(module)
    for name, value in before["values"].items():
        assert torch.equal(after["values"][name], value), name
    assert torch.equal(after.pop("random"), before["random"])
    assert all(a is b for a, b in zip(after["gradients"], before["gradients"], strict=True))
    for key in ("strides", "places", "required", "training"):
        assert after[key] == before[key]


def scalar(output):
    return output.float().logsumexp(1).mean()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mode": "training", "optimizer": "adam", "loss": scalar},
        {"mode": "training", "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=1.0)},
        {"mode": "training", "autocast": "bfloat16", "channels_last": True, "optimizer": "momentum"},
    ],
    ids=["inference", "adam", "a real step", "autocast, channels last"],
)
def test_a_module_is_left_as_it_was(options):
    """Parameters and buffers to the bit, gradients, flags, strides and the random generator."""
    module = Recorder()
    module.norm.eval()
    module.head.bias.requires_grad_(requires_grad=False)
    module.head.weight.grad = torch.ones_like(module.head.weight)
    before = everything(module)
    result = cb.autotune_module(module, (3, 8, 8), batch_sizes=[4], **options, **SHORT)
    assert set(module.sizes) == {4}
    assert (result.mode, result.library) == (options.get("mode", "inference"), "torch")
    assert result.dtype == options.get("autocast", "float32")
    assert_unchanged(module, before)


@pytest.mark.parametrize("stop", [ValueError("no loss today"), KeyboardInterrupt()])
def test_a_module_is_left_as_it_was_after_an_error(stop):
    """Also where a step raises in the middle of training, or the user presses Ctrl-C."""
    module = Recorder()
    before = everything(module)

    def loss(output):
        if len(output) == 4 and not isinstance(output, torch._subclasses.FakeTensor):
            raise stop
        return scalar(output)

    expected = cb.NothingMeasured if isinstance(stop, ValueError) else KeyboardInterrupt
    with pytest.raises(expected):
        cb.autotune_module(module, (3, 8, 8), mode="training", loss=loss, batch_sizes=[4], **SHORT)
    assert_unchanged(module, before)


def test_no_size_above_the_memory_limit_is_run(monkeypatch):
    """The limit lies between two sizes by the walk, which is all that is told: the smaller fits, and none above it."""
    monkeypatch.setattr(HostMeter, "peak", lambda self: None)
    module = Recorder()
    subject = torch_module.TorchModule(module, (3, 8, 8), mode="inference")
    with subject:
        peaks = subject.peaks(1 << 30)
    limit = peaks.at(37) + 1
    result = cb.autotune_module(module, (3, 8, 8), memory_limit=limit, **SHORT)
    assert result.largest_batch_size == 37
    assert max(module.sizes) <= 37
    assert {m.batch_size for m in result.measurements} >= {37, 32, 27}
    assert all(m.predicted_peak_bytes <= limit for m in result.measurements)
    module.sizes.clear()
    asked = cb.autotune_module(module, (3, 8, 8), memory_limit=limit, batch_sizes=[2, 38], **SHORT)
    assert [m.status for m in asked.measurements][1] == "over_limit"
    assert max(module.sizes) == 2
    with pytest.raises(cb.DoesNotFit, match="Recorder does not fit"):
        cb.autotune_module(module, (3, 8, 8), memory_limit=peaks.at(1) - 1, **SHORT)


@pytest.mark.parametrize(
    ("num_bytes", "top", "walked"),
    [
        (1 << 40, 32, [2, 16, 32]),  # no more than is wanted
        (1 << 40, 1, [2, 3]),  # a line needs two
        (80 * 8 * 64 * 4, None, [2, 16, 64]),  # the limit lies between them
    ],
)
def test_no_size_is_walked_through_that_tells_nothing_new(num_bytes, top, walked, monkeypatch):
    """A walk of a large module takes seconds, and users wait for it."""
    sizes = []

    def walk(_module, _inputs, _kind, _device, size, deadline):
        sizes.append(size)
        return torch_memory.Walk(100_000 + 8 * 64 * 4 * size, 100, ())

    monkeypatch.setattr(torch_memory, "walked", walk)
    torch_memory.peaks(None, None, None, None, num_bytes, top=top, seconds=math.inf)
    assert sizes == walked


def test_walks_end_near_the_limit(monkeypatch):
    """Beyond the last probe the largest that fits is walked through, again where a line misled, until it fills it."""
    sizes = []

    def taken(size):
        return 1000 + 10 * size + (5 * (size - 64) if size > 64 else 0)  # a line that bends upwards

    def walk(_module, _inputs, _kind, _device, size, deadline):
        sizes.append(size)
        return torch_memory.Walk(taken(size), 100, ())

    monkeypatch.setattr(torch_memory, "walked", walk)
    found = torch_memory.peaks(None, None, None, None, 11_000, top=None, seconds=math.inf)
    assert sizes == [2, 16, 64, 1000, 688]
    assert all(found.at(n) >= taken(n) for n in range(64, found.largest(11_000) + 1))
    assert found.largest(11_000) == (11_000 - 1000 + 320) // 15


class LooksInside(nn.Module):
    def forward(self, x):
        return x * 2 if x.numpy().sum() > 0 else x


def test_a_module_that_reads_its_data_by_numpy_needs_a_largest_size_if_memory_cannot_be_measured(monkeypatch):
    """There is no trace of it; with a limit of sizes it is tuned, and a note says so."""
    monkeypatch.setattr(HostMeter, "peak", lambda self: None)
    with pytest.raises(cb.InvalidArgument, match="max_batch_size"):
        cb.autotune_module(LooksInside(), (3,), **SHORT)
    result = cb.autotune_module(LooksInside(), (3,), max_batch_size=4, **SHORT)
    assert result.largest_batch_size is None
    assert any("Memory was not bounded" in reason for reason in result.reasons)


@dataclasses.dataclass
class Tokens:
    ids: torch.Tensor
    scale: float


class Embeds(nn.Module):
    """Takes tokens in all the ways that inputs come in, and keeps what it saw."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(50, 8)
        self.seen = UserList()

    def forward(self, ids=None, mask=None, *, tokens=None, labels=None):
        ids = ids if tokens is None else tokens.ids
        self.seen.append((ids, mask, labels))
        out = self.table(ids).sum(1)
        return {"loss": out.square().mean() * 3, "logits": out} if labels is not None else out


IDS = torch.tensor([[7, 49, 3], [9, 12, 40]])


@pytest.mark.parametrize(
    "example",
    [
        IDS,
        (IDS, torch.tensor([[True, False, True], [True, True, True]])),
        {"ids": IDS, "labels": torch.tensor([0, 1])},
        {"tokens": Tokens(IDS, 0.5)},
    ],
    ids=["a tensor", "a tuple", "a dict", "a dataclass"],
)
def test_batches_are_drawn_like_the_example(example):
    """Of its dtypes and of its integers, for the batch size asked for, and not constant."""
    module = Embeds()
    cb.autotune_module(module, example, mode="training", batch_sizes=[64], **SHORT)
    ids, mask, labels = module.seen[-1]
    assert (ids.shape, ids.dtype) == ((64, 3), torch.int64)
    assert set(ids.unique().tolist()) == set(IDS.unique().tolist())
    assert mask is None or (mask.dtype == torch.bool and mask.shape == (64, 3) and len(mask.unique()) == 2)
    assert labels is None or labels.shape == (64,)


def test_random_numbers_fill_the_range_of_the_example():
    """Between its least and its largest value, and normal where it has one value only."""
    make = random_like(torch.Generator().manual_seed(0), "cpu")
    drawn = make(torch.tensor([[-3.0], [5.0]]), (1000, 1))
    assert -3 <= drawn.min() < -2.5
    assert 4.5 < drawn.max() <= 5
    assert 0.8 < make(torch.zeros(1, 4), (1000, 4)).std() < 1.2
    inputs = Inputs.of({"x": torch.zeros(2, 4), "position": torch.arange(7), "name": "left"}, torch.float32)
    _, keyword, _ = inputs.batch(5, make)
    assert (keyword["x"].shape, keyword["position"].shape, keyword["name"]) == ((5, 4), (7,), "left")


def test_the_loss_of_the_output_is_the_one_that_is_lowered():
    """A mapping's own loss, as Hugging Face has it: its gradient is what the optimiser is given."""
    module, norms = Embeds(), []
    cb.autotune_module(
        module, {"ids": IDS, "labels": IDS[:, 0]}, mode="training", batch_sizes=[2], **SHORT,
        optimizer=lambda parameters: Watched(parameters, norms),
    )  # fmt: skip
    (3 * module.table(module.seen[-1][0]).sum(1).square().mean()).backward()
    assert norms[-1] == pytest.approx(float(module.table.weight.grad.norm()), rel=1e-5)


class Watched(torch.optim.SGD):
    """Keeps the length of the gradient that it is stepped with."""

    def __init__(self, parameters, kept):
        super().__init__(parameters, lr=0.0)
        self.kept = kept

    def step(self, closure=None):
        gradient = self.param_groups[0]["params"][0].grad
        if not isinstance(gradient, torch._subclasses.FakeTensor):
            self.kept.append(float(gradient.norm()))
        return super().step(closure)


def test_what_is_compiled_is_what_is_run(monkeypatch):
    """It is compiled once for all sizes, and not in the walk without data."""
    compiled = []

    def compile_(module, *, dynamic):
        compiled.append(dynamic)
        return module

    monkeypatch.setattr(torch, "compile", compile_)
    cb.autotune_module(Recorder(), (3, 8, 8), compile=True, batch_sizes=[1, 2], **SHORT)
    assert compiled == [True]


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"module": len}, "torch.nn.Module"),
        ({"mode": "eval"}, "mode"),
        ({"loss": 3}, "loss"),
        (
            {"loss": "cross_entropy", "mode": "training"},
            r"package.module:function.*torch\.nn\.functional\.cross_entropy",
        ),
        ({"loss": scalar}, "loss must be left out in inference"),
        ({"optimizer": "adam"}, r"optimizer must be left out in inference.*mode='training'"),
        ({"optimizer": lambda _: None, "mode": "training"}, r"optimizer must be a function.*one that returned None"),
        ({"optimizer": lambda: 1, "mode": "training"}, "optimizer must be one of .*or a function of parameters"),
        ({"module": nn.Sequential(nn.LazyLinear(3))}, "0.weight has no shape yet"),
        ({"example_inputs": (3,)}, "one whose inference step runs on batches of its inputs.*On two samples it raised"),
        ({"optimizer": "lion"}, "optimizer"),
        (
            {"optimizer": torch.optim.Adam(nn.Linear(1, 1).parameters()), "mode": "training"},
            "Adam of 2 parameters, of which the module lacks 2",
        ),
        ({"autocast": "float8"}, "autocast"),
        ({"example_inputs": {"name": "x"}}, "batches"),
        ({"example_inputs": ()}, "batches"),
        ({"device": "tpu"}, "device"),
        ({"module": nn.ReLU(), "mode": "training"}, "inference: the module has no parameter"),
        ({"module": nn.Linear(4, 4), "example_inputs": (3,)}, "mat1 and mat2"),
        ({"module": nn.Linear(3, 4), "example_inputs": torch.zeros(2, 3, device="meta")}, "tensors with data"),
    ],
)
def test_bad_arguments_are_named(wrong, match, caplog):
    """An InvalidArgument alone names what is wrong and what is allowed: PyTorch logs thirty lines of a failed trace."""
    given = {"module": Recorder(), "example_inputs": (3, 8, 8)} | SHORT | wrong
    with pytest.raises(cb.InvalidArgument, match=match):
        cb.autotune_module(given.pop("module"), given.pop("example_inputs"), **given)
    assert caplog.records == []


class OfSixty(nn.Linear):
    """What takes batches of 60 samples alone, and no tensors without data."""

    def forward(self, x):
        if len(x) != 60 or isinstance(x, torch._subclasses.FakeTensor):
            raise ValueError("60 samples only")
        return super().forward(x)


def test_a_module_of_one_batch_size_is_tuned_where_a_largest_is_given():
    """Its steps raise on two samples, and the walk without data does: it runs all the same, at 60."""
    result = cb.autotune_module(OfSixty(3, 2), (3,), max_batch_size=60, device="cpu", budget=60.0)
    assert (result.largest_measured, result.batch_size, result.recommended) == (60, None, False)


@pytest.mark.parametrize("sizes", [{"max_batch_size": 64}, {"batch_sizes": [8, 16]}])
@pytest.mark.parametrize("shape", [(4,), (8, 3, 8, 8)])
def test_inputs_that_no_size_takes_are_told_by_their_name(sizes, shape):
    """Of another shape, or with the batch left in: nothing could be measured, and no size is advised to be left out."""
    with pytest.raises(cb.NothingMeasured) as caught:
        cb.autotune_module(Recorder(), shape, device="cpu", budget=10.0, **sizes)
    assert "batches is a function" in caught.value.remedy
    assert "batch_sizes" not in caught.value.remedy


@dataclasses.dataclass
class Answer:
    loss: torch.Tensor
    logits: torch.Tensor


class Answers(Embeds):
    """Gives a dataclass, as models of Hugging Face do, and counts its calls in a buffer."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, *positional, **keyword):
        out = self.norm(self.table(keyword["tokens"].ids if "tokens" in keyword else keyword["ids"]).sum(1))
        return Answer(out.square().mean(), out)


@functools.wraps(torch.optim.AdamW.__init__)
def adamw(parameters):
    """Return an optimizer; by its decorator it seems to need `self` too."""
    return torch.optim.AdamW(parameters, lr=0.1)


def test_a_module_of_dataclasses_is_left_as_it_was():
    """With inputs and outputs as of Hugging Face: real steps of an optimizer with states change nothing for good."""
    module, ids = Answers(), IDS.clone()
    before = everything(module)
    inputs = {"tokens": Tokens(IDS, 0.5)}
    cb.autotune_module(module, inputs, mode="training", batch_sizes=[2, 8], optimizer=adamw, **SHORT)
    assert_unchanged(module, before)
    assert torch.equal(IDS, ids)


@pytest.mark.parametrize("mode", ["inference", "training"])
def test_a_module_is_left_as_it_was_after_memory_ran_out(mode):
    """In the middle of a forward pass, with gradients and running statistics half made."""

    class Half(Recorder):
        def forward(self, x):
            out = super().forward(x)
            if len(x) == 4 and not isinstance(x, torch._subclasses.FakeTensor):
                torch.empty(1 << 44)
            return out

    module = Half()
    before = everything(module)
    result = cb.autotune_module(module, (3, 8, 8), mode=mode, batch_sizes=[2, 4], device="cpu", budget=30.0)
    assert {m.batch_size: m.status for m in result.measurements} == {2: "ok", 4: "out_of_memory"}
    assert_unchanged(module, before)


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
@pytest.mark.parametrize("mode", ["inference", "training"])
@pytest.mark.filterwarnings("ignore")  # of PyTorch's compiler about itself
def test_a_compiled_module_is_left_as_it_was(mode):
    """Really compiled, with running statistics that the compiled code writes to."""
    torch.compiler.reset()
    module = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
    before = everything(module)
    result = cb.autotune_module(
        module,
        (4,),
        mode=mode,
        compile=True,
        batch_sizes=[2, 4],
        device="cpu",
        budget=30.0,
        optimizer="momentum" if mode == "training" else "sgd",
    )
    assert "ok" in {m.status for m in result.measurements}
    assert_unchanged(module, before)
    assert module(torch.zeros(2, 4)).shape == (2, 8)


def test_complex_numbers_are_normal_in_both_parts():
    """They have no range to be drawn from; of 4000 draws each part's deviation is within 5 errors of sqrt(1/2)."""
    drawn = random_like(torch.Generator().manual_seed(0), "cpu")(torch.zeros(1, 4, dtype=torch.complex64), (1000, 4))
    assert (drawn.dtype, drawn.shape) == (torch.complex64, (1000, 4))
    for part in (drawn.real, drawn.imag):
        assert abs(part.std() - 0.5**0.5) < 5 * 0.5**0.5 / 8000**0.5


class Lazy(nn.Module):
    """Makes tables when they are first needed: an attribute, a buffer, a list; and notes what it computed with."""

    def __init__(self):
        super().__init__()
        self.head, self.table, self.found, self.kinds = nn.Linear(4, 3), None, [], UserList()

    def forward(self, x):
        if self.table is None:
            self.table = torch.arange(4.0)
            self.register_buffer("scale", torch.ones(4))
        self.kinds.append((type(x).__name__, type(self.table).__name__, type(self.scale).__name__))
        self.found.append(x.sum())
        return self.head(x * self.table * self.scale)


@pytest.mark.parametrize("mode", ["inference", "training"])
def test_tables_that_are_made_when_they_are_needed_are_real_ones(mode):
    """The walk on tensors without data leaves none of its own; afterwards the module has none, and learns from data."""
    module = Lazy()
    cb.autotune_module(module, (4,), mode=mode, batch_sizes=[2, 4], **SHORT)
    assert set(module.kinds) == {("FakeTensor",) * 3, ("Tensor",) * 3}
    assert (module.table, module.found, "scale" in module.state_dict()) == (None, [], False)
    module(torch.ones(2, 4)).sum().backward()
    assert module.head.weight.grad.abs().sum() > 0


def test_a_named_function_that_is_not_there_is_told_by_its_argument():
    """Whichever part of the name is wrong, for a loss or an optimiser."""
    for field, name in (("loss", "nowhere_at_all:fn"), ("loss", "os:nope"), ("loss", ":"), ("optimizer", "sys:nope")):
        with pytest.raises(cb.InvalidArgument, match=rf"^{field} must be") as caught:
            cb.autotune_module(nn.Linear(2, 2), (2,), mode="training", **{field: name})
        assert caught.value.value == name


@pytest.mark.parametrize("store", [True, False])
def test_it_is_said_that_a_module_without_a_name_is_not_kept(store):
    """And what is; whoever wants nothing kept knows."""
    result = cb.autotune_module(nn.Linear(4, 4), (4,), max_batch_size=4, store=store, **SHORT)
    assert any("'package.module:build'" in reason for reason in result.reasons) == store
