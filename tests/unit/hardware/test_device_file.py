"""A device that its user describes in a file: what is read, where it goes, and what is wrong with it."""

from __future__ import annotations

import re
from pathlib import Path

import attrs
import pytest

import cubatch
from cubatch.errors import DeviceNotAvailable, InvalidArgument, UnknownName
from cubatch.hardware import catalogue, device_file, probe
from tests.unit.hardware.printed import FIELDS

ROOT = Path(cubatch.__file__).parents[1]
PAGE = "docs/reference/files.md"
EXAMPLE = re.search(r"<!-- device file -->\n```toml\n(.*?)```", (ROOT / PAGE).read_text("utf-8"), re.DOTALL)[1]
DATA = (ROOT / "cubatch/data/devices.toml").read_text(encoding="utf-8")
LEAST = "compute_capability = [8, 6]\n"


@pytest.fixture
def write(tmp_path):
    """Write a file and give its path as a user does."""

    def put(text, name="my-gpu.toml"):
        (tmp_path / name).write_text(text, encoding="utf-8")
        return str(tmp_path / name)

    return put


def test_a_file_has_the_facts_of_a_device(write):
    """In the units of data sheets, as the catalogue has them."""
    path = write(EXAMPLE)
    device = cubatch.device(path)
    assert (device.name, device.kind, device.slug, device.live) == ("RTX 3060 at 115 W", "cuda", "", False)
    assert (device.architecture, device.compute_capability, device.num_sms) == ("Ampere", (8, 6), 28)
    assert device.peak_flops_per_second["float16"] == 21.5e12
    assert (device.memory_bytes, device.l2_bytes, device.clock_hz) == (12 * 2**30, 3 * 2**20, 1.5e9)
    assert (device.peak_bytes_per_second, device.power_limit_watts) == (360e9, 115.0)
    assert (device.tensor_cores, device.source) == (True, path)


def test_blanks_around_a_path_are_none_of_it(write):
    """As around any other name of a device: people write a list with a blank after each comma."""
    path = write(EXAMPLE)
    named = cubatch.compare("lenet5", f"t4, {path}".split(","), batch_sizes=[8])
    assert set(named.forecasts) == {"t4", "RTX 3060 at 115 W"}
    assert cubatch.device(f" {path} ") == cubatch.device(path)


def test_what_is_absent_is_unknown(write):
    """But for the name, which is the file's, and what every chip of the generation has: Turing's GTX 16 differ."""
    device = cubatch.device(write(LEAST, "Odd Card.TOML"))
    assert (device.name, device.architecture, device.num_sms, device.tensor_cores) == ("Odd Card", "Ampere", None, True)
    assert cubatch.device(write(LEAST + "tensor_cores = 0")).tensor_cores is False
    assert cubatch.device(write("compute_capability = [7, 5]")).tensor_cores is None
    assert cubatch.device(write("compute_capability = [6, 1]")).tensor_cores is False


@pytest.mark.parametrize(
    ("ask", "keys"),
    [
        (
            lambda gpu: cubatch.predict("mobilenet-v3-large", device=gpu, library="cubatch", batch_sizes=[8]),
            "num_sms, boost_clock_mhz, bandwidth_gb_per_second",
        ),
        (lambda gpu: cubatch.predict("lenet5", device=gpu), "num_sms, peak_tflops.float32, bandwidth_gb_per_second"),
        (
            lambda gpu: cubatch.predict("lenet5", device=gpu, library="cubatch"),
            "num_sms, boost_clock_mhz, bandwidth_gb_per_second",
        ),
        (lambda gpu: cubatch.candidates("lenet5", device=gpu), "memory_gib"),
    ],
)
def test_what_needs_a_key_that_a_file_lacks_names_it_as_the_file_would(ask, keys, write):
    """With the path as it was given, whatever source the file names; those keys are enough."""
    path = write(LEAST + 'source = "https://example.org"\n')
    with pytest.raises(InvalidArgument, match=re.escape(f"{path} lacks {keys}.")):
        ask(path)
    with pytest.raises(InvalidArgument) as caught:
        ask(cubatch.Device(name="card", compute_capability=(8, 6)))
    assert "lacks" not in str(caught.value)
    assert "atalogue" not in str(caught.value)
    values = {"num_sms": "28", "boost_clock_mhz": "1500", "bandwidth_gb_per_second": "360", "memory_gib": "12"}
    values["peak_tflops.float32"] = "10.8"
    lines = "".join(f"{key} = {values[key]}\n" for key in {*keys.split(", "), "memory_gib"})
    assert ask(write(LEAST + lines))


def test_a_file_of_an_architecture_to_come_is_answered_for_with_a_note(write):
    """A note names it and the last known one, which replaces it; a known one has no note."""
    for capability, count in (("[13, 0]", 1), ("[8, 6]", 0)):
        path = write(EXAMPLE.replace("[8, 6]", capability))
        notes = [note for note in cubatch.predict("lenet5", device=path).notes if "Compute capability" in note]
        assert len(notes) == count
        assert all("13.0" in note and "12.1" in note for note in notes)


def test_a_path_that_does_not_end_in_toml_is_told_so(write):
    """It is no name that a device could have."""
    for path in (write(EXAMPLE, "my-gpu"), "./my-gpu", "gpus/mine"):
        with pytest.raises(InvalidArgument, match=r"A file that describes a GPU ends in \.toml\."):
            cubatch.device(path)


@pytest.mark.parametrize("slug", ["v100-sxm2-16gb", "k80", "jetson-thor-t5000", "gb10"])
def test_a_row_of_the_catalogue_is_such_a_file(write, slug):
    """Copied with its header or without; it is the same GPU but for its name in the catalogue, and its source."""
    row = re.search(rf"^\[{slug}\]\n(.*?)(?=^\[|\Z)", DATA, re.DOTALL | re.MULTILINE)
    board = attrs.evolve(catalogue.find(slug), slug="", source=write(row[0]))
    assert probe.device(write(row[0])) == probe.device(write(row[1])) == board


def test_every_key_of_the_catalogue_is_a_key_of_a_file():
    """And no other."""
    assert set(device_file._KINDS) == FIELDS


@pytest.mark.parametrize(
    ("line", "key", "words"),
    [
        ("num_sms = 0", "num_sms", "a whole number of at least 1, got 0"),
        ("num_sms = true", "num_sms", "a whole number"),
        ("tensor_cores = -1", "tensor_cores", "0 for none"),
        ("memory_gib = '12'", "memory_gib", "a number above 0, got '12'"),
        ("memory_gib = 8\nusable_mib = 8193", "usable_mib", "at most memory_gib, 8192 MiB"),
        ("usable_mib = 4096", "usable_mib", "at most memory_gib, 0 MiB"),
        ("peak_tflops = 12.7", "peak_tflops", "{ float32 = 12.7 }"),
        ("name = ' '", "name", "text that is not empty"),
    ],
)
def test_a_value_that_makes_no_sense_is_named_with_its_file(write, line, key, words):
    """The message has file, key, what would do and where it is described."""
    path = write(LEAST + line)
    with pytest.raises(InvalidArgument) as caught:
        cubatch.device(path)
    assert caught.value.field == f"{key} in {path}"
    assert words in str(caught.value)
    assert PAGE in str(caught.value)


@pytest.mark.parametrize("value", ["'8.6'", "8.6", "[8]", "[8, 6, 0]", "[8.0, 6]", "[8, -1]", "['8', '6']"])
def test_a_compute_capability_is_a_pair(write, value):
    """The one key that must be there."""
    path = write(f"compute_capability = {value}")
    with pytest.raises(InvalidArgument, match=re.escape("must be [major, minor], such as [8, 6]")):
        cubatch.device(path)


def test_a_file_without_a_compute_capability_is_refused(write):
    """Next to nothing can be said of such a GPU."""
    with pytest.raises(
        InvalidArgument, match=r"compute_capability in .*my-gpu.toml must be given .* \[7, 0\] is a V100"
    ):
        cubatch.device(write("num_sms = 28"))


def test_keys_that_no_row_has_list_those_near_them(write):
    """A misspelt key would be a fact that nobody reads."""
    with pytest.raises(UnknownName, match=r"unknown key in .*my-gpu\.toml 'num_sm'; did you mean 'num_sms'") as caught:
        cubatch.device(write(LEAST + "num_sm = 28"))
    assert caught.value.near[0] == "num_sms"
    with pytest.raises(UnknownName, match=r"key of peak_tflops in .* 'float23'; did you mean 'float32'"):
        cubatch.device(write(LEAST + "peak_tflops = { float23 = 12.7 }"))


@pytest.mark.parametrize("text", ["[a]\nnum_sms = 1\n[b]\nnum_sms = 2\n", "num_sms = 2\n[a]\nnum_sms = 1\n"])
def test_a_file_describes_one_device(write, text):
    """Neither the first nor the last of several is picked."""
    with pytest.raises(InvalidArgument, match="a file describes one device"):
        cubatch.device(write(text))


def test_what_cannot_be_read_is_refused_with_the_reason(write, tmp_path):
    """A missing file, a folder, a broken one, other bytes."""
    (tmp_path / "bytes.toml").write_bytes(b"\xff")
    for path in (tmp_path / "none.toml", tmp_path, write("num_sms = "), tmp_path / "bytes.toml", "a\0b.toml"):
        with pytest.raises(InvalidArgument, match="device must be a TOML file that can be read"):
            device_file.read(str(path))


def test_it_goes_wherever_a_device_does(write):
    """A path and a Device made by hand: whatever plans takes both, and measuring says that it is not here."""
    path = write(EXAMPLE)
    device = cubatch.device(path)
    for gpu in (path, device):
        assert cubatch.predict("lenet5", device=gpu, batch_sizes=[8], dtype="float16").batch_size == 8
        assert cubatch.candidates("lenet5", device=gpu)
        assert cubatch.footprint("lenet5", device=gpu).total
        assert cubatch.max_batch_size("lenet5", memory="1GiB", device=gpu)
        for measure in (
            lambda gpu=gpu: cubatch.autotune("lenet5", device=gpu),
            lambda gpu=gpu: cubatch.autotune_callable(lambda _: lambda: None, max_batch_size=8, device=gpu),
        ):
            with pytest.raises(DeviceNotAvailable, match=r"'RTX 3060 at 115 W' cannot be used: .* in no machine"):
                measure()
