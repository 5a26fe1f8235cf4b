"""
What users install: a wheel and an sdist that are the same whenever they are built, and that work by themselves.

    python -m tests.distribution [PYTHON ...]     # default: this one, and each of python3.11 to 3.14 that there is

Both are built twice, the second time from a copy of what git holds, and compared; their texts are checked as the
package index would; then each Python makes an environment of the wheel alone, runs a user's program and our commands
in it, and mypy judges that program strictly against the types that were installed.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests import gate

SUPPORTED = range(11, 15)  # of Python 3
SCRIPT = gate.ROOT / "tests" / "data" / "user" / "script.py"
_PLAIN = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "CUBATCH_"))}


def run(*command: str | Path, cwd: Path) -> str:
    """Run a command that must end well and give what it printed."""
    done = subprocess.run(command, cwd=cwd, env=_PLAIN, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}:\n{done.stdout}{done.stderr}")
    return done.stdout


def build(source: Path, place: Path) -> dict[str, str]:
    """Build the sdist, and the wheel from it; give their names and sums."""
    run(sys.executable, "-m", "build", "--outdir", place, source, cwd=place.parent)
    return {one.name: hashlib.sha256(one.read_bytes()).hexdigest() for one in sorted(place.iterdir())}


def tracked(place: Path) -> Path:
    """Copy what git holds or would, without anything that is left lying about."""
    for name in gate.files(gate.ROOT):
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(gate.ROOT / name, place / name)
    return place


def use(python: str, wheel: Path, place: Path) -> None:
    """Install the wheel by itself, and use it as its users do."""
    run(python, "-m", "venv", place, cwd=place.parent)
    its = place / "bin"
    run(its / "python", "-m", "pip", "install", "-q", "--disable-pip-version-check", wheel, cwd=place)
    script = shutil.copy(SCRIPT, place)  # beside its source mypy finds this repository
    run(its / "python", "-W", "error", script, cwd=place)
    assert "batch" in run(its / "cubatch", "predict", "lenet5", "--device", "titan-x-pascal", cwd=place)
    kernels = "import cubatch.kernels.variant as v; print(v.kernels_path().name, len(v.kernels()))"
    name, count = run(its / "python", "-c", kernels, cwd=place).split()
    assert (name, int(count) > 0) == ("_kernels", True), name
    arguments = ("--strict", "--python-executable", its / "python", "--cache-dir", place / "mypy")
    run(sys.executable, "-m", "mypy", *arguments, script, cwd=place)


def main(pythons: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        sums = build(gate.ROOT, place / "first")
        again = build(tracked(place / "copy"), place / "second")
        if sums != again:
            raise SystemExit(f"built twice, they differ: {sums}, {again}")
        say("\n".join(f"{value}  {name}" for name, value in sums.items()))
        files = sorted((place / "first").iterdir())
        run(sys.executable, "-m", "twine", "check", "--strict", *files, cwd=place)
        (wheel,) = (one for one in files if one.suffix == ".whl")
        others = [f"python3.{minor}" for minor in SUPPORTED if minor != sys.version_info.minor]
        for python in pythons or (sys.executable, *others):
            if not is_here(python):
                say(f"{python}: not here")
                continue
            use(python, wheel, place / f"with-{Path(python).name}")
            say(f"{python}: the wheel works by itself, and its types hold")


def is_here(python: str) -> bool:
    """Say whether a command is a Python that starts; a version manager has commands that do not."""
    return (
        bool(shutil.which(python)) and not subprocess.run((python, "-V"), capture_output=True, check=False).returncode
    )


def say(text: str) -> None:
    """Tell how far it is, at once."""
    print(text, flush=True)  # noqa: T201 - a command


if __name__ == "__main__":
    main(sys.argv[1:])
