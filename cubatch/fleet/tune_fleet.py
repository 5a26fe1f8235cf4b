"""autotune_fleet(): one measurement for each kind of device of a Dask cluster, kept where the fleet is asked from."""

from __future__ import annotations

import contextlib
import inspect
import json
import queue
import socket
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import attrs

from cubatch import checks, files
from cubatch.choices import Modelled
from cubatch.errors import CubatchError, InvalidArgument, MissingDependency, WorkerFailed
from cubatch.fleet import kept_rows, on_worker
from cubatch.fleet import kinds as fleet_kinds
from cubatch.fleet.fleet_result import FleetDevice, FleetResult
from cubatch.hardware import arithmetic, probe
from cubatch.hardware import room as hardware_room
from cubatch.measure.goal import Goal
from cubatch.network import models
from cubatch.network.models import SpecLike
from cubatch.tuning import anchors as anchored
from cubatch.tuning import forecast as forecasts
from cubatch.tuning import store as kept
from cubatch.tuning import tune
from cubatch.tuning.limits import Limits
from cubatch.tuning.results import TuningResult
from cubatch.workload import Workload

TICK_SECONDS = 0.2  # between looks at who is still there
_CONNECT_SECONDS = 30
_NO_SCHEDULER = "Start one: dask scheduler. Or mend the address."
_FIRST_WORKER_SECONDS = 60  # queues and machines that start take their time
_PREDICTABLE = (
    "mode", "dtype", "batch_sizes", "objective", "tolerance", "max_batch_size", "memory_limit", "latency_limit",
    "optimizer", "recompute",
)  # fmt: skip
"""Options that mean the same to `predict`."""

_DASK_SHARE = 0.6
"""Of a worker's memory limit: Dask pauses it at 0.8 of that, ends it at 0.95, and takes some itself."""

_ATTEMPTS = 3  # to measure a kind of device, each on another worker if there is one


@attrs.define
class _Task:
    """A kind that is being measured: by whom, and for the how manieth time; or why by nobody, for how many looks."""

    kind: fleet_kinds.Kind
    name: str
    address: str = ""
    attempts: int = 0
    future: Any = None
    reason: str = ""
    looks: int = 0


def autotune_fleet(
    layer_spec: SpecLike,
    client: Any,
    *,
    batch_sizes: Iterable[int] | None = None,
    predict: Iterable[str] = (),
    prices: Mapping[str, float] | None = None,
    store: bool | str | Path = True,  # noqa: A002, RUF100 - the contract's name
    progress: Callable[[str, str], None] | None = None,
    **options: Any,
) -> FleetResult:
    """
    Find the fastest batch size on every kind of device of a Dask cluster.

    One worker of each kind measures, alone on its GPU, or on its host where it has none.  What it times reaches the
    caller as it is taken and is kept in the caller's store, so that neither a worker's death nor the caller's loses it:
    the same call again goes on from there.  A worker that dies or leaves is replaced by another of its kind, and a kind
    that comes while others are measured is measured too.

    Args:
        layer_spec: A layer, a Network, a mapping, a model's name or a path to a spec file.
        client: A `distributed.Client`, or a scheduler's address: "tcp://10.0.0.1:8786".
        batch_sizes: Measure exactly these.
        predict: GPUs that are not in the fleet, by their names in the catalogue, whose answers are predicted, for the
            library of the fleet's GPUs and anchored by what was measured there; without any, for the vendor's.
        prices: What an hour of a device costs, by its name as the result has it, in any currency.
        store: As for `autotune`, of the caller.
        progress: Called with a device's name and a sentence after everything that happens there.
        options: The other arguments of `autotune`, the same for all: mode, dtype, objective, tolerance, budget, ...
            Without `memory_limit` a worker's CPU is given a share of what Dask lets it take.  A `library` that runs
            files, "onnxruntime", is refused: workers are sent the network, not the file.

    Returns:
        FleetResult: An entry a kind of device; one on which nothing could be measured says why.

    Raises:
        InvalidArgument: If an argument makes no sense, or the workers do not run the same versions as the caller.
            Names of devices are known last: where one of `prices` is none, `partial` on it holds the result.
        MissingDependency: If Dask's `distributed` is not installed.
        WorkerFailed: If no scheduler answers, or the cluster has no worker within a minute.

    Example:
        >>> from distributed import LocalCluster                                      # doctest: +SKIP
        >>> with LocalCluster(n_workers=2, threads_per_worker=1) as cluster:          # doctest: +SKIP
        ...     print(autotune_fleet("mnist-cnn", cluster.get_client(), budget=10))
    """
    if "device" in options:
        raise InvalidArgument("device", options["device"], "left out: every worker measures on its own")
    if batch_sizes is not None:
        options["batch_sizes"] = list(batch_sizes)
    _check(inspect.signature(tune.autotune).bind(layer_spec, **options), prices or {})
    missing = _missing(predict)
    kept.check_place(store)
    tune.check_progress(progress)
    spec = json.loads(json.dumps(models.resolve(layer_spec).to_mapping()))  # as it is kept
    with _connected(client) as connected, _Keep(kept.path_of(store), spec, refresh=store == "refresh") as keep:
        measured = _Fleet(connected, spec, options, keep, progress).measured()
    result = FleetResult(devices=_priced([*measured, *_predicted(spec, missing, measured, options)], prices or {}))
    names = [device.name for device in result.devices]
    for name in prices or {}:
        if name not in names:
            refusal = InvalidArgument("prices", name, f"one of {', '.join(names)}")
            refusal.partial = result  # type: ignore[attr-defined]
            raise refusal
    return result


def _check(asked: inspect.BoundArguments, prices: Mapping[str, float]) -> None:
    """Refuse a goal and limits here that each worker would refuse by itself, and what is no price, before measuring."""
    asked.apply_defaults()
    given = asked.arguments
    Goal.of(**{name: given[name] for name in ("objective", "tolerance", "latency_limit")})
    if given["library"] not in arithmetic.LIBRARIES:
        remedy = "ONNX Runtime runs a file, and workers are sent the network." * (given["library"] == "onnxruntime")
        raise InvalidArgument("library", given["library"], "one of " + ", ".join(arithmetic.LIBRARIES), remedy)
    limits = {name: given[name] for name in ("budget", "seed", "sweeps")}
    Limits.of(given["batch_sizes"], given["max_batch_size"], **limits)
    if given["memory_limit"] is not None:
        hardware_room.memory_limit(probe.device("cpu"), given["memory_limit"])
    for name, price in prices.items():
        checks.check_number(f"prices[{name!r}]", price, above=0.0)


def _missing(predict: Iterable[str]) -> list[str]:
    """Give the names of what is to be predicted, and refuse what is no GPU's, before measuring."""
    if isinstance(predict, str) or not isinstance(predict, Iterable):
        raise InvalidArgument("predict", predict, "a list of GPUs' names: ['t4']")
    names = list(predict)
    for name in names:
        if not isinstance(name, str) or probe.resolve(name, live=False).kind == "cpu":
            raise InvalidArgument("predict", name, "names of GPUs")
    return names


class _Keep:
    """The caller's store, and what it has of the question."""

    def __init__(self, path: Path | None, spec: Mapping[str, Any], *, refresh: bool) -> None:
        self._path, self._spec, self._refresh = path, spec, refresh
        self._runs: dict[str, kept.Run] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def known(self) -> list[dict[str, Any]]:
        """Give the runs that were kept before, and since."""
        if self._path is None or (self._refresh and not self._runs):
            return []
        return list(kept_rows.about(self._path, {"spec": self._spec}))

    def take(self, message: Mapping[str, Any]) -> None:
        """Keep what a worker says."""
        key = kept_rows.question(message["identity"], message["conditions"])
        if key not in self._runs:
            self._runs[key] = self._stack.enter_context(kept_rows.opened(self._path, message, refresh=self._refresh))
        kept_rows.replay(self._runs[key], message)


class _Fleet:
    """Tasks of all kinds, followed until each has ended."""

    def __init__(
        self, client: Any, spec: Mapping[str, Any], options: Mapping[str, Any], keep: _Keep,
        progress: Callable[[str, str], None] | None,
    ) -> None:  # fmt: skip
        self._client, self._spec, self._options, self._keep, self._progress = client, spec, options, keep, progress
        self._topic = f"cubatch-{uuid.uuid4().hex}"
        self._said: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._workers: dict[str, dict[str, Any]] = {}

    def measured(self) -> list[FleetDevice]:
        """Measure each kind, and give what came of it."""
        self._await_worker()
        kinds = fleet_kinds.grouped(self._workers)
        names: dict[fleet_kinds.Kind, str] = {}
        tasks: list[_Task] = []
        found: dict[fleet_kinds.Kind, FleetDevice] = {}
        self._client.subscribe_topic(self._topic, lambda event: self._said.put(event[1]))
        try:
            while tasks or kinds.keys() - names.keys():
                for kind, name in fleet_kinds.names(kinds, names).items():  # in a queue machines come one by one
                    tasks.append(_Task(kind, name))
                    self._begin(tasks[-1], *next(iter(kinds[kind].items())))
                    names[kind] = name
                time.sleep(TICK_SECONDS)
                self._drain()
                if self._look():
                    kinds = fleet_kinds.grouped(self._workers)
                for task in list(tasks):
                    if (device := self._ended(task, kinds.get(task.kind, {}))) is not None:
                        tasks.remove(task)
                        found[task.kind] = device
        finally:
            self._client.cancel([task.future for task in tasks if task.future is not None], force=True)
            self._client.unsubscribe_topic(self._topic)
            self._drain()
        return [attrs.evolve(device, workers=tuple(kinds.get(kind, {}))) for kind, device in found.items()]

    def _await_worker(self) -> None:
        """Wait until there is a worker."""
        for tick in range(round(_FIRST_WORKER_SECONDS / TICK_SECONDS)):
            if self._look() and self._workers:
                return
            if tick == 0 and self._progress is not None:
                self._progress("cluster", f"waiting for its first worker, {_FIRST_WORKER_SECONDS} s at most")
            time.sleep(TICK_SECONDS)
        remedy = "Start one: dask worker ADDRESS. Where a queue starts them: client.wait_for_workers(1)."
        raise WorkerFailed("the cluster has no worker", remedy)

    def _look(self) -> bool:
        """Forget workers that have gone, and ask those that have come what they have; says whether any has."""
        there = set(self._client.nthreads())
        come = sorted(there.difference(self._workers))
        if not come and len(there) == len(self._workers):
            return False
        self._workers = {address: facts for address, facts in self._workers.items() if address in there}
        if come:
            self._workers |= _described(self._client, come)
        return True

    def _begin(self, task: _Task, address: str, facts: Mapping[str, Any]) -> None:
        """Have a worker go on from what is kept by now."""
        options = {name: value for name, value in self._options.items() if value is not None}
        if facts["memory_bytes"] and task.kind.is_cpu:
            options.setdefault("memory_limit", int(_DASK_SHARE * facts["memory_bytes"]))
        task.attempts, task.address = task.attempts + 1, address
        self._tell(task, f"measuring on {address}")
        task.future = self._client.submit(
            on_worker.measure, self._spec, options, self._keep.known(), self._topic, facts["place"],
            workers=[address], allow_other_workers=False, pure=False, retries=0, resources=facts["resources"],
        )  # fmt: skip

    def _ended(self, task: _Task, there: Mapping[str, Mapping[str, Any]]) -> FleetDevice | None:
        """
        Give what came of a task that has ended; begin it on another worker where its own is gone.

        Where that was the last of its kind another is waited for: a nanny starts one in seconds.
        """
        future = task.future
        if future is not None:
            if future.status == "finished":
                said = future.result()
                result = None if "error" in said else TuningResult.from_json(said["result"])
                self._tell(task, f"the answer is {result.batch_size}" if result else said["error"])
                return FleetDevice(name=task.name, result=result, error=said.get("error", ""))
            if future.status == "pending" and task.address in there:
                return None
            is_gone = task.address not in there
            task.reason = f"{task.address} is gone" if is_gone else f"{task.address}: {future.exception()!r}"
            task.looks, task.future = 0, None
            future.cancel(force=True)
            self._tell(task, task.reason)
        others = {address: facts for address, facts in there.items() if address != task.address} or there
        if task.attempts < _ATTEMPTS and others:
            self._begin(task, *next(iter(others.items())))
        elif task.attempts >= _ATTEMPTS or task.looks * TICK_SECONDS >= _FIRST_WORKER_SECONDS:
            return FleetDevice(name=task.name, error=f"no worker that is left could measure: {task.reason}")
        task.looks += 1
        return None

    def _drain(self) -> None:
        """Keep what workers have said."""
        while True:
            try:
                message = json.loads(self._said.get_nowait())
            except queue.Empty:
                return
            self._keep.take(message)

    def _tell(self, task: _Task, sentence: str) -> None:
        if self._progress is not None:
            self._progress(task.name, sentence)


@contextlib.contextmanager
def _connected(client: Any) -> Iterator[Any]:
    try:
        import distributed
    except ImportError as error:
        raise MissingDependency("Dask's distributed", "autotune_fleet", "fleet") from error
    if isinstance(client, distributed.Client):
        yield client
        return
    if not isinstance(client, str):
        raise InvalidArgument("client", client, "a distributed.Client, or a scheduler's address: 'tcp://10.0.0.1:8786'")
    try:
        _await_answer(client, time.monotonic() + _CONNECT_SECONDS)
        connected = distributed.Client(client, timeout=_CONNECT_SECONDS, set_as_default=False)
    except ValueError as error:
        raise InvalidArgument("client", client, "a scheduler's address: 'tcp://10.0.0.1:8786'", f"{error}.") from error
    except OSError as error:
        raise WorkerFailed(f"no scheduler answers at {client}: {files.reason(error)}", _NO_SCHEDULER) from error
    with connected:
        yield connected


def _await_answer(address: str, deadline: float) -> None:
    """Knock until somebody opens: a Client that waits for that itself does not end with Ctrl-C."""
    from distributed.comm import addressing

    if addressing.parse_address(address)[0] not in {"tcp", "tls"}:  # of others it is not known how
        return
    place = addressing.get_address_host_port(address)
    while (left := deadline - time.monotonic()) > 0:
        with contextlib.suppress(OSError):
            socket.create_connection(place, timeout=left).close()
            return
        time.sleep(TICK_SECONDS)
    socket.create_connection(place, timeout=TICK_SECONDS).close()  # says what is in the way


def _described(client: Any, addresses: list[str]) -> dict[str, dict[str, Any]]:
    """Ask workers what they have; who goes meanwhile says nothing."""
    found: dict[str, dict[str, Any]] = client.run(on_worker.describe, workers=addresses, on_error="ignore")
    mine = on_worker.versions()
    for address, facts in found.items():
        if (theirs := facts["versions"]) != mine:
            named = [f"{name} {theirs.get(name)}, here {mine[name]}" for name in mine if theirs.get(name) != mine[name]]
            raise InvalidArgument("client", address, "a worker with the versions that are here", "; ".join(named))
    return found


def _predicted(
    spec: Mapping[str, Any], names: Iterable[str], measured: Iterable[FleetDevice], options: Mapping[str, Any]
) -> list[FleetDevice]:
    """Predict devices that are not in the fleet: with the library of the GPUs that are, anchored by what they gave."""
    results = {d.name: d.result for d in measured if d.result is not None and d.result.device["kind"] == "cuda"}
    library: Modelled = "cubatch" if any(result.library == "cubatch" for result in results.values()) else "vendor"
    known = {key: value for key, value in options.items() if key in _PREDICTABLE}
    found = []
    for name in names:
        try:
            settings = {"mode": known.get("mode", "inference"), "dtype": known.get("dtype", "float32")}
            asked = Workload.of(dict(spec), name, **settings)
            anchors, left_out = _telling(results, attrs.evolve(asked, library=library))
            forecast = forecasts.predict(dict(spec), device=name, library=library, anchors=anchors, **known)
        except CubatchError as error:  # no reason to keep silent about the others
            found.append(FleetDevice(name=name, error=str(error)))
        else:
            forecast = attrs.evolve(forecast, notes=(*forecast.notes, *left_out))
            found.append(FleetDevice(name=name, forecast=forecast))
    return found


def _telling(results: Mapping[str, TuningResult], asked: Workload) -> tuple[list[TuningResult], list[str]]:
    """Give the results that say something about what is asked, and a sentence of each that does not."""
    telling, left_out = list[TuningResult](), list[str]()
    for name, result in results.items():
        try:
            anchored.read([result], asked)
        except InvalidArgument as error:
            why = f"anchors must be {error.allowed}. {error.remedy}".strip()
            left_out.append(f"What was measured on {name} is left out: {why}")
        else:
            telling.append(result)
    return telling, left_out


def _priced(devices: Iterable[FleetDevice], prices: Mapping[str, float]) -> tuple[FleetDevice, ...]:
    """Give each device its price, and order them: measured before predicted before failed, the fastest first."""
    priced = [
        attrs.evolve(device, price_per_hour=float(prices[device.name])) if device.name in prices else device
        for device in devices
    ]
    return tuple(sorted(priced, key=lambda d: (bool(d.error), d.forecast is not None, -(d.samples_per_second or 0))))
