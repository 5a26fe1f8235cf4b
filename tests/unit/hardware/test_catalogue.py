"""The table of GPUs: unique names, positive and plausible numbers, a source for each, and lookup."""

from __future__ import annotations

import itertools
import re
from collections import Counter

import pytest

from cubatch.errors import InvalidArgument, UnknownName
from cubatch.hardware import architectures, catalogue, memory_limit as hardware_memory
from cubatch.hardware.facts import DTYPES
from tests.unit.hardware.printed import FIELDS, HALF_RATE, LOWER_CLOCK, TABLE, WITHOUT_TENSOR_CORES
from tests.unit.hardware.published import SMS

# Gbit/s of a pin from NVIDIA's slowest board to JEDEC's fastest, and GiB for 32 bits of the bus from the smallest board
# to the largest: two chips, on both sides of a board, or a stack of 8 to 12 layers for 1024 bits.
MEMORY = {
    "GDDR5": (4.8, 9, 0.25, 2), "GDDR5X": (9, 14, 1, 2), "GDDR6": (10, 16.1, 1, 4), "GDDR6X": (19, 24, 1, 2),
    "GDDR7": (24, 36, 2, 6), "HBM2": (1.4, 2.45, 0.125, 0.25), "HBM2e": (2.4, 3.7, 0.25, 0.5),
    "HBM3": (4.8, 6.5, 0.5, 0.75), "HBM3e": (6.3, 9.8, 0.5, 1.125), "LPDDR4": (2.6, 4.3, 1, 2),
    "LPDDR4X": (3.1, 4.3, 2, 8), "LPDDR5": (4.2, 6.5, 2, 8), "LPDDR5X": (6.4, 10.7, 8, 16),
}  # fmt: skip
FASTER = {("GDDR6", (8, 9)): (12.4, 20.1)}  # chips that came with a generation
WITHOUT_BUS = {"b200": 8192, "gb200": 8192}  # no source prints it: eight stacks

# Typed by hand from vendors' pages: SMs, boost MHz, GiB, GB/s within 1 %, float32 TFLOP/s within 1 %.
PUBLISHED = {
    "titan-x-maxwell": (24, 1075, 12, 336.5, 6.6),
    "titan-x-pascal": (28, 1531, 12, 480, 10.97),
    "titan-xp": (30, 1582, 12, 547.7, 12.15),
    "p100-sxm2-16gb": (56, 1480, 16, 732, 10.6),
    "v100-sxm2-16gb": (80, 1530, 16, 900, 15.7),
    "v100-pcie-32gb": (80, 1380, 32, 900, 14.1),
    "titan-v": (80, 1455, 12, 652.8, 14.9),
    "t4": (40, 1590, 16, 320, 8.1),
    "rtx-2080-ti": (68, 1545, 11, 616, 13.45),
    "a100-sxm4-40gb": (108, 1410, 40, 1555, 19.5),
    "rtx-4090": (128, 2520, 24, 1008, 82.6),
    "h100-sxm": (132, 1980, 80, 3350, 67),
    "gtx-980-ti": (22, 1075, 6, 336.5, 6.06),
    "gtx-1070": (15, 1683, 8, 256, 6.5),
    "p40": (30, 1531, 24, 346, 11.76),
    "v100s-pcie-32gb": (80, 1597, 32, 1134, 16.4),
    "gtx-1660-ti": (24, 1770, 6, 288, 5.4),
    "rtx-2070-super": (40, 1770, 8, 448, 9.1),
    "rtx-2080-super": (48, 1815, 8, 496, 11.2),
    "quadro-rtx-5000": (48, 1815, 16, 448, 11.2),
    "a2": (10, 1770, 16, 200, 4.5),
    "rtx-a6000": (84, 1800, 48, 768, 38.7),
    "rtx-3070": (46, 1725, 8, 448, 20.3),
    "rtx-3080-10gb": (68, 1710, 10, 760, 29.8),
    "l4": (58, 2040, 24, 300, 30.3),
    "rtx-4060-ti-16gb": (34, 2535, 16, 288, 22.06),
    "rtx-4080-super": (80, 2550, 16, 736, 52.2),
    "rtx-5000-ada": (100, 2550, 32, 576, 65.3),
    "rtx-6000-ada": (142, 2505, 48, 960, 91.1),
    "gh200-96gb": (132, 1980, 96, 4000, 67),
    "b200": (148, 1965, 180, 7700, 75),
    "rtx-5080": (84, 2617, 16, 960, 56.3),
    "rtx-pro-6000-blackwell-workstation": (188, 2617, 96, 1792, 125),
}

# Of a board's memory, what nvidia-smi prints with ECC on, as it is shipped; typed by hand.
DRIVERS_MIB = {
    "k80": 11441, "m40-12gb": 11448, "m40-24gb": 22939, "p4": 7611, "p40": 22919, "t4": 15360, "a2": 15356,
    "a10": 23028, "a10g": 23028, "a16": 15356, "a40": 46068, "l4": 23034, "l40": 46068, "l40s": 46068,
}  # fmt: skip

# Tensor rates of 16 bits with sums in float32, dense, typed by hand from data sheets and architecture papers.
PUBLISHED_TENSOR = {
    "v100s-pcie-32gb": 130, "rtx-2070": 29.9, "rtx-2080-super": 44.6, "quadro-rtx-5000": 89.2, "quadro-rtx-8000": 130.5,
    "a2": 18, "rtx-a4000": 153.4 / 2, "rtx-a6000": 309.7 / 2, "rtx-3070": 40.6, "rtx-3080-10gb": 59.5, "l4": 242 / 2,
    "rtx-4080": 97.5, "rtx-5000-ada": 1044.4 / 4, "rtx-6000-ada": 1457 / 4, "h100-nvl": 1671 / 2, "gh200-96gb": 990,
    "a10g": 140 / 2, "h200-nvl": 1671 / 2,
    "b200": 4500 / 2, "gb200": 5000 / 2, "rtx-5080": 112.6, "rtx-pro-6000-blackwell-workstation": 4000 / 8,
}  # fmt: skip


def normal(text: str) -> str:
    """Spell a name as it is compared: letters and digits, without the vendor's words."""
    return re.sub(r"[^a-z0-9]|nvidia|geforce|tesla", "", text.lower())


def test_the_catalogue_has_the_gpus_it_is_for():
    """At least 75 of them, among them those whose users asked for this, and the clouds' commonest."""
    asked_for = {"titan-x-maxwell", "titan-x-pascal", "titan-xp", "v100-sxm2-16gb", "v100-pcie-16gb", "h200-sxm"}
    asked_for |= {"l4", "a10g", "t4", "p40", "gh200-96gb", "b200"}

    assert len(catalogue.names()) >= 75
    assert asked_for < set(catalogue.names())
    assert [device.slug for device in catalogue.all_devices()] == list(catalogue.names())


def test_no_name_means_two_devices():
    """Slugs, names and aliases differ in more than case and punctuation, and no shared name is one device's own."""
    own = Counter(
        key
        for slug, facts in TABLE.items()
        for key in {normal(text) for text in (slug, facts["name"], *facts.get("aliases", ()))}
    )
    shared = Counter(normal(text) for facts in TABLE.values() for text in set(facts.get("shared_names", ())))

    assert [key for key, count in own.items() if count > 1] == []
    assert [key for key, count in shared.items() if count < 2] == []
    assert set(own) & set(shared) == set()


def test_no_row_is_a_copy_of_another():
    """Two boards with equal numbers all through are one board entered twice."""
    numbers = [
        (slug, {key: value for key, value in facts.items() if key not in {"name", "aliases", "source", "note"}})
        for slug, facts in TABLE.items()
    ]

    assert [(a, b) for (a, first), (b, second) in itertools.combinations(numbers, 2) if first == second] == []


@pytest.mark.parametrize("slug", TABLE)
def test_a_row_has_known_fields_positive_numbers_and_a_source(slug):
    """A misspelt field would be ignored, a zero would be taken for a fact, and without a source nobody can check it."""
    facts = TABLE[slug]
    numbers = {key: value for key, value in facts.items() if isinstance(value, int | float) and key != "tensor_cores"}

    assert set(facts) <= FIELDS
    assert all(value > 0 for value in [*numbers.values(), *facts.get("peak_tflops", {}).values()])
    assert set(facts.get("peak_tflops", {})) <= set(DTYPES)
    assert "https://" in facts["source"]
    assert tuple(facts["compute_capability"]) in architectures.known()
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", slug)


@pytest.mark.parametrize("slug", TABLE)
def test_a_row_agrees_with_its_architecture(slug):
    """Cores follow from SMs, the float32 rate from cores and clock: a slip in one breaks the ratio."""
    facts = TABLE[slug]
    sm = SMS[tuple(facts["compute_capability"])]
    if "num_sms" in facts:
        assert facts["cuda_cores"] == sm.cores * facts["num_sms"]
    if "tensor_cores" in facts and sm.tensor_cores is not None:
        assert facts["tensor_cores"] == (
            0 if facts["chip"] in WITHOUT_TENSOR_CORES else sm.tensor_cores * facts["num_sms"]
        )
    if "boost_clock_mhz" in facts:
        by_clock = 2 * facts["cuda_cores"] * facts["boost_clock_mhz"] * 1e-6
        assert facts["peak_tflops"]["float32"] == pytest.approx(by_clock, rel=0.01)


@pytest.mark.parametrize("slug", TABLE)
def test_memory_of_a_row_hangs_together(slug):
    """A known type; speed and size are those of its chips on that bus, and the L2 is one of its generation."""
    facts = TABLE[slug]
    capability = tuple(facts["compute_capability"])
    low, high, smallest, largest = MEMORY[facts["memory_type"]]
    low, high = FASTER.get((facts["memory_type"], capability), (low, high))
    bits = WITHOUT_BUS[slug] if slug in WITHOUT_BUS else facts["memory_bus_bits"]
    assert smallest * 0.97 <= facts["memory_gib"] / (bits / 32) <= largest
    if "bandwidth_gb_per_second" in facts:
        assert low <= facts["bandwidth_gb_per_second"] * 8 / bits <= high
    if "l2_mib" in facts:
        smallest, largest = SMS[capability].l2_mib
        assert smallest <= facts["l2_mib"] <= largest


@pytest.mark.parametrize("slug", TABLE)
def test_rates_of_a_row_are_plausible_beside_each_other(slug):
    """Tensor Cores give 2 to 32 times float32 for 16 bits, half of that for tf32; an SM gets 4 to 60 GB/s."""
    facts = TABLE[slug]
    rates = facts.get("peak_tflops", {})
    if "float16" in rates:
        assert 2 * 0.99 <= rates["float16"] / rates["float32"] <= 32
    if "bfloat16" in rates:
        assert rates["bfloat16"] == rates["float16"]
        assert rates["tf32"] == pytest.approx(rates["float16"] / 2, rel=0.03)
        assert facts["compute_capability"] >= [8, 0]
    if {"bandwidth_gb_per_second", "num_sms"} <= set(facts):
        assert 4 <= facts["bandwidth_gb_per_second"] / facts["num_sms"] <= 60
    if "base_clock_mhz" in facts:
        assert facts["base_clock_mhz"] <= facts["boost_clock_mhz"]


CLOCKED = [slug for slug, facts in TABLE.items() if "float16" in facts.get("peak_tflops", {}) and "num_sms" in facts]


@pytest.mark.parametrize("slug", CLOCKED)
def test_tensor_rates_follow_from_cores_and_clock(slug):
    """
    A rate with sparsity, or with fp16 sums on a GeForce board, would be twice as high.

    Vendors print rates at other boost clocks: up to 6 % above the reference board's, and 10 % below on Hopper.
    """
    facts = TABLE[slug]
    capability = tuple(facts["compute_capability"])
    rate = SMS[capability].tensor_fma
    assert rate, "what a Tensor Core of it does in a clock is to be written there, with its source"
    is_halved = ("GeForce" in facts["name"] and capability > (7, 0)) or slug in HALF_RATE
    per_clock = rate / (2 if is_halved else 1)
    by_clock = 2 * facts["tensor_cores"] * per_clock * LOWER_CLOCK.get(slug, facts["boost_clock_mhz"]) * 1e-6
    assert 0.9 <= facts["peak_tflops"]["float16"] / by_clock <= 1.06
    if "computed" in facts.get("note", ""):
        assert facts["peak_tflops"]["float16"] == pytest.approx(by_clock, rel=0.001)


@pytest.mark.parametrize("slug", PUBLISHED)
def test_numbers_are_those_that_vendors_print(slug):
    """Well-known cards, typed anew: a whole column shifted by one row would show."""
    num_sms, clock_mhz, gib, gb_per_second, tflops = PUBLISHED[slug]

    device = catalogue.find(slug)

    assert device.num_sms == num_sms
    assert device.clock_hz == pytest.approx(clock_mhz * 1e6, rel=0.015)
    assert device.memory_bytes == DRIVERS_MIB.get(slug, gib * 1024) * 2**20
    assert device.peak_bytes_per_second == pytest.approx(gb_per_second * 1e9, rel=0.01)
    assert device.peak_flops_per_second["float32"] == pytest.approx(tflops * 1e12, rel=0.015)
    assert not device.live


@pytest.mark.parametrize("slug", DRIVERS_MIB)
def test_what_ecc_takes_of_a_boards_memory_is_in_no_plan(slug):
    """A sixteenth, and under 1 % that the driver keeps too: a plan for all of the board would not fit on it."""
    device = catalogue.find(slug)
    assert device.memory_bytes == DRIVERS_MIB[slug] * 2**20
    assert 0.99 < DRIVERS_MIB[slug] / (TABLE[slug]["memory_gib"] * 1024 * 15 / 16) <= 1
    assert hardware_memory.memory_limit(device).bytes < DRIVERS_MIB[slug] * 2**20
    assert {slug for slug, facts in TABLE.items() if "usable_mib" in facts} == DRIVERS_MIB.keys()


@pytest.mark.parametrize("slug", PUBLISHED_TENSOR)
def test_tensor_rates_are_those_that_vendors_print(slug):
    """
    What follows from cores, clock and the rate of a class is what the data sheet has, less its sparsity.

    Data sheets print zeros' savings too (half of their figure is dense), FP8 (a quarter) or FP4 (an eighth).
    """
    rates = catalogue.find(slug).peak_flops_per_second
    assert rates["float16"] == pytest.approx(PUBLISHED_TENSOR[slug] * 1e12, rel=0.01)


def test_what_sources_dispute_stays_unknown():
    """The SMs of a GB200 and the tensor rates of a DGX Spark are absent rather than one of several claims."""
    assert catalogue.find("gb10").peak_flops_per_second.keys() == {"float32"}
    assert catalogue.find("gb200").num_sms is None
    assert catalogue.find("gh200-96gb").power_limit_watts is None
    assert catalogue.find("jetson-thor-t5000").peak_flops_per_second == {}
    assert catalogue.find("rtx-pro-6000-blackwell-server").peak_bytes_per_second is None


def test_where_sources_differ_the_driver_or_the_vendor_decides():
    """SMs and L2 as deviceQuery prints them, watts and memory as NVIDIA does, where TechPowerUp has others."""
    assert (catalogue.find("l4").num_sms, catalogue.find("a10g").num_sms) == (58, 80)
    caches = {"a100-pcie-80gb": 40, "l40s": 96, "h200-sxm": 60, "b200": 126, "gb10": 24}
    assert {slug: catalogue.find(slug).l2_bytes / 2**20 for slug in caches} == caches
    watts = {"l40": 300, "l40s": 350, "a10": 150, "a10g": 300}
    assert {slug: catalogue.find(slug).power_limit_watts for slug in watts} == watts
    memory = {"a100-sxm4-40gb": "HBM2", "a100-pcie-40gb": "HBM2", "a100-sxm4-80gb": "HBM2e", "a100-pcie-80gb": "HBM2e"}
    assert {slug: TABLE[slug]["memory_type"] for slug in memory} == memory


@pytest.mark.parametrize(
    ("spelling", "slug"),
    [
        ("v100-sxm2-16gb", "v100-sxm2-16gb"),
        ("Tesla V100-SXM2-16GB", "v100-sxm2-16gb"),
        ("  nvidia v100 SXM2 16GB ", "v100-sxm2-16gb"),
        ("TITAN X (Pascal)", "titan-x-pascal"),
        ("GeForce GTX TITAN X", "titan-x-maxwell"),
        ("NVIDIA TITAN Xp", "titan-xp"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("2080 Ti", "rtx-2080-ti"),
        ("NVIDIA GH200 480GB", "gh200-96gb"),
        ("a6000", "rtx-a6000"),
        ("NVIDIA GeForce GTX 1060 6GB", "gtx-1060-6gb"),
    ],
)
def test_a_device_is_found_by_any_spelling(spelling, slug):
    """Slug, driver's name and alias, in any case and punctuation."""
    assert catalogue.find(spelling).slug == slug


@pytest.mark.parametrize(
    ("spelling", "slugs"),
    [
        ("titan x", {"titan-x-maxwell", "titan-x-pascal"}),
        ("NVIDIA TITAN X", {"titan-x-maxwell", "titan-x-pascal"}),
        ("V100", {"v100-sxm2-16gb", "v100-sxm2-32gb", "v100-pcie-16gb", "v100-pcie-32gb"}),
        ("v100-16gb", {"v100-sxm2-16gb", "v100-pcie-16gb"}),
        ("h100", {"h100-sxm", "h100-pcie", "h100-nvl"}),
        ("RTX 6000", {"quadro-rtx-6000", "rtx-6000-ada"}),
        ("NVIDIA GeForce RTX 3060", {"rtx-3060-8gb", "rtx-3060-12gb"}),
    ],
)
def test_a_name_that_boards_share_is_an_error_naming_them_all(spelling, slugs):
    """None is picked silently: they differ by a factor in speed or memory."""
    with pytest.raises(InvalidArgument) as caught:
        catalogue.find(spelling)

    assert not isinstance(caught.value, UnknownName)
    assert set(re.findall(r"[a-z0-9]+(?:-[a-z0-9]+)+", caught.value.allowed)) == slugs
    assert caught.value.value == spelling


@pytest.mark.parametrize(("typo", "near"), [("v100-smx2-16gb", "v100-sxm2-16gb"), ("titan-xq", "titan-xp")])
def test_an_unknown_name_lists_those_near_it(typo, near):
    """A typo costs one look at the message, not a search."""
    with pytest.raises(UnknownName) as caught:
        catalogue.find(typo)

    assert near in caught.value.near


@pytest.mark.parametrize("name", ["", "GeForce", "radeon vii", "1"])
def test_a_name_of_nothing_is_unknown(name):
    """Also where nothing is left of it once the vendor's words are gone."""
    with pytest.raises(UnknownName) as caught:
        catalogue.find(name)

    assert caught.value.value == name
