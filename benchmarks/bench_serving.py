"""
Serving plans compared with a server under load: ONNX Runtime on one thread of the CPU, and Poisson arrivals.

    python -m benchmarks.bench_serving --out FILE [--server ray]

Needs `pip install onnxruntime onnx`.  The model is a stack of wide layers, whose weights a batch reads once.  Its
latency is measured by `autotune_callable` on the first CPU.  The server is a process on that CPU, which batches the
requests of a socket by the rule of the plan.  They come from a process on the last CPU, where the latency is taken.

The speed of a shared machine changes from minute to minute. So the server also times its own steps of each size, before
and after each load, while no requests arrive. "at its speed" replays the arrivals with these times.  The distance of
that latency from the measured one is the error of the queue model.

With `--server ray` the server is Ray Serve (`pip install "ray[serve]" aiohttp`), behind HTTP.  Steps run on the first
CPU, proxy and client on the last one.  A deeper model (`--layers 64`) leaves the proxy time for each request.  The
overhead of server and network is measured first: by requests to a deployment that returns at once.

Each plan takes turns with Ray Serve's defaults at the same rate (batches of at most 10, which wait for 10 ms).  Their
load lasts a quarter as long: at the higher rates their queue only grows.  The file is written after each plan.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import json
import multiprocessing
import os
import select
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np

import cubatch as cb
from benchmarks.provenance import on_cpu, write
from cubatch.serving.batching_queue import simulate

WIDTH = 2048
SIZES = (1, 2, 4, 8, 12, 16, 24, 32)
DEFAULTS = {"max_batch_size": 10, "batch_wait_timeout_s": 0.01}
PORT = 8123
STEPS = b"steps"  # a packet of another length than a request: asks a server to time its steps
TURNS = 3
PLANS = (  # share of the rate that steps of the largest size allow, and the limit in steps of that size
    (0.3, 3.0), (0.5, 3.0), (0.7, 4.0),
)  # fmt: skip


def write_model(path: Path, layers: int) -> None:
    """Write a stack of linear layers with ReLU as an ONNX file with an open batch."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    random, nodes, weights, name = np.random.default_rng(0), [], [], "x"
    for layer in range(layers):
        matrix = random.standard_normal((WIDTH, WIDTH), np.float32) / WIDTH**0.5
        weights.append(numpy_helper.from_array(matrix, f"w{layer}"))
        nodes.append(helper.make_node("MatMul", [name, f"w{layer}"], [f"y{layer}"]))
        nodes.append(helper.make_node("Relu", [f"y{layer}"], [f"z{layer}"]))
        name = f"z{layer}"
    ends = [helper.make_tensor_value_info(each, TensorProto.FLOAT, ["n", WIDTH]) for each in ("x", name)]
    graph = helper.make_graph(nodes, "wide", ends[:1], ends[1:], weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), str(path))


def session_of(path: str) -> Any:
    """Open a file in ONNX Runtime, on one thread."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def measure(path: Path, budget: float) -> cb.TuningResult:
    """Measure the latency of each batch size."""
    session = session_of(str(path))

    def make_step(n: int) -> Any:
        batch = np.random.default_rng(n).standard_normal((n, WIDTH), np.float32)
        return lambda: session.run(None, {"x": batch})

    return cb.autotune_callable(make_step, device="cpu", batch_sizes=SIZES, max_batch_size=SIZES[-1], budget=budget)


def time_steps(session: Any, most: int) -> list[list[float]]:
    """Return seconds of steps of 1, 2, ... requests, several of each size in shuffled turns."""
    sample = np.random.default_rng(0).standard_normal((most, WIDTH), np.float32)
    seconds: list[list[float]] = [[] for _ in range(most)]
    for turn in range(TURNS):
        for place in np.random.default_rng(turn).permutation(most):
            began = time.perf_counter()
            session.run(None, {"x": sample[: place + 1]})
            seconds[place].append(time.perf_counter() - began)
    return seconds


def serve(path: Path) -> Any:
    """
    Start Ray Serve with the model and an empty deployment; return the handle that sets the batching.

    This process and the server are bound to the last CPU, the steps of the model to the first one.
    """
    import ray
    from ray import serve

    first, last = min(os.sched_getaffinity(0)), max(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {last})
    ray.init(num_cpus=4, include_dashboard=False, logging_level="error")
    quiet = {"log_level": "ERROR", "enable_access_log": False}
    serve.start(http_options={"port": PORT}, logging_config=quiet)

    @serve.deployment(max_ongoing_requests=1000, logging_config=quiet)
    class Model:
        def __init__(self, path: str) -> None:
            self.session = session_of(path)
            self.sample = np.random.default_rng(0).standard_normal(WIDTH, np.float32)

        def reconfigure(self, config: dict[str, Any]) -> None:
            self.run.set_max_batch_size(config["max_batch_size"])
            self.run.set_batch_wait_timeout_s(config["batch_wait_timeout_s"])

        @serve.batch
        async def run(self, requests: list[float]) -> list[float]:
            return await asyncio.to_thread(self.step, len(requests))

        def step(self, count: int) -> list[float]:
            os.sched_setaffinity(0, {first})  # of this thread
            return [float(each) for each in self.session.run(None, {"x": np.tile(self.sample, (count, 1))})[0][:, 0]]

        def times(self, most: int) -> list[list[float]]:
            os.sched_setaffinity(0, {first})
            return time_steps(self.session, most)

        async def __call__(self, request: Any) -> Any:
            if most := request.query_params.get("steps"):
                return await asyncio.to_thread(self.times, int(most))
            return await self.run(0.0)

    @serve.deployment(max_ongoing_requests=1000, logging_config=quiet)
    class Empty:
        async def __call__(self, _: Any) -> float:
            return 0.0

    def configure(config: dict[str, Any]) -> None:
        serve.run(Model.options(user_config=config).bind(str(path)), name="model", route_prefix="/model")

    serve.run(Empty.bind(), name="empty", route_prefix="/empty")
    configure(DEFAULTS)
    return configure


def answer(path: str, link: socket.socket, config: dict[str, Any]) -> None:
    """Serve on the first CPU: batch the packets of a socket, each with the time of its request, and send them back."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    session, most, delay = session_of(path), config["max_batch_size"], config["batch_wait_timeout_s"]
    sample = np.random.default_rng(0).standard_normal(WIDTH, np.float32)
    batches = [np.tile(sample, (n, 1)) for n in range(most + 1)]
    for batch in batches[1:]:
        session.run(None, {"x": batch})
    link.send(b"ready")
    waiting = collections.deque[bytes]()
    while True:
        left = struct.unpack("d", waiting[0])[0] + delay - time.monotonic() if waiting else None
        while len(waiting) < most and select.select([link], [], [], None if left is None else max(0.0, left))[0]:
            packet = link.recv(8)
            if not packet:
                return
            if packet == STEPS:
                link.send(json.dumps(time_steps(session, most)).encode())
                continue
            waiting.append(packet)
            left = struct.unpack("d", waiting[0])[0] + delay - time.monotonic()
        count = min(most, len(waiting))
        session.run(None, {"x": batches[count]})
        for _ in range(count):
            link.send(waiting.popleft())


def loaded_alone(
    path: Path, config: dict[str, Any], arrivals: np.ndarray
) -> tuple[dict[str, float], list[list[list[float]]]]:
    """
    Send requests at these times from the last CPU to a server of its own.

    Returns percentiles of their latencies, and the times of its steps before and after the load.
    """
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server = multiprocessing.get_context("spawn").Process(target=answer, args=(str(path), its, config))
    server.start()
    its.close()
    usable, latencies, sent = os.sched_getaffinity(0), list[float](), 0

    def times() -> Any:
        ours.send(STEPS)
        return json.loads(ours.recv(2**16))

    os.sched_setaffinity(0, {max(usable)})
    try:
        ours.recv(8)
        before = times()
        due = time.monotonic() + arrivals
        while len(latencies) < len(due):
            left = None if sent == len(due) else max(0.0, due[sent] - time.monotonic())
            answers, free, _ = select.select([ours], [ours] if left == 0.0 else [], [], left or None)
            if answers:  # before the next request: a full socket would keep the server waiting
                latencies.append(time.monotonic() - struct.unpack("d", ours.recv(8))[0])
            elif free:
                ours.send(struct.pack("d", due[sent]))
                sent += 1
        return percentiles(latencies), [before, times()]
    finally:
        os.sched_setaffinity(0, usable)
        ours.close()
        server.join()


def arrivals_of(rate: float, seconds: float, seed: int) -> np.ndarray:
    """Return random times of requests."""
    return np.cumsum(np.random.default_rng(seed).exponential(1 / rate, size=int(rate * seconds)))


async def load(route: str, rate: float, seconds: float, seed: int) -> list[float]:
    """Send requests at random times, at a rate, and return the latency of each in seconds."""
    import aiohttp

    latencies: list[float] = []
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:

        async def request() -> None:
            began = time.perf_counter()
            async with client.get(f"http://127.0.0.1:{PORT}/{route}") as answer:
                await answer.read()
                answer.raise_for_status()
            latencies.append(time.perf_counter() - began)

        tasks = []
        for due in time.perf_counter() + arrivals_of(rate, seconds, seed):
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            tasks.append(asyncio.create_task(request()))
        await asyncio.gather(*tasks)
    return latencies


def times_of_ray(most: int) -> Any:
    """Return the times of steps that Ray Serve takes."""
    with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/model?steps={most}") as reply:
        return json.load(reply)


def loaded(route: str, rate: float, seconds: float, seed: int) -> dict[str, float]:
    """Send requests from a second process and return percentiles of their latency."""
    command = [sys.executable, "-m", "benchmarks.bench_serving", "--load", json.dumps([route, rate, seconds, seed])]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return percentiles(json.loads(done.stdout.splitlines()[-1]))


def percentiles(latencies: list[float]) -> dict[str, float]:
    """Return percentiles of the latencies, without the first tenth."""
    settled = latencies[len(latencies) // 10 :]
    p50, p95, p99 = np.percentile(settled, (50, 95, 99))
    return {"p50": float(p50), "p95": float(p95), "p99": float(p99), "requests": len(settled)}


def at_own_speed(
    result: cb.TuningResult,
    config: dict[str, Any],
    arrivals: np.ndarray,
    timed: list[list[list[float]]],
    **server: bool,
) -> dict[str, float]:
    """Return the 99th percentile of the simulated queue of a `server` for these arrivals and its own steps."""
    times = {m.batch_size: m.latency_seconds or 0.0 for m in result.measurements}
    planned = np.interp(range(1, len(timed[0]) + 1), list(times), list(times.values()))
    own = [[*before, *after] for before, after in zip(*timed, strict=True)]
    p99 = simulate(arrivals.tolist(), own, delay=config["batch_wait_timeout_s"], **server).p99
    ratios = [[statistics.fmean(mine) / step for mine, step in zip(each, planned, strict=True)] for each in timed]
    before, after = map(statistics.median, ratios)
    return {"own_speed_p99": p99, "steps_before": before, "steps_after": after}


def main() -> None:
    """Run the benchmark and write its JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--server", choices=("own", "ray"), default="own")
    parser.add_argument("--layers", type=int, default=8, help="of the model")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each load")
    parser.add_argument("--budget", type=float, default=20.0, help="of measuring the model")
    parser.add_argument("--load", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.load:
        print(json.dumps(asyncio.run(load(*options.load))))
        return
    content = {**on_cpu("serving"), "server": options.server, "layers": options.layers, "load_seconds": options.seconds}
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        write_model(path, options.layers)
        usable = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {min(usable)})
        result = measure(path, options.budget)
        os.sched_setaffinity(0, usable)
        configure = serve(path) if options.server == "ray" else None
        server = {"closes_while_busy": configure is not None}
        capacity = max(m.samples_per_second or 0.0 for m in result.measurements)
        step = max(m.latency_seconds or 0.0 for m in result.measurements)
        for share, steps in PLANS:
            rate = share * capacity
            overhead = 0.0
            if configure is not None:
                overhead = loaded("empty", rate, options.seconds / 6, 1)["p50"]
            plan = cb.serving_plan(
                result, arrival_rate=rate, p99=steps * step, instances=1, overhead=overhead, **server
            )  # fmt: skip
            ours = {"max_batch_size": plan.max_batch_size, "batch_wait_timeout_s": plan.queue_delay}
            row = {"rate": rate, "limit": steps * step, "overhead": overhead, "plan": plan.to_mapping()}
            for name, config in {"measured": ours, "defaults": DEFAULTS}.items():
                seconds = options.seconds / (4 if config is DEFAULTS else 1)
                arrivals = arrivals_of(rate, seconds, 3)
                if configure is None:
                    latency, timed = loaded_alone(path, config, arrivals)
                else:
                    configure(config)
                    loaded("model", rate, options.seconds / 6, 2)
                    before = times_of_ray(config["max_batch_size"])
                    latency = loaded("model", rate, seconds, 3)
                    timed = [before, times_of_ray(config["max_batch_size"])]
                own = at_own_speed(result, config, arrivals, timed, **server)
                own["own_speed_p99"] += overhead
                row[name] = latency | own
                print(
                    f"{rate:.0f}/s, {name}: at most {config['max_batch_size']}, "
                    f"delay {1e3 * config['batch_wait_timeout_s']:.1f} ms: p99 {1e3 * own['own_speed_p99']:.1f} ms at "
                    f"its speed (steps {own['steps_before']:.2f} and {own['steps_after']:.2f} of the planned), "
                    f"{1e3 * latency['p99']:.1f} ms measured",
                    flush=True,
                )
            print(f"{rate:.0f}/s: {1e3 * plan.load.p99:.1f} ms planned", flush=True)
            rows.append(row)
            if options.out:
                times = {str(m.batch_size): m.latency_seconds for m in result.measurements}
                write(options.out, {**content, "step_seconds": times, "plans": rows})


if __name__ == "__main__":
    main()
