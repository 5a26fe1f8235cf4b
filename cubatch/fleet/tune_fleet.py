"""autotune_fleet(): one measurement per distinct device of a Dask cluster."""

from __future__ import annotations

import contextlib
import inspect
import json
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs

from cubatch import checks, files
from cubatch.choices import Modelled
from cubatch.errors import CubatchError, InvalidArgument, MissingDependency, WorkerFailed
from cubatch.fleet import on_worker
from cubatch.fleet.fleet_result import FleetDevice, FleetResult
from cubatch.hardware import arithmetic, memory_limit as hardware_memory, probe
from cubatch.network import models
from cubatch.network.models import SpecLike
from cubatch.tuning import anchors as anchored, prediction as forecasts, tune
from cubatch.tuning.request import Request, check_progress
from cubatch.tuning.results import TuningResult
from cubatch.units import format_bytes
from cubatch.workload import Workload

POLL_SECONDS = 0.2
_CONNECT_SECONDS = 30
_FIRST_WORKER_SECONDS = 60  # a queue takes a while to start a worker
_NO_SCHEDULER = "Start one: dask scheduler. Or correct the address."
_NOT_INSTALLED = "Install cubatch on the workers: pip install '.[fleet]'."
_PREDICTABLE = (
    "mode", "dtype", "batch_sizes", "objective", "tolerance", "max_batch_size", "memory_limit", "latency_limit",
    "optimizer", "recompute",
)  # fmt: skip
"""Options with the same meaning for `predict`."""


def autotune_fleet(
    layer_spec: SpecLike,
    client: Any,
    *,
    batch_sizes: Iterable[int] | None = None,
    predict: Iterable[str] = (),
    prices: Mapping[str, float] | None = None,
    store: bool | str | Path = True,
    progress: Callable[[str, str], None] | None = None,
    **options: Any,
) -> FleetResult:
    """
    Find the fastest batch size on every distinct device of a Dask cluster.

    One worker per distinct device measures, alone on its GPU, or on its host if it has none.  If that worker dies, Dask
    measures on another one with the same device.  Workers keep their timings in their own stores, as `autotune` does,
    so that a repeated call continues from them.

    Args:
        layer_spec: A layer, a Network, a mapping, a model's name or a path to a spec file.
        client: A `distributed.Client`, or a scheduler's address: "tcp://10.0.0.1:8786".
        batch_sizes: Measure exactly these; None: the search chooses.
        predict: Names of GPUs that are not in the fleet.  Their results are predicted for the library of the fleet's
            GPUs, corrected by the measurements on them; without GPUs, for the vendor's library.
        prices: Cost of one hour by device name, as the result lists it, in any currency. None: unknown.
        store: As for `autotune`, on the workers; a path is a path there.
        progress: Called with a name and a sentence about its state. The name is a device's, "cluster", or the address
            of a worker that cannot describe its device. None: not called.
        options: The other arguments of `autotune`, equal for all workers: mode, dtype, objective, budget, ... Without
            `memory_limit` a worker that measures on its CPU uses 60 % of Dask's memory limit, if it has one.
            `library="onnxruntime"` is rejected: workers receive the network, not the file.

    Returns:
        FleetResult: An entry per distinct device; a device without a result has an error.

    Raises:
        InvalidArgument: If an argument is invalid, or the workers have other versions than the caller.  Names in
            `prices` are checked last: if one is unknown, `partial` of the error is the result.
        MissingDependency: If Dask's `distributed` is not installed.
        WorkerFailed: If no scheduler answers, the cluster has no worker within a minute, or no worker can describe its
            device.

    Example:
        >>> from distributed import LocalCluster                                      # doctest: +SKIP
        >>> with LocalCluster(n_workers=2, threads_per_worker=1) as cluster:          # doctest: +SKIP
        ...     print(autotune_fleet("mnist-cnn", cluster.get_client(), budget=10))
    """
    if "device" in options:
        raise InvalidArgument("device", options["device"], "left out: every worker measures on its own device")
    if batch_sizes is not None:
        options["batch_sizes"] = list(batch_sizes) if isinstance(batch_sizes, Iterator) else batch_sizes
    checks.check_options(options, tune.autotune)
    checks.check_kind("prices", prices or {}, Mapping, 'a mapping such as {"t4": 0.35}')
    _check(inspect.signature(tune.autotune).bind(layer_spec, **options), prices or {})
    missing = _missing(predict)
    if not isinstance(store, bool | str | Path) or not str(store):  # the workers check the folder
        raise InvalidArgument("store", store, 'True, False, "refresh" or a path on the workers')
    check_progress(progress)
    spec = json.loads(json.dumps(models.resolve(layer_spec).to_mapping()))
    sent = {name: value for name, value in options.items() if value is not None} | {"store": store}
    with _connected(client) as connected:
        measured = _measure(connected, spec, sent, progress or (lambda _name, _sentence: None))
    devices = _priced([*measured, *_predicted(spec, missing, measured, options)], prices or {})
    result = FleetResult(devices=devices)
    for name in prices or {}:
        if name not in (names := [device.name for device in devices]):
            error = InvalidArgument("prices", name, f"one of {', '.join(names)}")
            error.partial = result  # type: ignore[attr-defined]
            raise error
    return result


def _check(call: inspect.BoundArguments, prices: Mapping[str, float]) -> None:
    """Raise InvalidArgument for arguments of `autotune`, in `call`, that every worker would reject, or a bad price."""
    call.apply_defaults()
    given = call.arguments
    if given["library"] not in arithmetic.LIBRARIES:
        remedy = "ONNX Runtime runs a file, but workers receive the network." * (given["library"] == "onnxruntime")
        raise InvalidArgument("library", given["library"], "one of " + ", ".join(arithmetic.LIBRARIES), remedy)
    checked = inspect.signature(Request.of).parameters.keys() - {"store", "progress"}
    Request.of(**{name: given[name] for name in checked})
    if given["memory_limit"] is not None:
        hardware_memory.memory_limit(probe.device("cpu"), given["memory_limit"])
    for name, price in prices.items():
        checks.check_number(f"prices[{name!r}]", price, above=0.0)


def _missing(predict: Iterable[str]) -> list[str]:
    """Return `predict` as a list; raise InvalidArgument unless it holds names of GPUs only."""
    if isinstance(predict, str) or not isinstance(predict, Iterable):
        raise InvalidArgument("predict", predict, "a list of GPUs' names: ['t4']")
    names = list(predict)
    for name in names:
        if not isinstance(name, str) or probe.resolve(name, live=False).kind == "cpu":
            raise InvalidArgument("predict", name, "names of GPUs, which `cubatch devices` lists")
    return names


@contextlib.contextmanager
def _connected(client: Any) -> Iterator[Any]:
    """
    Yield `client` if it is a Dask client, else a new one that is connected to `client`, the address of a scheduler.

    The errors are those of `autotune_fleet`.
    """
    try:
        import distributed
        from distributed.comm import addressing
    except ImportError as error:
        raise MissingDependency("Dask's distributed", "autotune_fleet", "fleet") from error
    if isinstance(client, distributed.Client):
        yield client
        return
    if not isinstance(client, str):
        raise InvalidArgument("client", client, "a distributed.Client, or a scheduler's address: 'tcp://10.0.0.1:8786'")
    try:
        if addressing.parse_address(client)[0] in {"tcp", "tls"}:  # a Client that waits does not end with Ctrl-C
            socket.create_connection(addressing.get_address_host_port(client), timeout=_CONNECT_SECONDS).close()
        connected = distributed.Client(client, timeout=_CONNECT_SECONDS, set_as_default=False)
    except ValueError as error:
        raise InvalidArgument("client", client, "a scheduler's address: 'tcp://10.0.0.1:8786'", f"{error}.") from error
    except OSError as error:
        raise WorkerFailed(f"no scheduler answers at {client}: {files.reason(error)}", _NO_SCHEDULER) from error
    with connected:
        yield connected


def _measure(
    client: Any, spec: Mapping[str, Any], options: Mapping[str, Any], progress: Callable[[str, str], None]
) -> list[FleetDevice]:
    """
    Tune `spec` on one worker per distinct device, and return the devices with their results or errors.

    `options` are further arguments of `autotune` by name.
    """
    progress("cluster", f"waiting for its first worker, {_FIRST_WORKER_SECONDS} s at most")
    try:
        client.wait_for_workers(1, timeout=_FIRST_WORKER_SECONDS)
    except TimeoutError as error:
        remedy = "Start one: dask worker ADDRESS. If a queue starts them: client.wait_for_workers(1)."
        raise WorkerFailed("the cluster has no worker", remedy) from error
    addresses = sorted(client.nthreads())
    replies = client.run(on_worker.describe, workers=addresses, on_error="return")
    known = {address: reply for address, reply in replies.items() if not isinstance(reply, BaseException)}
    _check_versions(known)
    for address in replies.keys() - known.keys():
        progress(address, f"cannot describe its device: {replies[address]!r}")
    if not known:
        reason = repr(next(iter(replies.values()), "all workers left"))
        raise WorkerFailed(f"no worker of the cluster can describe its device: {reason}", _NOT_INSTALLED)
    devices = distinct(known)
    tasks = []
    try:
        for device in devices:
            resources = known[device.workers[0]]["resources"]
            tasks.append(
                client.submit(
                    on_worker.measure, spec, options, workers=list(device.workers), pure=False, resources=resources
                )
            )
            progress(device.name, "measuring")
        return [_measured(client, device, task, progress) for device, task in zip(devices, tasks, strict=True)]
    finally:
        client.cancel([task for task in tasks if not task.done()], force=True)


def _measured(client: Any, device: FleetDevice, task: Any, progress: Callable[[str, str], None]) -> FleetDevice:
    """Wait for `task`, the Dask future that tunes a device; return the device with its result, or with an error."""
    while not task.done():
        if not set(device.workers) & set(client.nthreads()):
            return _failed(device, "all workers with this device left the cluster: call again", progress)
        time.sleep(POLL_SECONDS)
    present = tuple(address for address in device.workers if address in client.nthreads())
    if task.status != "finished":
        return _failed(device, f"no worker could measure: {task.exception()!r}", progress)
    reply = task.result()
    if "error" in reply:
        return _failed(device, reply["error"], progress)
    result = TuningResult.from_json(reply["result"])
    progress(device.name, f"the answer is {result.batch_size}" if result.recommended else result.reasons[0])
    return attrs.evolve(device, workers=present, result=result)


def _failed(device: FleetDevice, error: str, progress: Callable[[str, str], None]) -> FleetDevice:
    progress(device.name, error)
    return attrs.evolve(device, error=error)


def _check_versions(workers: Mapping[str, Mapping[str, Any]]) -> None:
    """
    Raise InvalidArgument if a worker has other package versions than the caller.

    `workers` has the results of `on_worker.describe` by address.
    """
    here = on_worker.versions()
    for address, facts in workers.items():
        there = facts["versions"]
        if there != here:
            differing = [
                f"{name} {there.get(name)}, here {here[name]}" for name in here if there.get(name) != here[name]
            ]
            raise InvalidArgument("client", address, "a worker with the caller's versions", "; ".join(differing))


def distinct(workers: Mapping[str, Mapping[str, Any]]) -> list[FleetDevice]:
    """
    Return the different devices of workers, each with its workers and a name that no other device has.

    GPUs differ by name, MIG profile, memory and power limit; CPUs by name, BLAS threads and the worker's memory limit.

    Args:
        workers: Results of `on_worker.describe` by the address of the worker.
    """
    groups: dict[tuple[str, ...], list[str]] = {}
    for address, facts in workers.items():
        device = facts["device"]
        memory, watts, threads = device["memory_bytes"], device["power_limit_watts"], ""
        if device["kind"] == "cpu":
            threads = f"{facts['blas_threads']} threads"
            step = 1 << max(0, (facts["memory_bytes"] or 0).bit_length() - 7)  # limits of equal hosts differ by pages
            memory = round((facts["memory_bytes"] or 0) / step) * step
        details = (
            device["mig"] or "",
            threads,
            format_bytes(memory) if memory else "",
            f"{watts:g} W" if watts else "",
        )
        groups.setdefault((device["name"], *details), []).append(address)
    count = Counter(name for name, *_ in groups)
    return [
        FleetDevice(name=key[0] if count[key[0]] == 1 else ", ".join(filter(None, key)), workers=tuple(addresses))
        for key, addresses in groups.items()
    ]


def _predicted(
    spec: Mapping[str, Any], names: Iterable[str], measured: Iterable[FleetDevice], options: Mapping[str, Any]
) -> list[FleetDevice]:
    """
    Return an entry for each GPU in `names`, with its forecast for `spec` or an error.

    Results in `measured` on the fleet's GPUs correct the forecasts. `options` are those of `autotune`, by name.
    """
    results = {d.name: d.result for d in measured if d.result is not None and d.result.device["kind"] == "cuda"}
    library: Modelled = "cubatch" if any(result.library == "cubatch" for result in results.values()) else "vendor"
    known = {key: value for key, value in options.items() if key in _PREDICTABLE}
    settings = {"mode": known.get("mode", "inference"), "dtype": known.get("dtype", "float32")}
    predicted = []
    for name in names:
        try:
            anchors, notes = _usable(results, attrs.evolve(Workload.of(dict(spec), name, **settings), library=library))
            forecast = forecasts.predict(dict(spec), device=name, library=library, anchors=anchors, **known)
        except CubatchError as error:  # the other devices have results all the same
            predicted.append(FleetDevice(name=name, error=str(error)))
        else:
            forecast = attrs.evolve(forecast, notes=(*forecast.notes, *notes))
            predicted.append(FleetDevice(name=name, forecast=forecast))
    return predicted


def _usable(results: Mapping[str, TuningResult], work: Workload) -> tuple[list[TuningResult], list[str]]:
    """
    Return the results that can correct a prediction of a workload, and a sentence about each result that cannot.

    `results` has results by device name, and `work` is the workload.
    """
    usable, notes = list[TuningResult](), list[str]()
    for name, result in results.items():
        try:
            anchored.read([result], work)
        except InvalidArgument as error:
            why = f"anchors must be {error.allowed}. {error.remedy}".strip()
            notes.append(f"The measurement on {name} is not used: {why}")
        else:
            usable.append(result)
    return usable, notes


def _priced(devices: Iterable[FleetDevice], prices: Mapping[str, float]) -> tuple[FleetDevice, ...]:
    """
    Return the devices with their prices, sorted: measured, predicted, failed; the fastest of each group first.

    `prices` has the cost of an hour by device name.
    """
    priced = [
        attrs.evolve(device, price_per_hour=float(prices[device.name])) if device.name in prices else device
        for device in devices
    ]
    return tuple(sorted(priced, key=lambda d: (bool(d.error), d.forecast is not None, -(d.samples_per_second or 0))))
