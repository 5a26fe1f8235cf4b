"""Modules that tests of `autotune_module` name: a worker imports them."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from cubatch.frameworks import heap

torch = pytest.importorskip("torch")
nn = torch.nn
PLACE = "CUBATCH_TEST_PLACE"  # a folder where steps leave word


class Small(nn.Module):
    """A convolution and a linear layer, that note each real call in the folder of the test."""

    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, 3)
        self.head = nn.Linear(4, 5)

    def forward(self, x):
        if PLACE in os.environ and not isinstance(x, torch._subclasses.FakeTensor):
            with Path(os.environ[PLACE], "calls").open("a") as file:
                file.write(f"{os.getpid()} {len(x)}\n")
        return self.head(self.convolution(x).relu().mean((2, 3)))


class Dies(Small):
    """Killed by a signal in a step of 4 samples, once."""

    def forward(self, x):
        mark = Path(os.environ[PLACE], "died")
        if len(x) == 4 and not isinstance(x, torch._subclasses.FakeTensor) and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGSEGV)
        return super().forward(x)


class Exits(Small):
    """Ends its process at more than 4 samples, also where it is traced."""

    def forward(self, x):
        if len(x) > 4:
            os._exit(3)
        return super().forward(x)


class OfWords(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(50, 8)

    def forward(self, ids, labels):
        return {"loss": self.table(ids).square().mean() + labels.float().mean() * 0}


def small():
    return Small()


ready = Small()  # a module, not a function that makes one


def exits():
    """End the process, as a script does that parses the arguments of another program."""
    raise SystemExit(2)


def bound():
    """Return `small()`, after noting the CPUs and threads of this process in the folder of the test."""
    facts = {"pid": os.getpid(), "cpus": sorted(os.sched_getaffinity(0)), "threads": torch.get_num_threads()}
    with Path(os.environ[PLACE], "bound").open("a") as file:
        file.write(json.dumps(facts) + "\n")
    return Small()


def notes_mallopt():
    """Return `small()`, and have each call of `mallopt` in this process noted in the folder of the test."""
    set_threshold = heap._set

    def noted(threshold):
        with Path(os.environ[PLACE], "mallopt").open("a") as file:
            file.write(f"{os.getpid()}\n")
        set_threshold(threshold)

    heap._set = noted
    return Small()


def dies():
    return Dies()


def exits_above_four():
    return Exits()


def of_words():
    return OfWords()


def no_module():
    return {}


def broken():
    raise RuntimeError("no weights")


def ends():
    os._exit(3)


def scalar(output):
    return output.logsumexp(1).mean()


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, nesterov=True, momentum=0.9)


def batches(n):
    return torch.rand(n, 3, 8, 8)


def loader():
    images = torch.utils.data.TensorDataset(torch.rand(20, 3, 8, 8), torch.arange(20))
    return torch.utils.data.DataLoader(images, batch_size=4)
