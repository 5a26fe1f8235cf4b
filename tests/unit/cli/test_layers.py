"""`cubatch layers`."""

from __future__ import annotations

import json

from cubatch.network.layers import LAYERS


def test_layers_lists_every_type_with_keys_and_defaults(run):
    """What must be given stands without a default; what the engine cannot run is said."""
    code, out, _ = run("layers")
    _, text, _ = run("layers", "--json", "-")
    found = {kind["type"]: kind for kind in json.loads(text)["layers"]}

    assert code == 0
    assert tuple(found) == tuple(LAYERS)
    assert "k, r, s, stride=1, pad=0, dilation=1" in out
    assert (found["attention"]["runs"], found["opaque"]["runs"]) == (True, False)


def test_one_type_has_its_keys_explained_and_an_example(run):
    """The lines can be copied into a spec file; a mistyped type is answered with the one that was meant."""
    code, out, _ = run("layers", "conv2d")
    assert code == 0
    assert "Output channels." in out
    assert '[[layers]]\ntype = "conv2d"\nk = 64\nr = 3\ns = 3' in out

    code, _, err = run("layers", "conv2")
    assert code != 0
    assert "did you mean 'conv2d'" in err
