"""`cubatch candidates`: the batch sizes worth measuring on a device, which may be absent."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from cubatch.cli import console, options as opt


def candidates(
    model: opt.Model,
    *,
    device: opt.DeviceOption = None,
    mode: opt.ModeOption = "inference",
    dtype: opt.DtypeOption = "float32",
    optimizer: opt.OptimizerOption = "sgd",
    library: opt.LibraryOption = "auto",
    recompute: opt.RecomputeOption = False,
    max_batch_size: opt.MaxOption = None,
    memory_limit: opt.MemoryOption = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Show each layer: blocks, waves, and channels that miss the Tensor Cores.")
    ] = False,
    input_shape: opt.ShapeOption = None,
    classes: opt.ClassesOption = None,
    opaque: opt.OpaqueOption = False,
    json: opt.JsonOption = None,
) -> None:
    """
    List the batch sizes worth measuring, and why.

    Nothing is measured, and the device may be absent.

    Example: cubatch candidates resnet18 --device v100-sxm2-16gb --dtype float16 --explain
    """
    from cubatch.hardware import probe
    from cubatch.report.tables import candidates as candidates_table, common
    from cubatch.tuning import candidate_layers, ladder

    console.check_writable(json=json)
    spec = opt.read_spec(model, input_shape, classes, opaque=opaque)
    gpu = probe.resolve(device, live=False)
    if gpu.kind == "cuda" and gpu.num_sms is None:
        console.say(f"the number of SMs of {gpu} is unknown, so no candidate comes from Coulom's rule or a full wave")
    options: dict[str, Any] = {
        "device": gpu, "mode": mode, "dtype": dtype, "optimizer": optimizer, "library": library, "recompute": recompute,
        "max_batch_size": max_batch_size, "memory_limit": memory_limit,
    }  # fmt: skip
    proposed = ladder.candidates(spec, **options)
    rows = candidate_layers.explain(spec, **options) if explain else None
    grids = [
        candidates_table.candidates(proposed, title=f"{model}, {mode}, {dtype}, {gpu}: batch sizes worth measuring")
    ]
    grids += [] if rows is None else [candidates_table.explained(rows)]
    listed = [common.plain(candidate) for candidate in proposed]
    console.emit(grids, {"schema": 1, "device": gpu.to_mapping(), "candidates": listed, "explain": rows}, json)
