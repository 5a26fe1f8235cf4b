"""
Serving plans compared with a server under load: Ray Serve, ONNX Runtime on the CPU, and Poisson arrivals.

    python -m benchmarks.bench_serving --out FILE

Needs `pip install "ray[serve]" onnxruntime onnx aiohttp`.  The model is a stack of wide layers, whose weights a batch
reads once.  Its latency is measured by `autotune_callable` on one thread.  For each plan, a second process sends
requests at the planned rate, and the latency is taken there.  Each plan takes turns with Ray Serve's defaults at the
same rate (batches of at most 10, which wait for 10 ms).

The overhead of server and network is measured first: by requests to a deployment that returns at once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import cubatch as cb
from benchmarks.provenance import on_cpu, write

WIDTH, LAYERS = 4096, 8
SIZES = (1, 2, 4, 8, 12, 16, 24, 32)
DEFAULTS = {"max_batch_size": 10, "batch_wait_timeout_s": 0.01}
PORT = 8123
PLANS = (  # share of the rate that steps of the largest size allow, and the limit in steps of that size
    (0.3, 3.0), (0.5, 3.0), (0.7, 4.0),
)  # fmt: skip


def write_model(path: Path) -> None:
    """Write a stack of linear layers with ReLU as an ONNX file with an open batch."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    random, nodes, weights, name = np.random.default_rng(0), [], [], "x"
    for layer in range(LAYERS):
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


def serve(path: Path) -> Any:
    """Start Ray Serve with the model and an empty deployment; return the handle that sets the batching."""
    import ray
    from ray import serve

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
            batch = np.tile(self.sample, (len(requests), 1))
            return [float(each) for each in self.session.run(None, {"x": batch})[0][:, 0]]

        async def __call__(self, _: Any) -> float:
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


async def load(route: str, rate: float, seconds: float, seed: int) -> list[float]:
    """Send requests at random times, at a rate, and return the latency of each in seconds."""
    import aiohttp

    gaps = np.random.default_rng(seed).exponential(1 / rate, size=int(rate * seconds))
    latencies: list[float] = []
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:

        async def request() -> None:
            began = time.perf_counter()
            async with client.get(f"http://127.0.0.1:{PORT}/{route}") as answer:
                await answer.read()
                answer.raise_for_status()
            latencies.append(time.perf_counter() - began)

        due, tasks = time.perf_counter(), []
        for gap in gaps:
            due += gap
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            tasks.append(asyncio.create_task(request()))
        await asyncio.gather(*tasks)
    return latencies


def loaded(route: str, rate: float, seconds: float, seed: int) -> dict[str, float]:
    """Send requests from a second process and return percentiles of their latency."""
    command = [sys.executable, "-m", "benchmarks.bench_serving", "--load", json.dumps([route, rate, seconds, seed])]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    latencies = json.loads(done.stdout.splitlines()[-1])
    settled = latencies[len(latencies) // 10 :]
    p50, p95, p99 = np.percentile(settled, (50, 95, 99))
    return {"p50": float(p50), "p95": float(p95), "p99": float(p99), "requests": len(settled)}


def main() -> None:
    """Run the benchmark and write its JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each load")
    parser.add_argument("--budget", type=float, default=20.0, help="of measuring the model")
    parser.add_argument("--load", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.load:
        print(json.dumps(asyncio.run(load(*options.load))))
        return
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        write_model(path)
        result = measure(path, options.budget)
        configure = serve(path)
        capacity = max(m.samples_per_second or 0.0 for m in result.measurements)
        step = max(m.latency_seconds or 0.0 for m in result.measurements)
        for share, steps in PLANS:
            rate = share * capacity
            overhead = loaded("empty", rate, options.seconds / 6, 1)["p50"]
            plan = cb.serving_plan(result, arrival_rate=rate, p99=steps * step, instances=1, overhead=overhead)
            configure({"max_batch_size": plan.max_batch_size, "batch_wait_timeout_s": plan.queue_delay})
            loaded("model", rate, options.seconds / 6, 2)
            ours = loaded("model", rate, options.seconds, 3)
            configure(DEFAULTS)
            loaded("model", rate, options.seconds / 6, 2)
            default = loaded("model", rate, options.seconds, 3)
            rows.append({"rate": rate, "limit": steps * step, "plan": plan.to_mapping(), "overhead": overhead,
                         "measured": ours, "defaults": default})  # fmt: skip
            print(f"{rate:.0f}/s: at most {plan.max_batch_size}, delay {plan.queue_delay * 1e3:.1f} ms: "
                  f"p99 {plan.load.p99 * 1e3:.1f} ms planned, {ours['p99'] * 1e3:.1f} ms measured, "
                  f"{default['p99'] * 1e3:.1f} ms with the defaults", flush=True)  # fmt: skip
    if options.out:
        times = {str(m.batch_size): m.latency_seconds for m in result.measurements}
        write(options.out, {**on_cpu("serving"), "step_seconds": times, "plans": rows})


if __name__ == "__main__":
    main()
