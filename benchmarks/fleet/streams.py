"""What a worker says while it measures, recorded: `on_worker.measure` itself, on a GPU in virtual time."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any
from unittest import mock

import attrs
import numpy as np

from cubatch.fleet import on_worker
from cubatch.hardware import probe
from cubatch.hardware.facts import Device
from cubatch.tuning import forecast, runners
from tests.fakes import FakeDevice

_NOISE = 0.005
_PREPARE_SECONDS = 0.05


@attrs.frozen
class Stream:
    """
    What comes of measuring on a device.

    Attributes:
        device: What it is of.
        messages: When each was said, in seconds from the beginning, and its text.
        reply: What the task gives back.
        seconds: Until then.
    """

    device: Device
    messages: tuple[tuple[float, str], ...]
    reply: Mapping[str, str]
    seconds: float


def record(spec: Mapping[str, Any], device: Device, options: Mapping[str, Any]) -> Stream:
    """Tune a network on a GPU that is not here, whose steps take what the model of time says of it."""
    mode = options.get("mode", "inference")
    seconds = forecast.predict(dict(spec), device=device, mode=mode).seconds
    sizes = sorted(seconds)
    times = np.log([seconds[n] for n in sizes])

    def curve(n: int) -> float:
        return float(np.exp(np.interp(np.log(n), np.log(sizes), times)))

    runner = FakeDevice(curve, noise=_NOISE, prepare_seconds=_PREPARE_SECONDS)()
    messages: list[tuple[float, str]] = []
    worker = SimpleNamespace(log_event=lambda _, text: messages.append((runner.clock.now(), text)))
    dask = SimpleNamespace(get_worker=lambda: worker, Lock=lambda _: contextlib.nullcontext())
    with (
        mock.patch.dict(sys.modules, {"distributed": dask}),
        mock.patch.object(probe, "_present", return_value=device),
        mock.patch.object(runners, "factory", return_value=lambda: runner),
    ):
        given = {**options, "device": device, "isolate": False}
        reply = on_worker.measure(json.loads(json.dumps(spec)), given, [], "topic", "place")
    return Stream(device, tuple(messages), reply, runner.clock.now())
