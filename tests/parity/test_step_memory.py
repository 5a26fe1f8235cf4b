"""The memory of modules before they run: by part, and against what PyTorch's allocator hands out in a real step."""

from __future__ import annotations

import gc
import itertools
import json
import re
import sys
import warnings
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import cubatch as cb  # noqa: E402
from cubatch.cli import console  # noqa: E402
from cubatch.errors import DoesNotFit, InvalidArgument  # noqa: E402
from cubatch.frameworks import recurrent_workspace, torch_memory  # noqa: E402
from cubatch.hardware import context_overhead  # noqa: E402
from cubatch.units import format_bytes  # noqa: E402
from tests.parity.traced_modules import MODULES, WORDS, Adapted, Reading, Tied, tokens, transformers  # noqa: E402
from tests.unit.commands import in_process  # noqa: E402

TAKES_MORE_INSIDE = {
    "inference": {"U-Net", "diffusion", "detection", "checkpointed", "two towers"},
    "training": {"lstm", "U-Net", "diffusion", "detection"},
}


def adam(mode):
    return {"mode": mode, "optimizer": "adam" if mode == "training" else "sgd"}


def storages(tensors):
    return {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}


def first_tensor(output):
    return output if isinstance(output, torch.Tensor) else output[0]


def most_allocated(profiler, *, since=None):
    """The largest sum of allocated and freed bytes, from a named range on."""
    events = sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    names = [event.name() for event in events]
    sizes = [event.nbytes() if name == "[memory]" else 0 for event, name in zip(events, names, strict=True)]
    return max(list(itertools.accumulate(sizes))[names.index(since) if since else 0 :])


def real_peak(make, batches, *, training, steps=2):
    """Peak bytes of the last step, by the profiler's record of every allocation since the module was made."""
    gc.collect()  # or tensors of earlier tests are freed meanwhile
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        module, inputs = make().train(training), batches(24)
        positional, keyword = ((), inputs) if isinstance(inputs, dict) else (inputs, {})
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        optimizer = torch.optim.Adam(trained, lr=0.0) if training else None

        def step():
            with torch.inference_mode(not training):
                loss = first_tensor(module(*positional, **keyword))
                if training:
                    loss = loss.float().square().mean()
                    optimizer.zero_grad(set_to_none=True)
                    loss.backward()
                    optimizer.step()

        for _ in range(steps - 1):
            step()
        with torch.profiler.record_function("last step"):
            step()
    return most_allocated(profiler, since="last step")


@pytest.mark.parametrize("mode", ["inference", "training"])
@pytest.mark.parametrize("name", MODULES)
def test_the_total_is_what_the_tensors_of_a_real_step_take(name, mode):
    """
    Of PyTorch's allocations in training with Adam and in inference; the module stays as it was.

    All activations belong to its submodules, also where layers are computed again; next to none to the module itself.

    A hundredth is left for what operations take inside.  Convolutions and LSTM on a CPU take more inside (here up to
    four times the tensors), in inference also attention and a bag of embeddings: theirs is a lower bound.
    """
    torch.manual_seed(0)
    make, batches = MODULES[name]
    module = make().train(mode == "training")
    before = {key: value.clone() for key, value in module.state_dict().items()}
    found = cb.footprint(module, batches, batch_size=24, **adam(mode))
    assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items())
    assert all(parameter.grad is None for parameter in module.parameters())
    assert found.total == found.weights + found.inputs + found.gradients + found.optimizer + found.activations
    assert sum(found.by_submodule.values()) == found.activations
    assert found.by_submodule.keys() <= dict(module.named_modules()).keys()
    if name in {"text encoder", "T5", "checkpointed"}:
        assert found.by_submodule.get("", 0) <= 0.05 * found.activations
    real = real_peak(make, batches, training=mode == "training")
    assert found.total <= 1.01 * real
    if name not in TAKES_MORE_INSIDE[mode]:
        assert found.total >= 0.99 * real


def test_recurrent_layers_are_named_because_their_library_keeps_more():
    """Of each its qualified name, in the record and in the table; other modules have no such note."""
    module = nn.ModuleDict({"words": nn.Embedding(WORDS, 16), "reader": nn.GRU(16, 16, batch_first=True)})
    module.forward = lambda words: module["reader"](module["words"](words))[0]
    found = cb.footprint(module, lambda n: (tokens(n),), batch_size=8)
    assert found.recurrent == ("reader",)
    assert "time steps of reader" in found.table()
    assert "time steps" not in cb.footprint(nn.Linear(64, 32), (64,), batch_size=8).table()


@pytest.mark.parametrize("mode", ["inference", "training"])
@pytest.mark.parametrize("options", [{}, {"num_layers": 2}, {"bidirectional": True}], ids=["one", "two", "both"])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_a_recurrent_layer_takes_what_a_real_step_takes(kind, options, mode):
    """Within 5 % for an LSTM, of which oneDNN allocates most inside the operator, and 1 % for a GRU without oneDNN."""
    make, batches = lambda: kind(32, 96, batch_first=True, **options), lambda n: (torch.rand(n, 40, 32),)
    found = cb.footprint(make(), batches, batch_size=24, **adam(mode))
    real = real_peak(make, batches, training=mode == "training")
    assert found.total == pytest.approx(real, rel=0.05 if kind is nn.LSTM else 0.01)


@pytest.mark.parametrize(
    ("steps", "hidden", "samples", "options"),
    [(50, 96, 24, {}), (20, 900, 24, {"num_layers": 2}), (10, 1024, 24, {}), (10, 96, 200, {})],
    ids=["long", "wide", "aligned", "many samples"],
)
def test_what_onednn_takes_of_an_lstm_is_that_of_the_operator_itself(steps, hidden, samples, options):
    """At these extents: what it keeps within 2 %, and scratch memory of both passes within 5 %."""
    make, batches = lambda: nn.LSTM(32, hidden, batch_first=True, **options), lambda n: (torch.rand(n, steps, 32),)
    kept, scratch = [], []

    class Watched(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), options=None):
            learned = recurrent_workspace.scratch_bytes(name := torch_memory.name_of(function), arguments)
            if not learned:
                return function(*arguments, **(options or {}))
            results, taken = recurrent_workspace._watched(function, *arguments)
            scratch.append((learned, taken))
            if name == recurrent_workspace.OPERATOR:
                learned = recurrent_workspace.completed(arguments, (*results[:-1], torch.empty(0)))
                kept.append((learned[-1].nbytes, results[-1].nbytes))
            return results

    with Watched():
        make()(*batches(samples))[0].square().sum().backward()
    assert len(scratch) == 2 * len(kept) > 0
    for learned, own in kept:
        assert learned == pytest.approx(own, rel=0.02)
    for learned, own in scratch:
        assert learned == pytest.approx(own, rel=0.05)


@pytest.mark.parametrize(("device", "autocast"), [(None, "bfloat16"), ("t4", "float16")])
def test_an_lstm_is_traced_in_types_that_onednn_may_not_train_on_this_cpu(device, autocast):
    """What it keeps is then half of that in float32; other results are converted, so that both may exist."""
    parts = [
        cb.footprint(
            nn.LSTM(32, 96), lambda n: (torch.rand(50, n, 32),), batch_size=24, mode="training", device=device,
            autocast=each,
        )
        for each in (None, autocast)
    ]  # fmt: skip
    assert 0.4 <= parts[1].activations / parts[0].activations <= 0.9


class Sliced(nn.Module):
    """Adds gradients of slices in place, as autograd does with one that nothing else refers to."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 1024)

    def forward(self, x):
        return sum(map(torch.tanh, torch.tanh(self.layer(x)).split(128, dim=1)))


class Shared(Sliced):
    """Adds gradients of which some are still needed elsewhere."""

    def forward(self, x):
        hidden = torch.tanh(self.layer(x))
        first = hidden + torch.tanh(hidden)
        return first + torch.sigmoid(first) + hidden + first


class Product(torch.autograd.Function):
    """Adds two temporary tensors in Python, both of which are there next to the sum."""

    @staticmethod
    def forward(context, x):
        context.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(context, gradient):
        (x,) = context.saved_tensors
        return gradient * x + gradient * x


class Multiplied(Sliced):
    """Calls a function with its own gradient."""

    def forward(self, x):
        return Product.apply(self.layer(x))


@pytest.mark.parametrize("make", [Sliced, Shared, Multiplied])
def test_sums_of_gradients_take_what_a_real_step_takes(make):
    """Within a hundredth, whether autograd adds them in place or not; a tensor more would be a tenth."""
    batches = lambda n: (torch.rand(10 * n, 64),)  # noqa: E731
    found = cb.footprint(make(), (64,), batch_size=240, mode="training", optimizer="adam")
    assert found.total == pytest.approx(real_peak(make, batches, training=True), rel=0.01)


class Keeping(Sliced):
    """Keeps its last result, which is there until the next step has made another."""

    def forward(self, x):
        self.last = self.layer(x)
        return self.last.sum()


def test_a_result_that_a_module_keeps_counts_in_the_next_step():
    """Of 10 samples of 1024 floats: the last result next to the new one."""
    found = cb.footprint(Keeping(), (64,), batch_size=10)
    assert found.total - found.weights - found.inputs == 2 * 10 * 1024 * 4
    assert found.total == pytest.approx(real_peak(Keeping, lambda n: (torch.rand(10, 64),), training=False), rel=0.01)


class Packed(nn.Module):
    """Reads sequences without their padding, as classifiers of texts do."""

    def __init__(self):
        super().__init__()
        self.words, self.reader = nn.Embedding(WORDS, 64), nn.LSTM(64, 128, batch_first=True)

    def forward(self, words):
        lengths = torch.full((len(words),), words.shape[1])
        packed = nn.utils.rnn.pack_padded_sequence(self.words(words), lengths, batch_first=True)
        return self.reader(packed)[1][0][-1]


class Padded(nn.Module):
    """Reads sequences without their padding, and returns them with it, in both directions."""

    def __init__(self):
        super().__init__()
        self.reader, self.last = nn.GRU(64, 128, batch_first=True, bidirectional=True), nn.Linear(256, 64)

    def forward(self, x):
        lengths = torch.full((len(x),), x.shape[1])
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        whole, _ = nn.utils.rnn.pad_packed_sequence(self.reader(packed)[0], batch_first=True, total_length=60)
        return self.last(whole)


class Aligned(nn.Module):
    """Has the loss of speech recognition."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, WORDS)

    def forward(self, x, targets):
        scores = self.layer(x.transpose(0, 1)).log_softmax(-1)
        lengths = [torch.full((len(x),), each.shape[1]) for each in (x, targets)]
        return nn.functional.ctc_loss(scores, targets, *lengths)


@pytest.mark.parametrize(
    ("make", "batches"),
    [
        (Packed, lambda n: (torch.randint(WORDS, (n, 48)),)),
        (Padded, lambda n: (torch.rand(n, 48, 64),)),
        (Aligned, lambda n: (torch.rand(n, 100, 64), torch.randint(1, WORDS, (n, 10)))),
    ],
)
def test_sequences_whose_lengths_data_decide_take_what_a_real_step_takes(make, batches):
    """Sequences of full length, within 5 %: a trace assumes the longest that a batch may have."""
    found = cb.footprint(make(), batches, batch_size=24, mode="training", optimizer="adam")
    assert found.total == pytest.approx(real_peak(make, batches, training=True), rel=0.05)


class Exponential(nn.Module):
    """The exponential of a matrix of weights, whose norm decides how many matrices PyTorch computes it from."""

    def __init__(self, scale):
        super().__init__()
        self.weight = nn.Parameter(scale * torch.rand(256, 256))

    def forward(self, x):
        return x @ torch.linalg.matrix_exp(self.weight)


@pytest.mark.parametrize("mode", ["inference", "training"])
def test_the_exponential_of_a_matrix_takes_what_a_real_step_of_a_large_norm_takes(mode):
    """Within 5 %, and of a small norm no more than that; the operator is named among those that depend on data."""
    batches = lambda n: (torch.rand(n, 256),)  # noqa: E731
    found = cb.footprint(Exponential(0.1), batches, batch_size=24, **adam(mode))
    large, small = (
        real_peak(lambda: Exponential(scale), batches, training=mode == "training")  # noqa: B023
        for scale in (0.1, 1e-6)
    )
    assert small <= found.total == pytest.approx(large, rel=0.05)
    assert found.data_dependent == ("aten.linalg_matrix_exp.default",)


@pytest.mark.parametrize("mode", ["inference", "training"])
@pytest.mark.parametrize(("kind", "extents"), [("linear", (240,)), ("bicubic", (24, 24)), ("trilinear", (8, 8, 8))])
def test_an_enlarged_image_takes_what_a_real_step_takes(kind, extents, mode):
    """Within 1 %: PyTorch's kernels hold no more than input and output, unlike its compositions in Python."""
    make = lambda: nn.Sequential(nn.PReLU(), nn.Upsample(scale_factor=2, mode=kind), nn.Tanh())  # noqa: E731
    batches = lambda n: (torch.rand(n, 16, *extents),)  # noqa: E731
    found = cb.footprint(make(), batches, batch_size=24, **adam(mode))
    assert found.total == pytest.approx(real_peak(make, batches, training=mode == "training"), rel=0.01)


class Table(nn.Module):
    """A table of words of which a step reads few, so that its gradient is sparse."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(20_000, 64, sparse=True)

    def forward(self, words):
        return self.words(words).tanh()


def test_a_sparse_gradient_is_refused_with_a_remedy():
    """PyTorch's tensors without data lose its elements; inference has no gradient."""
    batches = lambda n: (torch.randint(20_000, (n, 48)),)  # noqa: E731
    with pytest.raises(InvalidArgument, match=r"Embedding\(sparse=False\)") as caught:
        cb.footprint(Table(), batches, batch_size=24, mode="training")
    assert caught.value.field == "module"
    assert cb.footprint(Table(), batches, batch_size=24).total > 20_000 * 64 * 4


def test_the_weights_of_a_quantized_layer_count():
    """A byte for each element and 4 for each bias; they are no parameters of the module."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(256, 512)), {nn.Linear})
        found = cb.footprint(module, (256,), batch_size=24)
    assert 256 * 512 + 512 * 4 <= found.weights <= 1.1 * 256 * 512 + 512 * 4
    assert found.inputs + found.activations == 24 * (256 + 512) * 4


class Converting(nn.Module):
    """Converts a layer in its forward pass to the type that it has, as routers of experts do."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x):
        return self.layer.to(torch.float32)(x)


def test_a_conversion_that_changes_nothing_is_traced():
    """The module and PyTorch's classes stay as they are."""
    module, before = Converting(), nn.Module._apply
    found = cb.footprint(module, (64,), batch_size=24, mode="training", optimizer="adam")
    assert found.total == pytest.approx(real_peak(Converting, lambda n: (torch.rand(n, 64),), training=True), rel=0.01)
    assert nn.Module._apply is before
    assert not isinstance(module.layer.weight, torch._subclasses.FakeTensor)


@pytest.fixture
def process_group():
    """A group of ranks with this process alone."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("shares", [False, True])
def test_the_buckets_of_distributed_training_take_what_they_take_in_a_real_step(process_group, shares):
    """
    Copies of all gradients, a fifth of the total, unless the gradients lie in the buckets; within 1 %.

    A thread of the communication library may still hold an old bucket, so that the least of three runs counts.
    """

    def make():
        layers = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256))
        return nn.parallel.DistributedDataParallel(layers, gradient_as_bucket_view=shares)

    batches = lambda n: (torch.rand(n, 256),)  # noqa: E731
    found = cb.footprint(make(), batches, batch_size=24, mode="training", optimizer="adam")
    assert found.total == pytest.approx(min(real_peak(make, batches, training=True) for _ in range(3)), rel=0.01)
    inside = make().module
    alone = cb.footprint(inside, batches, batch_size=24, mode="training", optimizer="adam")
    assert found.weights == alone.weights
    assert found.gradients == (1 if shares else 2) * num_bytes(inside.parameters())


def num_bytes(parameters):
    return sum(storages(parameters).values())


@pytest.mark.parametrize(("make", "batches"), [(Adapted, (256,)), (Tied, tokens(4))], ids=["frozen", "tied"])
def test_parts_count_what_is_trained_and_each_tensor_once(make, batches):
    """Adam keeps two values for each trained one, and a float of the number of steps for each parameter."""
    module = make()
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    found = cb.footprint(module, batches, batch_size=8, mode="training", optimizer="adam")
    assert found.weights == num_bytes(module.parameters())
    assert found.optimizer == 2 * num_bytes(trained) + 4 * len(trained)
    assert found.gradients <= num_bytes(trained)
    alone = cb.footprint(module, batches, batch_size=8)
    assert (alone.mode, alone.gradients, alone.optimizer) == ("inference", 0, 0)


def test_the_parts_of_a_layer_are_those_of_arithmetic():
    """One layer of 64 to 32 in inference: weights, the batch and its output."""
    found = cb.footprint(nn.Linear(64, 32), (64,), batch_size=10)
    assert (found.weights, found.inputs, found.activations) == (4 * (64 * 32 + 32), 4 * 10 * 64, 4 * 10 * 32)
    assert found.total == 4 * (64 * 32 + 32 + 10 * 64 + 10 * 32)
    assert json.loads(json.dumps(found.to_mapping()))["total"] == found.total
    assert "weights" in found.table()


class Nested(nn.Module):
    """Two blocks, and an addition outside of them."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 64), nn.Sigmoid(), nn.Linear(64, 16)) for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


class Masked(nn.Module):
    """Adds the first four elements of a mask, or of the tensor that an object holds, to each sample."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 4)

    def forward(self, x, mask):
        return self.linear(x) + getattr(mask, "held", mask).view(-1)[:4]


def test_an_input_that_is_the_same_at_all_sizes_counts_once():
    """A mask of 1 MiB, as it is or inside an object, and 64 floats a sample; a view of the mask takes nothing."""
    mask, holder = torch.zeros(512, 512), SimpleNamespace(held=torch.zeros(512, 512))
    for constant in (mask, holder):
        taken = cb.footprint(Masked(), lambda n, c=constant: (torch.zeros(n, 64), c), batch_size=32)
        assert taken.inputs == 4 * (512 * 512 + 32 * 64)
    with pytest.raises(cb.DoesNotFit):
        cb.max_batch_size(Masked(), memory="1MiB", batches=lambda n: (torch.zeros(n, 64), mask))


def test_activations_are_those_of_the_submodules_that_made_them():
    """
    By arithmetic, in training with SGD, 10 samples of 16 or 64 floats.

    The peak is in the second block's sigmoid, whose input is still there.  The first sigmoid's output and the sum of
    the first block are kept for the backward pass; the input of the first sigmoid is not.
    """
    found = cb.footprint(Nested(), (16,), batch_size=10, mode="training")
    wide, narrow = 10 * 64 * 4, 10 * 16 * 4
    assert found.by_submodule == {"blocks.0.1": wide, "blocks.1.0": wide, "blocks.1.1": wide, "": narrow}
    assert sum(found.by_submodule.values()) == found.activations
    assert list(found.by_submodule.values()) == sorted(found.by_submodule.values(), reverse=True)


def test_gradients_in_the_backward_pass_belong_to_the_layer_that_they_are_of():
    """At the peak there are the output of tanh, its gradient by layer 2, and the gradient of its input by tanh."""
    module = nn.Sequential(nn.Linear(8, 400), nn.Tanh(), nn.Linear(400, 8))
    found = cb.footprint(module, (8,), batch_size=100, mode="training")
    wide = 100 * 400 * 4
    assert {name: size for name, size in found.by_submodule.items() if name} == {"1": 2 * wide, "2": wide}


class EightBit(torch.optim.Optimizer):
    """Keeps two values of a byte for each parameter, and a scale for 256 of them, as 8-bit Adam does."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.0})

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            for name in ("first", "second"):
                if f"{name} scale" not in state:
                    state[name] = torch.zeros(parameter.numel(), dtype=torch.uint8)
                    state[f"{name} scale"] = torch.zeros(-(-parameter.numel() // 256))
                mean = state[name].float().add_(parameter.grad.flatten())
                state[name].copy_(mean)
            parameter.add_(mean.view_as(parameter), alpha=-self.param_groups[0]["lr"])


def test_an_optimizer_of_8_bits_counts_its_bytes():
    """One byte for each value and state, and its scales."""
    module = Adapted()
    sizes = [parameter.numel() for parameter in module.parameters() if parameter.requires_grad]
    found = cb.footprint(module, (256,), batch_size=8, mode="training", optimizer=EightBit)
    assert found.optimizer == 2 * sum(size + 4 * -(-size // 256) for size in sizes)


LAYERS, WIDTH, CONTEXT = 2, 64, 128


def language_model():
    """A small GPT-2."""
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=WORDS, n_embd=WIDTH, n_layer=LAYERS, n_head=4, n_positions=512, bos_token_id=0, eos_token_id=0
        )
    ).eval()


class Generating(nn.Module):
    """Reads a text, and adds three words with a cache of keys and values."""

    def __init__(self):
        super().__init__()
        self.model = language_model()

    def forward(self, words):
        cache = transformers.DynamicCache()
        for _ in range(4):
            output = self.model(words, past_key_values=cache, use_cache=True)
            words = output.logits[:, -1:].argmax(-1)
        return words


def test_words_that_are_generated_with_a_cache_take_what_a_real_run_takes():
    """The cache grows in the forward pass."""
    batches = lambda n: (tokens(n, CONTEXT),)  # noqa: E731
    found = cb.footprint(Generating(), batches, batch_size=24)
    assert found.total == pytest.approx(real_peak(Generating, batches, training=False), rel=0.05)


class Collecting(nn.Module):
    """Begins with an empty tensor on the device of its input, as a cache of Transformers does."""

    def __init__(self):
        super().__init__()
        self.layer, self.shift = nn.Linear(64, 64), torch.zeros(64)

    def forward(self, x):
        kept = torch.tensor([], device=self.layer.weight.device)
        x = x + self.shift + torch.ones(64)
        for _ in range(3):
            kept = torch.cat([kept, self.layer(x).flatten()])
        return kept


def test_a_module_on_the_meta_device_may_make_tensors_of_numbers():
    """A tensor without a name is on the same device; the footprint is that of a module with data."""
    with torch.device("meta"):
        absent, generating = Collecting(), Generating()
        found = cb.footprint(absent, (64,), batch_size=100)
    assert found == cb.footprint(absent, (64,), batch_size=100) == cb.footprint(Collecting(), (64,), batch_size=100)
    assert cb.footprint(generating, lambda n: (tokens(n, 8),), batch_size=4).total > 0


class Recomputed(nn.Module):
    """Two layers whose results the backward pass computes again, with the parameters of the module."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))

    def forward(self, x):
        return checkpoint(self.layers, x, use_reentrant=False)


class Named(nn.Module):
    """Has its device by name, and makes tensors there."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 64)
        self.device = self.layer.weight.device

    def forward(self, x):
        shift = torch.zeros(64, device=self.device) + torch.tensor([1.0], device=str(self.device))
        return self.layer(x.to(self.device)) + shift


@pytest.mark.parametrize(
    ("make", "batches"),
    [
        (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(288, 4)), (3, 8, 8)),
        (lambda: nn.LSTM(32, 64, batch_first=True), (16, 32)),
        (language_model, lambda n: {"input_ids": tokens(n, 8), "labels": tokens(n, 8)}),
        (Recomputed, (64,)),
        (Named, (64,)),
    ],
    ids=["batch norm", "LSTM", "tied transformer", "checkpointed", "named device"],
)
def test_a_module_on_the_meta_device_is_predicted_as_its_twin_on_the_cpu(make, batches):
    """Memory by part, the largest batch and the time on a GPU, in training with autocast."""
    with torch.device("meta"):
        absent = make()
    options = {"mode": "training", "optimizer": "adam", "autocast": "bfloat16"}
    for module in (absent, make()):
        taken = cb.footprint(module, batches, batch_size=24, **options)
        most = cb.max_batch_size(module, memory="40MiB", batches=batches, **options)
        forecast = cb.predict(module, batches, device="t4", batch_sizes=[8], memory_limit="40MiB", **options)
        if module is absent:
            wanted = taken, most, forecast.seconds
    assert (taken, most, forecast.seconds) == wanted


class Continuing(nn.Module):
    """Reads a word after those that a cache has the keys and values of."""

    def __init__(self):
        super().__init__()
        self.model = language_model()

    def forward(self, words, past):
        if isinstance(past, tuple):
            past = transformers.DynamicCache(past)
        return self.model(words, past_key_values=past, use_cache=True).logits


def keys_and_values(n):
    return tuple((torch.rand(n, 4, CONTEXT, WIDTH // 4), torch.rand(n, 4, CONTEXT, WIDTH // 4)) for _ in range(LAYERS))


def static_cache(n):
    """With place for a single word more."""
    cache = transformers.StaticCache(config=language_model().config, max_cache_len=CONTEXT + 1)
    cache.early_initialization(n, 4, WIDTH // 4, torch.float32, torch.device("cpu"))
    for place, (keys, values) in enumerate(keys_and_values(n)):
        cache.update(keys, values, place)
    return cache


CACHES = {
    "dynamic": lambda n: transformers.DynamicCache(keys_and_values(n)),
    "static": static_cache,
    "tuple": keys_and_values,
}


@pytest.mark.parametrize("kind", CACHES)
def test_a_cache_of_keys_and_values_is_an_input(kind):
    """
    Of any class; a step may free what it extends. The largest batch fits, and the next does not.

    The user's example stays as it is.
    """
    batches = lambda n: (tokens(n, 1), CACHES[kind](n))  # noqa: E731
    found = cb.footprint(Continuing(), batches, batch_size=24)
    cached = 24 * 2 * LAYERS * (CONTEXT + (kind == "static")) * WIDTH * 4
    assert found.total == pytest.approx(real_peak(Continuing, batches, training=False, steps=1), rel=0.05)
    if kind == "static":  # each layer counts its tokens in a number of at most 8 bytes
        assert 24 * 8 + cached <= found.inputs <= 24 * 8 + cached + 8 * LAYERS
    else:
        assert found.inputs <= 24 * 8 + cached
    assert found.total > cached
    example = batches(2)
    assert cb.footprint(Continuing(), example, batch_size=24).total == found.total
    largest = cb.max_batch_size(Continuing(), memory="64MiB", batches=batches)
    totals = [cb.footprint(Continuing(), batches, batch_size=n).total for n in (largest, largest + 1)]
    assert totals[0] <= 64 * 2**20 < totals[1]


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_each_step_that_is_timed_finds_the_same_cache(kind):
    """A step extends its own copy; the one of a static cache would be full after a step."""
    lengths = []

    class Counting(Continuing):
        def forward(self, words, past):
            lengths.append(int(past.get_seq_length()))
            return super().forward(words, past)

    found = cb.autotune_module(
        Counting(), lambda n: (tokens(n, 1), CACHES[kind](n)), device="cpu", batch_sizes=[2, 4], budget=10.0
    )
    assert {each.status for each in found.measurements} <= {"ok", "dropped"}
    assert set(lengths) <= {CONTEXT, 1}  # a trace reads no number


LIBRARY = torch.library.Library("cubatch_tests", "DEF")
LIBRARY.define("scaled(Tensor x) -> Tensor")
LIBRARY.impl("scaled", lambda x: x * 2, "CPU")


class Scaling(nn.Module):
    """Calls an operator that has no kernel for tensors without data."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(64, 64)

    def forward(self, x):
        return torch.ops.cubatch_tests.scaled(self.first(x)) + 1


def test_an_operator_without_a_fake_kernel_is_named_and_may_be_opaque():
    """By a function of its arguments, whose temporary tensors count."""
    with pytest.raises(InvalidArgument, match=r"(?s)cubatch_tests::scaled.*register_fake.*opaque="):
        cb.footprint(Scaling(), (64,), batch_size=1000)
    wide, weights = 1000 * 64 * 4, 4 * (64 * 64 + 64)
    found = cb.footprint(Scaling(), (64,), batch_size=1000, opaque={"cubatch_tests::scaled": torch.empty_like})
    assert found.total == weights + 3 * wide
    large = cb.footprint(
        Scaling(), (64,), batch_size=1000, opaque={"cubatch_tests::scaled": lambda x: x.repeat(5, 1)[:1000]}
    )
    assert large.total == weights + 7 * wide


def test_bytes_inside_an_operator_or_submodule_count_while_it_runs():
    """Next to its result; the module runs as it is, and is left alone."""
    module, wide = Nested(), 1000 * 64 * 4
    plain, inside = (
        cb.footprint(module, (16,), batch_size=1000, opaque=opaque) for opaque in (None, {"blocks.1.1": 10 * 2**20})
    )
    assert inside.total == plain.total + 10 * 2**20
    assert inside.by_submodule["blocks.1.1"] == 10 * 2**20 + wide
    assert "forward" not in vars(module.blocks[1][1])
    everywhere = cb.footprint(module, (16,), batch_size=1000, opaque={"aten::sigmoid": 10 * 2**20})
    assert everywhere.total == inside.total


def test_a_submodule_may_be_replaced_by_a_function():
    """One that reads its data cannot be traced."""
    module = nn.Sequential(nn.Linear(8, 8), Reading())
    with pytest.raises(InvalidArgument, match=r"submodule 1 reads data, .*opaque=\{'1': function\}"):
        cb.footprint(module, (8,), batch_size=100)
    found = cb.footprint(module, (8,), batch_size=100, opaque={"1": lambda x: x * 2})
    assert found.total == 4 * (72 + 3 * 800)


class Skipping(Nested):
    """Does not call its second part."""

    def forward(self, x):
        return self.blocks[0](x)


@pytest.mark.parametrize("name", ["aten::linear", "aten::nonsense", "aten::add.Tensor", "blocks.1.1"])
@pytest.mark.parametrize("mode", ["inference", "training"])
def test_a_name_that_the_trace_does_not_call_is_rejected(name, mode):
    """A composed operator, an unknown one, one with its overload, and a submodule that is not called."""
    with pytest.raises(InvalidArgument, match=rf"(?s)opaque.*aten::addmm.*'{name}'.*composed") as caught:
        cb.footprint(Skipping(), (16,), mode=mode, opaque={name: 1, "aten::addmm": 1})
    assert caught.value.field == "opaque"


def test_the_table_joins_layers_that_differ_in_their_number():
    """Twelve layers of one kind are a row, with their number and their sum."""
    module = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(12)))
    found = cb.footprint(module, (32,), batch_size=50, mode="training")
    (line,) = [line.split() for line in found.table().splitlines() if line.startswith("*.1 ")]
    kept = [size for name, size in found.by_submodule.items() if name.endswith(".1")]
    assert line[1] == str(len(kept)) == "12"
    assert " ".join(line[2:]) == format_bytes(sum(kept))


@pytest.mark.parametrize(
    ("name", "limit", "device"),
    [*((name, 32 * 2**20, None) for name in ("U-Net", "adapters", "checkpointed")), ("U-Net", 2**30, "t4")],
)
def test_the_largest_batch_fits_and_the_next_does_not(name, limit, device):
    """By the footprint of both, in training; on a GPU with its context."""
    make, batches = MODULES[name]
    module, options = make(), {"mode": "training", "optimizer": "adam", "device": device}
    largest = cb.max_batch_size(module, memory=limit, batches=batches, **options)
    assert cb.footprint(module, batches, batch_size=largest, **options).total <= limit
    assert cb.footprint(module, batches, batch_size=largest + 1, **options).total > limit
    with pytest.raises(DoesNotFit):
        cb.max_batch_size(module, memory="64KiB", batches=batches, **options)


def test_the_largest_batch_on_a_gpu_takes_four_traces(monkeypatch):
    """Two sizes show how each storage grows, two confirm the answer; the allocator's segments make steps of 20 MiB."""
    traced, walked = [], torch_memory.walked

    def watched(*arguments, **options):
        traced.append(arguments[4])
        return walked(*arguments, **options)

    monkeypatch.setattr(torch_memory, "walked", watched)
    (make, batches), options = MODULES["adapters"], {"mode": "training", "optimizer": "adam", "device": "t4"}
    module = make()
    largest = cb.max_batch_size(module, memory="2GiB", batches=batches, **options)
    assert traced == [2, 16, largest, largest + 1]
    totals = [cb.footprint(module, batches, batch_size=n, **options).total for n in (largest, largest + 1)]
    assert totals[0] <= 2**31 < totals[1]


class RowByRow(nn.Module):
    """Has as many operations as samples."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return torch.stack([row * self.scale for row in x])


class Growing(nn.Module):
    """Begins to take more for each sample at 20 samples."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return torch.cat([x] * (1 + len(x) // 20)) * self.scale


@pytest.mark.parametrize(("make", "features"), [(RowByRow, 2**18), (Growing, 2**14)])
def test_the_largest_batch_is_right_where_operations_depend_on_the_size(make, features):
    """The storages of two small sizes do not give those of a large one, so that more sizes are traced."""
    module = make()
    largest = cb.max_batch_size(module, memory="32MiB", batches=(features,), mode="training")
    totals = [cb.footprint(module, (features,), batch_size=n, mode="training").total for n in (largest, largest + 1)]
    assert totals[0] <= 2**25 < totals[1]


class Falling(nn.Module):
    """Takes less memory from 41 samples on, as a module that then works in parts."""

    def forward(self, x):
        return torch.cat([x] * (4 if len(x) <= 40 else 2)).sum()


def test_the_largest_batch_is_right_where_memory_falls_just_above_the_limit():
    """The line of small sizes meets the limit at 40 samples, and more fit."""
    taken = lambda n: cb.footprint(Falling(), (64,), batch_size=n).total  # noqa: E731
    limit = taken(40)
    largest = cb.max_batch_size(Falling(), memory=limit, batches=(64,))
    assert taken(41) < limit
    assert largest > 41
    assert taken(largest) <= limit < taken(largest + 1)


class Multiples(nn.Module):
    """Takes multiples of a number of samples, from a least number on."""

    def __init__(self, number, least):
        super().__init__()
        self.number, self.least, self.scale = number, least, nn.Parameter(torch.ones(1))

    def forward(self, x):
        if len(x) % self.number or len(x) < self.least:
            raise ValueError(f"{len(x)} samples")
        return x * self.scale


@pytest.mark.parametrize("device", [None, "t4"])
@pytest.mark.parametrize(("number", "least"), [(2, 2), (3, 3), (8, 8), (1, 4)])
def test_the_largest_batch_is_a_multiple_where_a_module_takes_no_other(number, least, device):
    """BLIP#101: traces of 2 samples, and of the sizes around the answer, raised."""
    module, options = Multiples(number, least), {"mode": "training", "device": device}
    largest = cb.max_batch_size(module, memory="1GiB", batches=(2**14,), **options)
    totals = [cb.footprint(module, (2**14,), batch_size=n, **options).total for n in (largest, largest + number)]
    assert totals[0] <= 2**30 < totals[1]
    with pytest.raises(DoesNotFit) as caught:
        cb.max_batch_size(module, memory="64KiB", batches=(2**14,), **options)
    assert caught.value.needed_bytes == cb.footprint(module, (2**14,), batch_size=least, **options).total


def test_a_module_that_takes_no_size_is_refused_with_its_first_error():
    """Of 2 samples, as those of other sizes say the same."""
    with pytest.raises(cb.InvalidArgument, match="ValueError: 2 samples"):
        cb.max_batch_size(Multiples(1, 10**6), memory="1GiB", batches=(8,))


def test_on_a_gpu_the_parts_are_those_of_the_tensors_and_of_its_allocator():
    """Of two layers in inference: weights of 4 KiB and 4 B times 10 share segments of 2 MiB; cuBLAS has 20 MiB."""
    plain = cb.footprint(nn.Linear(64, 32), (64,), batch_size=10)
    t4, h100 = (cb.footprint(nn.Linear(64, 32), (64,), batch_size=10, device=name) for name in ("t4", "h100-sxm"))
    parts = ("weights", "inputs", "gradients", "optimizer", "activations")
    for found in (t4, h100):
        assert [getattr(found, part) for part in parts] == [getattr(plain, part) for part in parts]
        assert found.total == plain.total + found.workspace + found.allocator + found.overhead
    assert (t4.workspace, h100.workspace) == (8_519_680, 32 * 2**20)
    assert t4.allocator == 2 * 2**20 + 20 * 2**20 - t4.workspace - plain.total
    assert h100.allocator == 2 * 2**20 - plain.total
    assert t4.overhead == context_overhead.overhead_bytes(cb.device("t4"))
    assert "published" in t4.overhead_source
    assert (plain.workspace, plain.allocator, plain.overhead, plain.overhead_source) == (0, 0, 0, "")
    assert "allocator" in t4.table()


def test_the_environment_and_the_memory_of_a_gpu_decide_what_its_allocator_reserves(monkeypatch):
    """Expandable segments need less; a card of 16 GB makes free segments go back, and one of 80 GB does not."""
    grow = nn.Sequential(*(nn.Linear(2**n, 2 ** (n + 1), bias=False) for n in range(6, 12)))
    options = {"batch_size": 150_000, "mode": "training"}
    (small, large), (expandable,) = (
        [cb.footprint(grow, (64,), device=name, **options) for name in names]
        for names, settings in ((("t4", "a100-sxm4-80gb"), ""), (("a100-sxm4-80gb",), "expandable_segments:True"))
        if monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", settings) is None
    )
    assert expandable.allocator < large.allocator
    assert (expandable.expandable_segments, large.expandable_segments) == (True, False)
    assert "with expandable segments" in expandable.table()
    assert "with default segments" in large.table()
    assert small.total < large.total
    assert small.total <= cb.device("t4").memory_bytes < large.total


def test_an_optimizer_on_a_gpu_steps_all_parameters_at_once():
    """
    As Adam does there by default; two real steps with `foreach=True` are the reference, from the first allocation on.

    One sample of wide layers peaks in the optimizer's step, which has a root for each parameter.
    """
    build = lambda: nn.Sequential(*(nn.Linear(256, 256) for _ in range(6)))  # noqa: E731
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        module, x = build(), torch.rand(1, 256)
        optimizer = torch.optim.Adam(module.parameters(), lr=0.0, foreach=True)
        for _ in range(2):
            optimizer.zero_grad()
            module(x).square().mean().backward()
            optimizer.step()
    options = {"batch_size": 1, "mode": "training", "optimizer": "adam"}
    found = cb.footprint(build(), (256,), device="t4", **options)
    tensors = found.total - found.workspace - found.allocator - found.overhead
    assert tensors == pytest.approx(most_allocated(profiler), rel=0.02)
    assert tensors > 1.15 * cb.footprint(build(), (256,), **options).total


NAMED = """
import torch

def build(): return torch.nn.Linear(64, 32)
def batches(n): return (torch.zeros(n, 64),)
def adam(parameters): return torch.optim.Adam(parameters, lr=0.0)
"""


@pytest.fixture
def named(tmp_path, monkeypatch):
    """A folder with a module of Python that builds a layer and its batches."""
    (tmp_path / "my_net.py").write_text(NAMED)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("my_net", None)


def test_the_command_gives_the_footprint_and_the_largest_batch(named, monkeypatch, capfd):
    """Those of the library, in both modes; the exit code is 1 where the batch does not fit. Traces are progress."""
    run = in_process(monkeypatch, capfd)
    monkeypatch.setattr(console, "LINE_SECONDS", 0.0)
    asked = ["memory", "my_net:build", "--library", "torch", "--batches", "my_net:batches", "--device", "cpu"]
    asked += ["--optimizer", "my_net:adam", "--accumulate", "2", "--limit", "1MiB"]
    code, text, err = run(*asked, "--batch-size", "10", "--json", "-")
    sizes = re.findall(r"cubatch: \d+ s, tracing a step of ([\d ]+) samples for ", err)
    assert code == 0
    assert len(sizes) == len(err.splitlines()) == 2 * 5
    assert sizes[:3] == sizes[5:8] == ["10", "2", "16"]
    found = json.loads(text)
    assert (found["memory"], list(found["modes"])) == (2**20, ["inference", "training"])
    layer = nn.Linear(64, 32)
    for mode, facts in found["modes"].items():
        options = adam(mode) | ({"accumulate": 2} if mode == "training" else {})
        assert facts["footprint"] == cb.footprint(layer, (64,), batch_size=10, **options).to_mapping()
        assert facts["max_batch_size"] == cb.max_batch_size(layer, memory="1MiB", batches=(64,), **options)
        assert (facts["fits"], facts["rules_of_thumb"]) == (True, [])
    code, text, _ = run(*asked, "--batch-size", "10")
    assert "by the trace: " in " ".join(text.split())
    code, text, err = run(*asked, "--batch-size", "100000", "--mode", "training")
    assert (code, "100 000 does not fit" in text) == (1, True)


def test_the_command_compares_devices_for_a_module(named, monkeypatch, capfd):
    """Each has the limit of its own memory; autocast is the type of --dtype."""
    run = in_process(monkeypatch, capfd)
    asked = ["memory", "my_net:build", "--library", "torch", "--batches", "my_net:batches", "--dtype", "bfloat16"]
    code, text, _ = run(*asked, "--device", "t4,v100-sxm2-32gb", "--mode", "inference", "--json", "-")
    t4, v100 = json.loads(text)["devices"]
    assert (code, t4["device"], v100["device"]) == (0, "t4", "v100-sxm2-32gb")
    assert t4["modes"]["inference"]["max_batch_size"] < v100["modes"]["inference"]["max_batch_size"]
    options = {"batch_size": 1, "autocast": "bfloat16"}
    assert (
        t4["modes"]["inference"]["footprint"]
        == cb.footprint(nn.Linear(64, 32), (64,), device="t4", **options).to_mapping()
    )
    assert t4["memory"] == cb.device("t4").memory_bytes
    assert "simulated with default segments" in run(*asked, "--device", "t4,l4", "--mode", "inference")[1]


@pytest.mark.parametrize(
    ("arguments", "options", "field"),
    [
        ((nn.Linear(8, 2),), {}, "batches"),
        ((nn.Linear(8, 2), (8,)), {"dtype": "float16"}, "dtype"),
        ((nn.Linear(8, 2), (8,)), {"recompute": True}, "recompute"),
        ((nn.Linear(8, 2), (8,)), {"batch_size": 0}, "batch_size"),
        ((nn.Linear(8, 2), (8,)), {"mode": "evaluation"}, "mode"),
        (("mlp",), {"loss": len}, "loss"),
        (("mlp",), {"accumulate": 2}, "accumulate"),
        (("mlp",), {"optimizer": "adam"}, "optimizer"),
        ((nn.Linear(8, 2), (8,)), {"optimizer": "adam"}, "optimizer"),
        ((Reading(), (8,)), {}, "module"),
        *(
            ((Scaling(), (64,)), {"opaque": each}, "opaque")
            for each in ({"nowhere": 1}, {"first": -1}, {"first": True}, [1])
        ),
    ],
)
def test_what_does_not_apply_is_rejected(arguments, options, field):
    """With the name of the argument."""
    with pytest.raises(InvalidArgument) as caught:
        cb.footprint(*arguments, **options)
    assert caught.value.field == field
