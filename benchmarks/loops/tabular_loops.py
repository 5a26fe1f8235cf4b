"""Loops on rows of numbers and on graphs: dense layers, accumulation, compilation, and a dict of losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - PyTorch's own abbreviation
from torch.utils.data import Dataset, TensorDataset

import cubatch as cb
from benchmarks.loops.plain_loop import CURRENT, Loop, MakeLoader, Train, plain_loop

FEATURES, CLASSES, ACCUMULATED = 64, 10, 4


def rows(count: int) -> Dataset:
    return TensorDataset(torch.rand(count, FEATURES), torch.randint(CLASSES, (count,)))


def dense(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(FEATURES, width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, width), nn.ReLU(),
        nn.Linear(width, CLASSES),
    )  # fmt: skip


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-4)


def classification(build: Callable[[], nn.Module], *, is_compiled: bool = False) -> Loop:
    """Return a loop over rows and labels."""

    def start() -> Train:
        model = build()
        optimizer = adam(model.parameters())
        called = torch.compile(model, dynamic=True) if is_compiled else model

        def train(batch: Any) -> None:
            features, labels = batch
            loss = F.cross_entropy(called(features), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        return train

    def tune(make_loader: MakeLoader, budget: float) -> cb.TuningResult:
        return cb.autotune_module(
            build(), make_loader(CURRENT), mode="training", loss=nn.CrossEntropyLoss(), optimizer="adam",
            compile=is_compiled, budget=budget,
        )  # fmt: skip

    return plain_loop(rows(16384), start, tune)


def mlp() -> Loop:
    return classification(lambda: dense(256))


def compiled() -> Loop:
    return classification(lambda: dense(512), is_compiled=True)


def accumulation() -> Loop:
    def start() -> Train:
        model = dense(512)
        optimizer = adam(model.parameters())
        count = 0

        def train(batch: Any) -> None:
            nonlocal count
            features, labels = batch
            loss = F.cross_entropy(model(features), labels) / ACCUMULATED
            loss.backward()
            count += 1
            if count % ACCUMULATED == 0:
                optimizer.step()
                optimizer.zero_grad()

        return train

    def tune(make_loader: MakeLoader, budget: float) -> cb.TuningResult:
        return cb.autotune_module(
            dense(512), make_loader(CURRENT), mode="training", loss=nn.CrossEntropyLoss(), optimizer="adam",
            accumulate=ACCUMULATED, budget=budget,
        )  # fmt: skip

    return plain_loop(rows(16384), start, tune)


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
    def start() -> Train:
        model = Regression()
        optimizer = adam(model.parameters())

        def train(batch: Any) -> None:
            features, target = batch
            loss = model(features, target)["loss"]
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        return train

    def tune(make_loader: MakeLoader, budget: float) -> cb.TuningResult:
        return cb.autotune_module(
            Regression(), make_loader(CURRENT), mode="training", optimizer="adam", budget=budget
        )  # fmt: skip

    return plain_loop(TensorDataset(torch.rand(16384, FEATURES), torch.rand(16384, 1)), start, tune)


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

    def start() -> Train:
        model = GraphNetwork()
        optimizer = adam(model.parameters())

        def train(batch: Any) -> None:
            nodes, edges, graph, labels = batch
            loss = F.cross_entropy(model(nodes, edges, graph), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        return train

    def tune(make_loader: MakeLoader, budget: float) -> cb.TuningResult:
        def batches(batch_size: int) -> Any:
            return join_graphs([data[place] for place in range(batch_size)])

        return cb.autotune_module(
            GraphNetwork(), batches, loader=make_loader(CURRENT), mode="training", loss=nn.CrossEntropyLoss(),
            optimizer="adam", max_batch_size=len(data), budget=budget,
        )  # fmt: skip

    return plain_loop(data, start, tune, collate=join_graphs)
