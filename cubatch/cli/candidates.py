"""`cubatch candidates`: the batch sizes worth measuring, for a device that need not be here."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from cubatch.cli import console
from cubatch.cli.options import (
    ClassesOption,
    DeviceOption,
    DtypeOption,
    JsonOption,
    LibraryOption,
    MaxOption,
    MemoryOption,
    Model,
    ModeOption,
    OpaqueOption,
    OptimizerOption,
    RecomputeOption,
    ShapeOption,
    read_spec,
)


def candidates(
    model: Model,
    *,
    device: DeviceOption = None,
    mode: ModeOption = "inference",
    dtype: DtypeOption = "float32",
    optimizer: OptimizerOption = "sgd",
    library: LibraryOption = "auto",
    recompute: RecomputeOption = False,
    max_batch_size: MaxOption = None,
    memory_limit: MemoryOption = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Per layer: blocks, busiest SM, fill, channels that miss a Tensor Core.")
    ] = False,
    input_shape: ShapeOption = None,
    classes: ClassesOption = None,
    opaque: OpaqueOption = False,
    json: JsonOption = None,
) -> None:
    """
    List the batch sizes worth measuring, and why.

    The device need not be here.

    Example: cubatch candidates resnet18 --device v100-sxm2-16gb --dtype float16 --explain
    """
    from cubatch.hardware import probe
    from cubatch.report.tables import candidates as candidates_table
    from cubatch.report.tables import common
    from cubatch.tuning import candidate_layers, ladder

    console.check_writable(json=json)
    spec = read_spec(model, input_shape, classes, opaque=opaque)
    gpu = probe.resolve(device, live=False)
    if gpu.kind == "cuda" and gpu.num_sms is None:
        console.say(f"how many SMs {gpu} has is not known, so no candidate comes from Coulom's rule or a crest")
    options: dict[str, Any] = {
        "device": gpu, "mode": mode, "dtype": dtype, "optimizer": optimizer, "library": library, "recompute": recompute,
        "max_batch_size": max_batch_size, "memory_limit": memory_limit,
    }  # fmt: skip
    found = ladder.candidates(spec, **options)
    rows = candidate_layers.explain(spec, **options) if explain else None
    title = f"{model}, {mode}, {dtype}, {gpu}: batch sizes worth measuring"
    grids = [candidates_table.candidates(found, title=title)]
    grids += [] if rows is None else [candidates_table.explained(rows)]
    listed = [common.plain(candidate) for candidate in found]
    console.emit(grids, {"schema": 1, "device": gpu.to_mapping(), "candidates": listed, "explain": rows}, json)
