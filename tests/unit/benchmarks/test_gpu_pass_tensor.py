"""What the GPU pass does on tensor cores: its lists, the families it may leave out, its tables."""

from __future__ import annotations

from types import SimpleNamespace

import attrs
import pytest

from benchmarks import gpu_pass, render
from benchmarks.gpu import cases as gpu_cases
from benchmarks.gpu import items, plan
from benchmarks.gpu import stages as gpu_stages
from benchmarks.gpu_pass import Run
from benchmarks.pages import gpu
from benchmarks.pages.gpu_rows import limit_of, rows_of
from cubatch.bench import cases, measure
from cubatch.bench.implementations import TENSOR_FAMILIES
from cubatch.errors import CompileError
from cubatch.hardware import catalogue
from cubatch.kernels import variant
from cubatch.network import layers as kinds
from cubatch.network.passes import Pass
from tests.unit.benchmarks.passes import FACTS, conv_case, entry, item_of, ran, result_of

H200, V100 = catalogue.find("h200-sxm"), catalogue.find("v100-sxm2-16gb")


# --- lists ---------------------------------------------------------------------------------------------------------


def test_odd_shapes_have_the_channels_that_tensor_cores_stumble_over():
    """8, 24, 64, 100 and 512 on either side, H unlike W, stride 2, dilation 2, pads of one side, several N."""
    found = gpu_cases.odd_products()
    assert [case.name for case in found] == [case.name for case in gpu_cases.odd_products()]
    assert {case.name for case in found} != {case.name for case in gpu_cases.odd_products(seed=1)}
    for dtype in ("float16", "bfloat16", "tf32"):
        layers = [case.layer for case in found if case.dtype == dtype and isinstance(case.layer, kinds.Conv2d)]
        assert {8, 24, 64, 100, 512} <= {layer.c for layer in layers} & {layer.k for layer in layers}
        assert all(layer.h != layer.w for layer in layers)
        assert any(layer.stride[0] == 2 for layer in layers)
        assert any(layer.dilation[0] == 2 for layer in layers)
        assert any(layer.pad[0] != layer.pad[1] for layer in layers)
        endings = {(c.operation, term) for c in found if c.dtype == dtype for term in c.epilogue}
        for product in ("conv2d", "linear"):
            assert {(product, term) for term in ("scale", "shift", "residual", "relu")} <= endings
            assert {(f"{product}_dgrad", term) for term in ("residual", "mask")} <= endings
    assert max(case.num_bytes for case in found) < 32 * 2**20


@pytest.mark.parametrize(
    "slug",
    [
        "t4",
        *(pytest.param(one, marks=pytest.mark.thorough) for one in ("h200-sxm", "v100-sxm2-16gb", "a100-sxm4-40gb")),
    ],
)
def test_every_variant_on_tensor_cores_is_checked(slug):
    """By the cases that come first in the stage: none is left to chance, whatever the GPU."""
    device = catalogue.find(slug)
    arch = items.arch_of(device)
    wanted = {k.name for k in variant.kernels() if k.family in TENSOR_FAMILIES and k.runs_on(arch)}
    launched = {
        launch.kernel
        for case in gpu_cases.odd_products()
        if arch >= 80 or case.dtype != "tf32"
        for entry in measure.plan(case, device, variants="all", compiled=False).entries
        for launch in entry.launches
    }
    assert wanted
    assert wanted <= launched


def test_the_facts_are_whole_whatever_else_is_chosen():
    """They say which device a file is of; of the other stages an expression takes the items that it finds."""
    facts, layers = (gpu_stages.stage_named(name) for name in ("facts", "gemm"))
    assert [item.name for item in gpu_stages.chosen(facts, H200, ", float16")][:2] == ["libraries", "copies"]
    assert {item.case.dtype for item in gpu_stages.chosen(layers, H200, ", float16")} == {"float16"}


def test_the_commands_of_the_readme_choose_what_they_say():
    """float32 alone by leaving out the other types, whose names say so."""
    text = (render.ROOT / "benchmarks/gpu/README.md").read_text()
    only = "^(?!.*, [bt]?f[l3])"
    assert f"--only '{only}'" in text
    for name in ("gemm", "steps"):
        stage = gpu_stages.stage_named(name)
        found = gpu_stages.chosen(stage, H200, only)
        assert found == [item for item in found if item.case.dtype == "float32"]
        assert len(found) == sum(item.case.dtype == "float32" and not item.keyword for item in stage.items(H200))


# --- families that hang --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variants", ["chosen", "ranked", "all"])
def test_a_family_that_is_left_out_runs_nowhere(variants):
    """What else can run a case does."""
    case = cases.gemm(256, 256, 256, dtype="float16")
    families = {way.main.family for way in measure.ways(case, H200, variants, ("hopper", "naive"))}
    assert families
    assert "hopper" not in families
    only = measure.ways(case, H200, "ranked", [f for f in {k.family for k in variant.kernels()} if f != "hopper"])
    assert {way.main.family for way in only} == {"hopper"}


def test_what_is_left_out_reaches_the_stages(monkeypatch, tmp_path):
    """By the child's command line, into its session, and into the file; a kernel that falls, into all that follows."""
    commands = []

    def stand_in(command, run, save, skipped, _):
        commands.append(command(0, 5.0))
        skipped["bad"] = "an illegal address"
        save()

    monkeypatch.setattr(gpu_pass, "run_stage", stand_in)
    stages = [gpu_stages.stage_named("gemm"), gpu_stages.stage_named("steps")]
    found = gpu_pass.run_all(
        stages,
        tmp_path / "f.json",
        H200,
        seconds=60.0,
        only="",
        without=["hopper", "mma"],
        skipped=["slow"],
        facts=FACTS,
    )
    assert found["without"] == ["hopper", "mma"]
    assert found["skipped_kernels"] == {"slow": "named by --skip-kernel", "bad": "an illegal address"}
    assert commands[0][-6:] == ["--without", "hopper", "--without", "mma", "--skip-kernel", "slow"]
    assert commands[1][-4:] == ["--skip-kernel", "slow", "--skip-kernel", "bad"]
    opened = []
    monkeypatch.setattr(items, "session_here", lambda *_, **given: opened.append(given) or SimpleNamespace(device=H200))
    with (tmp_path / "lines").open("w") as lines, pytest.raises(AttributeError):
        gpu_pass.child(
            stages[0], start=0, seconds=5.0, only="gemm nt 4096", lines=lines, without=["hopper"], skipped=["bad"]
        )
    assert opened == [{"without": ["hopper"], "skipped": ["bad"], "small": False}]


def test_a_stage_goes_on_where_every_tenth_item_hangs():
    """Only items that fall one behind the other end it: what some variant breaks is noted, the others are measured."""
    run, _ = ran(
        """
        for index in range(start, 24):
            if index % 3 == 0:
                say(begins=index, name=f"item {index}", limit=5)
                sys.exit("broken")
            do(index)
        """
    )
    statuses = [item["status"] for item in run.items]
    assert (run.status, len(statuses), statuses.count("crashed")) == ("ok", 24, 8)
    assert isinstance(run, Run)


# --- tables --------------------------------------------------------------------------------------------------------


def tensor_case(dtype, batch_size=256, pass_=Pass.FPROP):
    """A convolution of the goal's network."""
    layer = kinds.Conv2d(h=8, w=8, c=8, k=8, r=3, s=3, pad=1)
    return attrs.evolve(cases.of_layer(layer, pass_, batch_size, dtype), layers=("resnet50/a",))


def of_family(family, seconds, ratio):
    """An entry of a family."""
    return entry(seconds, ratio=ratio) | {"label": f"{family} 128x128x64"}


STEP = {
    "name": "resnet50, batch 256, float16", "status": "ok", "network": "resnet50", "dtype": "float16",
    "batch_size": 256, "images_per_second": {"cubatch": 2560.4, "PyTorch": 3200.0}, "ratio": 0.8,
    "ratio_interval": [0.79, 0.81], "timings": {},
}  # fmt: skip
HOPPER, SLOW = of_family("hopper", 1e-3, 2.0), of_family("hopper", 4e-3, 0.5)
SYNTHETIC = result_of(
    gemm=(
        [
            item_of(cases.gemm(64, 64, 64), [entry(1e-3, ratio=0.5)]),
            item_of(
                cases.gemm(64, 64, 64, dtype="float16"), [of_family("hopper", 1e-3, 2.0), of_family("mma", 2e-3, 1.0)]
            ),
            item_of(
                cases.gemm(64, 64, 32, dtype="float16"), [of_family("hopper", 4e-3, 0.5), of_family("mma", 2e-3, 1.0)]
            ),
            item_of(cases.gemm(64, 64, 64, dtype="bfloat16"), [of_family("hopper", 1e-3, 0.9)]),
        ],
        0,
    ),
    layers=(
        [
            item_of(tensor_case("float16"), [of_family("hopper", 1e-3, 1.1)]),
            item_of(tensor_case("float16", pass_=Pass.WGRAD), [of_family("mma", 1e-3, 0.7)]),
            item_of(tensor_case("bfloat16"), [of_family("mma", 1e-3, 9.0)]),
            item_of(conv_case(3), [entry(1e-3, ratio=0.4)]),
        ],
        0,
    ),
    fused=([item_of(tensor_case("float16"), [of_family("hopper", 1e-3, 1.1)])], 2),
    training=([STEP, STEP | {"dtype": "bfloat16", "ratio": 1.5}, STEP | {"status": "error"}], 0),
)


@pytest.mark.parametrize(
    "line",
    [
        "| matrix products, float32: mean ratio to cuBLAS | 0.95 | 0.500 | 1 | **no** |",
        "| matrix products, float16: mean ratio to cuBLAS | 1.00 | 1.414 | 2 | yes |",
        "| matrix products, bfloat16: mean ratio to cuBLAS | 1.00 | 0.900 | 1 | **no** |",
        "| resnet50, float16, batch 256, fprop: mean ratio to cuDNN | 1.00 | 1.100 | 1 | yes |",
        "| resnet50, float16, batch 256, wgrad: mean ratio to cuDNN | 1.00 | 0.700 | 1 | **no** |",
        "| resnet50, float16, batch 256, fused: mean ratio to cuDNN and separate kernels | 1.15 | 1.100 | 1 | **no** |",
        "| training step of resnet50, float16, batch 256: ratio to PyTorch eager | 1.00 | 0.800 | 1 | **no** |",
    ],
)
def test_goals_of_a_type_are_judged_by_that_type_alone(line):
    """The best of our families in each case, geometric mean; what has no case has no line."""
    assert line in gpu.goals(SYNTHETIC)
    assert "batch 32" not in gpu.goals(SYNTHETIC)


@pytest.mark.parametrize(
    "line",
    [
        "| gemm | float16 | hopper | 2 | 1.000 | 1 |",
        "| gemm | float16 | mma | 2 | 1.000 | 1 |",
        "| gemm | float32 | simt | 1 | 0.500 | 1 |",
        "| layers | float16 | mma | 1 | 0.700 | 1 |",
    ],
)
def test_families_are_compared_by_their_fastest_variant(line):
    """Mean ratio over the cases that a family runs, and in how many it was the fastest of ours."""
    assert line in gpu.families(SYNTHETIC)


def test_a_step_that_was_timed_with_all_rivals_counts_against_eager_too():
    """Whichever item has it; in inference it is no training step, and without eager there is nothing to compare."""
    figures = {"images_per_second": 1280.0, "ratio": 2.0, "ratio_interval": None, "failure": None}
    item = {
        "name": "x", "status": "ok", "network": "resnet50", "mode": "training", "dtype": "float16", "batch_size": 256,
        "cubatch": {"images_per_second": 2560.0}, "rivals": {"eager": figures, "compile": figures | {"ratio": 0.5}},
    }  # fmt: skip
    result = result_of(training=([item, item | {"mode": "inference"}, item | {"rivals": {"compile": figures}}], 0))
    lines = [line for line in gpu.training(result).splitlines() if line.startswith("| resnet50")]
    assert lines == ["| resnet50 | float16 | 256 | 2560 | 1280 | 2.00 |"]
    assert "ratio to PyTorch eager | 1.00 | 2.000 | 1 | yes |" in gpu.goals(result)


def test_what_misses_the_goal_of_its_type_is_slow():
    """1.1 is enough for a convolution, not for a fused one; 0.9 is not enough for bfloat16 products."""
    lines = [line for line in gpu.slow(SYNTHETIC).splitlines() if line.startswith(("| gemm", "| conv"))]
    assert [line.split(" | ")[2] for line in lines] == ["0.50", "0.90", "0.70", "0.40", "1.10"]


def test_what_limits_a_split_product_is_read_off_its_main_kernel():
    """Not off the sum of its slices, which has more blocks and is always full."""
    split = entry(1e-3, ratio=0.5, fill=0.4)
    split["launches"].append({**split["launches"][0], "kernel": "split_k_reduce", "grid": [999, 1, 1], "fill": 1.0})
    (row,) = rows_of(result_of(gemm=([item_of(cases.gemm(64, 64, 64), [split])], 0)), "gemm")
    assert "40.0 % of the SMs at work" in limit_of(row)


def test_a_dry_run_compiles_the_probes_too(monkeypatch, capsys):
    """One that does not compile is a problem before there is a GPU."""

    def refuse(found, arch):
        if "twins" in found.source:
            raise CompileError(found.name, arch, (), "line 7")
        return found

    monkeypatch.setattr(items.compiler, "compile_unit", refuse)
    assert gpu_pass.main(["--dry-run", "--stage", "facts"]) == 1
    assert capsys.readouterr().out.count("problem: ") == 3


def test_memory_plans_cover_every_type(monkeypatch, capsys):
    """A GPU that is too small for one is a problem of the dry run."""
    small = attrs.evolve(plan.hardware_memory.memory_limit(H200), bytes=1 << 30)
    monkeypatch.setattr(plan.hardware_memory, "memory_limit", lambda _: small)
    assert gpu_pass.main(["--dry-run", "--no-compile", "--stage", "memory"]) == 1
    out = capsys.readouterr().out
    assert "resnet50, training, batch 256, float16, cubatch needs" in out
