"""What an earlier pass of the same GPU has done, so that a call goes on where one was cut off."""

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
        found: What it holds; nothing where there was none.
    """

    found: Mapping[str, Any] = attrs.field(factory=dict)

    @classmethod
    def read(cls, path: Path) -> Earlier:
        """
        Read a pass.

        Raises:
            InvalidData: If it is none.
        """
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            if (found["benchmark"], found["schema"]) != ("gpu_pass", 1):
                raise InvalidData(str(path), "it is no result of benchmarks.gpu_pass")
            [(item["name"], item["status"]) for stage in found["stages"] for item in stage["items"]]
            found["device"]["name"]
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise InvalidData(str(path), f"it cannot be read: {error}") from error
        return cls(found)

    def check(self, device: Mapping[str, Any], path: Path) -> None:
        """
        Make sure that it is of a device.

        Raises:
            InvalidData: If it is of another.
        """
        if self.found["device"]["name"] != device["name"]:
            raise InvalidData(str(path), f"it is of {self.found['device']['name']}, and this is {device['name']}")

    def done(self, stage: str, commit: str) -> frozenset[str]:
        """Name the items of a stage that were ok, or lack what would be left out again: another commit may mend it."""
        whole = ("ok", "incomplete") if self.found and self.found["commit"] == commit else ("ok",)
        return frozenset(
            item["name"]
            for run in self.found.get("stages", ())
            if run["name"] == stage
            for item in run["items"]
            if item["status"] in whole
        )

    def skipped_kernels(self, commit: str) -> dict[str, str]:
        """Give the kernels that ended processes, by name with the reason: another commit's may be mended since."""
        return dict(self.found["skipped_kernels"]) if self.found and self.found["commit"] == commit else {}

    def calls(self) -> list[Record]:
        """Name the calls that the items came of, this one not counted."""
        if not self.found:
            return []
        mine = {name: self.found.get(name) for name in ("date", "commit", "seconds_spent")}
        return [*self.found.get("resumed", ()), mine]

    def joined(self, runs: Iterable[Record], commit: str) -> list[Record]:
        """Give all stages: an item done again takes the place of the one before, which else says whose commit it is."""
        stages = {run["name"]: run for run in self.found.get("stages", ())}
        foreign = {} if self.found.get("commit") == commit else {"commit": self.found.get("commit")}
        kept = {name: {item["name"]: foreign | item for item in run["items"]} for name, run in stages.items()}
        found = {name: run | {"items": list(kept[name].values())} for name, run in stages.items()}
        for run in runs:
            items = kept.get(run["name"], {}) | {item["name"]: item for item in run["items"]}
            skipped = [name for name in run["skipped"] if name not in items]  # what became of it before stays
            found[run["name"]] = run | {"items": list(items.values()), "skipped": skipped}
        return list(found.values())
