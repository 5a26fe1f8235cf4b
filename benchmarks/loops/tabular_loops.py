"""Loops on rows of numbers and on graphs: dense layers, accumulation, compilation, and a dict of losses."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - PyTorch's own abbreviation
from torch.utils.data import Dataset, TensorDataset

from benchmarks.loops.plain_loop import Loop, module_loop, supervised

FEATURES, CLASSES = 64, 10


def rows(count: int) -> Dataset:
    return TensorDataset(torch.rand(count, FEATURES), torch.randint(CLASSES, (count,)))


def dense(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(FEATURES, width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, width), nn.ReLU(),
        nn.Linear(width, CLASSES),
    )  # fmt: skip


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-4)


def classification(width: int, **options: Any) -> Loop:
    """Return a loop over rows and labels; `options` are those of `module_loop`."""
    return module_loop(
        rows(16384), lambda: dense(width), adam, supervised, loss=nn.CrossEntropyLoss(), optimizer="adam", **options
    )


def mlp() -> Loop:
    return classification(256)


def compiled() -> Loop:
    return classification(512, compile=True)


def accumulation() -> Loop:
    return classification(512, accumulate=4)


class Regression(nn.Module):
    """Two outputs, and a dict with the loss and what else is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(FEATURES, 256), nn.SiLU(), nn.Linear(256, 256), nn.SiLU())
        self.mean, self.log_variance = nn.Linear(256, 1), nn.Linear(256, 1)

    def forward(self, features: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.body(features)
        mean, log_variance = self.mean(x), self.log_variance(x)
        loss = F.gaussian_nll_loss(mean, target, log_variance.exp())
        return {"loss": loss, "error": F.l1_loss(mean, target).detach(), "prediction": mean}


def loss_dict() -> Loop:
    data = TensorDataset(torch.rand(16384, FEATURES), torch.rand(16384, 1))
    return module_loop(data, Regression, adam, lambda call, batch: call(*batch)["loss"], optimizer="adam")


class Graphs(Dataset):
    """Graphs of 6 to 20 nodes with two edges from each node."""

    def __init__(self, count: int) -> None:
        self.counts, self.labels = torch.randint(6, 21, (count,)).tolist(), torch.randint(CLASSES, (count,))

    def __len__(self) -> int:
        return len(self.counts)

    def __getitem__(self, place: int) -> Any:
        nodes = self.counts[place]
        generator = torch.Generator().manual_seed(place)
        sources = torch.arange(nodes).repeat(2)
        edges = torch.stack([sources, torch.randint(nodes, (2 * nodes,), generator=generator)])
        return torch.rand(nodes, 16, generator=generator), edges, self.labels[place]


def join_graphs(samples: list[Any]) -> Any:
    """Return one graph that holds all: nodes, edges, the graph of each node, and labels."""
    nodes, edges, labels = zip(*samples, strict=True)
    counts = torch.tensor([len(each) for each in nodes])
    first = counts.cumsum(0) - counts
    moved = [each + place for each, place in zip(edges, first, strict=True)]
    graph = torch.arange(len(samples)).repeat_interleave(counts)
    return torch.cat(nodes), torch.cat(moved, 1), graph, torch.stack(labels)


class GraphNetwork(nn.Module):
    """Three rounds of messages along edges; the mean over the nodes of a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 64)
        self.layers = nn.ModuleList(nn.Linear(128, 64) for _ in range(3))
        self.head = nn.Linear(64, CLASSES)

    def forward(self, nodes: torch.Tensor, edges: torch.Tensor, graph: torch.Tensor) -> torch.Tensor:
        x = self.first(nodes)
        for layer in self.layers:
            received = torch.zeros_like(x).index_add(0, edges[1], x[edges[0]])
            x = F.relu(layer(torch.cat([x, received], 1)))
        count = int(graph.max()) + 1
        total = x.new_zeros(count, x.shape[1]).index_add(0, graph, x)
        return self.head(total / torch.bincount(graph, minlength=count).unsqueeze(1))


def graphs() -> Loop:
    data = Graphs(4096)

    def batches(batch_size: int) -> Any:
        return join_graphs([data[place] for place in range(batch_size)])

    return module_loop(
        data, GraphNetwork, adam, supervised, collate=join_graphs, batches=batches, loss=nn.CrossEntropyLoss(),
        optimizer="adam", max_batch_size=len(data),
    )  # fmt: skip
