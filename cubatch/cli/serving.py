"""`cubatch serving`: maximum batch, queue delay and instances of a server that batches requests."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from cubatch.cli import console, options as opt

Server = Literal["triton", "ray-serve", "bentoml", "torchserve"]


def serving(
    result: Annotated[
        str,
        typer.Argument(
            metavar="RESULT",
            help="A result of inference, as `cubatch tune --json`, `cubatch tune --threads 1,2 --json` or `cubatch "
            "predict --device NAME --json` writes it.",
        ),
    ],
    *,
    arrival_rate: Annotated[float, typer.Option("--arrival-rate", help="Requests per second, of one sample each.")],
    p99: Annotated[float, typer.Option("--p99", help="Limit of the 99th percentile of the latency in seconds.")],
    instances: Annotated[
        int | None,
        typer.Option(
            "--instances",
            help="Copies of the model. Default: as few as keep the limit; of a result with --threads, as many as ran "
            "at the same time.",
        ),
    ] = None,
    overhead: Annotated[
        float, typer.Option("--overhead", help="Seconds that server and network add to each request.")
    ] = 0.0,
    price: Annotated[float | None, typer.Option("--price", help="Price of an instance per hour.")] = None,
    server: Annotated[
        Server | None,
        typer.Option(
            "--server",
            help="Print the settings of this server instead of the table. ray-serve: plan with batches that are closed "
            "while all instances are busy.",
        ),
    ] = None,
    json: opt.JsonOption = None,
) -> None:
    """
    Plan a server that batches requests.

    The plan has a maximum batch size, a queue delay and a number of instances. Nothing is measured: the latency of
    each batch size comes from a tuning result or a prediction, and the queue is simulated. Of several numbers of
    threads the best one counts.

    Example: cubatch serving result.json --arrival-rate 200 --p99 0.05 --server triton
    """
    from cubatch.serving import serving_plan

    console.check_writable(json=json)
    plan = serving_plan.serving_plan(
        result, arrival_rate=arrival_rate, p99=p99, instances=instances, overhead=overhead, price_per_hour=price,
        closes_while_busy=server == "ray-serve",
    )  # fmt: skip
    if server is not None and json != "-":
        texts = {
            "triton": plan.to_triton, "ray-serve": plan.to_ray_serve, "bentoml": plan.to_bentoml,
            "torchserve": plan.to_torchserve,
        }  # fmt: skip
        typer.echo(texts[server](), nl=False)
    if server is None or json is not None:
        from cubatch.report import views

        console.emit([] if server else views.grids(plan), plan.to_mapping(), json)
