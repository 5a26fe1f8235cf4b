"""A network of ours as PyTorch runs it: its layers by PyTorch's modules, and a training step as users write it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cubatch.network import layers
from cubatch.network.graph import Network

MOMENTUM = 0.9


def module(network: Network) -> Any:
    """
    Build a network of PyTorch's modules, freshly initialised.

    Args:
        network: Of convolutions, batch norms, ReLUs, max and global average pools, sums and linear layers.

    Raises:
        ValueError: If there is a layer of another kind.
    """
    import torch

    class Walk(torch.nn.Module):
        """Layers by name, run in the network's order."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleDict(
                {_key(node.name): _layer(torch, node.layer) for node in network.nodes if not _is_sum(node.layer)}
            )

        def forward(self, x: Any) -> Any:
            values = {"input": x}
            for node in network.nodes:
                read = [values[name] for name in node.inputs]
                values[node.name] = read[0] + read[1] if _is_sum(node.layer) else self.layers[_key(node.name)](*read)
            return values[network.nodes[-1].name]

    return Walk()


def training_step(network: Network, batch_size: int, dtype: str, *, device: str = "cuda") -> Callable[[], None]:
    """
    Give a training step on random data: channels last, SGD with momentum, mixed precision where the dtype has 16 bits.

    Args:
        network: What is trained.
        batch_size: Images.
        dtype: "float16" and "bfloat16" by automatic mixed precision, the former with a scaled loss.
        device: PyTorch's name of it.
    """
    import torch

    h, w, c = network.input_shape
    model = module(network).to(device, memory_format=torch.channels_last).train()
    x = torch.randn(batch_size, c, h, w, device=device).to(memory_format=torch.channels_last)
    labels = torch.randint(0, network.output_shape[-1], (batch_size,), device=device)
    # A rate of 0 does the same work on the same parameters in every step, as our runner does.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=MOMENTUM)
    scaler = torch.amp.GradScaler(device, enabled=dtype == "float16")
    mixed = dtype in {"float16", "bfloat16"}

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device, dtype=getattr(torch, dtype) if mixed else None, enabled=mixed):
            loss = torch.nn.functional.cross_entropy(model(x), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    return step


def _key(name: str) -> str:
    return name.replace(".", "_")  # PyTorch takes no dots


def _is_sum(layer: Any) -> bool:
    return isinstance(layer, layers.Add)


def _layer(torch: Any, layer: Any) -> Any:
    nn = torch.nn
    match layer:
        case layers.Conv2d():
            found = nn.Conv2d(
                layer.c, layer.k, (layer.r, layer.s), layer.stride, (layer.pad[0], layer.pad[2]), layer.dilation,
                layer.groups, bias=layer.bias,
            )  # fmt: skip
        case layers.BatchNorm2d():
            found = nn.BatchNorm2d(layer.c, eps=layer.eps, momentum=layer.momentum)
        case layers.ReLU():
            found = nn.ReLU(inplace=True)
        case layers.MaxPool2d():
            found = nn.MaxPool2d((layer.r, layer.s), layer.stride, (layer.pad[0], layer.pad[2]))
        case layers.GlobalAvgPool():
            found = nn.AdaptiveAvgPool2d(1)
        case layers.Linear():
            found = nn.Sequential(nn.Flatten(), nn.Linear(layer.c, layer.k, bias=layer.bias))
        case _:
            raise ValueError(f"PyTorch's side of the comparison has no module for {layer.type}")
    return found
