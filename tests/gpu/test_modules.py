"""PyTorch modules on a GPU: what of its memory is theirs, where they run, and that they are as before afterwards."""

from __future__ import annotations

import contextlib
import statistics

import pytest

import cubatch as cb
from cubatch.frameworks import module_worker
from cubatch.frameworks.memory_meter import AllocatorMeter
from cubatch.frameworks.torch_module import TorchModule
from cubatch.hardware import memory_limit as hardware_memory, probe

torch = pytest.importorskip("torch")
nn, MIB = torch.nn, 2**20

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that PyTorch sees")]
EXAMPLE = (3, 32, 32)
WITHIN = {"ok", "dropped", "not_run", "over_limit"}
BLOCKS = 2 * AllocatorMeter.grain


def small():
    """A network of convolutions, on the GPU."""
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)).cuda()


def usual(mode):
    """What `TorchModule` is told where a user says no more than a mode."""
    return {
        "mode": mode, "loss": None, "optimizer": "sgd", "autocast": None, "channels_last": False, "compiled": False,
    }  # fmt: skip


def held_by(subject):
    """What a run of a module would be told of the memory it may take."""
    with subject:
        return hardware_memory.memory_limit(subject.device, held=subject.held_bytes)


def fates(result):
    """What became of each size that was measured."""
    return {m.batch_size: m.status for m in result.measurements}


@contextlib.contextmanager
def others(share):
    """Tensors of the user's that hold a share of what is free until the block ends."""
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    held = [torch.empty(int(share * free), dtype=torch.uint8, device="cuda")]
    try:
        yield
    finally:
        held.clear()
        torch.cuda.empty_cache()


def test_what_a_notebook_holds_is_no_room_and_what_its_allocator_keeps_unused_is():
    """Half of what was free in tensors halves the limit; once they are deleted, kept by PyTorch, it is as before."""
    subject = TorchModule(small(), EXAMPLE, **usual("inference"))
    before = held_by(subject)
    slack = 512 * MIB  # what CUDA and the libraries load meanwhile, and others on the device
    free, _ = torch.cuda.mem_get_info()
    kept = torch.empty(free // 2, dtype=torch.uint8, device="cuda")
    assert held_by(subject).bytes == pytest.approx(before.bytes - free // 2, abs=slack)
    del kept
    try:
        assert torch.cuda.memory_reserved() > free // 2
        assert held_by(subject).bytes == pytest.approx(before.bytes, abs=slack)
    finally:
        torch.cuda.empty_cache()


def test_a_module_is_tuned_in_what_a_notebook_leaves_of_its_gpu():
    """Sizes end where the tensors beside it leave no room, and none runs out of memory."""
    module = small()
    with others(0.9):
        free, _ = torch.cuda.mem_get_info()
        result = cb.autotune_module(module, EXAMPLE, mode="training", budget=5)
    assert result.batch_size > 1
    assert set(fates(result).values()) <= WITHIN, fates(result)
    assert max(m.peak_bytes or 0 for m in result.measurements) <= free


@pytest.mark.parametrize("cudnn", [False, True])
@pytest.mark.parametrize("autocast", ["float16", "bfloat16", None])
def test_training_leaves_the_module_as_it_was_and_knows_its_memory(autocast, cudnn):
    """
    To the bit, running means included; what sizes take is within 10 % of what was said, but for a block or two.

    With cuDNN half of them are: which algorithm it chooses for a size nobody knows before, and one took 70 % more.
    """
    module = small()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    state = torch.cuda.get_rng_state()
    with torch.backends.cudnn.flags(enabled=cudnn):
        result = cb.autotune_module(
            module, EXAMPLE, mode="training", autocast=autocast, optimizer="adam", memory_limit="4GiB", budget=5
        )
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert torch.equal(state, torch.cuda.get_rng_state())
    assert all(parameter.grad is None for parameter in module.parameters())
    assert set(fates(result).values()) <= WITHIN, fates(result)
    told = {m.batch_size: (m.predicted_peak_bytes, m.peak_bytes) for m in result.measurements if m.peak_bytes}
    assert len(told) > 1
    assert max(took for _, took in told.values()) <= 4 * 2**30
    times = 1.7 if cudnn else 1.1
    assert {n: bytes_ for n, bytes_ in told.items() if bytes_[1] > times * bytes_[0] + BLOCKS} == {}, told
    assert statistics.median((took - BLOCKS) / said for said, took in told.values()) <= 1.1


def test_steps_of_a_module_are_timed_on_the_stream_on_which_it_runs():
    """Where the user has chosen another stream: a step lasts as long as on the usual one, not as long as a launch."""
    module = nn.Linear(8192, 8192, bias=False).cuda()

    def seconds():
        return cb.autotune_module(module, (8192,), batch_sizes=[4096], budget=3).measurements[0].latency_seconds

    usual_stream = seconds()
    with torch.cuda.stream(torch.cuda.Stream()):
        assert seconds() == pytest.approx(usual_stream, rel=0.5)


class Greedy(nn.Module):
    """Takes five times what it is given where there are data, of which a walk without them sees nothing."""

    def forward(self, x):
        if not isinstance(x, torch._subclasses.FakeTensor):
            torch.empty(5 * x.nbytes, dtype=torch.uint8, device=x.device)
        return 2 * x


def test_memory_that_no_walk_sees_is_learned_of_steps_and_nothing_runs_out_of_it():
    """A few small sizes are stepped first; what they took says where sizes end."""
    example = torch.zeros(1, 2 * MIB, device="cuda")  # 8 MiB, of which five more are taken and then one for the result
    result = cb.autotune_module(Greedy().cuda(), example, memory_limit="16GiB", budget=5)
    assert set(fates(result).values()) <= WITHIN, fates(result)
    assert 8 * MIB * result.largest_batch_size == pytest.approx(16 * 2**30 / 6, rel=0.2)


def test_an_out_of_memory_costs_its_size_and_no_other():
    """It is told as one, and the sizes beside it are timed, if not until the end."""
    free, _ = torch.cuda.mem_get_info()
    huge = (free >> 30) + 8

    class Spiky(nn.Module):
        """Takes more than there is at one size."""

        def forward(self, x):
            if len(x) == 3 and not isinstance(x, torch._subclasses.FakeTensor):
                torch.empty(huge << 30, dtype=torch.uint8, device=x.device)
            return 2 * x

    example = torch.zeros(1, 8, device="cuda")
    result = cb.autotune_module(Spiky().cuda(), example, batch_sizes=[2, 3, 4], budget=5)
    assert fates(result).pop(3) == "out_of_memory"
    assert {fates(result)[n] for n in (2, 4)} <= WITHIN, fates(result)


@pytest.mark.filterwarnings("ignore")  # a compiler's, which would end it
def test_a_compiled_module_is_compiled_before_it_is_timed():
    """A step of it lasts no longer than three of the module as it is, which seconds of compiling would."""
    pytest.importorskip("triton")
    module = small()

    def seconds(**options):
        result = cb.autotune_module(module, EXAMPLE, batch_sizes=[128], budget=20, **options)
        assert fates(result) == {128: "ok"}
        return result.measurements[0].latency_seconds

    assert seconds(compile=True) < 3 * seconds()


def test_a_named_module_runs_in_a_worker_on_the_gpu_that_is_named():
    """By a number, as PyTorch counts, or the uuid; this process takes nothing of the GPU for it."""
    found = probe.resolve("cuda:0")
    assert module_worker.place_of(found.address) == "cuda:0"
    before = torch.cuda.memory_reserved()
    result = cb.autotune_module(
        "tests.gpu.test_modules:small", EXAMPLE, device=found.address, budget=5, max_batch_size=256, store=False
    )
    assert result.batch_size > 1
    assert set(fates(result).values()) <= WITHIN, fates(result)
    assert torch.cuda.memory_reserved() == before
