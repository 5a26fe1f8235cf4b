"""What pytest is not to import here, the time of searches, and threads."""

import os
import subprocess
from types import SimpleNamespace

import pytest

os.environ["OMP_NUM_THREADS"] = "1"  # threads of tests that run at once wait for each other longer than they compute

from cubatch.measure import remote
from cubatch.tuning.subjects import bounded_subject
from tests import virtual_time as of_searches
from tests.parity import forked_workers

collect_ignore = ["snippet_project.py"]  # a user's own file, which needs Lightning


@pytest.fixture(autouse=True)
def virtual_time(monkeypatch):
    """Searches measure virtual seconds, so that they decide the same on any host; data loaders real ones, briefly."""
    of_searches.install(monkeypatch)
    monkeypatch.setattr(bounded_subject, "_MOST_LOADER_SECONDS", 0.1)


@pytest.fixture(autouse=True)
def forked(monkeypatch):
    """Workers are forked from a process in which PyTorch is loaded."""
    monkeypatch.setattr(remote, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": forked_workers.start}))
