"""
A step of a network without a schedule: one layer after another, every result an array of its own.

Nothing is done by a neighbour, written over or shared: what the schedule makes of a network is tested against it.
"""

from __future__ import annotations

import numpy as np

from cubatch.engine import functional as f
from cubatch.network import layers
from cubatch.network.graph import INPUT


class LayerByLayer:
    """
    A network's parameters and statistics, copied, and steps with them.

    Args:
        network: Of layers without draws: dropout passes everything.
        parameters, states: By layer and name, as `Model` has them.
        stored: The type of 16 bits that every result is rounded to, computed in float32; None: all is in float64.
    """

    def __init__(self, network, parameters, states, stored=None):
        self.network = network
        self.kind = np.float32 if stored else np.float64
        self.rounded = (lambda values: values.astype(stored).astype(np.float32)) if stored else np.asarray
        self.parameters, self.states = (
            {name: {key: np.array(array, self.kind) for key, array in of.items()} for name, of in both.items()}
            for both in (parameters, states)
        )
        self.gradients = {}
        self._saved = {}

    def output(self, x, *, training=False):
        """Give the output for images, and keep what the gradients need."""
        self.values = {INPUT: np.asarray(x, self.kind)}
        for node in self.network.nodes:
            read = [self.values[name] for name in node.inputs]
            self.values[node.name] = self.rounded(self._forward(node, read, training))
        return self.values[self.network.nodes[-1].name]

    def step(self, x, labels, rate):
        """Take a step of gradient descent; give the loss before it."""
        loss = self.differentiate(x, labels)
        for name, gradients in self.gradients.items():
            for key, value in gradients.items():
                self.parameters[name][key] -= rate * value
        return loss

    def differentiate(self, x, labels, **options):
        """Find the gradients of the loss, which has options of its own; give the loss."""
        last = self.network.nodes[-1].name
        logits = self.output(x, training=True)
        n, classes = len(x), logits.shape[-1]
        loss, gradient = np.zeros(1), np.empty((n, classes), self.kind)
        f.softmax_cross_entropy(
            logits.reshape(n, classes), labels.astype(np.int32), loss=loss, dlogits=gradient, **options
        )  # fmt: skip
        owed = {last: self.rounded(gradient).reshape(logits.shape)}
        for node in reversed(self.network.nodes):
            dy = np.ascontiguousarray(owed.pop(node.name).reshape(self.values[node.name].shape))
            read = [self.values[name] for name in node.inputs]
            for name, dx in zip(node.inputs, self._backward(node, read, dy), strict=True):
                owed[name] = owed[name] + dx if name in owed else self.rounded(dx)
        return float(loss[0])

    def _forward(self, node, read, training):  # noqa: C901, PLR0911, PLR0912 - a case for each kind
        layer, p, x = node.layer, self.parameters.get(node.name, {}), read[0]
        match layer:
            case layers.Conv2d():
                return f.conv2d(x, p["w"], p.get("b"), **_window(layer))
            case layers.Linear():
                return f.linear(x, p["w"], p.get("b"))
            case layers.BatchNorm2d():
                state = self.states[node.name]
                if not training:
                    return f.batch_norm_inference(
                        x, p["gamma"], p["beta"], running_mean=state["mean"], running_var=state["var"], eps=layer.eps
                    )
                mean, inv_std = self._saved[node.name] = np.empty_like(p["gamma"]), np.empty_like(p["gamma"])
                return f.batch_norm_train(
                    x, p["gamma"], p["beta"], mean=mean, inv_std=inv_std, running_mean=state["mean"],
                    running_var=state["var"], momentum=layer.momentum, eps=layer.eps,
                )  # fmt: skip
            case layers.ReLU():
                return np.maximum(x, 0)
            case layers.MaxPool2d():
                self._saved[node.name] = np.empty((len(x), *layer.output_shape), np.uint8)
                return f.max_pool2d(x, layer.window, argmax=self._saved[node.name])
            case layers.AvgPool2d():
                return f.avg_pool2d(x, layer.window)
            case layers.GlobalAvgPool():
                return x.mean((1, 2), keepdims=True)
            case layers.Flatten():
                return x.reshape(len(x), 1, 1, -1)
            case layers.Dropout():
                return x
            case layers.Add():
                return sum(read[1:], start=x)
            case layers.Scale():
                return x * read[1]
            case layers.Concat():
                return np.concatenate(read, axis=-1)
            case layers.Slice():
                return x[..., layer.start : layer.end]
        return f.activation(x, kind=layer.type)

    def _backward(self, node, read, dy):  # noqa: C901, PLR0911, PLR0912 - a case for each kind
        """Give the gradient of each input; those of parameters are kept."""
        layer, p, x = node.layer, self.parameters.get(node.name, {}), read[0]
        grads = self.gradients[node.name] = {key: np.empty_like(value) for key, value in p.items()}
        match layer:
            case layers.Conv2d():
                f.conv2d_wgrad(x, dy, dw=grads["w"], db=grads.get("b"), **_window(layer))
                return [f.conv2d_dgrad(dy, p["w"], x_shape=x.shape, **_window(layer))]
            case layers.Linear():
                f.linear_wgrad(x, dy, dw=grads["w"], db=grads.get("b"))
                return [f.linear_dgrad(dy, p["w"])]
            case layers.BatchNorm2d():
                mean, inv_std = self._saved[node.name]
                return [
                    f.batch_norm_backward(
                        dy, x, p["gamma"], mean=mean, inv_std=inv_std, dgamma=grads["gamma"], dbeta=grads["beta"]
                    )
                ]
            case layers.ReLU():
                return [np.where(x > 0, dy, 0)]
            case layers.MaxPool2d():
                return [f.max_pool2d_backward(dy, self._saved[node.name], layer.window, x_shape=x.shape)]
            case layers.AvgPool2d():
                return [f.avg_pool2d_backward(dy, layer.window, x_shape=x.shape)]
            case layers.GlobalAvgPool():
                return [np.broadcast_to(dy / (x.shape[1] * x.shape[2]), x.shape)]
            case layers.Flatten():
                return [dy.reshape(x.shape)]
            case layers.Dropout():
                return [dy]
            case layers.Add():
                return [dy for _ in read]
            case layers.Scale():
                return [dy * read[1], (dy * x).sum((1, 2), keepdims=True)]
            case layers.Concat():
                return np.split(dy, np.cumsum(layer.channels)[:-1], axis=-1)
            case layers.Slice():
                dx = np.zeros_like(x)
                dx[..., layer.start : layer.end] = dy
                return [dx]
        saved = self.values[node.name] if "y" in layer.backward_reads else x
        return [f.activation_backward(dy, saved, kind=layer.type)]


def _window(layer):
    return {"stride": layer.stride, "pad": layer.pad, "dilation": layer.dilation, "groups": layer.groups}
