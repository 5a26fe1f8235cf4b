"""torchvision's models with numbers in them that hide nothing, and what the engine makes of an imported one."""

from __future__ import annotations

import numpy as np
import pytest

from cubatch.engine.network import Model
from cubatch.hardware import probe

torch = pytest.importorskip("torch")
from tests.parity.beside_torchvision import registering_nothing  # noqa: E402

with registering_nothing():
    models = pytest.importorskip("torchvision.models")

torch.set_num_threads(1)
PRESERVE = torch.onnx.TrainingMode.PRESERVE  # exports batch norms as they are
MORE = {"googlenet": {"aux_logits": False, "init_weights": False}, "vgg16": {"init_weights": False}}


def build(name, classes=10):
    """Build a model whose batch norms have statistics, scales, shifts and momenta as after training."""
    draw = torch.Generator().manual_seed(len(name))
    torch.manual_seed(0)
    module = getattr(models, name)(weights=None, num_classes=classes, **MORE.get(name, {})).eval()
    if name == "vgg16":  # for images of 64 x 64, whose features are 2 x 2
        module.avgpool = torch.nn.AdaptiveAvgPool2d(2)
        module.classifier[0] = torch.nn.Linear(512 * 4, 64)
        module.classifier[3] = torch.nn.Linear(64, 32)
        module.classifier[6] = torch.nn.Linear(32, classes)
    if name == "alexnet":  # its features are 6 x 6 for images of 224 x 224; what follows is large without need
        module.classifier[1] = torch.nn.Linear(256 * 36, 64)
        module.classifier[4] = torch.nn.Linear(64, 32)
        module.classifier[6] = torch.nn.Linear(32, classes)
    with torch.no_grad():
        for part in module.modules():
            if isinstance(part, torch.nn.BatchNorm2d):
                part.running_mean.normal_(0, 0.3, generator=draw)
                part.running_var.uniform_(0.5, 1.5, generator=draw)
                part.weight.uniform_(0.5, 1.5, generator=draw)
                part.bias.normal_(0, 0.3, generator=draw)
            if hasattr(part, "layer_scale"):  # 1e-6 as it begins: then a block is nothing
                part.layer_scale.normal_(generator=draw)
    return module


def vision_transformer():
    """Build a small vision transformer without the zeros that its head, tokens and biases begin with."""
    torch.manual_seed(4)
    module = models.VisionTransformer(
        image_size=32, patch_size=8, num_layers=2, num_heads=3, hidden_dim=12, mlp_dim=24, num_classes=5
    )
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return module.eval()


def images(shape, n=2):
    """Draw images as PyTorch has them: (n, c, h, w)."""
    return np.random.default_rng(0).standard_normal((n, *shape))


def outputs(network, x):
    """Run a network on images (n, c, h, w), or on tokens (n, t, c), in float64: (n, h, w, c)."""
    with Model(network, device=probe.device("cpu"), dtype="float64") as model:
        model.prepare(len(x))
        model.load(x.transpose(0, 2, 3, 1) if x.ndim == 4 else x[:, :, None])
        model.step()
        return model.output()
