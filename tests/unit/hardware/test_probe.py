"""Devices of this machine with made-up GPUs, and the rules of `device=`, dtype and memory limit."""

from __future__ import annotations

import attrs
import pytest

import cubatch
from cubatch.errors import DeviceFailed, DeviceNotAvailable, InvalidArgument, UnknownName, UnsupportedDtype
from cubatch.hardware import arithmetic, catalogue, host, probe
from cubatch.hardware.facts import Device
from cubatch.kernels import survey
from cubatch.kernels.resources import recorded_figures
from cubatch.kernels.variant import kernels
from tests.unit.hardware.gpus import GIB, SLICE, T4, V100
from tests.unit.hardware.printed import TABLE

pytestmark = pytest.mark.usefixtures("gpus")  # whatever this machine has


def test_a_gpu_that_is_too_old_for_kernels_is_planned_and_predicted_for():
    """A K80 has occupancy and predictions of the vendor's libraries; what asks for kernels says what is missing."""
    k80 = cubatch.device("k80")
    found = cubatch.occupancy(
        compute_capability=list(k80.compute_capability), threads_per_block=256, registers_per_thread=128
    )
    assert (found.blocks_per_sm, found.limiters) == (4, ("registers",))  # twice the registers of other SMs
    assert cubatch.predict("lenet5", device=k80, batch_sizes=[8]).batch_size == 8
    assert cubatch.footprint("lenet5", device=k80).total > 0
    assert cubatch.candidates("lenet5", device=k80)[0].batch_size == 1
    for call in (
        lambda: cubatch.predict("lenet5", device="k80", library="cubatch"),
        lambda: cubatch.footprint("lenet5", device="k80", library="cubatch"),
        lambda: survey.needs(kernels()[0], "sm_37", recorded_figures()),
    ):
        with pytest.raises(InvalidArgument, match=r"sm_50 or newer.*No kernel is compiled for sm_37"):
            call()
    assert cubatch.predict("lenet5", device="jetson-agx-xavier-32gb", library="cubatch", batch_sizes=[8]).seconds


def test_the_cpu_is_a_device(monkeypatch):
    """Its name, threads, caches and memory are those of the machine; a peak rate is not known."""
    monkeypatch.setattr(host, "cpu_name", lambda: "AMD EPYC")
    monkeypatch.setattr(host, "cpu_threads", lambda: 2)
    monkeypatch.setattr(host, "cpu_caches", lambda: {"L2": 2**20})
    monkeypatch.setattr(host, "total_memory_bytes", lambda: 24 * GIB)

    (cpu,) = probe.devices()

    assert (cpu.name, cpu.kind, cpu.live) == ("AMD EPYC", "cpu", True)
    assert (cpu.threads, cpu.caches, cpu.memory_bytes) == (2, {"L2": 2**20}, 24 * GIB)
    assert (cpu.peak_flops_per_second, cpu.num_sms, cpu.compute_capability) == ({}, None, None)


def test_a_gpu_gets_the_catalogues_rates_and_keeps_its_own_facts(gpus):
    """What the driver says is never replaced: this board has more memory than the table says."""
    gpus(V100)

    gpu, cpu = probe.devices()

    assert (gpu.slug, gpu.architecture, gpu.tensor_cores) == ("v100-sxm2-16gb", "Volta", True)
    assert gpu.peak_flops_per_second == {"float32": 15.67e12, "float16": 125e12}
    assert gpu.peak_bytes_per_second == 897e9
    assert (gpu.memory_bytes, gpu.power_limit_watts) == (16_900_000_000, 250.0)
    assert (gpu.uuid, gpu.index, gpu.live, gpu.mig) == (V100.uuid, 0, True, None)
    assert cpu.kind == "cpu"


@pytest.mark.parametrize(
    "board",
    [
        attrs.evolve(V100, name="Tesla V100-SXM3-32GB"),  # not in the catalogue
        attrs.evolve(V100, name="NVIDIA A100"),  # a name that boards share
        attrs.evolve(V100, num_sms=72),  # the name of a board, and not its SMs
        attrs.evolve(V100, compute_capability=(7, 2)),  # nor its chip
    ],
)
def test_a_board_in_doubt_gets_no_rates(gpus, board):
    """Wrong peak rates would make a wrong roofline; none make none."""
    gpus(board)

    gpu = probe.devices()[0]

    assert (gpu.slug, gpu.peak_flops_per_second, gpu.peak_bytes_per_second) == ("", {}, None)
    assert (gpu.name, gpu.num_sms, gpu.tensor_cores) == (board.name, board.num_sms, True)


# What drivers say of boards that share a name: SMs, visible GiB, memory clock in MHz and bits of the bus.
SHARING = {
    "rtx-3060-12gb": ("NVIDIA GeForce RTX 3060", (8, 6), 28, 11.76, 7501, 192),
    "rtx-3060-8gb": ("NVIDIA GeForce RTX 3060", (8, 6), 28, 7.79, 7501, 128),
    "rtx-3080-10gb": ("NVIDIA GeForce RTX 3080", (8, 6), 68, 9.78, 9501, 320),
    "rtx-3080-12gb": ("NVIDIA GeForce RTX 3080", (8, 6), 70, 11.76, 9501, 384),
    "rtx-2060-6gb": ("GeForce RTX 2060", (7, 5), 30, 5.80, 7001, 192),
    "rtx-2060-12gb": ("NVIDIA GeForce RTX 2060", (7, 5), 34, 11.77, 7001, 192),
    "gtx-1650-gddr5": ("NVIDIA GeForce GTX 1650", (7, 5), 14, 3.82, 4001, 128),
    "gtx-1650-gddr6": ("NVIDIA GeForce GTX 1650", (7, 5), 14, 3.82, 6001, 128),
    "rtx-3060-ti-gddr6": ("NVIDIA GeForce RTX 3060 Ti", (8, 6), 38, 7.79, 7001, 256),
    "rtx-3060-ti-gddr6x": ("NVIDIA GeForce RTX 3060 Ti", (8, 6), 38, 7.79, 9501, 256),
    "rtx-4060-ti-16gb": ("NVIDIA GeForce RTX 4060 Ti", (8, 9), 34, 15.60, 9001, 128),
    "a100-pcie-80gb": ("NVIDIA A100", (8, 0), 108, 79.15, 1512, 5120),
}


def sharing_gpu(slug, **changes):
    name, capability, num_sms, gib, megahertz, bits = SHARING[slug]
    facts = {
        "name": name, "compute_capability": capability, "num_sms": num_sms, "memory_bytes": int(gib * GIB),
        "bytes_per_second": 2e6 * megahertz * bits / 8,
    }  # fmt: skip
    return attrs.evolve(V100, **(facts | changes))


@pytest.mark.parametrize("slug", SHARING)
def test_boards_of_one_name_are_told_apart_by_sms_and_memory(gpus, slug):
    """The driver's name alone would leave each of them without rates."""
    gpus(sharing_gpu(slug))

    gpu = probe.devices()[0]

    board = catalogue.find(slug)
    assert (gpu.slug, gpu.peak_flops_per_second) == (slug, board.peak_flops_per_second)
    assert (gpu.peak_bytes_per_second, gpu.tensor_cores) == (board.peak_bytes_per_second, board.tensor_cores)
    assert probe.resolve(slug).uuid == V100.uuid


@pytest.mark.parametrize(
    ("slug", "changes"),
    [
        ("gtx-1650-gddr5", {"bytes_per_second": None}),  # two boards differ in nothing else
        ("gtx-1650-gddr5", {"bytes_per_second": 160e9}),  # neither of them
        ("rtx-3060-12gb", {"memory_bytes": 6 * GIB}),  # a board that the catalogue does not have
        ("rtx-3060-12gb", {"memory_bytes": 13 * GIB}),
        ("rtx-3060-12gb", {"num_sms": 30}),
        ("rtx-3060-12gb", {"compute_capability": (8, 9)}),
        ("rtx-3060-12gb", {"name": "NVIDIA GeForce RTX 3060 MIG 1g.3gb", "mig": "1g.3gb"}),
    ],
)
def test_a_board_that_is_none_of_its_name_stays_unknown(gpus, slug, changes):
    """Nothing is taken for the nearest: another board would have other rates."""
    gpus(sharing_gpu(slug, **changes))
    assert (probe.devices()[0].slug, probe.devices()[0].peak_bytes_per_second) == ("", None)


def test_a_speed_that_the_driver_does_not_give_is_no_doubt_where_the_size_decides(gpus):
    """Virtual machines may report no memory clock."""
    gpus(sharing_gpu("rtx-3060-12gb", bytes_per_second=None))
    assert probe.devices()[0].slug == "rtx-3060-12gb"


def test_every_board_of_a_shared_name_can_be_told_from_the_others_or_from_none(gpus):
    """As its own row describes it, each is found as itself, or not at all where rows are alike."""
    found = {}
    for board in catalogue.all_devices():
        for name in [] if board.num_sms is None else board_names(board):
            facts = {"compute_capability": board.compute_capability, "num_sms": board.num_sms}
            memory = {"memory_bytes": int(0.97 * board.memory_bytes), "bytes_per_second": board.peak_bytes_per_second}
            gpus(attrs.evolve(V100, name=name, **facts, **memory))
            found[board.slug, name] = probe.devices()[0].slug
    assert {slug for (wanted, _), slug in found.items() if slug not in {wanted, ""}} == set()
    assert sum(slug != "" for slug in found.values()) >= 50


def board_names(board):
    facts = TABLE[board.slug]
    return facts.get("shared_names", [])


def test_a_mig_slice_has_its_own_sms_and_no_rates(gpus):
    """A slice of three sevenths has neither the board's rates nor, knowably, three sevenths of them."""
    gpus(SLICE, power_limit_watts=None)

    gpu = probe.devices()[0]

    assert (gpu.mig, gpu.num_sms, gpu.uuid) == ("3g.20gb", 42, SLICE.uuid)
    assert (gpu.slug, gpu.peak_flops_per_second, gpu.peak_bytes_per_second) == ("", {}, None)
    assert (gpu.architecture, gpu.tensor_cores, gpu.power_limit_watts) == ("Ampere", True, None)


@pytest.mark.parametrize(
    ("compute_capability", "tensor_cores"),
    [((6, 1), False), ((7, 0), True), ((7, 5), None), ((8, 9), True), ((12, 0), True)],
)
def test_tensor_cores_of_an_uncatalogued_board_follow_from_its_architecture(gpus, compute_capability, tensor_cores):
    """sm_75 is the one that exists with and without: there it stays unknown."""
    gpus(attrs.evolve(V100, name="some board", compute_capability=compute_capability))

    assert probe.devices()[0].tensor_cores is tensor_cores


def test_the_default_is_the_first_gpu_else_the_cpu(gpus):
    """None needs no thought on either machine."""
    assert probe.device().kind == "cpu"
    gpus(V100, T4)
    assert probe.device().uuid == V100.uuid
    assert probe.resolve(None).uuid == V100.uuid


@pytest.mark.parametrize(
    ("name", "uuid"),
    [("cuda", V100.uuid), ("cuda:0", V100.uuid), (" CUDA:1 ", T4.uuid), ("gpu", V100.uuid), ("GPU:1", T4.uuid)],
)
def test_a_gpu_is_named_by_cudas_number(gpus, name, uuid):
    """Numbers are CUDA's own, masks and order applied; "gpu" is another word for "cuda"."""
    gpus(V100, T4)

    assert probe.device(name).uuid == uuid
    assert probe.resolve(name).uuid == uuid


def test_cpu_means_the_cpu_even_beside_a_gpu(gpus):
    """And it does not touch the GPU's driver, which may be broken."""
    gpus(DeviceFailed("cuInit", "CUDA driver status 803"))

    assert probe.device("cpu").kind == "cpu"
    assert probe.resolve("CPU").live


def test_a_number_beyond_the_gpus_is_not_available(gpus, monkeypatch):
    """The message counts the GPUs and shows the mask, the usual cause."""
    gpus(V100)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")

    with pytest.raises(DeviceNotAvailable) as caught:
        probe.device("cuda:1")

    assert caught.value.device == "cuda:1"
    assert "1 GPU" in caught.value.reason
    assert "CUDA_VISIBLE_DEVICES=0" in caught.value.reason


def test_a_live_gpu_without_a_driver_is_not_available():
    """Asked for by name, the GPU is not silently replaced by the CPU."""
    with pytest.raises(DeviceNotAvailable) as caught:
        probe.device("cuda")

    assert caught.value.reason == "no driver"


def test_a_broken_driver_is_not_a_machine_without_a_gpu(gpus):
    """The default does not fall to the CPU when there is a GPU that does not work."""
    gpus(DeviceFailed("cuInit", "CUDA driver status 803"))

    with pytest.raises(DeviceFailed) as caught:
        probe.resolve(None)

    assert caught.value.operation == "cuInit"


def test_a_catalogue_name_gives_facts_anywhere():
    """cb.device() and predictions need no such GPU."""
    assert probe.device("v100-sxm2-16gb") == catalogue.find("v100-sxm2-16gb")
    assert probe.resolve("v100-sxm2-16gb", live=False) == catalogue.find("v100-sxm2-16gb")


@pytest.mark.parametrize("wanted", ["t4", "Tesla T4", catalogue.find("t4")])
def test_a_catalogue_name_means_the_gpu_of_that_kind_here(gpus, wanted):
    """To measure, a name stands for the first such GPU, wherever it is in the list."""
    gpus(V100, T4)

    assert probe.resolve(wanted).uuid == T4.uuid


@pytest.mark.parametrize("wanted", ["h200-sxm", catalogue.find("h200-sxm")])
@pytest.mark.parametrize("here", [(V100,), (DeviceNotAvailable("cuda", "no driver"),)])
def test_a_gpu_that_is_elsewhere_cannot_be_measured_on(gpus, wanted, here):
    """The error points at what does work: predict, candidates and memory."""
    gpus(*here)

    with pytest.raises(DeviceNotAvailable) as caught:
        probe.resolve(wanted)

    assert caught.value.device == "h200-sxm"
    assert "cubatch predict, candidates and memory" in caught.value.remedy


def test_a_live_gpu_is_known_again_by_its_uuid(gpus):
    """A Device kept from before finds its GPU although its number has changed, and one that is gone is not replaced."""
    gpus(V100)
    kept = probe.device()
    gpus(T4, attrs.evolve(V100, index=1))

    assert (probe.resolve(kept).uuid, probe.resolve(kept).index) == (V100.uuid, 1)

    gpus(T4)
    with pytest.raises(DeviceNotAvailable) as caught:
        probe.resolve(kept)
    assert caught.value.device == "v100-sxm2-16gb"


def test_a_device_made_by_hand_is_taken_as_it_is_for_predictions(gpus):
    """Tests and what-if questions bring their own facts."""
    made = Device(name="made up", num_sms=100)
    gpus(attrs.evolve(V100, name="a board outside the catalogue"))

    assert probe.resolve(made, live=False) is made
    with pytest.raises(DeviceNotAvailable) as caught:
        probe.resolve(made)
    assert caught.value.device == "made up"


@pytest.mark.parametrize("wanted", [3, ["cpu"], "titan x", "cuda:x", "gpu0"])
def test_what_is_no_device_is_refused(wanted):
    """A number is not CUDA's number; shared names list the boards, others list near names, and neither picks one."""
    with pytest.raises(InvalidArgument) as caught:
        probe.resolve(wanted)

    assert caught.value.field == "device"
    assert caught.value.value == wanted


@pytest.mark.parametrize(
    ("name", "supported"),
    [
        ("titan-x-maxwell", {"float32", "float16", "bfloat16"}),
        ("v100-sxm2-16gb", {"float32", "float16", "bfloat16"}),
        ("t4", {"float32", "float16", "bfloat16"}),
        ("a100-sxm4-40gb", {"float32", "tf32", "float16", "bfloat16"}),
        ("rtx-5090", {"float32", "tf32", "float16", "bfloat16"}),
        ("cpu", {"float32"}),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "tf32", "float16", "bfloat16"])
def test_dtypes_are_refused_where_the_contract_says(name, supported, dtype):
    """tf32 from sm_80, 16 bits on every GPU, float32 only on the CPU."""
    device = probe.device(name)

    if dtype in supported:
        arithmetic.check_dtype(device, dtype)
        return
    with pytest.raises(UnsupportedDtype) as caught:
        arithmetic.check_dtype(device, dtype)

    assert set(caught.value.supported) == supported
    assert caught.value.remedy


@pytest.mark.parametrize(("dtype", "near"), [("float23", "float32"), ("bf16", "bfloat16")])
def test_an_unknown_dtype_lists_the_known(dtype, near):
    """There are four, and all are shown."""
    with pytest.raises(UnknownName) as caught:
        arithmetic.check_dtype(probe.device("t4"), dtype)

    assert near in str(caught.value)


def test_a_device_is_found_by_the_name_that_it_prints(gpus, monkeypatch):
    """The CPU's, a board's that is in no catalogue, and one that several boards share, of which one is here."""
    monkeypatch.setattr(host, "cpu_name", lambda: "AMD EPYC")
    rare = attrs.evolve(V100, name="Tesla V100-SXM3-32GB")
    gpus(rare, sharing_gpu("rtx-3060-8gb"))
    assert probe.device("amd epyc").kind == "cpu"
    assert (probe.device("Tesla V100-SXM3-32GB").index, probe.device("NVIDIA GeForce RTX 3060").live) == (0, True)
    assert not probe.device("v100-sxm2-16gb").live  # the catalogue goes first
    with pytest.raises(UnknownName):
        probe.device("AMD EPYC 9")


@pytest.mark.parametrize(("name", "index"), [(V100.uuid, 0), (f" {T4.uuid.lower()} ", 1)])
def test_a_uuid_names_a_gpu_whatever_its_number(gpus, name, index):
    """As `nvidia-smi -L` prints it: numbers follow CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER."""
    gpus(V100, T4)
    assert probe.device(name).index == index
    assert probe.resolve(name).live


@pytest.mark.parametrize("uuid", ["GPU-00000000-0000-0000-0000-0000000000ff", SLICE.uuid])
def test_a_uuid_that_is_not_here_is_not_available(gpus, uuid):
    """It is no name of the catalogue, and no other GPU stands in for it."""
    gpus(V100, T4)
    with pytest.raises(DeviceNotAvailable, match="2 GPUs, none of this uuid") as caught:
        probe.device(uuid)
    assert caught.value.device == uuid
