"""Results of an earlier pass of the same GPU, so that a call continues where one was cut off."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import attrs

from cubatch.errors import InvalidData

Record = dict[str, Any]


@attrs.frozen
class Earlier:
    """
    The file of an earlier pass.

    Attributes:
        content: Its content; empty if there is no file.
    """

    content: Mapping[str, Any] = attrs.field(factory=dict)

    @classmethod
    def read(cls, path: Path) -> Earlier:
        """
        Read a pass.

        Raises:
            InvalidData: If the file is no pass.
        """
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if (content["benchmark"], content["schema"]) != ("gpu_pass", 1):
                raise InvalidData(str(path), "it is no result of benchmarks.gpu_pass")
            [(item["name"], item["status"]) for stage in content["stages"] for item in stage["items"]]
            content["device"]["name"]
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise InvalidData(str(path), f"it cannot be read: {error}") from error
        return cls(content)

    def check(self, device: Mapping[str, Any], path: Path) -> None:
        """
        Check that the pass is of a device.

        Raises:
            InvalidData: If it is of another device.
        """
        if self.content["device"]["name"] != device["name"]:
            raise InvalidData(str(path), f"it is of {self.content['device']['name']}, and this is {device['name']}")

    def done(self, stage: str, commit: str) -> frozenset[str]:
        """Return the items of a stage that need not run again: ok, or incomplete at the same commit."""
        whole = ("ok", "incomplete") if self.content and self.content["commit"] == commit else ("ok",)
        return frozenset(
            item["name"]
            for run in self.content.get("stages", ())
            if run["name"] == stage
            for item in run["items"]
            if item["status"] in whole
        )

    def skipped_kernels(self, commit: str) -> dict[str, str]:
        """Return the kernels that ended processes, with the reason; none of another commit, which may be fixed."""
        return dict(self.content["skipped_kernels"]) if self.content and self.content["commit"] == commit else {}

    def calls(self) -> list[Record]:
        """Return the earlier calls of the pass: date, commit and seconds."""
        if not self.content:
            return []
        mine = {name: self.content.get(name) for name in ("date", "commit", "seconds_spent")}
        return [*self.content.get("resumed", ()), mine]

    def joined(self, runs: Iterable[Record], commit: str) -> list[Record]:
        """Return all stages; a new item replaces an earlier one, and items of another commit have its name."""
        stages = {run["name"]: run for run in self.content.get("stages", ())}
        foreign = {} if self.content.get("commit") == commit else {"commit": self.content.get("commit")}
        items_of = {name: {item["name"]: foreign | item for item in run["items"]} for name, run in stages.items()}
        content = {name: run | {"items": list(items_of[name].values())} for name, run in stages.items()}
        for run in runs:
            items = items_of.get(run["name"], {}) | {item["name"]: item for item in run["items"]}
            skipped = [name for name in run["skipped"] if name not in items]  # an earlier result stays
            content[run["name"]] = run | {"items": list(items.values()), "skipped": skipped}
        return list(content.values())
