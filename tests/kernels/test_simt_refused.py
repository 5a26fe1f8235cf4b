"""What does not go together is refused before kernels/simt are launched."""

from __future__ import annotations

import numpy as np
import pytest

from cubatch.engine.native import conv, gemm, linear
from cubatch.engine.native.operands import Fused, geometry
from cubatch.errors import InvalidArgument
from cubatch.network.windows import conv_shape
from tests.kernels.tiles import context


def test_what_does_not_go_together_is_refused_before_a_launch(launcher):
    """Layouts, a workspace that is too small, half a batch norm, a residual's shape."""
    where = context(launcher)
    a, b = launcher.put(np.ones((4, 8), np.float32)), launcher.put(np.ones((4, 8), np.float32))
    ones = launcher.put(np.ones(4, np.float32))
    for arguments in (
        {"layout": "tt"},
        {"layout": "nn"},
        {"fused": Fused(scale=ones)},
        {"fused": Fused(residual=launcher.put(np.ones((4, 5), np.float32)))},
        {"fused": Fused(activation="cosine")},
    ):
        with pytest.raises(InvalidArgument):
            gemm.gemm(where, a, b, **arguments)
    x, dy = launcher.put(np.ones((4, 16, 16, 4), np.float32)), launcher.put(np.ones((4, 16, 16, 4), np.float32))
    small = launcher.put(np.zeros(64, np.uint8))
    with pytest.raises(InvalidArgument, match="workspace"):
        conv.conv2d_wgrad(where, x, dy, dw=launcher.put(np.ones((4, 1, 1, 4), np.float32)), workspace=small)
    huge = conv_shape((1 << 15, 1 << 15, 2), (2, 1, 1, 2), (1, 1), (0, 0, 0, 0), (1, 1))
    with pytest.raises(InvalidArgument, match="2\\^31"):
        geometry(huge)


def test_a_pass_refuses_what_its_layer_cannot_mean(launcher):
    """Bias, folded batch norm and activation are of forward passes, a mask is of an input's gradient."""
    where = context(launcher)
    ones, square = launcher.put(np.ones(4, np.float32)), launcher.put(np.ones((4, 4), np.float32))
    forward = {"scale": Fused(scale=ones, shift=ones), "activation": Fused(activation="relu")}
    for layout in ("nn", "tn"):
        for name, fused in forward.items():
            with pytest.raises(InvalidArgument, match=f"{name}.*gemm_{layout}"):
                gemm.gemm(where, square, square, layout=layout, fused=fused)
        with pytest.raises(InvalidArgument, match=f"bias.*gemm_{layout}"):
            gemm.gemm(where, square, square, ones, layout=layout)
    for layout in ("nt", "tn"):
        with pytest.raises(InvalidArgument, match=f"mask.*gemm_{layout}"):
            gemm.gemm(where, square, square, layout=layout, fused=Fused(mask=square))
    x, w = launcher.put(np.ones((2, 5, 5, 4), np.float32)), launcher.put(np.ones((4, 3, 3, 4), np.float32))
    y = conv.conv2d(where, x, w)
    with pytest.raises(InvalidArgument, match=r"mask.*conv2d_dgrad or gemm_nn.*conv2d_wgrad"):
        conv.conv2d_wgrad(where, x, y, dw=w, fused=Fused(mask=w))


def test_a_bias_and_its_gradient_are_checked_by_name_before_a_launch(launcher):
    """What they do not fit is left as it was."""
    where = context(launcher)
    x, short = launcher.put(np.ones((4, 8), np.float32)), launcher.put(np.ones(3, np.float32))
    dw = launcher.put(np.zeros((8, 8), np.float32))
    with pytest.raises(InvalidArgument, match="bias"):
        gemm.gemm(where, x, x, short)
    with pytest.raises(InvalidArgument, match="db"):
        linear.linear_wgrad(where, x, x, dw=dw, db=short)
    image, dw_of_image = launcher.put(np.ones((4, 1, 1, 8), np.float32)), dw.reshape(8, 1, 1, 8)
    with pytest.raises(InvalidArgument, match="db"):
        conv.conv2d_wgrad(where, image, image, dw=dw_of_image, db=short)
    assert not launcher.get(dw).any()
