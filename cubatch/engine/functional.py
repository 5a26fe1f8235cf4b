"""
Every operation of the engine: arrays in, arrays out.

Activations are NHWC, filters KRSC. These rules hold for every function:

- Arrays are C-contiguous. `out` receives the result and is returned; None allocates it.
- `x` is the forward pass's input, `dy` the gradient of its output. Pairs such as `stride` are (vertical, horizontal).
- Arguments with names such as `dw` and `dgamma` receive the gradients of parameters and are overwritten.
- `workspace` is a 1-D uint8 array of scratch memory. Its size sets the block that a function works on. None allocates
  it; `InvalidArgument` is raised if it is too small for one row of outputs.
- With results and workspace given, a function allocates nothing that grows with the batch.

A function works in the calling thread, on the samples that it receives: members of a `team.Team` call it on shards.
`backend.prepare()` binds a call to its arrays for fast repetition.
"""

from cubatch.engine.activation_functions import activation, activation_backward, relu, relu_backward
from cubatch.engine.batch_norm import batch_norm_backward, batch_norm_inference, batch_norm_train, fold_batch_norms
from cubatch.engine.conv import conv2d, conv2d_dgrad, conv2d_wgrad
from cubatch.engine.layer_norm import layer_norm, layer_norm_backward
from cubatch.engine.linear import linear, linear_dgrad, linear_wgrad
from cubatch.engine.loss_scale import update_loss_scale
from cubatch.engine.losses import softmax, softmax_backward, softmax_cross_entropy
from cubatch.engine.optim import adam, momentum, sgd
from cubatch.engine.pointwise import (
    add,
    concat,
    concat_backward,
    dropout,
    dropout_backward,
    slice_channels,
    slice_channels_backward,
)
from cubatch.engine.scaling import layer_scale, layer_scale_backward, scale, scale_backward
from cubatch.engine.self_attention import attention, attention_backward
from cubatch.engine.tokens import class_token, class_token_backward, tokens, tokens_backward
from cubatch.engine.window_pooling import (
    avg_pool2d,
    avg_pool2d_backward,
    global_avg_pool,
    global_avg_pool_backward,
    max_pool2d,
    max_pool2d_backward,
)

__all__ = [
    "activation", "activation_backward", "adam", "add", "attention", "attention_backward", "avg_pool2d",
    "avg_pool2d_backward", "batch_norm_backward", "batch_norm_inference", "batch_norm_train", "class_token",
    "class_token_backward", "concat", "concat_backward", "conv2d", "conv2d_dgrad", "conv2d_wgrad", "dropout",
    "dropout_backward", "fold_batch_norms", "global_avg_pool", "global_avg_pool_backward", "layer_norm",
    "layer_norm_backward", "layer_scale", "layer_scale_backward", "linear", "linear_dgrad", "linear_wgrad",
    "max_pool2d", "max_pool2d_backward", "momentum", "relu", "relu_backward", "scale", "scale_backward", "sgd",
    "slice_channels", "slice_channels_backward", "softmax", "softmax_backward", "softmax_cross_entropy", "tokens",
    "tokens_backward", "update_loss_scale",
]  # fmt: skip
