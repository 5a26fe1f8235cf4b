"""`train` on a simulated GPU: gradients added up, in float16, cut off and gone on with, as one run to the bit."""

from __future__ import annotations

from pathlib import Path

from tests.cudasim.simulation import NEEDS, python

pytestmark = NEEDS

SAMPLE = Path(__file__).parents[1] / "data" / "mnist-sample"


def test_a_run_that_was_cut_off_ends_as_one_that_was_not(tmp_path):
    """Cut off in each of two epochs, between steps of four batches that are graphs from the second on."""
    code = f"""
    import functools
    from pathlib import Path
    from cubatch.engine.train import train
    from cubatch.hardware import probe
    from cubatch.measure import kernel_context
    from cubatch.network.graph import Network
    from cubatch.network.layers import BatchNorm2d, Conv2d, Dropout, Flatten, Linear, ReLU

    GPU, FOLDER = probe.device("cuda"), Path({str(tmp_path)!r})
    NETWORK = Network(input_shape=(28, 28, 1), layers=[
        Conv2d(k=8, r=3, s=3, stride=4, bias=False), BatchNorm2d(), ReLU(), Flatten(), Dropout(p=0.3), Linear(k=10),
    ])
    run = functools.partial(
        train, NETWORK, data={str(SAMPLE)!r}, batch_size=50, target_batch_size=200, device=GPU, epochs=2,
        dtype="float16", optimizer="adam", learning_rate=0.003,
        context=kernel_context.kernel_context(GPU, "float16", overlaps=False, seconds=0.0, path=None),
    )
    whole = run(save=FOLDER / "whole.safetensors")
    for last in (3, 6):
        def stepped(step):
            if step.done == last:
                raise KeyboardInterrupt
        try:
            run(checkpoint=FOLDER / "run.safetensors", checkpoint_seconds=0, stepped=stepped)
        except KeyboardInterrupt:
            pass
    again = run(checkpoint=FOLDER / "run.safetensors", save=FOLDER / "again.safetensors")
    assert [e.loss for e in again.epochs] == [e.loss for e in whole.epochs]
    assert again.epochs[1].loss < again.epochs[0].loss
    assert (FOLDER / "again.safetensors").read_bytes() == (FOLDER / "whole.safetensors").read_bytes()
    print("same")
    """
    assert python(code, devices="a100") == "same"
