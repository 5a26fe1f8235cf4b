"""What the room knows of the others: nothing but units and errors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import cubatch

ROOT = Path(cubatch.__file__).parent.parent


def test_a_report_needs_no_other_room():
    """It is handed dictionaries and records, so whatever a result was made by, it can be shown without it."""
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in (ROOT / "cubatch/report").rglob("*.py")
    ]
    assert len(modules) > 20
    code = f"import sys, {', '.join(name.removesuffix('.__init__') for name in modules)}\n"
    code += "print(*sorted({name.split('.')[1] for name in sys.modules if name.startswith('cubatch.')}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == {"errors", "report", "units"}
