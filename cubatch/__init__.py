"""
cubatch: the batch size at which a neural network really runs fastest on a given GPU.

    import cubatch as cb

    result = cb.autotune("mnist-cnn", mode="training")
    result.batch_size, result.reasons

Every name below is public.  Names are loaded when first used, so that importing cubatch loads no
GPU, plotting or command-line library.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "errors": (
        "CompileError", "CubatchError", "DeviceFailed", "DeviceNotAvailable", "DoesNotFit", "EnergyNotAvailable",
        "InvalidArgument", "InvalidData", "InvalidSpec", "MissingDependency", "NothingMeasured", "OutOfMemory",
        "StoreError", "TimedOut", "UnknownName", "UnsupportedDtype", "UnsupportedLayer", "WorkerDied", "WorkerFailed",
    ),
    "kinds": (
        "Add", "Attention", "AvgPool2d", "BatchNorm2d", "ClassToken", "Concat", "Conv2d", "Dropout", "Flatten", "GELU",
        "GlobalAvgPool", "HardSigmoid", "HardSwish", "LayerNorm", "Linear", "MaxPool2d", "ReLU", "ReLU6", "Scale",
        "SiLU", "Sigmoid", "Softmax", "Tokens",
    ),
    "spec": ("Network", "SuspiciousSpec", "load_spec"),
    "hardware": ("Device",),
    "probe": ("device", "devices"),
    "waves": ("coulom_batch_size", "count_waves", "occupancy"),
    "memory": ("footprint", "max_batch_size", "rules_of_thumb"),
    "results": ("Candidate", "Measurement", "TuningResult"),
    "ladder": ("candidates",),
    "forecast_record": ("Forecast",),
    "forecast": ("predict",),
    "tuning": ("autotune", "autotune_callable"),
}  # fmt: skip
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = ["__version__", "models", *sorted(_HOME_OF)]  # noqa: PLE0604 - the names are text, made from one table

if TYPE_CHECKING:
    from cubatch import models as models
    from cubatch.errors import *  # noqa: F403
    from cubatch.forecast import predict as predict
    from cubatch.forecast_record import Forecast as Forecast
    from cubatch.hardware import Device as Device
    from cubatch.kinds import *  # noqa: F403
    from cubatch.ladder import candidates as candidates
    from cubatch.memory import footprint as footprint
    from cubatch.memory import max_batch_size as max_batch_size
    from cubatch.memory import rules_of_thumb as rules_of_thumb
    from cubatch.probe import device as device
    from cubatch.probe import devices as devices
    from cubatch.results import Candidate as Candidate
    from cubatch.results import Measurement as Measurement
    from cubatch.results import TuningResult as TuningResult
    from cubatch.spec import Network as Network
    from cubatch.spec import SuspiciousSpec as SuspiciousSpec
    from cubatch.spec import load_spec as load_spec
    from cubatch.tuning import autotune as autotune
    from cubatch.tuning import autotune_callable as autotune_callable
    from cubatch.waves import coulom_batch_size as coulom_batch_size
    from cubatch.waves import count_waves as count_waves
    from cubatch.waves import occupancy as occupancy


def __getattr__(name: str) -> Any:
    if name == "models":
        return importlib.import_module("cubatch.models")
    if name not in _HOME_OF:
        raise AttributeError(f"module 'cubatch' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"cubatch.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
