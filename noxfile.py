"""Sessions for nox: the stages of `.ci/run`, each in an environment of its own.  `nox -l` lists them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import nox

RUN = Path(__file__).parent / ".ci" / "run"
STAGES = subprocess.run([RUN, "--list"], capture_output=True, text=True, check=True).stdout.split()
nox.options.sessions = ["lint", "types", "imports", "documentation", "tests"]
nox.options.reuse_existing_virtualenvs = True


def _make_session(stage: str) -> None:
    @nox.session(name=stage)
    def session(session: nox.Session) -> None:
        session.run(str(RUN), "--venv", session.virtualenv.location, stage, external=True)


for _stage in STAGES:
    _make_session(_stage)
