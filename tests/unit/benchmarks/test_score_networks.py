"""Scores of whole networks compare with published steps what these steps do."""

from __future__ import annotations

import pytest

from benchmarks.predictor.score_networks import network, networks
from cubatch.estimate.step import predict_step
from cubatch.hardware.catalogue import find

HEADER = "gpu_name_reported,n_gpus,model,mode,precision,batch_total,img_size,mean_ms,median_ms"


@pytest.mark.parametrize(("mode", "word"), [("inference", "infer"), ("training", "train")])
def test_copies_and_sums_of_gradients_count_as_in_the_published_step(tmp_path, mode, word):
    """
    A step that takes what it is predicted to take, a copy at 2.9 GB/s, and in training 4 transfers of all gradients.

    These have two launches for each of 32 parameters of VGG16, at 0.75 of the bandwidth; the host launches them, too.
    """
    device, spec = find("titan-v"), network("vgg16")
    step = predict_step(spec, [12], device, mode=mode, library="torch")
    seconds = float(step.seconds[0]) + 12 * 3 * 224 * 224 * 4 / 2.9e9
    if mode == "training":
        moved = 4 * 4 * spec.parameters / device.peak_bytes_per_second / 0.75 + 2 * 32 * 3e-6
        seconds += (moved**2 + (2 * 32 * 30e-6) ** 2) ** 0.5
    row = f"TITAN V,1,vgg16,{word},fp32,12,224,0,{1e3 * seconds}"
    (tmp_path / "pytorch_gpu_benchmark_ryujaehun.csv").write_text(f"{HEADER}\n{row}\n")
    (score,) = networks(tmp_path).values()
    assert score["cases"] == 1
    assert score["mean_error"] == 0.0
