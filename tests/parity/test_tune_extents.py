"""autotune_extents(): batch sizes at several sequence lengths, of a PyTorch module and of an ONNX file."""

from __future__ import annotations

import functools
import json
import warnings

import pytest

torch = pytest.importorskip("torch")

import cubatch as cb  # noqa: E402
from cubatch.frameworks.torch_inputs import are_alike  # noqa: E402
from tests.unit.commands import in_process  # noqa: E402


class Decoder(torch.nn.Module):
    """A small decoder of texts."""

    def __init__(self):
        super().__init__()
        self.words = torch.nn.Embedding(100, 32)
        self.layer = torch.nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)

    def forward(self, tokens):
        """Return an encoding of each token."""
        return self.layer(self.words(tokens))


def batches(n, sequence=16):
    """Return texts of a length."""
    return torch.randint(0, 100, (n, sequence))


def test_each_length_has_a_result_of_its_own():
    """Each step has the tokens of its length; 8 samples take too little memory to tell how many fit."""
    options = {"max_batch_size": 8, "memory_limit": "2GiB", "budget": 3.0}
    result = cb.autotune_extents(Decoder().eval(), {"sequence": (64, 16)}, batches=batches, **options)
    assert list(result.results) == [16, 64]
    assert result.failed == {}
    for length, tuned in result.results.items():
        assert {n for n, m in tuned.sizes.items() if m.is_measured} <= set(range(1, 9))
        assert tuned.largest_measured
        assert tuned.batch_size is None or result.tokens_per_second[length] == length * tuned.samples_per_second
        assert tuned.largest_batch_size is None


def test_an_onnx_file_is_tuned_by_its_named_axis(tmp_path, monkeypatch, capfd):
    """The extent goes to the axis of that name, also by the command."""
    pytest.importorskip("onnxruntime")
    of_words = torch.nn.Sequential(torch.nn.Embedding(100, 32), torch.nn.Linear(32, 32)).eval()
    path, axes = tmp_path / "model.onnx", {0: "batch", 1: "sequence"}
    with warnings.catch_warnings(action="ignore"):
        torch.onnx.export(
            of_words, (batches(2),), str(path), input_names=["tokens"], dynamic_axes={"tokens": axes},
            dynamo=False,
        )  # fmt: skip
    options = {"device": "cpu", "max_batch_size": 4, "budget": 3.0, "store": False}
    result = cb.autotune_extents(str(path), {"sequence": (8, 32)}, **options)
    assert list(result.results) == [8, 32]
    taken = [tuned.sizes[tuned.largest_measured].predicted_peak_bytes for tuned in result.results.values()]
    assert taken[1] > taken[0]
    command = in_process(monkeypatch, capfd, "tune", str(path), "--device", "cpu", "--no-store", "--budget", "3")
    code, out, _ = command("--dim", "sequence=8", "--dim", "sequence=32", "--max-batch-size", "4", "--json", "-")
    assert (code, list(json.loads(out)["results"])) == (0, ["8", "32"])
    for wrong in (["--report", "page.html"], ["--threads", "1"], ["--dim", "tokens=1,2"]):
        code, _, err = command("--dim", "sequence=8,32", *wrong)
        assert code == 2
        assert wrong[0] in err
        assert '{"' not in err  # as in Python
    code, _, err = command("--dim", "sequence=8,")
    assert code == 2
    assert "sequence=8," in err


@pytest.mark.parametrize(
    ("extents", "given", "field"),
    [
        ({}, batches, "extents"),
        ({"sequence": ()}, batches, "extents"),
        ({"sequence": (0,)}, batches, "extents['sequence']"),
        ({"sequence": (8,), "width": (8,)}, batches, "extents"),
        ({"sequence": (8,)}, torch.zeros(2, 8), "batches"),
    ],
)
def test_an_argument_out_of_range_is_named(extents, given, field):
    """The error names the argument before anything is tuned."""
    with pytest.raises(cb.InvalidArgument) as refused:
        cb.autotune_extents(Decoder(), extents, batches=given, budget=1.0)
    assert refused.value.field == field


def test_inputs_that_do_not_depend_on_the_axis_are_refused():
    """Rates at 8 and 16 tokens would be those of one input; a scalar, a number, lengths or a mask may be the extent."""
    with pytest.raises(cb.InvalidArgument, match="inputs that are the same at sequence=8 and sequence=16"):
        cb.autotune_extents(Decoder(), {"sequence": (8, 16)}, batches=lambda n, sequence: batches(n), budget=1.0)
    for make in (
        lambda n, steps: {"x": batches(n), "steps": steps},
        lambda n, steps: (batches(n), torch.tensor(steps)),
        lambda n, steps: (torch.randn(n, 16, 2), torch.full((n,), steps)),
        lambda n, steps: (torch.randn(n, 16, 2), torch.arange(16).expand(n, 16) < steps),
    ):
        assert are_alike([functools.partial(make, steps=8)] * 2, 4)
        assert not are_alike([functools.partial(make, steps=8), functools.partial(make, steps=16)], 4)


def test_a_function_without_the_axis_is_the_error_of_the_user():
    """A function that does not take the extent raises nothing but an error of cubatch."""
    with pytest.raises(cb.CubatchError, match="sequence"):
        cb.autotune_extents(Decoder(), {"sequence": (8,)}, batches=lambda n: torch.zeros(n, 8), budget=1.0)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"dims": {"sequence": 8}}, "dims"), ({"dims": [("target", 8)]}, "dims"), ({"dims": 3}, "dims"),
        ({"library": "torch"}, "library"),
    ],
)  # fmt: skip
def test_options_of_a_file_that_contradict_its_extents_are_refused(tmp_path, options, field):
    """Neither a second extent of the axis nor another library is replaced silently."""
    pytest.importorskip("onnxruntime")
    path = tmp_path / "model.onnx"
    path.write_bytes(b"")
    with pytest.raises(cb.InvalidArgument) as refused:
        cb.autotune_extents(str(path), {"sequence": (8, 32)}, device="cpu", store=False, budget=1.0, **options)
    assert refused.value.field == field
