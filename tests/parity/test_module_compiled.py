"""A module that comes compiled is timed as compiled, and stays so."""

from __future__ import annotations

import pytest

import cubatch as cb

torch = pytest.importorskip("torch")

from cubatch.errors import InvalidArgument  # noqa: E402
from cubatch.frameworks.ranks import RankedRunner, Ranks  # noqa: E402
from cubatch.frameworks.torch_module import TorchModule  # noqa: E402

nn = torch.nn


class Block(nn.Module):
    """A part whose forward pass PyTorch compiles, as it does not that of its own parts."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.layer = nn.Linear(inputs, outputs)

    def forward(self, x):
        return self.layer(x).relu()


class Net(nn.Module):
    """Two of them."""

    def __init__(self):
        super().__init__()
        self.first, self.last = Block(4, 8), Block(8, 2)

    def forward(self, x):
        return self.last(self.first(x))


def whole(module, **options):
    """Wrap the module."""
    return torch.compile(module, **options)


def in_place(module, **options):
    """Compile the module where it is."""
    module.compile(**options)
    return module


def a_part(module, **options):
    """Wrap a part."""
    module.first = torch.compile(module.first, **options)
    return module


def a_part_in_place(module, **options):
    """Compile a part where it is."""
    module.first.compile(**options)
    return module


def counting():
    """Give a backend, and the list of the calls of what it made."""
    calls = []

    def backend(graph, _):
        def run(*arguments):
            calls.append(None)
            return graph.forward(*arguments)

        return run

    return backend, calls


@pytest.mark.parametrize("mode", ["inference", "training"])
@pytest.mark.parametrize("compiled", [whole, in_place, a_part, a_part_in_place])
def test_steps_run_the_code_that_the_users_compiler_made_and_so_do_later_calls(compiled, mode):
    """The backend's code is called by steps, and afterwards the same module still calls it; nothing runs eagerly."""
    torch._dynamo.reset()
    backend, calls = counting()
    module = compiled(Net(), backend=backend, fullgraph=True)
    result = cb.autotune_module(module, (4,), mode=mode, device="cpu", batch_sizes=[2, 4], budget=1.0)
    by_steps = len(calls)
    assert by_steps > 0
    assert all(each.predicted_peak_bytes for each in result.measurements)
    module(torch.zeros(2, 4))
    assert len(calls) == by_steps + 1


@pytest.mark.parametrize("compiled", [in_place, a_part, a_part_in_place])
def test_before_pytorch_2_6_compiled_parts_are_not_walked_through(compiled, monkeypatch):
    """They would run eagerly from then on: steps run the compiled code, and what is not known beforehand is told."""
    torch._dynamo.reset()
    monkeypatch.delattr(torch.compiler, "set_stance")
    backend, calls = counting()
    module = compiled(Net(), backend=backend, fullgraph=True)
    result = cb.autotune_module(module, (4,), device="cpu", batch_sizes=[2, 4], budget=1.0)
    assert calls
    assert any("needs PyTorch 2.6" in reason for reason in result.reasons)


def test_a_compiled_module_has_the_name_of_what_was_compiled():
    """PyTorch calls what it wraps it in OptimizedModule."""
    found = TorchModule(torch.compile(Net(), backend="eager"), (4,), mode="inference")
    assert found.name == "Net"


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # PyTorch's own, as it imports its compiler
@pytest.mark.parametrize("how", ["wrapped", "a part", "in place"])
def test_cuda_graphs_are_refused_on_a_gpu(how):
    """The error names the mode and another one; on a CPU the same module has no graphs."""
    module = Identity()
    if how == "in place":
        module.compile(mode="reduce-overhead")
    else:
        module = torch.compile(module, mode="reduce-overhead")
    asked = {
        "mode": "inference", "loss": None, "optimizer": "sgd", "autocast": None, "channels_last": False,
        "compiled": False,
    }  # fmt: skip
    module = nn.Sequential(module) if how == "a part" else module
    with pytest.raises(InvalidArgument, match=r"module must be .*mode='reduce-overhead'.*max-autotune-no-cudagraphs"):
        TorchModule(module, (4,), place="cuda:0", **asked)
    assert TorchModule(module, (4,), **asked).device.kind == "cpu"
    plain = nn.Sequential(torch.compile(Identity()), torch.compile(Identity(), backend="eager"))
    assert TorchModule(plain, (4,), place="cuda:0", **asked).name == "Sequential"


class Identity(nn.Module):
    """Has no tensors, so that it runs on any device."""

    def forward(self, x):
        return x + 1


class Specialized(nn.Module):
    """Its code runs over the samples, so that PyTorch compiles it for each batch size."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x):
        weights = [1.0 / (1 + place) for place in range(min(x.shape[0], 64))]  # the memory trace tries huge batches
        return self.layer(x) * weights[-1]


@pytest.fixture
def _nothing_compiled():
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()


@pytest.mark.usefixtures("_nothing_compiled")
def test_compiling_is_reported_and_sizes_share_it():
    """A module that is compiled once for all sizes: a graph for a batch of 1 and one for the others."""
    compiled = torch.compile(Net(), backend="eager", dynamic=True)
    result = cb.autotune_module(compiled, (4,), batch_sizes=[1, 2, 4, 8], budget=300.0)
    assert all(m.timings_seconds for m in result.measurements)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2
    assert any(reason.startswith("Compilation took") for reason in result.reasons)


@pytest.mark.usefixtures("_nothing_compiled")
def test_a_size_that_pytorch_would_not_compile_any_more_is_no_result():
    """PyTorch compiles a function eight times; the ninth size would run uncompiled, and is an error by name."""
    compiled = torch.compile(Specialized(), backend="eager", dynamic=True)
    limit = torch._dynamo.config.recompile_limit
    sizes = list(range(2, 2 + limit + 2))
    result = cb.autotune_module(compiled, (4,), batch_sizes=sizes, budget=600.0)
    timed = [m.batch_size for m in result.measurements if m.timings_seconds]
    failed = {m.batch_size: m.stop_reason for m in result.measurements if m.status == "error"}
    assert len(timed) == limit
    assert sorted([*timed, *failed]) == sizes
    assert all("compile" in reason for reason in failed.values())
    assert any("compiled separately for 8 batch sizes" in reason for reason in result.reasons)


@pytest.fixture
def _one_rank(_nothing_compiled):
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def ranked(module):
    """The runner of a job's ranks, of which this process is the only one."""
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.zeros(40, 4)), batch_size=2)
    made = TorchModule(torch.compile(module, backend="eager", dynamic=True), data, mode="inference")
    return RankedRunner(Ranks(), made.ready().runner(2**30, 0), 2**30)


@pytest.mark.usefixtures("_one_rank")
def test_ranks_look_without_compiling_and_time_what_they_compile():
    """Looking at memory compiles nothing and gives the samples; the size that is compiled has its time, the next 0."""
    runner = ranked(Net())
    assert runner.look(seconds=10.0, top=None, trace_seconds=60.0)["num_samples"] == 40
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 0
    runner.prepare(6)  # unlike the number of features, which would share its symbol
    assert runner.compile_seconds > 0
    assert [(remark["code"], remark["values"]["count"]) for remark in runner.remarks] == [("compiled", 1)]
    runner.prepare(12)
    assert runner.compile_seconds == 0
