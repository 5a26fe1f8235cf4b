"""The error of an operator that cannot be imported."""

from __future__ import annotations

from pathlib import Path

from cubatch.errors import CubatchError

AS_IT_IS = (
    "tune the network as it is, hand its PyTorch module to autotune_module(), or its step to autotune_callable()."
)
KEEP = "Pass opaque=True to keep it as a layer of known bytes and FLOP, for memory and prediction"
OPAQUE = f"{KEEP}; to {AS_IT_IS}"


def as_a_file(path: Path) -> str:
    """Return how to tune an ONNX file without importing it, as the end of a sentence."""
    return (
        f'tune the file as it is, call cubatch.autotune("{path}", library="onnxruntime"), or `cubatch tune {path} '
        "--library onnxruntime`; to tune another framework's step, hand it to autotune_callable()."
    )


class UnsupportedOperator(CubatchError):
    """
    An operator of an imported network for which cubatch has no layer.

    Args:
        operator: Its name in the imported network: "aten.cumsum", "Einsum".
        place: The path of its module, or the name of its node.
        reason: Why no layer computes it.
        remedy: What else can be done with the network.
    """

    def __init__(self, operator: str, place: str, reason: str, remedy: str = OPAQUE) -> None:
        super().__init__(operator, place, reason, remedy)
        self.operator, self.place, self.reason, self.remedy = operator, place, reason, remedy

    def __str__(self) -> str:
        return f"{self.operator} at {self.place!r} cannot be imported: {self.reason}. {self.remedy}"
