"""Where a module's steps run, what of that device's memory counts as theirs, and how a float16 loss is scaled."""

from __future__ import annotations

import dataclasses

import pytest

import cubatch as cb

torch = pytest.importorskip("torch")

from torch.testing._internal.two_tensor import TwoTensor  # noqa: E402 - PyTorch's own example of a wrapper

from cubatch.errors import InvalidArgument  # noqa: E402
from cubatch.frameworks.torch_inputs import Inputs  # noqa: E402
from cubatch.frameworks.torch_memory import num_bytes  # noqa: E402
from cubatch.frameworks.torch_module import TorchModule  # noqa: E402
from cubatch.frameworks.torch_state import SavedState  # noqa: E402
from cubatch.hardware import host  # noqa: E402

nn, MIB = torch.nn, 2**20
USUAL = {
    "mode": "inference", "loss": None, "optimizer": "sgd", "autocast": None, "channels_last": False, "compiled": False,
}  # fmt: skip


def subject(module, example=(8,), **options):
    """A module to be tuned, with the usual options."""
    return TorchModule(module, example, **USUAL | options)


def test_a_gpu_that_is_not_the_current_one_is_while_a_module_runs_on_it(monkeypatch):
    """Events and kernels of a user's go to the current device's stream; afterwards it is the one from before."""
    chosen = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda place: chosen.append(str(place)))
    found = subject(nn.Linear(8, 8))
    found._place = torch.device("cuda:1")
    with pytest.raises(ZeroDivisionError), found:  # noqa: PT012 - a step that fails
        assert chosen == ["cuda:1"]
        raise ZeroDivisionError
    assert chosen == ["cuda:1", "0"]


def test_a_module_on_several_devices_is_refused_but_for_numbers_on_the_cpu():
    """Time and memory would be those of one of them; a number there is taken along by every operation."""
    module = nn.Linear(8, 8, device="meta")
    module.register_buffer("count", torch.tensor(3))
    with pytest.raises(InvalidArgument, match="CPU or an NVIDIA GPU"):
        _ = subject(module).device
    module.register_buffer("table", torch.zeros(3))
    with pytest.raises(InvalidArgument, match=r"on cpu and meta.*autotune_callable"):
        subject(module)


@pytest.mark.parametrize("counts", [False, True])
def test_a_module_without_floating_point_runs_where_it_is_or_its_example_is(counts):
    """Where its whole numbers are; where it has no tensors at all, where the example is, or a worker was told to go."""
    module, example = nn.Upsample(scale_factor=2), torch.zeros(1, 3, 4, 4, device="cpu" if counts else "meta")
    if counts:
        module.register_buffer("calls", torch.zeros(2, dtype=torch.int64, device="meta"))
    with pytest.raises(InvalidArgument, match="on meta"):
        _ = subject(module, example).device
    with pytest.raises(InvalidArgument, match="on meta"):
        _ = subject(nn.Upsample(scale_factor=2), (3, 4, 4), place="meta").device


def test_bytes_of_what_stands_for_other_tensors_are_those_of_the_others():
    """As quantised weights do; the two of 12 numbers here share no storage, and what is there twice counts once."""
    both = TwoTensor(torch.zeros(12), torch.zeros(12))
    assert num_bytes([both, both, torch.zeros(5)]) == 4 * (12 + 12 + 5)


def test_a_module_that_is_there_already_has_the_memory_it_takes(monkeypatch):
    """Of 100 MiB that are free 80 may be taken; one of 128 MiB, which is not taken from them, runs beside."""
    monkeypatch.setattr(host, "available_memory_bytes", lambda: 100 * MIB)
    module = nn.Linear(8192, 4096, bias=False)
    result = cb.autotune_module(module, (8192,), batch_sizes=[2], budget=5)
    assert [m.status for m in result.measurements] == ["ok"]
    with pytest.raises(cb.DoesNotFit):
        cb.autotune_module(module, (8192,), batch_sizes=[2], budget=5, memory_limit=128 * MIB)


def test_memory_is_known_beforehand_where_a_float16_loss_is_scaled():
    """Its scale is chosen by what the gradients hold, which tensors without data do not tell; the walk does without."""
    module = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 4))
    result = cb.autotune_module(
        module, (64,), mode="training", autocast="float16", optimizer="adam", memory_limit=64 * MIB, budget=1
    )
    assert max(result.sizes) > 1
    assert all(m.predicted_peak_bytes for m in result.measurements)


def test_a_scale_that_was_found_is_kept_for_the_next_size():
    """A gradient of 2^16 x 10 is beyond float16, so the scale is halved until it is not, once for all sizes."""
    module = nn.Linear(8, 1, bias=False)
    with subject(module, mode="training", autocast="float16", loss=lambda y: 10 * y.sum()) as found:
        runner = found.runner(1 << 30, seed=0)
        for size in (1, 2):
            runner.prepare(size)
            for _ in range(6):
                runner.step()
            found_scale = runner._scaler.get_scale()
            assert found_scale < 2**14
            runner.draw(size)
            assert runner._scaler.get_scale() == found_scale
        runner.close()


def test_what_others_hold_of_a_gpu_is_no_room(monkeypatch):
    """Of 50 MiB that the allocator has, 30 are in use: 1 by the module, which may take that and the 20 unused ones."""
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda place: 50 * MIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda place: 30 * MIB)
    found = subject(nn.Linear(512, 512, bias=False), (512,))
    assert found.held_bytes == MIB
    found._place = torch.device("cuda:0")
    assert found.held_bytes == 21 * MIB


@dataclasses.dataclass
class Checked:
    """A batch that looks at its tensor when it is made."""

    ids: torch.Tensor

    def __post_init__(self):
        assert self.ids.ndim == 2


def test_where_an_example_is_can_be_told_whatever_class_it_has():
    """Its tensors are read and not replaced."""
    assert Inputs.of((Checked(torch.zeros(2, 3)),), torch.float32).device == torch.device("cpu")


class Asked(nn.Linear):
    """Reads a number from its data, without which no walk tells what steps change."""

    def forward(self, x):
        return super().forward(x) * x.sum().item()


def test_a_copy_that_lies_in_the_same_memory_is_taken_from_what_is_free(monkeypatch):
    """Of 400 MiB it takes 128: steps may take 0.8 of what it leaves, beside the module itself."""
    keep, copied = SavedState.keep, []

    def kept(self, parameters):
        copied.extend(parameters)
        return keep(self, copied[-1:])

    monkeypatch.setattr(SavedState, "keep", kept)
    monkeypatch.setattr(host, "available_memory_bytes", lambda: 400 * MIB - num_bytes(copied))
    module = Asked(8192, 4096, bias=False)
    result = cb.autotune_module(module, (8192,), max_batch_size=2, device="cpu", budget=1.0)
    assert num_bytes(copied) == 128 * MIB
    assert result.limits["memory_bytes"] == int(0.8 * 272 * MIB) + 128 * MIB
    lowered = "Memory is limited to 345.60 MiB: a copy of the parameters that its steps change takes the rest."
    assert lowered in result.reasons
    result = cb.autotune_module(module, (8192,), max_batch_size=2, device="cpu", budget=1.0, memory_limit=200 * MIB)
    assert result.limits["memory_bytes"] == 200 * MIB
