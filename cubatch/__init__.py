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
        "OverLimit", "StoreError", "TimedOut", "UnknownName", "UnsupportedDtype", "UnsupportedLayer",
        "UnsupportedVersion", "WorkerDied", "WorkerFailed",
    ),
    "network.layers": (
        "Add", "Attention", "AvgPool2d", "BatchNorm2d", "ClassToken", "Concat", "Conv2d", "Dropout", "Flatten", "GELU",
        "GlobalAvgPool", "HardSigmoid", "HardSwish", "LayerNorm", "LayerScale", "Linear", "MaxPool2d", "Opaque", "ReLU",
        "ReLU6", "Scale", "SiLU", "Sigmoid", "Slice", "Softmax", "Tokens",
    ),
    "network.graph": ("Network", "SuspiciousSpec"),
    "network.specfile": ("load_spec",),
    "network.weight_files": ("from_state_dict", "load_weights", "save_weights", "to_state_dict"),
    "network.importers.onnx_file": ("load_onnx",),
    "network.importers.refusal": ("UnsupportedOperator",),
    "network.importers.torch_export": ("from_torch",),
    "hardware.facts": ("Device",),
    "hardware.probe": ("device", "devices"),
    "hardware.waves": ("coulom_batch_size", "count_waves", "occupancy"),
    "memory.thumb_rules": ("rules_of_thumb",),
    "measure.records": ("Candidate",),
    "measure.profile_records": ("StepProfile",),
    "measure.step_profile": ("profile",),
    "frameworks.loader_rate": ("LoaderRate",),
    "frameworks.module_footprint": ("ModuleFootprint",),
    "tuning.step_memory": ("footprint", "max_batch_size"),
    "tuning.results": ("Measurement", "TuningResult"),
    "tuning.ladder": ("candidates",),
    "tuning.forecast_record": ("Forecast",),
    "tuning.prediction": ("predict",),
    "tuning.comparison": ("Comparison", "compare"),
    "tuning.training": ("train",),
    "tuning.tune": ("autotune", "autotune_callable"),
    "tuning.tune_module": ("autotune_module",),
    "tuning.tune_each": ("autotune_extents", "autotune_threads"),
    "tuning.extents_result": ("ExtentsResult",),
    "tuning.length_plan": ("LengthPlan",),
    "tuning.threads_result": ("ThreadsResult",),
    "serving.serving_plan": ("ServingPlan", "serving_plan"),
    "fleet.fleet_result": ("FleetDevice", "FleetResult"),
    "fleet.tune_fleet": ("autotune_fleet",),
}  # fmt: skip
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = ["__version__", "models", *sorted(_HOME_OF)]  # noqa: PLE0604 - the names are text, made from one table

if TYPE_CHECKING:
    from cubatch.errors import *  # noqa: F403
    from cubatch.fleet.fleet_result import FleetDevice as FleetDevice, FleetResult as FleetResult
    from cubatch.fleet.tune_fleet import autotune_fleet as autotune_fleet
    from cubatch.frameworks.loader_rate import LoaderRate as LoaderRate
    from cubatch.frameworks.module_footprint import ModuleFootprint as ModuleFootprint
    from cubatch.hardware.facts import Device as Device
    from cubatch.hardware.probe import device as device, devices as devices
    from cubatch.hardware.waves import (
        coulom_batch_size as coulom_batch_size,
        count_waves as count_waves,
        occupancy as occupancy,
    )
    from cubatch.measure.profile_records import StepProfile as StepProfile
    from cubatch.measure.records import Candidate as Candidate
    from cubatch.measure.step_profile import profile as profile
    from cubatch.memory.thumb_rules import rules_of_thumb as rules_of_thumb
    from cubatch.network import models as models
    from cubatch.network.graph import Network as Network, SuspiciousSpec as SuspiciousSpec
    from cubatch.network.importers.onnx_file import load_onnx as load_onnx
    from cubatch.network.importers.refusal import UnsupportedOperator as UnsupportedOperator
    from cubatch.network.importers.torch_export import from_torch as from_torch
    from cubatch.network.layers import *  # noqa: F403
    from cubatch.network.specfile import load_spec as load_spec
    from cubatch.network.weight_files import (
        from_state_dict as from_state_dict,
        load_weights as load_weights,
        save_weights as save_weights,
        to_state_dict as to_state_dict,
    )
    from cubatch.serving.serving_plan import ServingPlan as ServingPlan, serving_plan as serving_plan
    from cubatch.tuning.comparison import Comparison as Comparison, compare as compare
    from cubatch.tuning.extents_result import ExtentsResult as ExtentsResult
    from cubatch.tuning.forecast_record import Forecast as Forecast
    from cubatch.tuning.ladder import candidates as candidates
    from cubatch.tuning.length_plan import LengthPlan as LengthPlan
    from cubatch.tuning.prediction import predict as predict
    from cubatch.tuning.results import Measurement as Measurement, TuningResult as TuningResult
    from cubatch.tuning.step_memory import footprint as footprint, max_batch_size as max_batch_size
    from cubatch.tuning.threads_result import ThreadsResult as ThreadsResult
    from cubatch.tuning.training import train as train
    from cubatch.tuning.tune import autotune as autotune, autotune_callable as autotune_callable
    from cubatch.tuning.tune_each import autotune_extents as autotune_extents, autotune_threads as autotune_threads
    from cubatch.tuning.tune_module import autotune_module as autotune_module


def __getattr__(name: str) -> Any:
    if name == "models":
        return importlib.import_module("cubatch.network.models")
    if name not in _HOME_OF:
        raise AttributeError(f"module 'cubatch' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"cubatch.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
