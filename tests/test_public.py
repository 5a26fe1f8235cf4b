"""What `import cubatch` gives, and what it does not load."""

from __future__ import annotations

import ast
import importlib
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import cubatch
from cubatch import errors
from cubatch.frameworks.lazy_torch import torch

PACKAGE = Path(cubatch.__file__).parent
HEAVY = ("cupy", "matplotlib", "typer", "rich", "pynvml", "torch", "onnx", "onnxruntime", "safetensors")
# The only modules that may import a GPU library, one for each.
GPU_MODULES = {
    "hardware/gpu_library.py": {"cupy"}, "hardware/nvml.py": {"pynvml"}, "engine/exchange.py": {"cupy"},
    "bench/rivals.py": {"torch"}, "frameworks/data_dependent.py": {"torch"},
    "measure/clocks.py": {"torch"}, "network/importers/torch_export.py": {"torch"},
    "frameworks/lazy_torch.py": {"torch"}, "frameworks/loader_rate.py": {"torch"}, "frameworks/ranks.py": {"torch"},
    "frameworks/recurrent_workspace.py": {"torch"}, "frameworks/step_operators.py": {"torch"},
    "frameworks/torch_compile.py": {"torch"},
    "frameworks/torch_memory.py": {"torch"}, "frameworks/torch_module.py": {"torch"},
    "frameworks/torch_step.py": {"torch"}, "integrations/lightning.py": {"torch"},
    "integrations/huggingface.py": {"torch"},
}  # fmt: skip

# Loads everything else first, so that no module can hide a function of its name, then uses every name twice.
RESOLVE = """
import importlib, pkgutil, cubatch
for module in pkgutil.walk_packages(cubatch.__path__, "cubatch."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
for _ in range(2):
    for name in cubatch.__all__:
        print(name, type(getattr(cubatch, name)).__name__)
"""


def fresh(code):
    """Run code in an interpreter that has imported nothing, warnings being errors."""
    command = [sys.executable, "-W", "error", "-c", code]
    with tempfile.TemporaryDirectory() as cache:  # of its own: who else measures on this machine is told of there
        environment = os.environ | {"XDG_CACHE_HOME": cache}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_importing_cubatch_loads_no_heavy_library():
    """No GPU, plotting, command-line or array library is loaded by the import itself."""
    (loaded,) = fresh(f"import sys, cubatch; print([name for name in {(*HEAVY, 'numpy')} if name in sys.modules])")
    assert loaded == "[]"


USES = (
    "cubatch.models.build('resnet50').parameters",
    "cubatch.footprint('mlp', batch_size=1, device='v100-sxm2-16gb')",
    "cubatch.candidates('mnist-cnn', device='v100-sxm2-16gb')",
    "cubatch.predict('mnist-cnn', device='v100-sxm2-16gb')",
    "cubatch.autotune_callable(lambda n: int, max_batch_size=1, device='cpu', budget=1.0)",
)


@pytest.fixture(scope="module")
def loaded_by():
    """What is loaded of the heavy libraries after each use and those before it, in one process."""
    code = (
        "import sys, cubatch\n"
        f"for use in {USES}:\n"
        "    eval(use)\n"
        f"    print([name for name in {HEAVY} if name in sys.modules])\n"
    )
    return dict(zip(USES, fresh(code), strict=True))


@pytest.mark.parametrize("use", USES)
def test_using_cubatch_without_gpu_plot_or_command_line_loads_none(loaded_by, use):
    """Specs, memory, candidates, predictions and tuning on the CPU need none of those libraries either."""
    assert loaded_by[use] == "[]"


def test_every_public_name_resolves_twice_after_everything_is_imported():
    """Importing a submodule puts it into the package, so a module must not have the name of a function."""
    lines = fresh(RESOLVE)
    half = len(lines) // 2
    assert lines[:half] == lines[half:]
    assert [line.split()[0] for line in lines[:half]] == cubatch.__all__
    kinds = dict(line.split() for line in lines)
    assert [name for name, kind in kinds.items() if kind == "module"] == ["models"]
    assert {kinds[name] for name in ("autotune", "candidates", "device", "footprint", "occupancy")} == {"function"}


def test_all_is_sorted_and_is_the_table_of_homes():
    """`__all__` is what the table says, in order; each name lives in the module or package it says."""
    table = [name for names in cubatch._HOMES.values() for name in names]
    assert len(table) == len(set(table))
    assert cubatch.__all__ == ["__version__", "models", *sorted(table)]
    assert set(cubatch.__all__) <= set(dir(cubatch))
    for home, names in cubatch._HOMES.items():
        module = importlib.import_module(f"cubatch.{home}")
        for name in names:
            assert f"{getattr(module, name).__module__}.".startswith(f"{module.__name__}."), name


CONTRACT = """
    Conv2d Linear MaxPool2d AvgPool2d GlobalAvgPool BatchNorm2d LayerNorm ReLU ReLU6 HardSwish HardSigmoid Sigmoid SiLU
    GELU Softmax Dropout Flatten Add Scale Concat Attention Network load_spec models autotune autotune_callable
    autotune_module from_torch load_onnx UnsupportedOperator
    TuningResult Measurement Candidate Device device devices coulom_batch_size candidates footprint max_batch_size
    rules_of_thumb occupancy count_waves predict CubatchError
"""


def test_what_is_promised_is_there():
    """Every name of the public contract."""
    assert set(CONTRACT.split()) <= set(cubatch.__all__)


def test_an_unknown_name_is_an_attribute_error():
    """As for any module."""
    with pytest.raises(AttributeError, match="no attribute 'autotun'"):
        cubatch.autotun  # noqa: B018 - getting it is the test


# --- errors --------------------------------------------------------------------------------------------------


def drawn_tree():
    """Read the drawing at the top of errors.py: each class, the one above it, its other base, in order."""
    found, above = [], {}
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"^ {4}([│├└─ ]*)(\w+)(?: \((\w+)\))?(?: {2,}(\S.*))?$", line)
        if match and (match[2] == "CubatchError" or match[1]):
            depth = len(match[1]) // 4
            above[depth] = match[2]
            found.append((match[2], above.get(depth - 1), match[3], match[4]))
    return found


def test_the_drawn_tree_of_errors_is_the_tree():
    """The drawing holds every class once, under its parent, with its other base and a word on what it is for."""
    tree = drawn_tree()
    classes = {
        name: kind
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, Exception) and kind.__module__ == errors.__name__
    }
    assert sorted(name for name, *_ in tree) == sorted(classes)
    for name, parent, other, purpose in tree:
        bases = [base.__name__ for base in classes[name].__bases__]
        assert bases == [base for base in (parent or "Exception", other) if base], name
        assert purpose or name == "CubatchError"


def test_every_error_is_exported():
    """Whoever catches it can name it."""
    assert {name for name, *_ in drawn_tree()} == set(cubatch._HOMES["errors"])


# --- who may import a GPU library ----------------------------------------------------------------------------


def imports_of(path):
    """Give each imported top-level package, and whether it stands inside a function."""
    found = []

    def walk(node, inside):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                found.extend((alias.name.partition(".")[0], inside) for alias in child.names)
            elif isinstance(child, ast.ImportFrom) and child.module and not child.level:
                found.append((child.module.partition(".")[0], inside))
            walk(child, inside or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda))

    walk(ast.parse(path.read_text()), inside=False)
    return found


def test_gpu_libraries_are_imported_by_their_own_modules_and_inside_functions():
    """So that every module imports on any machine; the table holds no more than there is."""
    libraries = {"cupy", "cupyx", "cupy_backends", "pynvml", "torch"}
    found, at_import = {}, []
    for path in PACKAGE.rglob("*.py"):
        name = path.relative_to(PACKAGE).as_posix()
        for library, inside in imports_of(path):
            if library in libraries:
                found.setdefault(name, set()).add(library)
                at_import += [] if inside else [name]
    assert at_import == []
    assert found == GPU_MODULES


def test_a_module_that_names_pytorch_can_be_inspected_without_it(monkeypatch):
    """Doctests ask every object of a module for `__wrapped__`; only a use of PyTorch says that it is missing."""
    monkeypatch.setitem(sys.modules, "torch", None)
    assert not hasattr(torch, "__wrapped__")
    with pytest.raises(errors.MissingDependency, match="needs PyTorch"):
        torch.Tensor  # noqa: B018
