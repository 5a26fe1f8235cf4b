"""
Check exported settings with the parser or schema of each target: Triton, Ray Serve, BentoML, lhotse and transformers.

    pip install -e '.[torch]' 'ray[serve]' 'tritonclient[grpc]' bentoml lhotse transformers accelerate
    python -m benchmarks.check_exports

It fails at the first setting that a target rejects or understands differently.  Three targets are not checked here.
TorchServe parses its configuration in Java.  fairseq 0.12.2, its last release, cannot be imported by Python 3.11.  Few
machines can import the parser of vLLM.  docs/how-to/serving.md and lengths.md have how they were checked once.  NeMo
passes its buckets on to lhotse.
"""

from __future__ import annotations

import tempfile
from typing import Any

import attrs
import bentoml
import torch
import yaml
from google.protobuf import text_format
from lhotse.dataset.sampling.dynamic_bucketing import FixedBucketBatchSizeConstraint
from lhotse.testing.dummies import dummy_cut
from ray.serve.schema import DeploymentSchema
from transformers import HfArgumentParser, TrainingArguments
from tritonclient.grpc.model_config_pb2 import ModelConfig

import cubatch as cb
from cubatch.serving.serving_plan import ServingPlan
from cubatch.tuning.extents_result import ExtentsResult

EXTENTS = (32, 64, 128)


def make_plan() -> ServingPlan:
    """Tune a small network and plan half the rate of its best size."""
    result = cb.autotune("mnist-cnn", device="cpu", budget=10.0, store=False)
    rate, size = result.samples_per_second, result.batch_size
    if rate is None or size is None:
        raise SystemExit("The network has no recommendation; repeat on a quiet machine.")
    return cb.serving_plan(result, arrival_rate=rate / 2, p99=20 * size / rate, closes_while_busy=True)


def make_extents() -> ExtentsResult:
    """Tune a small text model at each extent."""
    module = torch.nn.Sequential(torch.nn.Embedding(100, 32), torch.nn.Linear(32, 32))
    batches = lambda n, *, sequence: torch.randint(100, (n, sequence))  # noqa: E731
    result = cb.autotune_extents(module, {"sequence": EXTENTS}, batches=batches, budget=10.0, max_batch_size=16)
    # Any size will do to check the form of a setting: a busy machine gives no recommendation.
    ran = {n: attrs.evolve(each, batch_size=each.largest_measured) for n, each in result.results.items()}
    return attrs.evolve(result, results=ran)


def expect(understood: Any, planned: Any) -> None:
    """Stop if a target understands a setting differently."""
    if understood != planned:
        raise SystemExit(f"understood {understood}, not {planned}")


def check_triton(plan: ServingPlan) -> None:
    """Parse the lines with Triton's protobuf schema."""
    config = text_format.Parse(plan.to_triton(), ModelConfig())
    expect(config.max_batch_size, plan.max_batch_size)
    expect(config.dynamic_batching.max_queue_delay_microseconds, round(1e6 * plan.queue_delay))
    expect([group.count for group in config.instance_group], [plan.instances if plan.on_cpu else 1])


def check_ray_serve(plan: ServingPlan) -> None:
    """Validate the deployment with Ray's schema."""
    (settings,) = yaml.safe_load(plan.to_ray_serve("Classifier"))
    deployment = DeploymentSchema.model_validate(settings)
    expect((deployment.name, deployment.num_replicas), ("Classifier", plan.instances))
    expect(deployment.user_config["max_batch_size"], plan.max_batch_size)


def check_bentoml(plan: ServingPlan) -> None:
    """Execute the decorators on a service."""
    of_service, of_api = plan.to_bentoml().splitlines()
    method = "def predict(self, x: list[float]) -> list[float]: return x"
    names = {"bentoml": bentoml, "__name__": __name__}
    exec(f"{of_service}\nclass Service:\n    {of_api}\n    {method}\n", names)  # noqa: S102 - the text is a program
    service = names["Service"]
    api = service.apis["predict"]
    expect((service.config["workers"], api.batchable, api.max_batch_size), (plan.instances, True, plan.max_batch_size))


def check_lhotse(result: ExtentsResult) -> None:
    """Fill lhotse's batches with cuts of each length up to the sizes of their buckets."""
    settings = yaml.safe_load(result.to_lhotse(tokens_per_unit=10.0))
    bins, sizes = settings["bucket_duration_bins"], settings["bucket_batch_size"]
    expect(bins, [extent / 10 for extent in EXTENTS])
    for seconds, size in zip(bins, sizes, strict=True):
        constraint = FixedBucketBatchSizeConstraint(max_seq_len_buckets=bins, batch_sizes=sizes)
        for number in range(size):
            constraint.add(dummy_cut(number, duration=seconds))
        expect((constraint.exceeded(), constraint.close_to_exceeding()), (False, True))


def check_transformers(result: ExtentsResult) -> None:
    """Parse the options of a training script."""
    plan = result.with_lengths(range(1, EXTENTS[-1] + 1))
    batch_size, sampler = plan.to_huggingface().split()[1::2]
    with tempfile.TemporaryDirectory() as folder:
        options = [*plan.to_huggingface().split(), "--output_dir", folder]
        (arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(options)
    expect(arguments.per_device_train_batch_size, int(batch_size))
    expect(arguments.train_sampling_strategy, sampler)


def main() -> None:
    """Check all targets."""
    plan, extents = make_plan(), make_extents()
    check_triton(plan)
    check_ray_serve(plan)
    check_bentoml(plan)
    check_lhotse(extents)
    check_transformers(extents)
    print("Triton, Ray Serve, BentoML, lhotse and transformers accept the settings.")


if __name__ == "__main__":
    main()
