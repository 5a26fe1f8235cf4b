"""
Run the kernels' tests under a sanitizer: `python -m tests.cpusim address|thread [arguments of pytest]`.

The sanitizer's library has to be in the process from its start, hence a process of its own. A report fails the
test whose launch caused it; after a crash the report is printed when the process is gone.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.cpusim.building import ROOT

LIBRARIES = {"address": "libasan.so", "thread": "libtsan.so"}
# halt_on_error=0: Python raises, and the other tests run. suppress_equal_...=0: what one test showed, another may.
OPTIONS = {
    "address": ("ASAN_OPTIONS", "detect_leaks=0:halt_on_error=0:suppress_equal_pcs=0:print_legend=0"),
    "thread": ("TSAN_OPTIONS", "halt_on_error=0:exitcode=0:atexit_sleep_ms=0:suppress_equal_addresses=0"),
}
_ADDR_NO_RANDOMIZE = 0x0040000


def main(arguments: Sequence[str]) -> int:
    """Give pytest's exit status; without arguments for pytest it runs tests/kernels."""
    if not arguments or arguments[0] not in LIBRARIES:
        print(__doc__, file=sys.stderr)  # noqa: T201 - a command's usage
        return 2
    build, *rest = arguments
    found = ["g++", f"-print-file-name={LIBRARIES[build]}"]
    library = subprocess.run(found, capture_output=True, text=True, check=True).stdout.strip()
    with tempfile.TemporaryDirectory() as folder:
        prefix = f"{folder}/report"
        name, options = OPTIONS[build]
        environment = {
            **os.environ,
            name: f"{options}:log_path={prefix}",
            "LD_PRELOAD": library,
            "CUBATCH_CPUSIM": build,
            "CUBATCH_CPUSIM_REPORTS": prefix,
            "OPENBLAS_NUM_THREADS": "1",  # threads that TSan would have to follow
        }
        # TSan's map of the address space has no room for every place that a kernel may draw.
        ctypes.CDLL(None).personality(_ADDR_NO_RANDOMIZE)
        command = [sys.executable, "-m", "pytest", *(rest or [str(ROOT / "tests" / "kernels")])]
        status = subprocess.run(command, env=environment, check=False).returncode
        if status < 0 or status not in {0, 1, 2, 5}:  # it crashed: pytest itself could not say why
            for report in sorted(Path(folder).iterdir()):
                print(report.read_text(errors="replace"), file=sys.stderr)  # noqa: T201 - a command's output
        return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
