"""What commands refuse before they do anything: a line each, with its exit code and words of the message."""

from __future__ import annotations

import contextlib
import shlex
import sqlite3

import pytest

from cubatch.hardware import probe
from cubatch.hardware.facts import Device

FPROP = "conv2d_fprop_implicit_gemm_f32_simt_128x128x8_v4"
NUMBERS = "occupancy --device t4 --threads 256 --registers 96"
KERNEL = f"occupancy {FPROP} --device t4"
GEMM = "bench gemm --m 70 --n 50 --k 30"
PREDICT = "predict lenet5 --device v100-sxm2-16gb"
TORCH = "memory a:b --library torch"

REFUSED = [
    ("nothing", 2, "nothing"),
    # tune
    ("tune", 2, "Missing argument 'MODEL'"),
    ("tune mlp --mode sleeping", 2, "'--mode': 'sleeping' is not one of"),
    ("tune mlp --batch-sizes '32;64'", 2, "32;64"),
    ("tune mlp --batch-sizes ''", 2, "--batch-sizes"),
    ("tune mlp --budget long", 2, "--budget"),
    ("tune mlp --tolerance x", 2, "'--tolerance': a number is needed"),
    ("tune mlp --seed -1", 2, "'--seed': at least 0 is needed"),
    ("tune mlp --fresh --no-store", 2, "--fresh"),
    ("memory mlp --device t4 --batch-size 4 --mode inference --optimizer adam", 2, "Or pass --mode training."),
    (f"{PREDICT} --optimizer adam", 2, "Or pass --mode training."),
    ("tune mlp --quick --budget 20", 2, "--quick and --budget exclude each other"),
    ("tune mlp --input-shape 28,28", 2, "--input-shape"),
    ("tune net.toml --classes 3", 2, "--classes"),
    ("tune resnet5 --json -", 2, "resnet50"),
    ("tune missing.toml --json -", 2, "missing.toml"),
    ("tune mlp --report a.pdf", 2, ".html"),
    ("tune mlp --json nowhere/f.png", 2, "--json"),
    ("tune mlp --plot nowhere/f.png", 2, "--plot"),
    ("tune mlp --report nowhere/f.png", 2, "--report"),
    ("fleet tune mlp --scheduler tcp://10.0.0.1:8786 --no-store --fresh", 2, "--no-store"),
    ("memory mlp --target-batch-size 4 --batch-size 2 --mode inference", 2, "--target-batch-size must be left out"),
    # memory and candidates
    ("memory mlp --batch-size x", 2, "'--batch-size': a whole number is needed"),
    ("memory mlp --batch-size 0 --json -", 2, "--batch-size must be"),
    ("memory mlp --batch-size 8 --device cpu --target-batch-size 30", 2,
     "--target-batch-size must be a multiple of the batch size, 8"),
    ("memory mlp --device t4 --memory ''", 2, "''"),
    ("memory mlp --device 'titan x' --json -", 2, "titan-x-pascal"),
    ("memory mlp --device nonsense --json -", 2, "`cubatch devices` lists"),
    ("memory mlp --device t4,t5", 2, "t5"),
    ("memory mlp --device t4,l4 --prices nowhere.toml", 2, "--prices"),
    ("memory mlp --device t4,l4 --prices t4=free", 2, "--prices"),
    ("memory mlp --limit much", 2, "much"),
    ("memory mlp --batches a:b", 2, "--batches is for --library torch, not auto"),
    ("memory mlp --library torch --input-shape 8,8,3", 2, "package.module:name of a function"),
    (TORCH, 2, "needs exactly one of these options"),
    (f"{TORCH} --batches a:c --loader a:d", 2, "exclude each other"),
    (f"{TORCH} --batches a:c --recompute", 2, "leave out --recompute"),
    ("candidates resnet50 --memory-limit 1MiB --device t4 --json -", 1, "does not fit"),
    # predict
    ("predict lenet5", 2, "--device"),
    (f"{PREDICT} --devices t4", 2, "--devices"),
    ("predict lenet5 --devices t4,p4 --explain", 2, "--explain"),
    ("predict lenet5 --device t4 --prices t4=1", 2, "--prices"),
    ("predict lenet5 --devices t4 --prices cheap", 2, "--prices"),
    (f"{PREDICT} --batch-sizes 8,many", 2, "--batch-sizes"),
    (f"{PREDICT} --objective energy", 2, "energy"),
    (f"{PREDICT} --library im2col", 2, "im2col"),
    (f"{PREDICT} --dtype float8", 2, "float8"),
    (f"{PREDICT} --dtype tf32", 2, "use --dtype float32 or float16"),
    (f"{PREDICT} --mode training --optimizer adagrad", 2, "--optimizer must be one of sgd, momentum, adam"),
    (f"{PREDICT} --json nowhere/a.png", 2, "nowhere"),
    (f"{PREDICT} --plot nowhere/a.png", 2, "nowhere"),
    (f"{PREDICT} --memory-limit 1KiB", 1, "1.00 KiB"),
    (f"{PREDICT} --anchors nowhere.json", 1, "nowhere.json"),
    # occupancy and kernels
    ("occupancy --device t4", 2, "KERNEL"),
    ("occupancy nonsense --device t4 --json -", 2, "`cubatch kernels` lists"),
    ("occupancy --threads 2000 --registers 32 --device t4 --json -", 2, "--threads must be"),
    ("occupancy --device t4 --threads 256", 2, "--registers"),
    (f"{NUMBERS} --batch-size 4", 2, "--model"),
    (f"{NUMBERS} --model go-net", 2, "KERNEL"),
    (f"{NUMBERS} --plot a.png", 2, "--sweep"),
    (f"{NUMBERS} --sweep warps", 2, "warps"),
    (f"{KERNEL} --threads 256", 2, "--threads"),
    (f"{KERNEL} --layer conv1", 2, "--model"),
    (f"{KERNEL} --input-shape 8,8,3", 2, "--input-shape needs --model"),
    (f"{KERNEL} --classes 10", 2, "--classes needs --model"),
    (f"{KERNEL} --sweep batch-size", 2, "--model"),
    (f"{KERNEL} --model go-net", 2, "--batch-size"),
    (f"{KERNEL} --model go-net --blocks 4", 2, "exclude"),
    ("kernels --arch 80", 2, "such as 'sm_70'"),
    ("kernels --arch sm_30", 2, "unknown --arch 'sm_30'"),
    ("kernels --family smit", 2, "unknown --family"),
    ("kernels --operation gemm", 2, "did you mean 'gemm_"),
    ("kernels --operation gemm_nt --family attention", 2, "operation gemm_nt: "),
    # bench and profile
    ("bench dream", 2, "dream"),
    ("bench model", 2, "MODEL"),
    ("bench model resnet50 --pass x", 2, "--pass"),
    ("bench gemm --m 3", 2, "--n"),
    ("bench gemm --m 0 --n 1 --k 1", 2, "--m"),
    ("bench conv --h 3", 2, "--w"),
    ("bench gemm --m 8 --n 8 --k 8 --dry-run --device ''", 2, "''"),
    (f"{GEMM} --layout tt", 2, "--layout"),
    (f"{GEMM} --dtype float64", 2, "--dtype"),
    (f"{GEMM} --plot f.txt", 2, ".png"),
    (f"{GEMM} --device cpu", 2, "--device must be a GPU"),
    ("profile mlp --batch-size 0", 2, "--batch-size must be a whole number of at least 1"),
    ("profile mlp --batch-size two", 2, "--batch-size takes whole numbers"),
    ("profile mlp --budget 0", 2, "budget"),
    ("profile mlp --device v100-sxm2-16gb", 1, "v100"),
    ("profile mlp --plot x.bmp", 2, "plot file"),
    # train
    ("train mnist-cnn --data here --device cpu --dtype bfloat16", 2, "float32"),
    ("train mnist-cnn --data here --batch-size 8 --save w.pt", 2, ".safetensors or .npz"),
    ("train mnist-cnn --data here --batch-size 8 --checkpoint w.pt", 2, ".safetensors or .npz"),
    ("train mnist-cnn --data here --batch-size 8 --weights w.pt", 2, ".safetensors or .npz"),
    ("train mlp --data . --batch-size 4 --save a.safetensors --checkpoint a.safetensors", 2, "two files"),
    # store, study, watch
    ("store nothing", 2, "nothing"),
    ("store clear --store store.db", 2, "--all"),
    ("store show 7 --store no-such.db --json -", 1, "no-such.db"),
    ("study memory-rules '' --device t4", 2, "''"),
    ("study powers-of-three", 2, "powers-of-three"),
    ("study powers-of-two mlp --max-batch-size 4", 2, "--max-batch-size"),
    ("study powers-of-two mlp --out /no/such/folder", 2, "--out"),
    ("study powers-of-two mlp --device v100-sxm2-16gb", 1, "v100"),
    ("study powers-of-two mlp --data mnist", 2, "--data"),
    ("study generalisation --device cpu", 2, "--data"),
    ("study generalisation --data no-such-folder", 1, "no-such-folder"),
    ("study generalisation --download", 2, "--download"),
    ("study generalisation --mode inference", 2, "--mode"),
    ("study waves mlp --device cpu --max-batch-size 8", 2, "mlp"),
    ("watch --interval -1", 2, "--interval"),
    ("watch --seconds inf", 2, "--seconds"),
]  # fmt: skip


@pytest.mark.usefixtures("autotune")
@pytest.mark.parametrize(("line", "exits", "words"), REFUSED, ids=[line for line, *_ in REFUSED])
def test_a_command_that_cannot_be_done_is_one_clear_message(run, monkeypatch, tmp_path, line, exits, words):
    """Code 2 if the request makes no sense, else 1: in the option's words, nothing on stdout, no file, no traceback."""
    monkeypatch.chdir(tmp_path)
    named, here = probe.device, Device(name="a CPU", kind="cpu", threads=1, memory_bytes=2**32)
    monkeypatch.setattr(probe, "device", lambda name=None: here if name is None else named(name))
    code, out, err = run(*shlex.split(line))
    assert (code, out, [path for path in tmp_path.rglob("*") if path.is_file()]) == (exits, "", [])
    assert words in " ".join(err.split())
    assert not any(foreign in err for foreign in ("Traceback", "Input should", "Value error"))
    assert err.count("\n") == 1 or not err.startswith("cubatch: ")


def test_remedies_name_options_and_no_arguments(run, tmp_path):
    """Of arguments whose option has another name, and of a store that belongs to another program."""
    with contextlib.closing(sqlite3.connect(tmp_path / "other.db")) as database:
        database.execute("CREATE TABLE theirs (number)")
    said = [
        run("tune", "mlp", "--device", "cpu", "--store", tmp_path / "other.db")[2],
        run("tune", "mlp", "--device", "cpu", "--dim", "rows=3")[2],
        run("tune", "mlp", "--devices", "cpu")[2],
    ]
    for text, option in zip(said, ("--no-store", "--dim must be", "--device cpu"), strict=True):
        assert option in text
    assert not [text for text in said if "store=" in text or "dims" in text or "device=" in text]
