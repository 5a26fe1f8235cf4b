"""`cubatch models`: the networks that have a name."""

from __future__ import annotations

from cubatch.cli import console
from cubatch.cli.layers import runs
from cubatch.cli.options import JsonOption


def models(*, json: JsonOption = None) -> None:
    """
    List the networks that have a name.

    With input, output, parameters and FLOP per sample; and what else a MODEL may be. Letter case, hyphens, underscores
    and spaces in a name are ignored.

    Example: cubatch models
    """
    from cubatch.network import models as named
    from cubatch.report.tables import models as models_table

    console.check_writable(json=json)
    rows = []
    for name in named.names():
        network = named.build(name)
        rows.append({
            "name": name, "input_shape": list(network.input_shape), "output_shape": list(network.output_shape),
            "parameters": network.parameters, "flop_per_sample": network.flops(),
            "runs": all(runs(type(layer)) for layer in network.layers),
        })  # fmt: skip
    console.emit([models_table.models(rows)], {"schema": 1, "models": rows}, json)
