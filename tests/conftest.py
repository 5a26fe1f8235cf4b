"""How every test runs: no example is timed, in CI all draw the same ones, and what is thorough runs when asked for."""

import gc
import os
import signal

import pytest
from hypothesis import settings
from threadpoolctl import threadpool_limits

from cubatch.frameworks import heap
from cubatch.tuning import machine_lock
from tests.thorough import THOROUGH, examples

settings.register_profile("local", deadline=None, max_examples=examples(100))
settings.register_profile("ci", settings.get_profile("local"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")


def pytest_configure(config):
    """
    Let Ctrl-C be heard, and make the mark known by which a case runs only where all is tried.

    Of several workers each has one thread of BLAS: more than there are CPUs spin while they wait for each other.
    """
    if hasattr(config, "workerinput"):
        threadpool_limits(1, user_api="blas")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background: what tests start would not hear it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.addinivalue_line(
        "markers", "thorough: adds little to other cases, or tests what tests; CUBATCH_THOROUGH=1 runs it"
    )


def pytest_collection_modifyitems(config, items):
    """Leave out what is thorough."""
    left_out = set() if THOROUGH else {item for item in items if item.get_closest_marker("thorough")}
    if left_out:
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]


def pytest_collection_finish():
    """Set aside what collecting made: going through ten thousand tests takes each collection of garbage 0.2 s."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def malloc_is_not_chosen(monkeypatch):
    """No variable says where blocks lie: Dask leaves one of them in the environment of the tests that follow."""
    for name in (*heap._CHOICES, "GLIBC_TUNABLES", "LD_PRELOAD"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True, scope="session")
def _own_marks(tmp_path_factory):
    """Mark devices in a folder of this process's own: tests that run at once are no tuners that disturb each other."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine_lock, "folder", lambda: tmp_path_factory.getbasetemp() / "measuring")
        yield
