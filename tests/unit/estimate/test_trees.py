"""The learned correction: trees against if and else, what they are shown, and where they are not trusted."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from cubatch.estimate.vendor.algorithms import FAMILIES, algorithms, seconds
from cubatch.estimate.vendor.trees import SHOWN, Trees, features, logarithmic
from cubatch.network.layers import Conv2d
from cubatch.network.passes import Pass
from tests.checks import assert_within, gamma
from tests.unit.estimate.building import CASES, constants_of, places_of, work_of

INFINITE = np.inf
HALF = 2.0**-24  # unit roundoff of float32, in which leaves are kept


def two_trees(low=(-INFINITE, -INFINITE), high=(INFINITE, INFINITE)):
    """
    An ensemble of two trees over (a, b), as `by_hand` computes it.

    Nodes: 0 asks a <= 1.5, 1 asks b <= 4; after 0 come the leaf 2 and 3, which asks b <= -2; after 1 the leaves 4 and
    5; after 3 the leaves 6 and 7.
    """
    return Trees(
        features=("a", "b"),
        depths=np.array([2, 1], np.int16),
        feature=np.array([0, 1, -1, 1, -1, -1, -1, -1], np.int16),
        number=np.array([1.5, 4, 0.5, -2, 0.125, -1, -0.25, 2], np.float32),
        low=np.array(low, np.float32),
        high=np.array(high, np.float32),
    )


def by_hand(a, b):
    """What the two trees say, in if and else; all sums are exact in binary."""
    first = 0.5 if a <= 1.5 else -0.25 if b <= -2 else 2.0
    return first + (0.125 if b <= 4 else -1.0)


NUMBERS = st.sampled_from([1.5, -2.0, 4.0]) | st.floats(-10, 10, width=32)


@given(cases=st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=20))
def test_trees_are_ifs(cases):
    """Each case goes left where its feature is at most the threshold, and its leaves add up."""
    a, b = np.array(cases).T
    assert two_trees()({"b": b, "a": a}).tolist() == [by_hand(*case) for case in cases]


def test_a_long_table_is_as_its_rows():
    """Rows are taken some hundred at a time, and none is lost between two hundreds."""
    a, b = np.random.default_rng(1).uniform(-10, 10, (2, 2500)).astype(np.float32)
    assert two_trees()({"a": a, "b": b}).tolist() == [by_hand(*case) for case in zip(a, b, strict=True)]


def test_the_correction_fades_to_nothing_a_factor_of_four_beyond_what_was_seen():
    """Features are logarithms: half of the trust is left at a factor of two, none at four, on either side."""
    trees = two_trees(low=(0, -INFINITE), high=(5, INFINITE))
    a = np.array([0, 2.5, 5, *np.log([0.5, 0.25, 0.01]), *(5 + np.log([2, 4, 100]))])
    b = np.full(9, 3.0)
    trust = [1, 1, 1, 0.5, 0, 0, 0.5, 0, 0]
    table = np.stack([a, b], axis=1).astype(np.float32)
    # log 2 / log 4 of numbers near 6, rounded to float32.
    assert_within(trees.trust(table), np.array(trust), 6 * gamma(3, HALF) / np.log(4), axes="n")
    inside = np.array([by_hand(x, 3.0) for x in a])
    assert_within(trees({"a": a, "b": b}), inside * trust, 3 * 6 * gamma(3, HALF) / np.log(4), axes="n")


def test_the_feature_that_is_farthest_outside_decides():
    """A case that is inside in one feature and a factor of four outside in another is not trusted."""
    trees = two_trees(low=(0, 0), high=(1, 1))
    assert trees.trust(np.array([[0.5, 0.5], [0.5, 1 + np.log(4.01)]], np.float32)).tolist() == [1, 0]


# --- what the trees are shown --------------------------------------------------------------------------------

GENERAL = constants_of(alone=0.9) | {
    f"{name} {family}": 2.0
    for name in ("launch", "extra", "x", "y", "w") for family in FAMILIES
}  # fmt: skip


def described(work, places, constants=GENERAL):
    """Features of a table, and the times that they are made of."""
    found = algorithms(work, places.num_sms)
    times = seconds(work, places, constants, found)
    return features(work, places, found, times), found, times


@settings(max_examples=25)
@given(cases=CASES, num_sms=st.sampled_from([10, 48, 132]), bandwidth=st.sampled_from([1e11, 4e12]))
def test_every_feature_of_every_case_is_a_number(cases, num_sms, bandwidth):
    """No logarithm of nothing, no ratio to nothing, whatever the layer, the pass and the GPU."""
    columns, _, _ = described(work_of(*cases), places_of(len(cases), num_sms=num_sms, bandwidth=bandwidth))
    for name, column in columns.items():
        assert np.shape(column) == (len(cases),), name
        assert np.isfinite(column).all(), name


@settings(max_examples=12)
@given(cases=CASES, faster=st.sampled_from([2.0, 4.0]))
def test_the_trees_see_ratios_of_a_gpu_only(cases, faster):
    """A GPU twice as fast in all looks the same to them but for the launches, which then weigh more."""
    work, size = work_of(*cases), len(cases)
    constants = GENERAL | {name: 0.0 for name in GENERAL if name.startswith("launch")}
    slow, quick = places_of(size), places_of(size, peak=faster * 48 * 64 * 2 * 1.8e9, bandwidth=faster * 500e9)
    (before, _, _), (after, _, _) = (described(work, places, constants) for places in (slow, quick))
    assert before.keys() == after.keys()
    for name in before:
        shift = np.log(faster) if name == "launches" else 0.0
        # Halving and doubling are exact, so only the logarithm of the launches is rounded.
        assert_within(after[name], np.asarray(before[name], float) - shift, 60 * gamma(4, 2.0**-53), label=name)


def test_the_features_of_one_layer_are_as_by_pocket_calculator():
    """97 boards of 8 x 8 x 128 on 48 SMs: 49 tiles of 128 x 128, of which 48.5 are filled."""
    work = work_of((Conv2d(h=8, w=8, c=128, k=128, r=3, s=3, pad=1), Pass.FPROP, 97))
    columns, found, times = described(work, places_of(1))
    got = {name: float(np.ravel(column)[0]) for name, column in columns.items()}
    board, flop = 97 * 64 * 128, 2 * 97 * 64 * 128 * 1152
    want = {
        "waves 128x128": np.log(49 / 48), "rounding 128x128": 2 / (49 / 48), "waste 128x128": 49 / 48.5,
        # Fused, 388 and 196 blocks of 32 filters at 128 pixels: half of 8 x 16 lies outside, of 2 x 8 x 8 one board.
        "waste 1x8x16": 2, "rounding 1x8x16": 9 * 48 / 388, "waste 2x8x8": 98 / 97, "rounding 2x8x8": 5 * 48 / 196,
        "n": np.log(97), "c": np.log(128), "depth": np.log(1152), "m": np.log(97 * 64), "columns": np.log(128),
        "n mod 8": 1, "c mod 32": 0, "p mod 4": 0, "p mod 8": 0, "stride_h": 1, "pass": 0, "lanes": 64,
        "intensity": np.log(flop / (4 * (2 * board + 9 * 128**2)) / (11.0592e12 / 500e9)),
        "input in L2": np.log(4 * board / 2**22), "filter in L2": np.log(4 * 9 * 128**2 / 2**22),
    }  # fmt: skip
    assert {name: got[name] for name in want} == pytest.approx(want, rel=1e-12)
    usable = sorted(float(time) for (time,) in times if np.isfinite(time))
    assert got["margin"] == pytest.approx(min(np.log(usable[1] / usable[0]), 1.0))
    for kind in ("waves", "rounding"):
        assert {f"{kind} {name}" for name in SHOWN} <= got.keys()
    assert "waves 32x32" not in got
    groups = list(dict.fromkeys(one.group for one in found))
    assert groups[int(got["best"])] == found[int(np.argmin(times))].group
    assert got["launches"] == pytest.approx(np.log(usable[0] / 1e-5))
    # Of the algorithms of a group the shortest counts; one that takes e^3 times as long, or cannot, is e^3 away.
    for group in {one.group for one in found}:
        shortest = min(time[0] for one, time in zip(found, times, strict=True) if one.group == group)
        assert got[f"ratio {group}"] == pytest.approx(min(np.log(shortest / usable[0]), 3.0))


def test_16_bits_are_half_the_bytes_of_every_tensor():
    """Each is half as much of the L2 cache, and the FLOP for each byte are twice as many."""
    work = work_of((Conv2d(h=8, w=8, c=128, k=128, r=3, s=3, pad=1), Pass.FPROP, 97))
    whole, half = (described(work, places_of(1, element_bytes=size))[0] for size in (4, 2))
    moved = {name: half[name] - whole[name] for name in ("intensity", "input in L2", "output in L2", "filter in L2")}
    assert moved.pop("intensity") == pytest.approx([np.log(2)])
    assert list(moved.values()) == [pytest.approx([-np.log(2)])] * 3


def test_blocks_of_fused_winograd_cover_what_the_pass_computes():
    """An input gradient's lie on the input and its channels; of what the algorithm cannot compute there are none."""
    wide, narrow = Conv2d(h=10, w=8, c=32, k=320, r=3, s=3), Conv2d(h=10, w=8, c=32, k=320, r=3, s=1)
    work = work_of((wide, Pass.FPROP, 1), (wide, Pass.DGRAD, 1), (wide, Pass.WGRAD, 1), (narrow, Pass.FPROP, 1))
    columns, _, _ = described(work, places_of(4))
    # 8 x 6 outputs of 320 filters on 48 SMs: one piece of 16 x 8, ten blocks; 10 x 8 inputs of 32 channels: one.
    assert columns["waste 1x16x8"] == pytest.approx([128 / 48, 128 / 80, 0, 0], rel=1e-12)
    assert columns["rounding 1x16x8"] == pytest.approx([4.8, 48, 0, 0], rel=1e-12)
    assert columns["waste 2x8x8"] == pytest.approx([128 / 48, 2 * 128 / 80, 0, 0], rel=1e-12)


def test_leaving_the_range_matters_for_sizes_but_not_for_the_batch():
    """Trust is lost by sizes of layers that were never seen; batches and remainders are ordinary anywhere."""
    names = ("n", "c", "n mod 8", "depth", "intensity", "stride_h", "waves 128x128", "input in L2")
    assert logarithmic(names).tolist() == [False, True, False, True, True, False, False, False]


def test_the_last_of_many_features_is_asked_for():
    """300 columns times the cases of a chunk are more than 16 bits hold."""
    names = tuple(map(str, range(300)))
    unbounded = np.full(300, np.inf, np.float32)
    stump = Trees(
        names, np.array([1], np.int16), np.array([299, -1, -1], np.int16), np.array([0.5, -1, 1], np.float32),
        low=-unbounded, high=unbounded,
    )  # fmt: skip
    cases = dict.fromkeys(names, np.zeros(200)) | {"299": np.ones(200)}
    assert stump(cases).tolist() == [1.0] * 200
