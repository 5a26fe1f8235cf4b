"""The lines that hold a serving plan in the configuration of common servers."""

from __future__ import annotations

import math


def triton(max_batch_size: int, delay: float, instances: int) -> str:
    """Return lines of a Triton `config.pbtxt`: each GPU of the server runs one instance."""
    return (
        f"# {instances} in total, each on a device of its own\n"
        "instance_group [ { count: 1 } ]\n"
        f"max_batch_size: {max_batch_size}\n"
        f"dynamic_batching {{ max_queue_delay_microseconds: {round(1e6 * delay)} }}\n"
    )


def ray_serve(deployment: str, max_batch_size: int, delay: float, instances: int) -> str:
    """Return a deployment of Ray Serve, as YAML; its class sets the batch from `user_config` in `reconfigure`."""
    return (
        f"- name: {deployment}\n"
        f"  num_replicas: {instances}\n"
        f"  max_ongoing_requests: {2 * max_batch_size}  # one batch runs, the next one gathers\n"
        f"  user_config:\n"
        f"    max_batch_size: {max_batch_size}\n"
        f"    batch_wait_timeout_s: {delay:.6g}\n"
    )


def bentoml(max_batch_size: int, instances: int) -> str:
    """Return decorators of BentoML, which chooses the queue delay by itself."""
    return f"@bentoml.service(workers={instances})\n@bentoml.api(batchable=True, max_batch_size={max_batch_size})\n"


def torchserve(max_batch_size: int, delay: float, instances: int) -> str:
    """Return lines of a TorchServe `model-config.yaml`, whose delay is a whole number of milliseconds."""
    return (
        f"minWorkers: {instances}\nmaxWorkers: {instances}\n"
        f"batchSize: {max_batch_size}\nmaxBatchDelay: {math.ceil(1e3 * delay)}\n"
    )
