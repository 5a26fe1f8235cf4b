"""The error of what cannot be imported."""

from __future__ import annotations

from pathlib import Path

from cubatch.errors import CubatchError

AS_IT_IS = (
    "tune the network as it is, hand its PyTorch module to autotune_module(), or its step to autotune_callable()."
)
KEEP = "Pass opaque=True to keep it as a layer of known bytes and FLOP, for memory and prediction"
OPAQUE = f"{KEEP}; to {AS_IT_IS}"


def as_a_file(path: Path) -> str:
    """Return how an ONNX file is tuned as it is."""
    return (
        f'tune the file as it is, call cubatch.autotune("{path}", library="onnxruntime"), or `cubatch tune {path} '
        "--library onnxruntime`; to tune another framework's step, hand it to autotune_callable()."
    )


class UnsupportedOperator(CubatchError):
    """
    An operator of an imported network that no layer of ours stands for.

    Args:
        operator: As its source calls it: "aten.cumsum", "Einsum".
        place: Where it is: the path of a module, the name of a node.
        reason: What about it is not ours.
        remedy: What else can be done with the network.
    """

    def __init__(self, operator: str, place: str, reason: str, remedy: str = OPAQUE) -> None:
        super().__init__(operator, place, reason, remedy)
        self.operator, self.place, self.reason, self.remedy = operator, place, reason, remedy

    def __str__(self) -> str:
        return f"{self.operator} at {self.place!r} cannot be imported: {self.reason}. {self.remedy}"
