"""A module's runner keeps within the limit by what smaller sizes took, whatever the walk without data says."""

from __future__ import annotations

from collections import UserList

import pytest

import cubatch as cb

torch = pytest.importorskip("torch")

from cubatch.errors import OverLimit  # noqa: E402
from cubatch.frameworks import heap, module_runner, torch_module  # noqa: E402
from cubatch.frameworks.memory_meter import HostMeter  # noqa: E402
from cubatch.frameworks.torch_memory import num_bytes  # noqa: E402
from cubatch.frameworks.torch_module import TorchModule  # noqa: E402
from cubatch.hardware.memory_limit import MemoryLimit  # noqa: E402

nn = torch.nn
MIB = 2**20
SHAPE = (64, 1024)
BATCH = MIB // 4  # of a sample
WALKED = 3 * BATCH  # the input and two results


class Sized(nn.Module):
    """Keeps the sizes of its real calls."""

    def __init__(self):
        super().__init__()
        self.sizes = UserList()  # a list would get its old items back

    def forward(self, x):
        if not isinstance(x, torch._subclasses.FakeTensor):
            self.sizes.append(len(x))
        return x.relu().tanh()


class Device:
    """A device on which a step takes `base` bytes and `each` a sample beside what the batch itself takes."""

    def __init__(self, module, base, each):
        self.module, self.base, self.each, self.grain, self.scatter = module, base, each, 0, 0.08
        self.remedy = "Use a device that scatters less."

    def start(self):
        """Count from here."""

    def settle(self):
        """It has no heap."""

    def tidy(self):
        return False

    def peak(self):
        return self.base + self.each * self.module.sizes[-1]


@pytest.fixture
def on_device(monkeypatch):
    """Have steps take what a device says, and give the bytes of a step with its batch."""

    def chosen(module, base, each):
        device = Device(module, base, each)
        monkeypatch.setattr(module_runner, "HostMeter", lambda: device)
        return lambda n: n * BATCH + base + each * n

    return chosen


def tuned(module, budget=5.0, **options):
    return cb.autotune_module(module, SHAPE, device="cpu", budget=budget, **options)


@pytest.mark.parametrize("times", [0.5, 1, 3, 8], ids=lambda times: f"{times} times the walk")
def test_no_size_above_the_limit_is_tried_and_the_largest_comes_near_it(on_device, times):
    """A library that takes half or eight times what was walked: learned from small sizes, in both directions."""
    module = Sized()
    takes = on_device(module, 0, int(times * WALKED) - BATCH)
    limit = takes(100)
    runner = runner_of(module, limit)
    facts = runner.look(seconds=10.0, top=None, trace_seconds=60.0)
    assert max(module.sizes) <= 100
    assert facts["largest"] == pytest.approx(100, rel=0.25)
    for size in (200, 130, 101):
        with pytest.raises(OverLimit) as refused:
            runner.prepare(size)
        assert not refused.value.remedy  # these do not fit
    runner.prepare(91)  # after some between the largest that was looked at and this
    runner.release()
    assert max(module.sizes) == 91
    assert all(row["measured_bytes"] == takes(row["batch_size"]) for row in runner.history)
    assert all(row["predicted_bytes"] == pytest.approx(row["measured_bytes"], rel=0.05) for row in runner.history[2:])
    tuned(module, memory_limit=limit)
    assert max(module.sizes) <= 100


class Eights(Sized):
    """Takes multiples of eight samples; `reads` their values, so that it cannot be traced."""

    def __init__(self, *, reads):
        super().__init__()
        self.reads = reads

    def forward(self, x):
        if len(x) % 8:
            raise ValueError(f"{len(x)} is no multiple of 8")
        if self.reads:
            float(x.sum().numpy())
        return super().forward(x)


@pytest.mark.parametrize("reads", [False, True], ids=["traced", "not traced"])
@pytest.mark.parametrize("options", [{}, {"multiple_of": 8}])
def test_sizes_that_a_module_does_not_take_do_not_keep_its_memory_from_being_known(on_device, options, reads):
    """Traces and steps of 2 samples raised, so that it was refused, or a size failed in place of a smaller one."""
    module = Eights(reads=reads)
    takes = on_device(module, 0, 3 * WALKED)
    result = tuned(module, memory_limit=takes(100), **options)
    assert result.recommended
    assert result.largest_batch_size is not None
    assert 16 <= max(module.sizes) <= 100
    failed = {m.batch_size for m in result.measurements if m.status == "error"}
    assert all(size % 8 for size in failed)
    assert not (options and failed)
    assert any("could not be traced" in reason for reason in result.reasons) == reads


class Unseen(Sized):
    """Reads values, so that it cannot be traced."""

    def forward(self, x):
        float(x.sum().numpy())
        return super().forward(x)


@pytest.mark.parametrize("listed", [{"batch_sizes": [4, 32, 350]}, {}], ids=["listed", "searched"])
def test_without_a_trace_memory_that_does_not_grow_is_told_from_what_does(on_device, listed):
    """A step of two takes as much as 62 samples, of which 60 do not grow; 16 times as many as that would not fit."""
    module = Unseen()
    takes = on_device(module, 60 * BATCH, 0)
    result = tuned(module, memory_limit=takes(400), **listed)
    assert max(module.sizes) == 350 if listed else 240 < max(module.sizes) <= 400
    assert result.largest_batch_size == pytest.approx(400, rel=0.1)


def test_memory_is_learned_at_sizes_that_a_module_takes(on_device):
    """The nearest one to 88 that is sure to fit may be no multiple of 8, and the error was that of 88."""
    module = Eights(reads=False)
    takes = on_device(module, 0, 3 * WALKED - BATCH)
    runner = runner_of(module, takes(100))
    runner.look(seconds=10.0, top=16, trace_seconds=60.0)
    assert module.sizes[-1] == 8
    for limit in (100, 120, 140):
        runner = runner_of(module, takes(limit))
        runner.prepare(88)
        runner.release()
    assert max(module.sizes) == 88


def test_what_is_said_of_sizes_that_did_not_run_is_what_is_known_at_last(on_device):
    """Steps take four times what a walk says, which 600 of them tell of 2000, and of the largest that fits."""
    module = Sized()
    takes = on_device(module, 0, 3 * MIB)
    result = tuned(module, memory_limit=takes(1000), batch_sizes=[2, 600, 2000], budget=20.0)
    assert result.largest_batch_size == pytest.approx(1000, rel=0.01)
    assert [m.predicted_peak_bytes for m in result.measurements][-1] == pytest.approx(takes(2000), rel=0.01)


def test_a_size_that_only_scatter_keeps_from_running_names_what_helps(on_device):
    """A module of 60 MiB ran at 1 and 2 samples in the user's process, where a worker can run 48."""
    module = Sized()
    takes = on_device(module, 0, 2 * MIB)
    runner = runner_of(module, takes(100))
    runner.meter.scatter = 1.0
    runner.prepare(40)
    with pytest.raises(OverLimit) as refused:
        runner.prepare(80)
    assert refused.value.remedy == runner.meter.remedy
    assert max(module.sizes) < 80


def test_a_size_that_took_more_than_it_may_is_out_of_memory(on_device):
    """Where something jumps, as a library that chooses another algorithm, the size that met it is no answer."""
    module = Sized()
    takes = on_device(module, 0, MIB)
    limit = takes(100)

    class Jumps(Device):
        def peak(self):
            return super().peak() + (1000 * MIB if self.module.sizes[-1] > 50 else 0)

    runner = runner_of(module, limit)
    runner.meter = Jumps(module, 0, MIB)
    runner.prepare(40)
    with pytest.raises(cb.OutOfMemory):
        runner.prepare(60)
    with pytest.raises(OverLimit):
        runner.prepare(60)
    runner.prepare(45)


def test_a_heap_is_kept_in_order_only_where_it_might_take_more_than_the_limit(on_device):
    """
    A device whose steps take up to twice as much until its heap is put in order, by chance.

    Sizes that fit also then are measured as they are; larger ones in order, and come near the limit, never above it.
    """
    module = Sized()
    takes = on_device(module, 0, MIB)
    limit = takes(400)

    class Heap(Device):
        scatter, is_tidy = 1.0, False

        def tidy(self):
            was_tidy, self.is_tidy, self.scatter = self.is_tidy, True, 0.08
            return not was_tidy

        def peak(self):
            size = self.module.sizes[-1]
            return super().peak() * (1 if self.is_tidy or size % 3 else 2)

    runner = runner_of(module, limit)
    runner.meter = Heap(module, 0, MIB)
    runner.prepare(40)
    runner.prepare(99)
    assert not runner.meter.is_tidy
    remains = {"code": "state_remains", "values": {"attributes": "sizes"}}  # of `Sized`, which is no list
    assert runner.remarks == [remains]
    runner.prepare(350)
    assert runner.meter.is_tidy
    compacted = {"code": "heap_compacted", "values": {"batch_size": 350}}
    assert [remark for remark in runner.remarks if remark != remains] == [compacted]
    runner.release()
    assert max(row["measured_bytes"] for row in runner.history) <= limit


def test_all_steps_but_first_ones_meet_the_same_bounds(monkeypatch, malloc_is_not_chosen):
    """They are raised before any step, and again after the first with a size, where the heap is kept in order.

    What was free in the heap is held no longer than that first step.
    """
    if not heap.is_movable():
        pytest.skip("no glibc")
    monkeypatch.setattr(heap, "_is_owned", True)
    met = []
    held = [object()]
    monkeypatch.setattr(heap, "keep_apart", lambda: met.append("apart") or held)
    monkeypatch.setattr(heap, "put_together", lambda free: met.append(("together", free is held)))

    class Seen(Sized):
        def forward(self, x):
            if not isinstance(x, torch._subclasses.FakeTensor):
                met.append("step")
            return super().forward(x)

    runner = runner_of(Seen(), 2**40)
    runner.prepare(4)
    assert met[0] == ("together", False)
    assert "apart" not in met
    assert runner.meter.tidy()
    met.clear()
    runner.prepare(8)
    runner.step()
    assert met[-4:] == ["apart", "step", ("together", True), "step"]


def runner_of(module, limit):
    subject = TorchModule(module, SHAPE, mode="inference")
    return subject.ready().runner(limit, 0)


def test_ranks_share_what_a_copy_of_their_parameters_leaves(monkeypatch):
    """Each of three may take a third of the free memory, and what its module holds already."""
    monkeypatch.setattr(torch_module.hardware_memory, "memory_limit", lambda _: MemoryLimit(900, 900, ""))
    with TorchModule(nn.Linear(64, 64), (64,), mode="inference") as subject:
        assert subject.put_aside(None, 2**20) == 900 + subject.held_bytes
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 3)
        assert subject.put_aside(None, 2**20) == 300 + subject.held_bytes
        assert subject.put_aside(None, 100) == 100


def test_what_was_not_told_is_not_learned(on_device, monkeypatch):
    """Where the meter tells nothing, the walk is all there is, and its largest size is tried."""
    module = Sized()
    on_device(module, 0, 0)
    monkeypatch.setattr(Device, "peak", lambda self: None)
    runner = runner_of(module, 100 * MIB)
    facts = runner.look(seconds=10.0, top=None, trace_seconds=60.0)
    assert runner.history == []
    largest = runner._planned().largest(100 * MIB)
    assert facts["largest"] == largest
    runner.prepare(largest)
    with pytest.raises(OverLimit):
        runner.prepare(2 * largest)


class Greedy(Sized):
    """Takes five times what it is given where there are data, of which a walk without them sees nothing."""

    def forward(self, x):
        if not isinstance(x, torch._subclasses.FakeTensor):
            torch.ones(5 * x.numel())
        return super().forward(x)


@pytest.fixture
def host_limit():
    """512 MiB, if this system tells the high water of the resident set."""
    meter = HostMeter()
    meter.start()
    if meter.peak() is None:
        pytest.skip("the resident set's high water is unknown here")
    return 512 * MIB


def test_the_resident_set_bounds_what_is_tried_on_the_cpu(host_limit):
    """With the real meter: 600 samples are 450 MiB by the walk, but would take 900, which 16 of them tell."""
    assert 600 * WALKED < host_limit < 600 * 6 * BATCH
    module = Greedy()
    runner = runner_of(module, host_limit)
    runner.prepare(16)
    with pytest.raises(OverLimit):
        runner.prepare(600)
    assert max(module.sizes) < 600
    result = tuned(Greedy(), memory_limit="512MiB", batch_sizes=[16])
    assert result.measurements[0].peak_bytes >= 16 * 5 * BATCH


def test_a_module_in_the_users_process_leaves_its_allocator_alone(monkeypatch, host_limit, malloc_is_not_chosen):
    """A size that takes 73 % of the limit is refused instead of calling `mallopt`, and no note claims a call."""
    calls = []
    monkeypatch.setattr(heap, "_set", calls.append)
    runner = runner_of(Sized(), host_limit)
    runner.prepare(16)
    with pytest.raises(OverLimit):
        runner.prepare(500)
    result = tuned(Sized(), memory_limit="512MiB", batch_sizes=[16, 500])
    assert calls == []
    assert result.measurements[-1].status != "ok"
    assert not any("mallopt" in reason or heap.format_variables(heap.RAISED) in reason for reason in result.reasons)


class Graph(nn.Module):
    """Multiplies by a buffer that is mostly zero."""

    def __init__(self, buffer):
        super().__init__()
        self.register_buffer("buffer", buffer)

    def forward(self, x):
        return (self.buffer @ x.T).T


@pytest.mark.filterwarnings("ignore:Sparse")  # PyTorch's, that they are new
@pytest.mark.parametrize(("layout", "held"), [("coo", 3 * (2 * 8 + 4)), ("csr", 5 * 8 + 3 * (8 + 4)), ("csc", 76)])
def test_a_module_with_a_sparse_buffer_is_tuned_and_holds_its_indices_and_values(layout, held):
    """Three floats of a matrix of four by four, with places of eight bytes; of its steps no walk tells."""
    values, places, starts = torch.tensor([1.0, 2.0, 3.0]), torch.arange(3), torch.tensor([0, 1, 2, 3, 3])
    given = (torch.stack([places, places]),) if layout == "coo" else (starts, places)
    module = Graph(getattr(torch, f"sparse_{layout}_tensor")(*given, values, (4, 4)))
    assert num_bytes(module.buffers()) == held
    result = cb.autotune_module(module, (4,), max_batch_size=2, device="cpu", budget=1.0)
    assert any("from measured steps alone" in reason for reason in result.reasons)
