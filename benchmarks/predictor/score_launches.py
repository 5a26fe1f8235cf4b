"""
Errors of predicted Tensor Core kernels on an H200 by the fixed time that each launch takes.

    python -m benchmarks.predictor.score_launches [--out FILE]

LAUNCH_MICROSECONDS of `cubatch/estimate/vendor/fitted.py` was chosen on the products, cuBLAS' times of linear layers.
Convolutions by cuDNN had no part in it.  Both are float16 in one GPU pass.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.fit_ours import KINDS
from benchmarks.predictor.score_modules import RESULTS
from benchmarks.provenance import provenance, write
from cubatch.estimate.predictions import UNSCALED
from cubatch.estimate.vendor.fitted import LAUNCH_MICROSECONDS
from cubatch.estimate.vendor.vendor_calls import Call
from cubatch.estimate.vendor.vendor_model import vendor_parts
from cubatch.hardware import catalogue
from cubatch.network.passes import Pass

PASS = RESULTS / "h200-sxm" / "2026-11-26-2572091.json"
_DTYPE = "float16"
_LAUNCHES = range(2, 13)


def ratios(result: Mapping[str, Any]) -> dict[str, list[tuple[float, float]]]:
    """Return the predicted and measured seconds of the vendor's kernels in a GPU pass: "linear" and "conv2d"."""
    device, out = catalogue.find("h200-sxm"), dict[str, list[tuple[float, float]]]()
    items = [item for stage in result["stages"] if stage["name"] in {"gemm", "layers"} for item in stage["items"]]
    for timed in (item["result"] for item in items if item["status"] == "ok"):
        case = timed["case"]
        facts = dict(case["layer"])
        kind = KINDS.get(facts.pop("type"))
        # NHWC, as Tensor Cores take images.
        taken = [
            entry["seconds"] for entry in timed["entries"]
            if entry["side"] == "vendor" and entry.get("seconds") and "NCHW" not in entry["name"]
        ]  # fmt: skip
        if kind is None or case["dtype"] != _DTYPE or not taken or facts.get("groups", 1) > 1:
            continue
        sizes = np.array([case["batch_size"]], float)
        call = Call.of_layer(kind(**facts), Pass(case["pass"]), sizes, _DTYPE)
        part, _ = vendor_parts([call], sizes, device, _DTYPE, scales=UNSCALED, notes=[])
        out.setdefault(case["layer"]["type"], []).append((float(part.seconds[0, 0]), min(taken)))
    return out


def scores(pairs: Sequence[tuple[float, float]]) -> dict[str, object]:
    """Return the mean error in percent by the microseconds of a launch: every algorithm takes as much more or less."""
    predicted, measured = np.array(pairs).T
    errors = {
        str(launch): round(
            100 * float(np.abs((predicted + (launch - LAUNCH_MICROSECONDS) * 1e-6) / measured - 1).mean()), 1
        )
        for launch in _LAUNCHES
    }
    return {"rows": len(pairs), "mean_error_by_launch": errors}


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the errors; `arguments` None: those of the process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the errors there as JSON")
    options = parser.parse_args(arguments)
    errors = {name: scores(pairs) for name, pairs in ratios(json.loads(PASS.read_text())).items()}
    print(errors)
    if options.out:
        facts = {"schema": 1, "benchmark": "predictor-launches", **provenance(), "pass": PASS.name, "scores": errors}
        write(options.out, facts)


if __name__ == "__main__":
    main()
