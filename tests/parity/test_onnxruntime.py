"""`library="onnxruntime"`: ONNX Runtime's own steps of files that PyTorch wrote."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import warnings
import weakref

import numpy as np
import pytest

import cubatch as cb
from tests.unit.commands import in_process

torch = pytest.importorskip("torch")
onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")

from cubatch.errors import InvalidArgument, InvalidSpec  # noqa: E402
from cubatch.frameworks import heap, onnxruntime_runner  # noqa: E402
from cubatch.frameworks.onnx_graph import OnnxGraph  # noqa: E402
from cubatch.tuning import store as results  # noqa: E402
from tests.parity.onnx_files import SHAPE, Flattened, OfWords, Small, export, written  # noqa: E402

ASKED = {"device": "cpu", "library": "onnxruntime", "batch_sizes": [2, 4], "budget": 20.0}
UNIT = 2.0**-24  # of float32


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The files, by name; each is exported once."""
    folder = tmp_path_factory.mktemp("onnx")
    torch.manual_seed(0)
    small, ids = Small(), torch.arange(8).reshape(2, 4)
    two = torch.randn(2, *SHAPE)
    return {
        "module": small,
        "open": export(small, folder / "open.onnx", two),
        "fixed": export(small, folder / "fixed.onnx", two, is_open=False),
        "flat": export(Flattened(), folder / "flat.onnx", two, is_open=False),
        "words": export(OfWords(), folder / "words.onnx", ids),
    }


def runner_of(path, limit=2**30):
    return onnxruntime_runner.runner(path=str(path), device="cpu", threads=1, memory_limit=limit, seed=0)


def statuses(result):
    return {m.batch_size: m.status for m in result.measurements}


@pytest.mark.parametrize("name", ["open", "fixed"])
@pytest.mark.parametrize("batch_size", [1, 7])
def test_results_are_those_of_pytorch(files, name, batch_size):
    """
    Also of a file that was exported with a batch of two; the reference is PyTorch in float64.

    A sum of k rounded products is off by at most k u of the sum of their magnitudes (Higham, 3.1), u(1 + k u) ~ u; the
    sums of a path follow each other, so that their k add up: 28 of the convolution, 197 of the mean, 65 of the head.
    The magnitudes are what the network makes of those of its weights and inputs.
    """
    x = np.random.default_rng(3).standard_normal((batch_size, *SHAPE), dtype=np.float32)
    graph = onnx.load(str(files[name])).graph
    (y,) = runner_of(files[name]).results({graph.input[0].name: x})
    exact, sizes = Small().double(), Small().double()
    state = {key: value.double() for key, value in files["module"].state_dict().items()}
    exact.load_state_dict(state)
    sizes.load_state_dict({key: value.abs() for key, value in state.items()})
    with torch.no_grad():
        expected, bound = exact(torch.from_numpy(x).double()), sizes(torch.from_numpy(x).double().abs())
    assert y.shape == (batch_size, 5)
    assert (np.abs(y - expected.numpy()) <= 1.01 * (28 + 197 + 65) * UNIT * bound.numpy()).all()


@pytest.mark.parametrize("name", ["open", "fixed", "words"])
def test_a_file_is_tuned_whatever_batch_it_was_exported_with(files, name):
    """The answer is one of the sizes, and table and JSON say what ran it."""
    result = cb.autotune(files[name], store=False, **ASKED)
    assert result.batch_size in {2, 4}
    assert set(statuses(result).values()) <= {"ok", "dropped"}
    told = json.loads(result.to_json())
    assert (told["library"], told["spec"]["name"], told["dtype"]) == ("onnxruntime", f"{name}.onnx", result.dtype)
    assert (told["mode"], told["environment"]["provider"]) == ("inference", "CPUExecutionProvider")
    assert "library onnxruntime" in result.table()
    assert all(m.first_seconds > 0 for m in result.measurements if m.is_measured)
    assert cb.TuningResult.from_json(result.to_json()) == result


def test_token_ids_stay_within_their_table(files):
    """50 rows: every id that is drawn is one of them, and they are not all 0 and 1."""
    runner = runner_of(files["words"])
    (ids,) = runner._drawn(100).values()
    assert (ids.dtype, ids.shape) == (np.int64, (100, 4))
    assert ids.min() >= 0
    assert 40 < ids.max() < 50


def test_timings_are_kept_and_a_changed_file_is_measured_anew(files, tmp_path, monkeypatch, malloc_is_not_chosen):
    """A rerun starts no worker; other weights under the same name are refused by the field."""
    path, place = tmp_path / "model.onnx", tmp_path / "store.sqlite3"
    export(Small(), path, torch.randn(2, *SHAPE))
    first = cb.autotune(path, store=place, **ASKED)
    (kept,) = results.list_runs(place)
    raised = heap.format_variables(heap.RAISED)
    assert kept.conditions["malloc"] == (raised if heap.is_movable() else None)
    assert any(raised in reason for reason in first.reasons) == heap.is_movable()
    with monkeypatch.context() as still:
        still.setattr("cubatch.tuning.subjects.bounded_subject.RemoteBoundedRunner", None)
        again = cb.autotune(path, store=place, **ASKED)
    assert [m.timings_seconds for m in again.measurements] == [m.timings_seconds for m in first.measurements]
    assert any("Answered from the store" in reason for reason in again.reasons)
    graph = path.read_bytes()
    export(Small(), path, torch.randn(2, *SHAPE))
    path.write_bytes(graph)  # what lies beside it is new
    anew = cb.autotune(path, store=place, **ASKED)
    assert any("file_sha256 of model.onnx.data was" in reason for reason in anew.reasons)
    assert not any("Answered from the store" in reason for reason in anew.reasons)


def test_a_reshape_that_fixes_the_batch_is_named(files):
    """PyTorch writes a flattening so, where the batch was not open; the remedy is to export it anew."""
    with pytest.raises(InvalidSpec, match=r"Reshape 'node_view' of shape \[2, 12544\].*dynamic_shapes.*dynamic_axes"):
        cb.autotune(files["flat"], store=False, **ASKED)


def test_samples_that_a_reshape_would_mix_are_not_run(tmp_path):
    """A softmax over the whole batch: its results grow with the batch all the same, and are none of the file's."""
    make = onnx.helper.make_node
    nodes = [
        make("Reshape", ["x", "one"], ["row"], name="to_row"), make("Softmax", ["row"], ["shares"]),
        make("Reshape", ["shares", "rows"], ["y"], name="to_rows"),
    ]  # fmt: skip
    path = written(tmp_path / "mixes.onnx", nodes, {"x": ("FLOAT", [1, 4])}, one=[1, -1], rows=[-1, 4])
    with pytest.raises(InvalidSpec, match=r"Reshape 'to_row' of shape \[1, -1\]"):
        cb.autotune(path, store=False, **ASKED)


def opened(path, target):
    """Copy a file with a batch that only seems to be open."""
    model = onnx.load(str(path))
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "n"
    del model.graph.value_info[:]
    model.graph.output[0].type.tensor_type.ClearField("shape")
    onnx.save(model, str(target))
    return target


def test_a_batch_that_only_seems_to_be_open_is_found_by_running(files, tmp_path):
    """A size that fails, or results that do not grow, are no measurements."""
    with pytest.raises(InvalidSpec, match="batch fixed inside, by Reshape 'node_view'"):
        cb.autotune(opened(files["flat"], tmp_path / "seems.onnx"), store=False, **ASKED)


def test_a_size_above_the_limit_is_not_tried(files):
    """3000 samples of 64 x 14 x 14 floats are 144 MiB, twice with what is activated: more than 128 MiB."""
    result = cb.autotune(files["open"], store=False, memory_limit="128MiB", **ASKED | {"batch_sizes": [2, 3000]})
    assert statuses(result) == {2: "ok", 3000: "over_limit"}
    assert result.largest_batch_size < 3000


OUT_OF_MEMORY = """
import resource, sys
from cubatch.errors import OutOfMemory
from cubatch.frameworks import onnxruntime_runner
runner = onnxruntime_runner.runner(
    path=sys.argv[1], device="cpu", threads=1, memory_limit=2**40, seed=0
)
runner.results(runner._drawn(1))
resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))
try:
    runner.results(runner._drawn(int(sys.argv[2])))
except OutOfMemory as error:
    print(error)
"""


def test_what_its_arena_cannot_have_is_out_of_memory(files):
    """Of 1 GiB: 30000 samples of 64 x 14 x 14 floats are 1.4 GiB, their input is 88 MiB; two samples are no matter."""
    said = {
        n: subprocess.run(
            [sys.executable, "-c", OUT_OF_MEMORY, str(files["open"]), str(n)],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for n in (2, 30000)
    }
    assert said == {2: "", 30000: "out of memory: a step of open.onnx in ONNX Runtime\n"}


def test_what_a_step_reads_is_there_as_long_as_the_step(files, monkeypatch):
    """A binding of an older release keeps nothing of what is bound to it: freed, a step reads whatever lies there."""
    made = []

    def bound(self, name, value):
        made.append(weakref.ref(value))
        self._iobinding.bind_ortvalue_input(name, value._ortvalue)

    monkeypatch.setattr(onnxruntime.IOBinding, "bind_ortvalue_input", bound)
    runner = runner_of(files["open"])
    runner.draw(3)
    gc.collect()
    assert made
    assert made[-1]() is not None
    runner.close()
    gc.collect()
    assert made[-1]() is None


def test_tensors_of_unknown_shape_are_not_taken_for_nothing(tmp_path):
    """Of ONNX Runtime's own operators onnx infers none: measured steps bound the memory, and the tensor is named."""
    make = onnx.helper.make_node
    nodes = [
        make("Relu", ["x"], ["y"]), make("Gelu", ["y"], ["z"], domain="com.microsoft"), make("Relu", ["z"], ["out"]),
    ]  # fmt: skip
    path = written(tmp_path / "gelu.onnx", nodes, {"x": ("FLOAT", ["batch", 64])}, "out")
    result = cb.autotune(str(path), device="cpu", library="onnxruntime", budget=2.0, memory_limit="1GiB", store=False)
    bytes_per_sample = 3 * 64 * 4  # the arena of ONNX Runtime grows by powers of two
    assert result.largest_batch_size is None or 1 / 8 < result.largest_batch_size * bytes_per_sample / 2**30 < 1
    assert any("onnx infers no shape of z, an output of Gelu" in reason for reason in result.reasons)
    few = cb.autotune(str(path), store=False, **ASKED)
    assert set(statuses(few).values()) <= {"ok", "dropped", "not_run"}
    assert few.largest_batch_size is None  # 4 samples of 768 bytes tell nothing of a million


def test_a_tensor_without_elements_takes_nothing(tmp_path):
    """Resize's roi, as PyTorch wrote it at opset 11: two inputs of 3 x 8 x 8 floats, results of four times that."""
    roi = onnx.helper.make_tensor("", onnx.TensorProto.FLOAT, [0], [])
    nodes = [
        onnx.helper.make_node("Constant", [], ["roi"], value=roi),
        onnx.helper.make_node("Resize", ["x", "roi", "scales"], ["y"]),
    ]
    scales = np.float32([1, 1, 2, 2])
    path = written(tmp_path / "r.onnx", nodes, {"x": ("FLOAT", ["batch", 3, 8, 8])}, opset=11, scales=scales)
    assert OnnxGraph(path).peaks().at(2) == 4 * (4 + 2 * 5 * 3 * 8 * 8)


def test_memory_that_was_taken_is_learned_from(files):
    """What 960 samples more take is at least the output of the convolution, 64 x 14 x 14 floats each: 46 MiB."""
    runner = runner_of(files["open"])
    taken = {}
    for n in (64, 1024):
        runner.prepare(n)
        taken[n] = runner.peak_bytes
    runner.close()
    if None in taken.values():
        pytest.skip("this kernel does not let the peak be reset")
    assert taken[1024] - taken[64] >= 960 * 64 * 14 * 14 * 4
    assert [row["batch_size"] for row in runner.history][-1] == 1024
    assert runner.predicted(1024) >= runner.predicted(64) + 900 * 64 * 14 * 14 * 4


def test_dims_give_the_extent_of_another_open_axis(files, tmp_path):
    """The error says so; the memory of the step is that of the extent."""
    model, path = onnx.load(str(files["open"])), tmp_path / "open.onnx"
    model.graph.input[0].type.tensor_type.shape.dim[2].dim_param = "height"
    onnx.save(model, str(path))
    with pytest.raises(InvalidSpec, match="--dim height=N") as refused:
        cb.autotune(path, store=False, **ASKED)
    assert "extent of axis batch" not in str(refused.value)  # which `dims` refuse
    result = cb.autotune(path, store=False, dims={"height": 16}, **ASKED)
    assert all(measured.timings_seconds for measured in result.measurements)
    at = {height: OnnxGraph(path, {"height": height}).peaks().at(64) for height in (16, 32)}
    assert at[16] == OnnxGraph(files["open"]).peaks().at(64)
    assert 1.9 < at[32] / at[16] < 2.3
    batch = model.graph.input[0].type.tensor_type.shape.dim[0].dim_param
    for wrong in ({"width": 16}, {"height": 0}, {"height": "16"}, {"height": 16, batch: 8}, 3):
        with pytest.raises(InvalidArgument, match="dims"):
            cb.autotune(path, store=False, dims=wrong, **ASKED)
    with pytest.raises(InvalidArgument, match="dims"):
        cb.autotune("mlp", store=False, dims={"height": 16}, device="cpu", batch_sizes=[2])


def repeated(path):
    """A row for each sample, as exporters of PyTorch write `expand`: onnx does not compute the result of Where."""
    make = onnx.helper.make_node
    nodes = [
        make("Shape", ["x"], ["shape"]),
        make("Equal", ["shape", "minus"], ["is_open"]),
        make("Where", ["is_open", "one", "shape"], ["target"]),
        make("Expand", ["row", "target"], ["rows"]),
        make("Add", ["x", "rows"], ["y"]),
    ]
    weights = {"row": np.ones((1, 8), "float32"), "minus": np.full(2, -1), "one": np.ones(2, "int64")}
    return written(path, nodes, {"x": ("FLOAT", ["batch", 8])}, "y", **weights)


def test_tensors_whose_shape_is_computed_are_planned(tmp_path):
    """Input, rows and output of 64 samples of 8 floats, and 64 bytes of weights."""
    assert OnnxGraph(repeated(tmp_path / "rows.onnx")).peaks().at(64) == 3 * 64 * 8 * 4 + 64


class Attending(torch.nn.Module):
    """Words with positions and a causal mask, which the code makes of the length."""

    def __init__(self):
        super().__init__()
        self.words, self.places = torch.nn.Embedding(50, 8), torch.nn.Embedding(100, 8)

    def forward(self, ids):
        """Return a vector for each word."""
        places = torch.arange(ids.shape[1])
        x = self.words(ids) + self.places(places)
        mask = (places[:, None] >= places[None, :]).expand(ids.shape[0], 1, -1, -1)
        heads = x.unflatten(2, (2, 4)).transpose(1, 2)
        return torch.nn.functional.scaled_dot_product_attention(heads, heads, heads, attn_mask=mask).flatten(2)


def test_shapes_of_a_file_of_the_dynamo_exporter_are_those_of_its_run(tmp_path):
    """All tensors have the shape that ONNX Runtime gives them at a batch and a length of which it was not exported."""
    path, axes = tmp_path / "attending.onnx", {0: torch.export.Dim("batch"), 1: torch.export.Dim("sequence")}
    with warnings.catch_warnings(action="ignore"):
        torch.onnx.export(
            Attending().eval(), (torch.arange(8).reshape(2, 4),), str(path), dynamic_shapes=(axes,), verbose=False
        )
    graph, model = OnnxGraph(path, {"sequence": 7}), onnx.load(str(path))
    planned = {name: shape for name, (shape, _) in graph._inferred(3).items()}
    named = {name for node in model.graph.node for name in node.output} - {each.name for each in model.graph.output}
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in named)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    (value,) = session.get_inputs()
    names = [each.name for each in session.get_outputs()]
    computed = dict(zip(names, session.run(names, {value.name: np.ones((3, 7), "int64")}), strict=True))
    assert {name: each.shape for name, each in computed.items()} == {name: planned[name] for name in names}
    assert len(names) > 10


RECURRENT = {"w": np.ones((1, 16, 8), "float32"), "r": np.ones((1, 16, 4), "float32")}


def recurrent(path, shape, *more, **others):
    node = onnx.helper.make_node("LSTM", ["x", *RECURRENT, *more], ["y"], hidden_size=4)
    return written(path, [node], {"x": ("FLOAT", shape), **others}, "y", **RECURRENT)


@pytest.mark.parametrize("others", [{}, {"steps": 5}])
def test_a_batch_that_is_not_axis_0_is_found_by_its_name(tmp_path, others):
    """Recurrent networks take time first; the time may be open too."""
    path = recurrent(tmp_path / "rnn.onnx", [next(iter(others), 5), "batch_size", 8])
    (value,) = OnnxGraph(path, others).inputs
    assert value.extents(3) == (5, 3, 8)
    result = cb.autotune(path, store=False, dims=others, **ASKED)
    assert all(measured.timings_seconds for measured in result.measurements)
    # Inputs and outputs only: 5 steps of 8 and 4 floats per sample, and the weights.
    assert OnnxGraph(path, others).peaks().at(64) == 4 * (16 * 8 + 16 * 4) + 4 * 5 * 64 * (8 + 4)


def test_a_batch_that_a_recurrent_layer_reads_as_time_is_refused(tmp_path):
    """The first axis of an LSTM is time, by ONNX's definition; given its extent, the batch is the other open one."""
    with pytest.raises(InvalidSpec, match="reads as time"):
        OnnxGraph(recurrent(tmp_path / "fixed.onnx", [5, 1, 8]))
    path = recurrent(tmp_path / "open.onnx", ["T", "N", 8])
    with pytest.raises(InvalidSpec, match=r"reads as time.*--dim T=N"):
        OnnxGraph(path, {"N": 2})
    assert OnnxGraph(path, {"T": 5}).inputs[0].extents(3) == (5, 3, 8)


def sliced(path):
    nodes = [("ReduceMax", ["n"], "most"), ("Slice", ["x", "zero", "most"], "y")]
    nodes = [onnx.helper.make_node(kind, read, [made]) for kind, read, made in nodes]
    return written(path, nodes, {"x": ("FLOAT", ["batch", 8]), "n": ("INT64", ["batch"])}, "y", zero=np.array([0, 0]))


def looped(path):
    make, types = onnx.helper, onnx.TensorProto
    kinds = {"i": types.INT64, "more": types.BOOL, "v": types.FLOAT, "on": types.BOOL, "w": types.FLOAT}
    values = [make.make_tensor_value_info(name, kind, None) for name, kind in kinds.items()]
    nodes = [make.make_node("Tanh", ["v"], ["w"]), make.make_node("Identity", ["more"], ["on"])]
    body = make.make_graph(nodes, "body", values[:3], values[3:])
    return written(
        path, [make.make_node("Loop", ["n", "", "x"], ["y"], body=body)],
        {"x": ("FLOAT", ["batch", 8]), "n": ("INT64", [])}, "y",
    )  # fmt: skip


def lengths(path):
    return recurrent(path, [5, "batch", 8], "", "n", n=("INT32", ["batch"]))


@pytest.mark.parametrize("write", [lengths, sliced, looped])
def test_integers_that_decide_how_much_is_computed_must_be_given(tmp_path, write):
    """Drawn from 0 and 1, they would make a sequence of 50 steps one of at most one."""
    path = write(tmp_path / "made.onnx")
    with pytest.raises(InvalidSpec, match="--dim n=N"):
        OnnxGraph(path)
    given = OnnxGraph(path, {"n": 4}).inputs[1]
    assert np.all(onnxruntime_runner.drawn(given, 3, np.random.default_rng(0)) == 4)


def test_integers_that_are_only_computed_with_are_drawn(tmp_path):
    """A mask of zeros and ones changes no extent, nor do shapes that are read of it."""
    nodes = [("Cast", ["n"], "m"), ("Mul", ["x", "m"], "y"), ("Shape", ["n"], "s"), ("Expand", ["y", "s"], "z")]
    nodes = [
        onnx.helper.make_node(kind, read, [made], **({"to": 1} if kind == "Cast" else {})) for kind, read, made in nodes
    ]
    shape = ["batch", 8]
    path = written(tmp_path / "mask.onnx", nodes, {"x": ("FLOAT", shape), "n": ("INT64", shape)}, "z")
    assert [each.value for each in OnnxGraph(path).inputs] == [None, None]


def test_the_output_that_grows_may_be_any(tmp_path):
    """Detectors give their anchors first, which are the same for every batch."""
    nodes = [onnx.helper.make_node("Identity", ["a"], ["first"]), onnx.helper.make_node("Relu", ["x"], ["second"])]
    path = written(
        tmp_path / "two.onnx", nodes, {"x": ("FLOAT", ["batch", 8])}, "first second", a=np.ones(3, "float32")
    )
    runner = runner_of(path)
    assert runner.look(seconds=1.0, top=4, trace_seconds=1.0)
    runner.close()


def test_a_file_that_cannot_be_loaded_is_not_blamed_for_its_batch(files, tmp_path):
    """ONNX Runtime reads the versions of the format that it knows, and its message names them."""
    model = onnx.load(str(files["open"]))
    model.ir_version = 99
    onnx.save(model, str(tmp_path / "new.onnx"))
    with pytest.raises(InvalidSpec, match=r"can load \(.*99") as caught:
        cb.autotune(tmp_path / "new.onnx", store=False, **ASKED)
    assert "batch" not in str(caught.value)


def test_an_open_axis_without_a_name_is_fixed_by_the_whole_shape(files, tmp_path):
    """ONNX Runtime's tool takes no number of an axis: it fixes a file so, which is tuned then."""
    model = onnx.load(str(files["open"]))
    (value,) = model.graph.input
    value.type.tensor_type.shape.dim[2].Clear()
    onnx.save(model, str(tmp_path / "open.onnx"))
    with pytest.raises(InvalidSpec) as caught:
        cb.autotune(tmp_path / "open.onnx", store=False, **ASKED)
    told = f"make_dynamic_shape_fixed --input_name {value.name} --input_shape 1,3,N,16 open.onnx fixed.onnx"
    assert told in str(caught.value)
    command = told.replace("N", "16").replace("open.onnx", str(tmp_path / "open.onnx"))
    command = command.replace("fixed.onnx", str(tmp_path / "fixed.onnx")).split()
    subprocess.run([sys.executable, "-m", f"onnxruntime.tools.{command[0]}", *command[1:]], check=True)
    assert OnnxGraph(tmp_path / "fixed.onnx").inputs[0].shape == SHAPE


def test_an_input_whose_first_axis_has_another_name_holds_no_batch(tmp_path):
    """It is an open axis like any other; under the batch's own name it is the batch."""
    nodes = [onnx.helper.make_node("Add", ["x", "z"], ["y"])]
    same, other = (
        written(tmp_path / f"{name}.onnx", nodes, {"x": ("FLOAT", ["batch", 4]), "z": ("FLOAT", [name, 4])})
        for name in ("batch", "rows")
    )
    assert [each.batch_axis for each in OnnxGraph(same).inputs] == [0, 0]
    with pytest.raises(InvalidSpec, match="--dim rows=N"):
        OnnxGraph(other)


def test_what_is_no_file_of_onnx_is_refused(tmp_path):
    """By its name."""
    (tmp_path / "no.onnx").write_bytes(b"no")
    with pytest.raises(InvalidSpec, match="a file that onnx can read"):
        cb.autotune(tmp_path / "no.onnx", store=False, **ASKED)


def test_the_command_tunes_a_file(files, monkeypatch, capfd):
    """`cubatch tune model.onnx --library onnxruntime`."""
    tune = in_process(
        monkeypatch, capfd, "tune", str(files["open"]), "--library", "onnxruntime", "--device", "cpu", "--no-store"
    )
    code, out, _ = tune("--batch-sizes", "2,4", "--budget", "5", "--json", "-")
    assert (code, json.loads(out)["library"]) == (0, "onnxruntime")
    for wrong in (["--mode", "training"], ["--input-shape", "3,16,16"], ["--dim", "sequence"]):
        code, _, err = tune(*wrong)
        assert code == 2
        assert wrong[0].strip("-") in err
        assert "onnxruntime" in err or wrong[0] == "--dim"
    code, _, err = tune("--batch-sizes", "2,4", "--dim", "sequence=128")
    assert code == 2
    assert "sequence" in err  # its axes are fixed


@pytest.mark.parametrize("kind", ["text", "a sequence"])
def test_an_output_that_is_no_tensor_of_numbers_is_named(tmp_path, kind):
    """Its copy ended the worker by a signal."""
    helper, types = onnx.helper, onnx.TensorProto
    x = helper.make_tensor_value_info("x", types.FLOAT, [None, 3])
    if kind == "text":
        node = helper.make_node("Cast", ["x"], ["label"], to=types.STRING)
        output = helper.make_tensor_value_info("label", types.STRING, [None, 3])
    else:
        node = helper.make_node("SequenceConstruct", ["x"], ["label"])
        output = helper.make_tensor_sequence_value_info("label", types.FLOAT, None)
    path = tmp_path / "named.onnx"
    onnx.save(helper.make_model(helper.make_graph([node], "g", [x], [output])), path)
    with pytest.raises(InvalidSpec, match=f"output label is a tensor of numbers, not {kind}"):
        OnnxGraph(path)


def test_an_input_of_text_is_named(tmp_path):
    """sklearn-onnx#125: the words of a table are no numbers, and NumPy calls their type "object"."""
    nodes = [onnx.helper.make_node("Identity", ["words"], ["y"])]
    with pytest.raises(InvalidSpec, match=r"input words is of float32, .*, not text"):
        OnnxGraph(written(tmp_path / "words.onnx", nodes, {"words": ("STRING", ["batch", 1])}))
