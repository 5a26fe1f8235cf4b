"""
Errors of the vendor's kernels on an H200, and on Tensor Cores by the fixed time that each launch takes.

    python -m benchmarks.predictor.score_launches [--out FILE]

LAUNCH_MICROSECONDS of `cubatch/estimate/vendor/fitted.py` was chosen on the products, cuBLAS' times of linear layers.
Convolutions by cuDNN had no part in it.  All are of one GPU pass; float32 does not use Tensor Cores there.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.fit_ours import KINDS
from benchmarks.fit_predictor import RESULTS
from benchmarks.provenance import provenance, write
from cubatch.estimate.predictions import UNSCALED
from cubatch.estimate.vendor.fitted import LAUNCH_MICROSECONDS
from cubatch.estimate.vendor.vendor_calls import Call
from cubatch.estimate.vendor.vendor_model import vendor_parts
from cubatch.hardware import catalogue
from cubatch.network.passes import Pass

PASS = RESULTS.parent / "h200-sxm" / "2026-11-26-2572091.json"
_TENSOR = "float16"
_LAYOUTS = {"float16": "NHWC", "float32": "NCHW"}
"""Layout of images by type, as PyTorch takes them without a conversion."""
_LAUNCHES = range(2, 13)


def ratios(result: Mapping[str, Any], dtype: str) -> dict[str, list[tuple[float, float]]]:
    """Return the predicted and measured seconds of the vendor's kernels in a GPU pass: "linear" and "conv2d"."""
    device, out = catalogue.find("h200-sxm"), dict[str, list[tuple[float, float]]]()
    items = [item for stage in result["stages"] if stage["name"] in {"gemm", "layers"} for item in stage["items"]]
    for timed in (item["result"] for item in items if item["status"] == "ok"):
        case = timed["case"]
        facts = dict(case["layer"])
        kind = KINDS.get(facts.pop("type"))
        taken = [
            entry["seconds"] for entry in timed["entries"]
            if entry["side"] == "vendor" and entry.get("seconds")
            and (case["layer"]["type"] == "linear" or ("NCHW" in entry["name"]) == (_LAYOUTS[dtype] == "NCHW"))
        ]  # fmt: skip
        if kind is None or case["dtype"] != dtype or not taken or facts.get("groups", 1) > 1:
            continue
        sizes = np.array([case["batch_size"]], float)
        call = Call.of_layer(kind(**facts), Pass(case["pass"]), sizes, dtype)
        part, _ = vendor_parts([call], sizes, device, dtype, scales=UNSCALED, notes=[])
        out.setdefault(case["layer"]["type"], []).append((float(part.seconds[0, 0]), min(taken)))
    return out


def scores(pairs: Sequence[tuple[float, float]], dtype: str) -> dict[str, object]:
    """Return mean error and bias in percent; on Tensor Cores also by the microseconds that each launch takes."""
    predicted, measured = np.array(pairs).T

    def error(launch: float) -> float:  # every algorithm takes as much more or less
        shifted = predicted + (launch - LAUNCH_MICROSECONDS) * 1e-6
        return round(100 * float(np.abs(shifted / measured - 1).mean()), 1)

    bias = round(100 * (float(np.exp(np.mean(np.log(predicted / measured)))) - 1), 1)
    by_launch = {str(launch): error(launch) for launch in _LAUNCHES if dtype == _TENSOR}
    return {"rows": len(pairs), "mean_error": error(LAUNCH_MICROSECONDS), "bias": bias, "by_launch": by_launch}


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the errors; `arguments` None: those of the process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the errors there as JSON")
    options = parser.parse_args(arguments)
    timed = json.loads(PASS.read_text())
    errors = {
        f"{name}, {dtype}": scores(pairs, dtype) for dtype in _LAYOUTS for name, pairs in ratios(timed, dtype).items()
    }
    print(errors)
    if options.out:
        facts = {"schema": 1, "benchmark": "predictor-launches", **provenance(), "pass": PASS.name, "scores": errors}
        write(options.out, facts)


if __name__ == "__main__":
    main()
