"""`cubatch layers`: the kinds of layers, their keys and defaults."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import attrs
import typer

from cubatch.cli import console
from cubatch.cli.options import JsonOption

if TYPE_CHECKING:
    from cubatch.network.layer import Layer


def layers(
    kind: Annotated[str | None, typer.Argument(metavar="[TYPE]", help="One type; default: all.")] = None,
    *,
    json: JsonOption = None,
) -> None:
    """
    List the types of layers that a spec file may hold.

    Of one type its keys, defaults and an example.

    Example: cubatch layers conv2d
    """
    from cubatch.network import kinds
    from cubatch.network.layers import LAYERS
    from cubatch.report.tables import layers as layers_table

    console.check_writable(json=json)
    wanted = kinds.kinds() if kind is None else (kinds.kind(kind),)
    found = [attrs.asdict(one) | {"runs": runs(LAYERS[one.type])} for one in wanted]
    grids = [layers_table.layers(found)] if kind is None else layers_table.layer(found[0])
    console.emit(grids, {"schema": 1, "layers": found}, json)


def runs(kind: type[Layer]) -> bool:
    """Say whether the engine has code for a kind of layer."""
    from cubatch.engine import layers as engine

    return engine.TABLE.get(kind, engine.NOT_WRITTEN) is not engine.NOT_WRITTEN
