"""`cubatch layers`: the types of layers, their keys and defaults."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import attrs
import typer

from cubatch.cli import console
from cubatch.cli.options import JsonOption

if TYPE_CHECKING:
    from cubatch.network.layer import Layer


def layers(
    kind: Annotated[str | None, typer.Argument(metavar="[TYPE]", help="One type. Default: a list of all.")] = None,
    *,
    json: JsonOption = None,
) -> None:
    """
    List the types of layers that a spec file may hold.

    With a TYPE: its keys, what they mean, their defaults and an example.

    Example: cubatch layers conv2d
    """
    from cubatch.network import kinds
    from cubatch.network.layers import LAYERS
    from cubatch.report.tables import layers as layers_table

    console.check_writable(json=json)
    chosen = kinds.kinds() if kind is None else (kinds.kind(kind),)
    rows = [attrs.asdict(each) | {"runs": runs(LAYERS[each.type])} for each in chosen]
    grids = [layers_table.layers(rows)] if kind is None else layers_table.layer(rows[0])
    console.emit(grids, {"schema": 1, "layers": rows}, json)


def runs(kind: type[Layer]) -> bool:
    """Return whether the engine can run a type of layer."""
    from cubatch.engine import layers as engine

    return engine.TABLE.get(kind, engine.NOT_WRITTEN) is not engine.NOT_WRITTEN
