"""Moments of demonstrations: steps of a LeRobot v3 data set's episodes, of which the metadata alone is read here."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from headrace_schema.problems import Impossible, problem
from pydantic import Field
from typing_extensions import override

from headrace_coordinator.data.builtin.parquet import PATH_KEY, read_rows
from headrace_coordinator.data.items import DataItem
from headrace_coordinator.data.sources import DataSource

IMAGES, IMAGE = "observation.images.", "observation.image"
"""Of a data set with several cameras, and with one, which is called `image`."""


class LeRobot(DataSource):
    """Every step of every episode: what was seen, and the actions that came next, which the trainers read."""

    path: str = Field(
        min_length=1, description="directory of a LeRobot v3 data set, which the trainers see as well"
    )
    cameras: dict[str, str] = Field(
        default_factory=dict,
        description="image feature of the data set by camera of the policy, as {front: observation.images.top}; "
        "default: the one of the camera's own name",
    )
    fps: Annotated[float, Field(ge=0)] = Field(
        default=0.0, description="steps a second that the data set must have; 0: any"
    )
    cache_mib: Annotated[int, Field(strict=True, ge=1)] = Field(
        default=2048,
        description="most memory for decoded pictures on each rank; others are decoded when drawn",
    )

    @override
    def fingerprint(self) -> str:
        """Times and sizes of the files of metadata."""
        try:
            states = [file.stat() for file in (self._folder / "meta" / "info.json", *self._files())]
        except OSError:
            return "unreadable"
        return " ".join(f"{state.st_mtime_ns}-{state.st_size}" for state in states)

    @override
    def items(self) -> Iterator[DataItem]:
        """Yields the moments of one episode after the other."""
        for place, (task, steps) in enumerate(self._episodes):
            for step in range(steps):
                answer = json.dumps({"episode": place, "step": step, "steps": steps})
                yield DataItem(task, answer, id=f"episode {place}, step {step}")

    @override
    def wholes(self) -> list[int]:
        """Episodes are held out whole: moments of one look alike."""
        return [place for place, (_, steps) in enumerate(self._episodes) for _ in range(steps)]

    @property
    def _folder(self) -> Path:
        return Path(os.path.expanduser(self.path))

    def _files(self) -> list[Path]:
        return sorted((self._folder / "meta" / "episodes").glob("chunk-*/file-*.parquet"))

    @cached_property
    def info(self) -> dict[str, Any]:
        """What the data set says of itself. Raises Impossible."""
        try:
            found: dict[str, Any] = json.loads((self._folder / "meta" / "info.json").read_text())
            version = str(found["codebase_version"])
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise _unreadable(
                f"{self.path} is no LeRobot data set: meta/info.json cannot be read ({error})"
            ) from error
        if not version.startswith("v3."):
            raise _unreadable(f"{self.path} has the format {version}, and v3 is read")
        return found

    def shape(self, feature: str) -> tuple[int, ...]:
        """Of a feature; of a picture height, width and channels. Empty: there is none. Raises Impossible."""
        try:
            if (stated := self.info["features"].get(feature)) is None:
                return ()
            shape = [int(extent) for extent in stated["shape"]]
            first = str((stated.get("names") or [""])[0]) in ("channel", "channels") and len(shape) == 3
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise _unreadable(
                f"{self.path}: meta/info.json states no shape of {feature} ({error})"
            ) from error
        return tuple([*shape[1:], shape[0]] if first else shape)

    def features_of_cameras(self, named: Sequence[str] | None) -> dict[str, str]:
        """The image feature of each camera of a policy: of these, else of all that the options or the data set name.

        Raises Impossible.
        """
        features = self.info.get("features") or ()
        known = {name.removeprefix(IMAGES): name for name in features if name.startswith(IMAGES)}
        if IMAGE in features:
            known = {"image": IMAGE, **known}
        found = {}
        for camera in (self.cameras or known) if named is None else named:
            feature = known.get(asked := self.cameras.get(camera, camera), asked)
            if feature not in known.values():
                key = "data.options.cameras" if camera in self.cameras else "model.policy.cameras"
                reason = f"{asked!r} is no camera of the data set, only {list(known)}"
                raise Impossible(
                    [problem(key, reason, "name those, or say which is meant in data.options.cameras")]
                )
            found[camera] = feature
        return found

    def action_bounds(self) -> dict[str, list[float | None]] | None:
        """The least and the greatest of each number of an action; None where its statistics state none."""
        try:
            stated = json.loads((self._folder / "meta" / "stats.json").read_text())["action"]
            pairs = [
                (float(low), float(high)) for low, high in zip(stated["min"], stated["max"], strict=True)
            ]
        except (OSError, ValueError, TypeError, KeyError):
            return None
        whole = [pair if all(map(math.isfinite, pair)) else (None, None) for pair in pairs]
        return {"low": [low for low, _ in whole], "high": [high for _, high in whole]}

    @cached_property
    def _episodes(self) -> list[tuple[str, int]]:
        """(task, steps) of each episode. Raises Impossible."""
        _ = self.info  # which is refused where it is of another format
        rows = [row for file in self._files() for row in read_rows(file, ["tasks", "length"])]
        try:
            found = [("; ".join(map(str, row["tasks"] or ())), int(row["length"])) for row in rows]
        except (TypeError, ValueError, KeyError) as error:
            raise _unreadable(f"{self.path}: meta/episodes states no tasks or no length ({error})") from error
        if not found:
            raise _unreadable(f"{self.path}: meta/episodes lists no episode")
        return found


def _unreadable(reason: str) -> Impossible:
    fix = "name the directory of a LeRobot v3 data set, as headrace demonstrations collect writes one"
    return Impossible([problem(PATH_KEY, reason, fix)])
