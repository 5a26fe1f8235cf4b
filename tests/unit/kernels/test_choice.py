"""The choice of variants: timed once by a made-up clock, kept, and reused."""

from __future__ import annotations

import logging
import types

import attrs
import pytest

from cubatch.errors import DeviceFailed, UnsupportedDtype
from cubatch.hardware import catalogue, probe
from cubatch.kernels import choice as choices
from cubatch.kernels.choice import TimedChoice, Winners
from cubatch.kernels.problem import Problem
from cubatch.kernels.ranking import SplitKernel, of_phases, other_slices, ranked, ranking
from cubatch.kernels.transposing import ranking_transposed
from cubatch.kernels.variant import kernels
from cubatch.measure import kernel_context
from tests.unit.launch_fakes import FakeDevice

V100, A100 = catalogue.find("v100-sxm2-16gb"), catalogue.find("a100-sxm4-40gb")
PROBLEM = Problem("conv2d_fprop", "float32", 64 * 56 * 56, 128, 576, vector=4)
CONTENDERS = ranked(PROBLEM, V100)[: choices.CONTENDERS]


def winners(path=None, gpu="V100", sources="abc", *, overlaps=False):
    """The file of winners."""
    return Winners(path, gpu=gpu, sources=sources, overlaps=overlaps)


def choice(device, kept=None, seconds=10.0):
    """A choice on a made-up device."""
    return TimedChoice(lambda: device.clock, kept or winners(), seconds)


def taking(*seconds):
    """Say how long the contenders take, in the order of the ranking."""
    return {kernel.name: taken for kernel, taken in zip(CONTENDERS, seconds, strict=False)}


def test_the_fastest_of_the_contenders_wins_not_the_first_of_the_ranking():
    """What was measured decides, where the ranking would have chosen another."""
    device = FakeDevice(taking(3e-3, 1e-3, 2e-3))
    assert choice(device)(PROBLEM, V100, device.prepare).kernel == CONTENDERS[1]
    assert set(device.launched) == {kernel.name for kernel in CONTENDERS}


def refusing(device, refused, status):
    """Bind as a device does, but for some variants that the driver does not take."""

    def prepare(split):
        if split.kernel in refused:
            raise DeviceFailed.by_driver(f"launching {split.kernel.name}", status)
        return device.prepare(split)

    return prepare


def test_a_contender_that_the_driver_refuses_leaves_the_choice_to_the_others(caplog):
    """The fastest of those that run wins; where none does, the ranking's first is the answer, and nothing is kept."""
    device = FakeDevice(taking(1e-3, 3e-3, 2e-3, 4e-3))
    assert choice(device)(PROBLEM, V100, refusing(device, CONTENDERS[:1], 1)).kernel == CONTENDERS[2]
    assert f"{CONTENDERS[0].name} is left out" in caplog.text
    kept = winners()
    assert choice(device, kept)(PROBLEM, V100, refusing(device, CONTENDERS, 1)).kernel == CONTENDERS[0]
    assert not kept._known


def test_a_contender_that_breaks_the_device_ends_the_choice():
    """After an illegal address nothing more runs in this process."""
    device = FakeDevice(taking(1e-3))
    with pytest.raises(DeviceFailed):
        choice(device)(PROBLEM, V100, refusing(device, CONTENDERS[1:2], 700))


def test_a_problem_is_timed_once():
    """The second question about the same problem launches nothing."""
    device = FakeDevice(taking(3e-3, 1e-3))
    chosen = choice(device)
    first = chosen(PROBLEM, V100, device.prepare)
    launched = device.launched.total()
    assert chosen(PROBLEM, V100, device.prepare) == first
    assert device.launched.total() == launched


def test_a_winner_holds_for_batches_with_as_many_blocks_on_the_busiest_sm():
    """One more row of pixels changes no block count, so the choice is reused; twice the batch is timed anew."""
    device = FakeDevice(taking(3e-3, 1e-3))
    chosen = choice(device)
    chosen(PROBLEM, V100, device.prepare)
    launched = device.launched.total()
    chosen(attrs.evolve(PROBLEM, m=PROBLEM.m - 1), V100, device.prepare)
    assert device.launched.total() == launched
    chosen(attrs.evolve(PROBLEM, m=4 * PROBLEM.m), V100, device.prepare)
    assert device.launched.total() > launched


def test_slices_count_as_blocks_of_the_busiest_sm():
    """A filter's gradient has the tiles of the filter at every batch; a deeper one is cut into more slices."""
    device = FakeDevice({})
    chosen = choice(device)
    shallow, deep = (Problem("conv2d_wgrad", "float32", 64, 576, depth, vector=4) for depth in (2048, 50176))
    chosen(shallow, V100, device.prepare)
    launched = device.launched.total()
    chosen(shallow, V100, device.prepare)
    assert device.launched.total() == launched
    chosen(deep, V100, device.prepare)
    assert device.launched.total() > launched


WGRAD = Problem("conv2d_wgrad", "float32", 64, 576, 50176, vector=4)


@pytest.mark.parametrize("side", ["/2", "*2"])
def test_the_fastest_is_timed_with_fewer_and_with_more_slices(side, tmp_path):
    """The model's count of slices stands in for no timing: half or twice as many win where they are faster, for good.

    A batch at which the GPU has as much to do, and another for which no time is left, take the same side.
    """
    path = tmp_path / "kernels.sqlite3"
    best = SplitKernel.modelled(WGRAD, ranked(WGRAD, V100)[0], V100)
    others = other_slices(WGRAD, best.kernel, V100)
    assert others["/2"] < best.slices < others["*2"]
    device = FakeDevice({best.kernel.name: 2e-3, (best.kernel.name, others[side]): 1e-3})
    chosen = choice(device, winners(path))
    assert chosen(WGRAD, V100, device.prepare) == SplitKernel(best.kernel, others[side])
    again = FakeDevice({})
    assert choice(again, winners(path))(WGRAD, V100, again.prepare) == SplitKernel(best.kernel, others[side])
    assert not again.launched
    chosen.seconds = 0.0
    deeper = attrs.evolve(WGRAD, k=2 * WGRAD.k)
    found = chosen(deeper, V100, device.prepare)
    assert found == SplitKernel(best.kernel, other_slices(deeper, best.kernel, V100)[side])


@pytest.mark.parametrize("is_faster", [False, True])
def test_phases_are_finished_in_registers_where_that_is_faster(is_faster):
    """A strided gradient keeps its fastest usual variant unless that of phases, timed against it alone, is faster."""
    h200 = catalogue.find("h200-sxm")
    problem = Problem("conv2d_dgrad", "float16", 256 * 28 * 28, 128, 288, phases=4, vector=8)
    best = ranked(problem, h200)[0]
    phased = of_phases(problem, best)
    assert (best.family, phased.operation) == ("hopper", "conv2d_dgrad_phases")
    device = FakeDevice({best.name: 2e-3, phased.name: 1e-3 if is_faster else 3e-3})
    chosen, kept = SplitKernel(phased if is_faster else best), winners()
    assert choice(device, kept)(problem, h200, device.prepare) == chosen
    assert {name for name in device.launched if "_phases_" in name} == {phased.name}
    assert choice(FakeDevice({}), kept)(problem, h200, device.prepare) == chosen


@pytest.mark.parametrize("is_faster", [False, True])
def test_operands_are_transposed_where_that_is_faster(is_faster):
    """The usual variants are timed as before; the best of the others is timed against the fastest, or not chosen."""
    h200, problem = catalogue.find("h200-sxm"), Problem("gemm_tn", "tf32", 768, 3072, 25216, vector=4)
    usual, best = ranked(problem, h200), SplitKernel.modelled(problem, ranked(problem, h200)[0], h200)
    _, slices, first = ranking_transposed(problem, h200)[0]
    device = FakeDevice({best.kernel.name: 2e-3, first.name: 1e-3 if is_faster else 3e-3})
    chosen, kept = SplitKernel(first, slices) if is_faster else best, winners()
    assert choice(device, kept)(problem, h200, device.prepare) == chosen
    assert set(device.launched) == {first.name, *(kernel.name for kernel in usual[: choices.CONTENDERS])}
    assert choice(FakeDevice({}), kept)(problem, h200, device.prepare) == chosen
    assert choice(FakeDevice({}))(problem, h200, None) == best


def test_the_nearest_winner_holds_where_it_has_no_other_slices():
    """With half the slices it won where there are many; a shallow gradient, of one slice, takes the variant itself."""
    best = ranked(WGRAD, V100)[0]
    shallow = attrs.evolve(WGRAD, k=64)
    assert not other_slices(shallow, best, V100)
    second = ranked(WGRAD, V100)[1]
    device = FakeDevice({second.name: 2e-3, (second.name, other_slices(WGRAD, second, V100)["/2"]): 1e-3})
    chosen = choice(device)
    assert chosen(WGRAD, V100, device.prepare).kernel == second
    chosen.seconds = 0.0
    contenders = {kernel.name for _, _, kernel in choices._contenders(ranking(shallow, V100))}
    found = chosen(shallow, V100, device.prepare).kernel
    assert found == (second if second.name in contenders else ranked(shallow, V100)[0])


def test_where_no_time_is_left_for_slices_the_models_count_wins():
    """The contenders' timings are kept though none of other slices could follow."""
    names = {kernel.name for _, _, kernel in choices._contenders(ranking(WGRAD, V100))}
    device = FakeDevice(dict.fromkeys(names, 1e-3))
    kept = winners()
    found = choice(device, kept, seconds=7.5e-3 * len(names))(WGRAD, V100, device.prepare)
    assert found == SplitKernel.modelled(WGRAD, ranked(WGRAD, V100)[0], V100)
    assert list(kept._known.values()) == [found.kernel.name]


def test_short_launches_are_read_several_at_a_time():
    """A launch far shorter than a reading's span is repeated, so that the clock's resolution does not decide."""
    device = FakeDevice(taking(1e-5, 1.1e-5, 1.1e-5, 1.1e-5))
    choice(device)(PROBLEM, V100, device.prepare)
    per_reading = (device.launched[CONTENDERS[0].name] - 2) / choices.TIMED_ROUNDS
    assert per_reading == pytest.approx(choices.SPAN_SECONDS / 1e-5, rel=0.01)


def test_without_time_left_nothing_is_launched_and_the_nearest_winner_holds():
    """When its seconds are spent, a choice takes the same layer's winner at the nearest batch, else the ranking."""
    device = FakeDevice(taking(3e-3, 2.9e-3))
    chosen = choice(device, seconds=0.053)  # 3 launches of 3, 2.9, 5 and 5 ms and one of the first two spend it
    chosen(PROBLEM, V100, device.prepare)
    launched = device.launched.total()
    assert chosen(attrs.evolve(PROBLEM, m=2 * PROBLEM.m), V100, device.prepare).kernel == CONTENDERS[1]
    other = Problem("gemm_nt", "float32", 512, 512, 512, vector=4)
    assert chosen(other, V100, device.prepare).kernel == ranked(other, V100)[0]
    assert device.launched.total() == launched


def test_a_choice_that_would_take_too_long_is_not_begun():
    """
    Four long launches of each contender must fit into what is left, seven shorter ones.

    After one that says they will not, none follow.
    """
    for seconds, launches in ((3e-3, 4), (1.9e-3, 7)):
        device = FakeDevice(taking(*[seconds] * 4))
        left = len(CONTENDERS) * launches * seconds - 1e-4
        chosen = choice(device, seconds=left)
        assert chosen(PROBLEM, V100, device.prepare).kernel == CONTENDERS[0]
        assert device.launched == {CONTENDERS[0].name: 2}
        assert chosen.seconds == pytest.approx(left - 2 * seconds)
        chosen = choice(device, seconds=left + 2e-4)
        chosen(PROBLEM, V100, device.prepare)
        assert set(device.launched) == {kernel.name for kernel in CONTENDERS}


def test_what_is_far_behind_is_read_once_and_long_launches_twice():
    """Two launches tell what a contender takes, then those within a quarter are read in turns: 5 times, or 2."""
    for seconds, rounds in ((1e-3, 5), (1e-2, 2)):
        device = FakeDevice(taking(1.1 * seconds, seconds, 1.3 * seconds, 3 * seconds))
        assert choice(device)(PROBLEM, V100, device.prepare).kernel == CONTENDERS[1]
        assert [device.launched[kernel.name] for kernel in CONTENDERS] == [2 + rounds, 2 + rounds, 3, 3]


def test_without_arrays_nothing_is_launched():
    """Asked without a way to launch, the choice is the ranking's, and no winner is kept."""
    device = FakeDevice({})
    chosen = choice(device)
    assert chosen(PROBLEM, V100).kernel == CONTENDERS[0]
    assert not device.launched


def test_winners_outlive_the_process(tmp_path):
    """A second process with the same file, GPU and sources times nothing."""
    path = tmp_path / "cache" / "kernels.sqlite3"
    device = FakeDevice(taking(3e-3, 2e-3, 1e-3))
    kept = winners(path)
    first = choice(device, kept)(PROBLEM, V100, device.prepare)
    again = FakeDevice({})
    assert choice(again, winners(path))(PROBLEM, V100, again.prepare) == first
    assert not again.launched


def test_what_won_is_told_without_a_gpu(tmp_path, monkeypatch):
    """The choice that a run left in its file, and the ranking's where there is none; nothing is launched or loaded."""
    monkeypatch.setattr(kernel_context, "kernels_sha256", lambda: "abc")
    path = tmp_path / "kernels.sqlite3"
    assert kernel_context.kept_choice(V100, path)(PROBLEM, V100).kernel == CONTENDERS[0]
    device = FakeDevice(taking(3e-3, 1e-3))
    choice(device, winners(path, gpu=V100.name))(PROBLEM, V100, device.prepare)
    assert kernel_context.kept_choice(V100, path)(PROBLEM, V100).kernel == CONTENDERS[1]
    assert kernel_context.kept_choice(V100, None)(PROBLEM, V100).kernel == CONTENDERS[0]
    assert kernel_context.kept_choice(A100, path)(PROBLEM, A100).kernel == ranked(PROBLEM, A100)[0]


@pytest.mark.parametrize("other", [{"gpu": "T4"}, {"sources": "def"}, {"overlaps": True}])
def test_winners_of_another_gpu_other_sources_or_overlap_do_not_hold(tmp_path, other):
    """A change of the GPU, of a kernel's source or of the overlap of launches times every problem again."""
    path = tmp_path / "kernels.sqlite3"
    device = FakeDevice(taking(3e-3, 1e-3))
    kept = winners(path)
    choice(device, kept)(PROBLEM, V100, device.prepare)
    again = FakeDevice(taking(1e-3, 3e-3))
    assert choice(again, winners(path, **other))(PROBLEM, V100, again.prepare).kernel == CONTENDERS[0]


def test_winners_with_and_without_overlap_have_rows_of_their_own(tmp_path):
    """Neither kind replaces the other, and both go with their GPU."""
    path = tmp_path / "kernels.sqlite3"
    for overlaps, winner in ((False, "first"), (True, "second")):
        winners(path, V100.name, overlaps=overlaps).put("product", winner, {})
    assert winners(path, V100.name).get("product") == "first"
    assert winners(path, V100.name, overlaps=True).get("product") == "second"
    assert choices.delete_winners(path, V100) == 2


def test_a_choice_without_a_gpu_prefers_winners_of_its_own_overlap(tmp_path, monkeypatch):
    """A problem that was timed only with the other kind of launches takes that winner."""
    monkeypatch.setattr(kernel_context, "kernels_sha256", lambda: "abc")
    path = tmp_path / "kernels.sqlite3"

    def chosen(*, overlaps):
        return kernel_context.kept_choice(V100, path, overlaps=overlaps)(PROBLEM, V100).kernel

    device = FakeDevice(taking(3e-3, 1e-3))
    choice(device, winners(path, V100.name, overlaps=True))(PROBLEM, V100, device.prepare)
    assert [chosen(overlaps=False), chosen(overlaps=True)] == [CONTENDERS[1]] * 2
    device = FakeDevice(taking(3e-3, 2e-3, 1e-3))
    choice(device, winners(path, V100.name))(PROBLEM, V100, device.prepare)
    assert [chosen(overlaps=False), chosen(overlaps=True)] == [CONTENDERS[2], CONTENDERS[1]]


def test_winners_are_forgotten_for_one_gpu_or_for_all(tmp_path):
    """Those of every source of that GPU and slice go, and it says how many; a file that is not there is not made."""
    path = tmp_path / "kernels.sqlite3"
    assert choices.delete_winners(path) == 0
    assert not path.exists()
    for gpu, sources in ((V100.name, "a"), (V100.name, "b"), (f"{A100.name} 3g.20gb", "a"), (A100.name, "a")):
        winners(path, gpu=gpu, sources=sources).put("product", "first", {})
    assert choices.delete_winners(path, V100) == 2
    assert choices.delete_winners(path, attrs.evolve(A100, mig="3g.20gb")) == 1
    assert winners(path, gpu=A100.name, sources="a").get("product") == "first"
    assert choices.delete_winners(path) == 1
    assert winners(path, gpu=A100.name, sources="a").get("product") is None


def test_a_file_that_cannot_be_used_costs_only_the_memory(tmp_path, caplog):
    """An unusable place is a warning that names it and a remedy; choices are made, and kept in memory."""
    blocked, damaged = tmp_path / "file", tmp_path / "damaged.sqlite3"
    blocked.write_text("in the way")
    damaged.write_bytes(b"SQLite format 3\0" + b"garbage" * 500)
    with caplog.at_level(logging.WARNING):
        winners(damaged)
        kept = winners(blocked / "kernels.sqlite3")
    assert str(blocked) in caplog.text
    assert "damaged" in caplog.text.replace(str(damaged), "")
    device = FakeDevice(taking(3e-3, 1e-3))
    chosen = choice(device, kept)
    assert chosen(PROBLEM, V100, device.prepare).kernel == CONTENDERS[1]
    assert chosen(PROBLEM, V100, device.prepare).kernel == CONTENDERS[1]


@pytest.mark.parametrize(
    ("dtype", "compiled"),
    [
        ("float32", {"float32"}),
        ("float16", {"float16"}),
        ("bfloat16", {"bfloat16"}),
        ("tf32", {"tf32", "float32"}),
    ],
)
def test_a_context_has_every_kernel_that_its_dtype_needs(monkeypatch, dtype, compiled):
    """tf32 only rounds what products multiply: all that is not one has float32 kernels."""
    given = []
    launcher = types.SimpleNamespace(compile=given.extend, overlaps=False)
    monkeypatch.setattr(kernel_context, "CudaLauncher", lambda device, *, overlaps: launcher)
    context = kernel_context.kernel_context(A100, dtype, overlaps=False, seconds=1.0, path=None)
    assert {kernel.dtype for kernel in given} == compiled & {kernel.dtype for kernel in kernels()}
    assert all(kernel.runs_on(80) for kernel in given)
    assert {"batch_norm_apply", "sgd", "gemm_nt"} <= {kernel.operation for kernel in given}
    assert not any(kernel.sums_norms for kernel in given)
    assert context.tf32 == (dtype == "tf32")


def test_launches_overlap_where_that_is_asked_for(monkeypatch):
    """Training by itself, whose steps are graphs, asks for none."""
    asked, launcher = [], types.SimpleNamespace(compile=list, overlaps=False)
    monkeypatch.setattr(kernel_context, "CudaLauncher", lambda device, *, overlaps: asked.append(overlaps) or launcher)
    for overlaps in (False, True):
        kernel_context.kernel_context(A100, "float16", overlaps=overlaps, seconds=1.0, path=None)
        kernel_context.usual_context(A100, "float16", overlaps=overlaps)
    kernel_context.usual_context(A100, "float16")
    assert asked == [False, False, True, True, False]


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_context_keeps_winners_under_the_overlap_of_its_launcher(monkeypatch, tmp_path, overlaps):
    """The launcher decides, not the request: the GPU or the driver may not support overlap."""
    path = tmp_path / "kernels.sqlite3"
    launcher = types.SimpleNamespace(compile=list, overlaps=overlaps)
    monkeypatch.setattr(kernel_context, "CudaLauncher", lambda *_, **__: launcher)
    monkeypatch.setattr(kernel_context, "kernels_sha256", lambda: "abc")
    context = kernel_context.kernel_context(A100, "float16", overlaps=True, seconds=1.0, path=path)
    context.chooser.winners.put("product", "first", {})
    assert winners(path, A100.name, overlaps=overlaps).get("product") == "first"
    assert winners(path, A100.name, overlaps=not overlaps).get("product") is None


def test_the_clock_of_a_choice_is_made_with_its_first_timing():
    """It takes memory of the current device, which the model's GPU is by then; one clock does for all choices."""
    device, made = FakeDevice(taking(3e-3, 1e-3)), []
    chosen = TimedChoice(lambda: made.append(True) or device.clock, winners(), 10.0)
    chosen(PROBLEM, V100)
    assert not made
    chosen(PROBLEM, V100, device.prepare)
    chosen(attrs.evolve(PROBLEM, m=4 * PROBLEM.m), V100, device.prepare)
    assert made == [True]


def test_training_on_a_cpu_has_no_kernels_and_one_dtype():
    """None means the array library's own calls; what the CPU does not take is refused."""
    assert kernel_context.usual_context(probe.device("cpu")) is None
    with pytest.raises(UnsupportedDtype):
        kernel_context.usual_context(probe.device("cpu"), "float16")
    with pytest.raises(UnsupportedDtype):
        kernel_context.usual_context(V100, "tf32")
