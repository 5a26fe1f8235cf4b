"""The vendor's side of `cubatch bench` where PyTorch has no GPU: the same calls, on the same memory."""

from __future__ import annotations

import numpy as np
import pytest

from cubatch.bench import cases, check, place, rivals
from cubatch.kinds import Conv2d
from cubatch.layer import Pass

torch = pytest.importorskip("torch")

LAYERS = [
    Conv2d(h=9, w=7, c=6, k=10, r=3, s=2, stride=2, pad=[1, 1, 0, 0]),
    Conv2d(h=9, w=8, c=6, k=12, r=3, s=3, groups=3, pad=1, dilation=2),
    Conv2d(h=9, w=7, c=6, k=6, r=3, s=3, groups=6, pad=1, stride=2),
]


@pytest.mark.parametrize("pass_", list(Pass))
@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_pytorchs_convolution_is_given_the_same_convolution(layer, pass_, monkeypatch):
    """What its functions return is what the case asks for, within the bound that our kernels are held to."""
    case = cases.of_layer(layer, pass_, 3)
    arrays = place.fill(np, case, 1)
    expected = check.Expected(case, arrays, np.random.default_rng(0), images=None, channels=None)
    returned = []
    forward, backward = torch.nn.functional.conv2d, torch.ops.aten.convolution_backward
    monkeypatch.setattr(torch.nn.functional, "conv2d", lambda *a: returned.append(forward(*a)))
    monkeypatch.setattr(torch.ops.aten, "convolution_backward", lambda *a: returned.append(backward(*a)))

    found = rivals.rival(case, np)
    found.bind(arrays)()

    index = {Pass.FPROP: None, Pass.DGRAD: 0, Pass.WGRAD: 1}[pass_]
    result = returned[0] if index is None else returned[0][index]
    assert found.name == "torch"
    if index is not None:
        assert [part is not None for part in returned[0]] == [pass_ is Pass.DGRAD, pass_ is Pass.WGRAD, False]
    assert result.is_contiguous(memory_format=torch.channels_last)
    arrays[case.results[0]][...] = result.permute(0, 2, 3, 1).numpy()
    assert expected.check(arrays).passed


def test_tf32_is_off_and_algorithms_are_timed():
    """Whatever was set before; in a sweep cuDNN chooses without timing."""
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = True
    case = cases.of_layer(LAYERS[0], Pass.FPROP, 3)
    arrays = place.fill(np, case, 1)
    rivals.rival(case, np).bind(arrays)
    assert (torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32) == (False, False)
    assert torch.backends.cudnn.benchmark is True
    rivals.rival(case, np, benchmark=False).bind(arrays)
    assert torch.backends.cudnn.benchmark is False


def test_one_sided_pads_have_no_rival():
    """PyTorch's convolution pads both sides of an axis alike."""
    layer = Conv2d(h=9, w=7, c=6, k=10, r=3, s=3, pad=[1, 0, 1, 1])
    assert "both sides" in rivals.rival(cases.of_layer(layer, Pass.FPROP, 3), np)


def test_versions_are_those_of_pytorch():
    """The CPU build has no cuDNN."""
    assert rivals.versions()["torch"] == torch.__version__
