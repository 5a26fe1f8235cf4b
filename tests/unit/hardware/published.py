"""
What is printed of every architecture and its boards, typed once more: what data/architectures.toml is held to.

Limits of launches are not here: test_occupancy_header.py compares them with NVIDIA's own header.

What no page prints, such as which architectures share PTX, is written down as it was found.
"""

from __future__ import annotations

import attrs


@attrs.frozen
class Sm:
    """
    One SM of a compute capability; None and () where nothing is published.

    Attributes:
        cores, tensor_cores: CUDA cores and Tensor Cores, from NVIDIA's architecture papers and that guide.
        l2_mib: L2 of the smallest and of the largest board; wider than published where the catalogue has no board.
        tensor_fma: Multiply-adds of 16 bits, summed in float32, that a Tensor Core does in a clock: papers;
            of 7.2, 8.7, 10.3 and 12.1 data sheets (Jetson AGX Xavier and Orin, HGX B300, DGX Spark). Boards of GeForce
            have half of it from 7.5 on. Without it no board of the capability has a rate of Tensor Cores.
        mma: Multiply-adds of the SM in a clock by mma.sync, of float16 and tf32, by peak FLOP/s / 2 / SMs / boost clock
            of architecture papers (V100, Turing, A100, H100) and data sheets (T4, A40, L4, RTX PRO 6000); of 8.7 a
            quarter of sparse INT8's (Jetson AGX Orin, 170 TOPS). Of 9.0, 62 % of wgmma's (arXiv 2402.13499); of 10.0
            no source is known, and the rate of the A100 stands.
        wgmma: The same by wgmma.
        surveyed: Whether every kernel is compiled for it before a release.
    """

    cores: int
    tensor_cores: int | None
    l2_mib: tuple[float, float]
    tensor_fma: int | None = None
    mma: tuple[int, ...] = ()
    wgmma: tuple[int, ...] = ()
    surveyed: bool = False


SMS = {
    (3, 7): Sm(192, 0, (1.5, 1.5)),
    (5, 0): Sm(128, 0, (1, 2)),
    (5, 2): Sm(128, 0, (1, 3), surveyed=True),
    (5, 3): Sm(128, 0, (0.25, 0.25)),
    (6, 0): Sm(64, 0, (3, 4)),
    (6, 1): Sm(128, 0, (0.5, 3), surveyed=True),
    (6, 2): Sm(128, 0, (0.5, 0.5)),
    (7, 0): Sm(64, 8, (4.5, 6), tensor_fma=64, mma=(512,), surveyed=True),
    (7, 2): Sm(64, 8, (0.5, 0.5), tensor_fma=64, mma=(512,)),
    (7, 5): Sm(64, 8, (0.5, 6), tensor_fma=64, mma=(512,), surveyed=True),
    (8, 0): Sm(64, 4, (24, 48), tensor_fma=256, mma=(1024, 512), surveyed=True),
    (8, 6): Sm(128, 4, (1, 6), tensor_fma=128, mma=(512, 256), surveyed=True),
    (8, 7): Sm(128, 4, (1, 4), tensor_fma=256, mma=(1024, 512)),
    (8, 8): Sm(128, None, (1, 6), mma=(512, 256)),
    (8, 9): Sm(128, 4, (12, 96), tensor_fma=128, mma=(512, 256), surveyed=True),
    (9, 0): Sm(128, 4, (50, 60), tensor_fma=512, mma=(1270, 635), wgmma=(2048, 1024), surveyed=True),
    (10, 0): Sm(128, 4, (126, 126), tensor_fma=1024, mma=(1024, 512), surveyed=True),
    (10, 3): Sm(128, 4, (96, 192), tensor_fma=1024, mma=(1024, 512)),
    (11, 0): Sm(128, 4, (32, 32), mma=(1024, 512)),
    (12, 0): Sm(128, 4, (24, 128), tensor_fma=128, mma=(512, 256), surveyed=True),
    (12, 1): Sm(128, 4, (24, 24), tensor_fma=128, mma=(512, 256)),
}

# By all variants under one build of the compiler.
SAME_PTX = {
    "plain": ((52, 61), (70, 75, 80, 86, 89), (100, 120)),
    "bfloat16": ((52, 61), (70, 75), (80, 86, 89), (100, 120)),
    "mma": ((80, 86, 89), (100, 120)),
}

NAMES = {3: "Kepler", 5: "Maxwell", 6: "Pascal", 9: "Hopper", 10: "Blackwell", 11: "Blackwell", 12: "Blackwell"}
