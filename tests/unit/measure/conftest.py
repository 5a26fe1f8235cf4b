"""What the tests of measuring share: runners in workers that end with the test."""

from __future__ import annotations

import contextlib

import pytest

from cubatch.measure.remote import RemoteRunner


@pytest.fixture
def start():
    """Start runners that are closed at the end, whatever happens."""
    with contextlib.ExitStack() as runners:

        def start(factory, **options):
            runner = RemoteRunner(factory, **options)
            runners.callback(runner.close)
            return runner

        yield start
