"""
Measurements that others published, from CSV files, as cases of the model.

The overhead of a harness is subtracted from the time and stored separately: it is no property of a layer.
"""

from __future__ import annotations

import csv
import re
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs
import numpy as np

from cubatch.estimate.block_counts import FUSED_FILTERS
from cubatch.estimate.vendor.algorithms import Array, Mask, Places, Work
from cubatch.estimate.vendor.fitted import kin_of, lanes
from cubatch.estimate.vendor.vendor_model import l2_of
from cubatch.hardware import catalogue
from cubatch.hardware.facts import Device
from cubatch.hardware.waves import busiest_sm_blocks

NEUSIGHT, CONV, GEMM = "neusight", "deepbench conv", "deepbench gemm"
SOURCES = (NEUSIGHT, CONV, GEMM)

# Boards that the sources do not tell apart: guessed from their best GEMM (predictor.md, 0).
_BOARDS = {"tesla v100": "v100-sxm2-16gb", "tesla p100": "p100-pcie-16gb", "a100": "a100-pcie-80gb"}
# Kepler, as the model was fitted and scored with it: NVIDIA's board specifications of K40 (BD-06902-001) and K80
# (BD-07317-001).  The catalogue's K80 has 0.6 GB/s more.
_KEPLER = {
    "tesla k40": Device(name="Tesla K40", slug="k40", compute_capability=(3, 5), num_sms=15, l2_bytes=3 << 19,
                        peak_flops_per_second={"float32": 4.29e12}, peak_bytes_per_second=288e9),
    "tesla k80": Device(name="Tesla K80", slug="k80", compute_capability=(3, 7), num_sms=13, l2_bytes=3 << 19,
                        peak_flops_per_second={"float32": 4.11e12}, peak_bytes_per_second=240e9),
}  # fmt: skip
SIBLINGS = {
    "titan-x-pascal": "GP102", "titan-xp": "GP102", "gtx-1080-ti": "GP102", "titan-x-maxwell": "GM200",
    "m40-12gb": "GM200", "k40": "Kepler", "k80": "Kepler",
}  # fmt: skip
"""Sibling boards, which are left out together."""
BASE_CLOCK_HZ = {"a100-pcie-80gb": 1065e6}
"""
Base clock by the data sheet of GPUs that were measured at about this clock, not at their boost clock.

NeuSight's A100 took 1.5 clocks of 1410 MHz for each step of a tile (`tile_clocks`), and its V100 1.0 to 1.2.  In cuBLAS
another A100 took 1.03: 0.113 s for a float32 product of 10240 x 10240 x 10240 (PaddlePaddle/Paddle#30612).
"""

_TILE = re.compile(r"_scudnn_(\d+)x(\d+)_")
_FUSED_STEPS = 128 * 4  # products of F(2x2, 3x3) for a block's 128 pixels, per filter and channel
_CHANNELS = 32  # at fewer, the beginning and the end of a tile take much of its time


@attrs.frozen(eq=False)
class Rows:
    """
    Measurements of one source.

    Attributes:
        source: One of SOURCES.
        work: What ran.
        devices: GPUs by the catalogue's name.
        gpu: The GPU of each row, by that name.
        seconds: Time of the layer alone.
        overhead: What the harness added, in seconds.
        shape: Fold key: equal for rows that differ only in batch and GPU.
        dtype: "float32", or "float16" in storage.
        tensor: Whether Tensor Cores did it.
    """

    source: str
    work: Work
    devices: Mapping[str, Device]
    gpu: np.ndarray
    seconds: Array
    overhead: Array
    shape: np.ndarray
    dtype: str = "float32"
    tensor: bool = False

    @property
    def name(self) -> str:
        """The source, and the arithmetic where it is not that of float32."""
        return f"{self.source} tensor" if self.tensor else self.source

    def __len__(self) -> int:
        return len(self.seconds)

    def take(self, mask: Mask) -> Rows:
        """Return the rows of a mask."""
        gpu = self.gpu[mask]
        return attrs.evolve(
            self, work=self.work.take(mask), devices={slug: self.devices[slug] for slug in self.devices if slug in gpu},
            gpu=gpu, seconds=self.seconds[mask], overhead=self.overhead[mask], shape=self.shape[mask],
        )  # fmt: skip

    def folds(self, count: int = 5) -> np.ndarray:
        """Return each row's fold, by a checksum of its shape."""
        numbers = {shape: zlib.crc32(str(shape).encode()) % count for shape in np.unique(self.shape)}
        return np.array([numbers[shape] for shape in self.shape])

    def places(self, scales: Mapping[str, tuple[float, float]]) -> Places:
        """Return each row's GPU with its factors."""
        names = list(self.devices)
        index = np.searchsorted(np.array(sorted(names)), self.gpu)
        devices = [self.devices[name] for name in sorted(names)]

        def column(values: Sequence[float | None]) -> Array:
            return np.array(values, float)[index]

        kind = self.dtype if self.tensor else "float32"
        return Places(
            peak=column([device.peak_flops_per_second.get(kind) for device in devices]),
            bandwidth=column([device.peak_bytes_per_second for device in devices]),
            num_sms=column([device.num_sms for device in devices]),
            l2_bytes=column([l2_of(device) for device in devices]),
            lanes=column([lanes(device) for device in devices]),
            element_bytes=np.full(len(self), 4.0 if self.dtype == "float32" else 2.0),
            compute=column([scales.get(device.slug, (1.0, 1.0))[0] for device in devices]),
            memory=column([scales.get(device.slug, (1.0, 1.0))[1] for device in devices]),
            gpu=np.array([device.slug for device in devices])[index],
            kin=np.array([kin_of(device) for device in devices])[index],
        )

    def at_base_clock(self) -> Rows:
        """Return the rows of GPUs that were measured at about their base clock, with the rates of that clock."""
        rows = self.take(np.isin(self.gpu, list(BASE_CLOCK_HZ) if self.source == NEUSIGHT else []))
        devices = {slug: _at_clock(device, BASE_CLOCK_HZ[slug]) for slug, device in rows.devices.items()}
        return attrs.evolve(rows, devices=devices)


def _at_clock(device: Device, clock_hz: float) -> Device:
    share = clock_hz / (device.clock_hz or clock_hz)
    rates = {dtype: share * rate for dtype, rate in device.peak_flops_per_second.items()}
    return attrs.evolve(device, clock_hz=clock_hz, peak_flops_per_second=rates)


def find_device(name: str) -> Device:
    """Find the GPU of a source's name."""
    key = name.lower()
    return _KEPLER[key] if key in _KEPLER else catalogue.find(_BOARDS.get(key, name))


def _read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def _numbers(rows: Sequence[Mapping[str, str]], name: str) -> Array:
    return np.array([float(row[name] or "nan") for row in rows])


def _texts(rows: Sequence[Mapping[str, str]], name: str) -> np.ndarray:
    return np.array([row[name] for row in rows])


def _gpus(rows: Sequence[Mapping[str, str]]) -> tuple[dict[str, Device], np.ndarray]:
    by_name = {name: find_device(name) for name in sorted({row["gpu"] for row in rows})}
    return {device.slug: device for device in by_name.values()}, np.array([by_name[row["gpu"]].slug for row in rows])


def _shapes(rows: Sequence[Mapping[str, str]], names: Sequence[str]) -> np.ndarray:
    return np.array(["_".join(row[name] for name in names) for row in rows])


def load(folder: Path, source: str) -> list[Rows]:
    """
    Read a source from a folder; empty where the folder has none of its files.

    The filters are those of predictor.md, 8: rows of at least twice the overhead (neusight) and of
    at least 0.02 ms (deepbench).
    """
    readers = {NEUSIGHT: _neusight, CONV: _deepbench_conv, GEMM: _deepbench_gemm}
    return readers[source](folder)


def tile_clocks(folder: Path) -> dict[str, dict[str, tuple[float, int]]]:
    """
    Return the SM clocks that tiles took in NeuSight's rows, at the boost clock: by GPU and tile (median, rows).

    One is the time of the multiply-adds alone, on all lanes of the busiest SM, whose blocks are those of the published
    grid.  No constant of the time model is used.  Rows count from 1 ms and four times the overhead on.
    """
    rows = _neusight_rows(folder)
    if not rows:
        return {}
    devices, gpu = _gpus(rows)
    seconds, overhead = _neusight_seconds(rows, gpu)
    ratios: dict[tuple[str, str], list[float]] = {}
    for row, slug, time, more in zip(rows, gpu, seconds, overhead, strict=True):
        device, kernel, channels = devices[slug], row["main_kernel_truncated"], int(row["c_in"])
        match = _TILE.search(kernel)
        if channels < _CHANNELS or time + more < max(1e-3, 4 * more):
            continue
        if "_scudnn_winograd_" in kernel:
            tile, steps = "winograd 2x2", FUSED_FILTERS * _FUSED_STEPS * channels
        elif match:
            tile, steps = f"{match[1]}x{match[2]}", int(match[1]) * int(match[2]) * int(row["kernel"]) ** 2 * channels
        else:
            continue
        blocks = int(row["grid_x"]) * int(row["grid_y"]) * int(row["grid_z"])
        least = busiest_sm_blocks(blocks, device.num_sms or 1) * steps / lanes(device) / (device.clock_hz or 1.0)
        ratios.setdefault((str(slug), tile), []).append(time / least)
    out: dict[str, dict[str, tuple[float, int]]] = {}
    for (slug, tile), values in sorted(ratios.items()):
        out.setdefault(slug, {})[tile] = round(float(np.median(values)), 2), len(values)
    return out


def _neusight_rows(folder: Path) -> list[dict[str, str]]:
    return [row for path in sorted(folder.glob("neusight_conv_*.csv")) for row in _read(path)]


def _neusight_seconds(rows: Sequence[Mapping[str, str]], gpu: np.ndarray) -> tuple[Array, Array]:
    """Return the time of each row's kernels, and what the harness added to it."""
    latency, position, gflop = (_numbers(rows, name) for name in ("latency_ms", "position", "gflop"))
    overhead = np.zeros(len(rows))
    for slug in np.unique(gpu):
        of = gpu == slug
        overhead[of] = _drifting_floor(latency[of] / 1e3, position[of], gflop[of])
    return latency / 1e3 - overhead, overhead


def _neusight(folder: Path) -> list[Rows]:
    rows = _neusight_rows(folder)
    if not rows:
        return []
    devices, gpu = _gpus(rows)
    seconds, overhead = _neusight_seconds(rows, gpu)
    measured = Rows(
        NEUSIGHT, _square(rows), devices, gpu, seconds, overhead,
        _shapes(rows, ("c_in", "c_out", "in_hw", "kernel", "stride")),
    )  # fmt: skip
    return [measured.take(seconds >= overhead)]


def _drifting_floor(latency: Array, position: Array, gflop: Array) -> Array:
    """
    Fit what the harness adds, which grows with the row's place in its file (predictor.md, 0).

    It is the 5 % quantile of the rows with least work (a fifth), as a parabola of the position.  Asymmetric weights put
    5 of 100 rows below it.
    """
    small = gflop <= np.quantile(gflop, 0.2)
    x = np.stack([np.ones(small.sum()), position[small], position[small] ** 2], axis=1)
    y, weights = latency[small], np.ones(small.sum())
    for _ in range(200):
        scaled = x * weights[:, None]
        coefficients = np.linalg.lstsq(scaled.T @ x, scaled.T @ y, rcond=None)[0]
        gap = y - x @ coefficients
        weights = np.where(gap > 0, 0.05, 0.95) / np.maximum(np.abs(gap), 1e-6)
    everywhere = np.stack([np.ones(len(position)), position, position**2], axis=1)
    return np.maximum(everywhere @ coefficients, 0.0)


def _square(rows: Sequence[Mapping[str, str]]) -> Work:
    side, out, taps, stride = (_numbers(rows, name) for name in ("in_hw", "out_hw", "kernel", "stride"))
    return Work.of(
        np.zeros(len(rows), int), n=_numbers(rows, "batch"), h=side, w=side, c=_numbers(rows, "c_in"),
        k=_numbers(rows, "c_out"), r=taps, s=taps, p=out, q=out, stride_h=stride, stride_w=stride, dilation=1.0,
        groups=1.0,
    )  # fmt: skip


def _deepbench(folder: Path, name: str) -> list[tuple[list[dict[str, str]], str, bool]]:
    path = folder / name
    if not path.exists():
        return []
    rows = [row for row in _read(path) if row["suite"] == "train"]
    kinds = (("fp32", "float32", False), ("fp16_storage", "float16", False), ("fp16_mixed_tensorop", "float16", True))
    sets = [
        ([row for row in rows if row["precision"].startswith(kind)], dtype, tensor) for kind, dtype, tensor in kinds
    ]
    return [item for item in sets if item[0]]


def _multiple(row: Mapping[str, str], *names: str) -> bool:
    """Return whether Tensor Cores take these extents unpadded; others run ten times slower, on other units."""
    return all(int(row[name]) % 8 == 0 for name in names)


def _deepbench_conv(folder: Path) -> list[Rows]:
    """
    Read convolutions; a case that stands for several applications has as many rows, each a measurement of its own.

    Of the 60 such pairs in float32 36 differ, by up to a tenth as a rule and once by a factor of four.
    """
    names = {"n": "n", "h": "h", "w": "w", "c": "c", "k": "k", "r": "r_filter_h", "s": "s_filter_w", "p": "out_h",
             "q": "out_w", "stride_h": "stride_h", "stride_w": "stride_w"}  # fmt: skip
    shape = ("c", "h", "w", "k", "r_filter_h", "s_filter_w", "stride_h", "stride_w")
    out = []
    for rows, dtype, tensor in _deepbench(folder, "deepbench_conv.csv"):
        cases = [
            (row, pass_) for pass_, column in enumerate(("fwd_ms", "bwd_inputs_ms", "bwd_params_ms"))
            for row in rows
            if row[column] and float(row[column]) >= 0.02 and (not tensor or _multiple(row, "c", "k"))
        ]  # fmt: skip
        case_rows = [row for row, _ in cases]
        columns = ("fwd_ms", "bwd_inputs_ms", "bwd_params_ms")
        time = np.array([float(row[columns[pass_]]) for row, pass_ in cases]) / 1e3
        work = Work.of(
            np.array([pass_ for _, pass_ in cases]), groups=1.0, dilation=1.0,
            **{name: _numbers(case_rows, column) for name, column in names.items()},
        )  # fmt: skip
        out.append(
            Rows(
                CONV, work, *_gpus(case_rows), time, np.zeros(len(case_rows)), _shapes(case_rows, shape), dtype, tensor
            )
        )
    return out


def _deepbench_gemm(folder: Path) -> list[Rows]:
    out = []
    for every, dtype, tensor in _deepbench(folder, "deepbench_gemm.csv"):
        rows = [row for row in every if float(row["time_ms"]) >= 0.02 and (not tensor or _multiple(row, "m", "n", "k"))]
        # As a linear layer's passes are launched: the output T N, its input's gradient N N, its filter's N T.
        passes = np.array([0 if row["a_t"] == "T" else 2 if row["b_t"] == "T" else 1 for row in rows])
        m, n, k = (_numbers(rows, name) for name in "mnk")
        work = Work.of(
            passes, n=np.where(passes == 2, k, n), c=np.select([passes == 0], [k], m),
            k=np.select([passes == 0, passes == 1], [m, k], n),
            h=1.0, w=1.0, r=1.0, s=1.0, p=1.0, q=1.0, stride_h=1.0, stride_w=1.0, groups=1.0, dilation=1.0,
        )  # fmt: skip
        time = _numbers(rows, "time_ms") / 1e3
        out.append(Rows(GEMM, work, *_gpus(rows), time, np.zeros(len(rows)), _shapes(rows, ("k", "m")), dtype, tensor))
    return out
