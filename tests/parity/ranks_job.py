"""A job of several ranks that tune modules together, started by torchrun; each rank writes what it was given."""

from __future__ import annotations

import datetime as dt
import hashlib
import json
import os
import sys
from collections import UserList
from pathlib import Path

import pytest

import cubatch as cb
from tests import virtual_time

torch = pytest.importorskip("torch")
from torch import distributed, nn  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402

OPTIONS = {"mode": "training", "budget": 120.0, "device": "cpu"}


class Small(nn.Module):
    """Two convolutions, a batch norm and a linear layer; notes the sizes of its real calls."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)
        )
        self.sizes: UserList[int] = UserList()  # a list would get its old items back

    def forward(self, x):
        if not isinstance(x, torch._subclasses.FakeTensor):
            self.sizes.append(len(x))
        return self.layers(x)


class Greedy(Small):
    """Finds no memory for more than 8 samples on rank 1."""

    def forward(self, x):
        result = super().forward(x)
        if distributed.get_rank() == 1 and len(x) > 8 and not isinstance(x, torch._subclasses.FakeTensor):
            raise MemoryError("injected")
        return result


class Broken(Small):
    """Raises in every real step of the last rank."""

    def forward(self, x):
        result = super().forward(x)
        if distributed.get_rank() == distributed.get_world_size() - 1 and not isinstance(
            x, torch._subclasses.FakeTensor
        ):
            raise ValueError("injected")
        return result


class Clamped(Small):
    """Writes to its weights in every forward pass."""

    def forward(self, x):
        self.layers[0].weight.data.clamp_(-0.01, 0.01)
        return super().forward(x)


class Late(Small):
    """Raises on rank 1 above 8 samples, in a step with the others only: its rehearsal went well."""

    def forward(self, x):
        result = super().forward(x)
        if distributed.get_rank() == 1 and len(x) > 8 and nn.parallel.DistributedDataParallel._get_active_ddp_module():
            raise ValueError("injected")
        return result


KINDS = {"greedy": Greedy, "broken": Broken, "clamped": Clamped, "late": Late}


def digest(module: nn.Module) -> str:
    held = [v.full_tensor() if hasattr(v, "full_tensor") else v for v in module.state_dict().values()]
    return hashlib.sha256(b"".join(v.numpy().tobytes() for v in held)).hexdigest()


def wrapped(bare: Small, kind: str) -> nn.Module:
    if kind != "sharded":
        return nn.parallel.DistributedDataParallel(bare)
    return fully_shard(bare)


def told(kind: str, options: dict) -> dict:
    """Tune a module of a kind, and give what this rank was told and how it left the module."""
    torch.manual_seed(0)
    bare = KINDS.get(kind, Small)()
    module = wrapped(bare, kind)
    before = digest(module)
    try:
        result = cb.autotune_module(module, (3, 12, 12), **(OPTIONS | options))
    except cb.CubatchError as error:
        said = {"error": f"{type(error).__name__}: {error}"}
    else:
        said = {"result": result.to_json()}
    return said | {"sizes": list(bare.sizes), "restored": digest(module) == before, "training": module.training}


def group(folder: Path, name: str, seconds: float) -> None:
    """Begin a group whose members wait for each other for a number of seconds."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    options = {"rank": rank, "world_size": ranks, "timeout": dt.timedelta(seconds=seconds)}
    distributed.init_process_group("gloo", store=distributed.FileStore(str(folder / name), ranks), **options)


def main() -> None:
    folder, jobs = Path(sys.argv[1]), json.loads(sys.argv[2])
    virtual_time.install(pytest.MonkeyPatch(), all_steps=True)
    group(folder, "patient", 600.0)
    said = [told(kind, options) for kind, options in jobs[:-1]]
    rank = distributed.get_rank()
    distributed.destroy_process_group()
    group(folder, "late", 5.0)  # the last job is "late", after which a group is of no use any more
    said.append(told(*jobs[-1]))
    (folder / f"rank{rank}.json").write_text(json.dumps(said))
    distributed.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads of PyTorch's that still run abort an interpreter that ends, now and then ("terminate called")


if __name__ == "__main__":
    assert "LOCAL_RANK" in os.environ
    main()
