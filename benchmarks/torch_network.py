"""A cubatch network in PyTorch: its layers as PyTorch modules, and a training step as users write it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cubatch.network import layers
from cubatch.network.graph import Network

MOMENTUM = 0.9
_PLAIN = {
    "relu6": "ReLU6", "hard_swish": "Hardswish", "hard_sigmoid": "Hardsigmoid", "sigmoid": "Sigmoid", "silu": "SiLU"
}  # fmt: skip


def module(network: Network) -> Any:
    """
    Build a network of PyTorch's modules, freshly initialised.

    Args:
        network: Of the layers of convolutional networks; those that join others only as it names them.

    Raises:
        ValueError: If there is a layer of another kind.
    """
    import torch

    class Walk(torch.nn.Module):
        """Layers by name, run in the network's order."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleDict(
                {_key(node.name): _layer(torch, node.layer) for node in network.nodes if not _joins(node.layer)}
            )

        def forward(self, x: Any) -> Any:
            values = {"input": x}
            for node in network.nodes:
                read = [values[name] for name in node.inputs]
                joined = _joined(torch, node.layer, read)
                values[node.name] = self.layers[_key(node.name)](*read) if joined is None else joined
            return values[network.nodes[-1].name]

    return Walk()


def torch_step(module: Any, x: Any, labels: Any, dtype: str, compile_mode: str | None = None) -> Callable[[], Any]:
    """
    Return a step of a PyTorch module; the step returns the loss, or in inference the output.

    Args:
        module: The module, on the device of `x`.
        x: Images.
        labels: Classes of the images; `None` for inference.
        dtype: Of automatic mixed precision in training: "float16" (with a scaled loss) or "bfloat16"; else it is off.
        compile_mode: Of `torch.compile`; `None` runs the module without it.
    """
    import torch

    run = module if compile_mode is None else torch.compile(module, mode=compile_mode, dynamic=False)
    if labels is None:
        module.eval()

        def infer() -> Any:
            with torch.inference_mode():
                return run(x)

        return infer
    module.train()
    device = x.device.type
    # A learning rate of 0 keeps the parameters, as in cubatch's runner; the work of a step is the same.
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0, momentum=MOMENTUM)
    scaler = torch.amp.GradScaler(device, enabled=dtype == "float16")
    mixed = dtype in {"float16", "bfloat16"}

    def train() -> Any:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device, dtype=getattr(torch, dtype) if mixed else None, enabled=mixed):
            loss = torch.nn.functional.cross_entropy(run(x), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    return train


def training_step(
    network: Network, batch_size: int, dtype: str, *, device: str = "cuda", channels_last: bool = True
) -> Callable[[], Any]:
    """
    Return a training step of a network on random data: SGD with momentum, as `torch_step` has it.

    Args:
        network: What is trained.
        batch_size: Images.
        dtype: As in `torch_step`.
        device: PyTorch's name of it.
        channels_last: Lay activations and filters out as NHWC, not NCHW.
    """
    import torch

    model, x = _laid_out(torch, network, batch_size, device, channels_last=channels_last)
    return torch_step(model, x, torch.randint(0, network.output_shape[-1], (batch_size,), device=device), dtype)


def inference_step(network: Network, batch_size: int, *, device: str, channels_last: bool) -> Callable[[], Any]:
    """Return a forward pass in float32 on random data; arguments as in `training_step`."""
    import torch

    model, x = _laid_out(torch, network, batch_size, device, channels_last=channels_last)
    return torch_step(model, x, None, "float32")


def _laid_out(torch: Any, network: Network, batch_size: int, device: str, *, channels_last: bool) -> tuple[Any, Any]:
    h, w, c = network.input_shape
    layout = torch.channels_last if channels_last else torch.contiguous_format
    x = torch.randn(batch_size, c, h, w, device=device).to(memory_format=layout)
    return module(network).to(device, memory_format=layout), x


def _key(name: str) -> str:
    return name.replace(".", "_")  # PyTorch takes no dots


def _joins(layer: Any) -> bool:
    return isinstance(layer, layers.Add | layers.Concat | layers.Scale)


def _joined(torch: Any, layer: Any, read: list[Any]) -> Any:
    """Return the output of a layer with several inputs, or None for a layer with one."""
    match layer:
        case layers.Add():
            return sum(read[1:], read[0])
        case layers.Concat():
            return torch.cat(read, 1)
        case layers.Scale():
            return read[0] * read[1]
    return None


def _layer(torch: Any, layer: Any) -> Any:
    nn = torch.nn
    match layer:
        case layers.Conv2d() | layers.MaxPool2d() | layers.AvgPool2d():
            module = _window(nn, layer)
        case layers.BatchNorm2d():
            module = nn.BatchNorm2d(layer.c, eps=layer.eps, momentum=layer.momentum)
        case layers.ReLU():
            module = nn.ReLU(inplace=True)
        case layers.GlobalAvgPool():
            module = nn.AdaptiveAvgPool2d(1)
        case layers.Flatten():
            module = nn.Flatten()
        case layers.Dropout():
            module = nn.Dropout(layer.p)
        case layers.Linear():
            module = nn.Sequential(nn.Flatten(), nn.Linear(layer.c, layer.k, bias=layer.bias))
        case _ if layer.type in _PLAIN:
            module = getattr(nn, _PLAIN[layer.type])()
        case _:
            raise ValueError(f"PyTorch's side of the comparison has no module for {layer.type}")
    return module


def _window(nn: Any, layer: Any) -> Any:
    pad = layer.pad[0], layer.pad[2]
    if isinstance(layer, layers.Conv2d):
        extents = layer.c, layer.k, (layer.r, layer.s)
        return nn.Conv2d(*extents, layer.stride, pad, layer.dilation, layer.groups, bias=layer.bias)
    options = {"ceil_mode": layer.ceil}
    if isinstance(layer, layers.AvgPool2d):
        return nn.AvgPool2d((layer.r, layer.s), layer.stride, pad, count_include_pad=layer.count_pad, **options)
    return nn.MaxPool2d((layer.r, layer.s), layer.stride, pad, **options)
