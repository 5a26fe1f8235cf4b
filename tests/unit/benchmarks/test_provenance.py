"""The commit that a result names, also on a machine that has a copy of the tree and nothing else."""

from __future__ import annotations

import subprocess

import pytest

from benchmarks.provenance import provenance


@pytest.fixture(autouse=True)
def nameless(monkeypatch):
    """No commit is named."""
    monkeypatch.delenv("CUBATCH_COMMIT", raising=False)


def test_without_git_the_commit_is_the_one_that_is_named(monkeypatch, tmp_path):
    """On the command line before the environment; nothing ends for want of git."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert provenance()["commit"] == ""
    monkeypatch.setenv("CUBATCH_COMMIT", "1234567")
    assert provenance()["commit"] == "1234567"
    assert provenance("89abcde")["commit"] == "89abcde"


def test_a_checkout_names_its_commit(monkeypatch, tmp_path):
    """What git says, and nothing outside of a repository."""
    monkeypatch.chdir(tmp_path)
    assert provenance()["commit"] == ""
    somebody = ["-c", "user.name=a", "-c", "user.email=b"]
    for command in (["init", "-q"], [*somebody, "commit", "-q", "--allow-empty", "-mx"]):
        subprocess.run(["git", *command], check=True)
    head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], check=True, capture_output=True, text=True)
    assert provenance()["commit"] == head.stdout.strip() != ""
