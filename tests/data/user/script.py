"""A user's own program, typed strictly: run from an environment that holds the wheel and nothing of this repository."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import TypeVar

import cubatch as cb
from cubatch.choices import Mode

_T = TypeVar("_T")


def carried(record: _T) -> _T:
    """Send a record through a pickle, as to another process."""
    copy: _T = pickle.loads(pickle.dumps(record))
    assert copy == record, record
    return copy


def best(mode: Mode, sizes: list[int]) -> int | None:
    """Ask for the fastest size, and read what an answer holds."""
    result = carried(cb.autotune("mnist-cnn", mode=mode, device="cpu", batch_sizes=sizes, budget=1.0, store=False))
    rates: dict[int, float] = {m.batch_size: m.samples_per_second or 0.0 for m in result.measurements}
    reasons: tuple[str, ...] = result.reasons
    assert reasons
    assert max(rates, key=lambda n: rates[n]) in sizes
    return result.batch_size


def refused(batch_size: int) -> str:
    """Give the name of the field that an error of ours names, after its travel to another process."""
    try:
        cb.footprint("lenet5", batch_size=batch_size)
    except cb.InvalidArgument as error:
        copy: cb.InvalidArgument = pickle.loads(pickle.dumps(error))
        return copy.field
    return ""


def main() -> None:
    """Use each public record once."""
    assert best("inference", [1, 2]) in (1, 2)
    network = cb.Network(
        input_shape=(8, 8, 3),
        layers=[cb.Conv2d(k=8, r=3, s=3, pad=1), cb.ReLU(), cb.Flatten(), cb.Linear(k=10)],
    )
    assert carried(network).output_shape == (1, 1, 10)
    device: cb.Device = carried(cb.device("titan-x-pascal"))
    assert device.num_sms == 28  # NVIDIA's data sheet
    forecast: cb.Forecast = carried(cb.predict(network, device=device, batch_sizes=[8, 16]))
    assert forecast.batch_size in (8, 16)
    total: int = carried(cb.footprint(network, batch_size=8, mode="training", device=device)).total
    assert total > 0
    sizes: list[int] = [one.batch_size for one in cb.candidates(network, device=device)]
    assert sizes == sorted(sizes)
    comparison: cb.Comparison = carried(cb.compare(network, ["t4", "a40"], prices={"t4": 0.35}))
    assert comparison
    assert refused(0) == "batch_size"
    assert not Path("cubatch").exists()  # it is not the source tree that was imported


if __name__ == "__main__":
    main()
