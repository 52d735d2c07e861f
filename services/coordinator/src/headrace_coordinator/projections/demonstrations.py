"""Demonstrations as people browse them: episodes of a LeRobot v3 data set that a policy imitates. Synchronous.

Reads what the page shows, a few rows at a time; what learns from a data set reads it by itself, and is stricter.
pyarrow is an extra, imported when a data set is asked for.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from headrace_schema.resources.evaluations import (
    CameraView,
    DemonstrationListView,
    DemonstrationView,
    EpisodeView,
)
from headrace_servicekit.folders import read_below

IMAGES, IMAGE = "observation.images.", "observation.image"
ACTION, REWARD, SUCCESS = "action", "next.reward", "next.success"


class NotReadable(ValueError):
    """A data set, or a part of one, that cannot be read; the message says why."""


class DemonstrationSet:
    """A directory of format v3; its paths are followed below it alone, and over no link."""

    def __init__(self, directory: Path) -> None:
        """Raises NotReadable."""
        self.directory = directory
        try:
            with read_below(directory, directory / "meta" / "info.json") as file:
                self._info = json.load(file)
            features = self._info["features"]
            self.fps = float(self._info.get("fps") or 0)
            self._cameras = {
                name.removeprefix(IMAGES): str(feature["dtype"])
                for name, feature in features.items()
                if name == IMAGE or name.startswith(IMAGES)
            }
            known = set(features)
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise NotReadable(
                f"{directory} is no LeRobot v3 data set on the coordinator's host: meta/info.json: {error}"
            ) from error
        self._told = [name for name in (REWARD, SUCCESS) if name in known]
        self._rows = self._episodes()

    def page(self, first: int, size: int) -> DemonstrationListView:
        """At most `size` episodes from one on. Raises NotReadable."""
        last, total = min(first + size, len(self._rows)), len(self._rows)
        return DemonstrationListView(
            directory=str(self.directory),
            fps=self.fps,
            total=total,
            demonstrations=[self.view(place) for place in range(first, last)],
            next_page_token=str(last) if last < total else "",
        )

    def view(self, place: int) -> DemonstrationView:
        """The episode at a place of the metadata, counted from 0. Raises NotReadable."""
        row = self._row(place)
        tasks = row.get("tasks") or []
        return DemonstrationView(
            episode=place,
            task="; ".join(map(str, tasks)) if isinstance(tasks, list) else str(tasks),
            steps=int(row["length"]),
            cameras=[
                CameraView(
                    name=name,
                    film=dtype == "video",
                    from_s=float(row.get(f"videos/{self._feature(name)}/from_timestamp") or 0),
                )
                for name, dtype in self._cameras.items()
            ],
        )

    def steps(self, place: int) -> EpisodeView:
        """What was done in an episode. Raises NotReadable."""
        columns = self._columns(place, [ACTION, *self._told])
        try:
            actions = [[float(each) for each in _flat(row)] for row in columns[ACTION]]
            rewards = [float(_flat(row)[0]) for row in columns.get(REWARD, [])]
            successes = [bool(_flat(row)[0]) for row in columns.get(SUCCESS, [])]
        except (TypeError, ValueError, IndexError) as error:
            raise NotReadable(f"episode {place} of {self.directory}: {error}") from error
        return EpisodeView(
            actions=actions,
            rewards=rewards,
            successes=successes,
            chunk_starts=list(range(len(actions))),
            values=None,
            truncated=False,
        )

    def picture(self, place: int, camera: str, step: int) -> bytes:
        """The image file that a camera took before an action. Raises NotReadable."""
        feature = self._feature(camera)
        (cell,) = self._columns(place, [feature], step)[feature] or [None]
        content = cell.get("bytes") if isinstance(cell, dict) else None
        if not content:
            raise NotReadable(
                f"episode {place} of {self.directory} has no picture of {camera} at step {step}"
            )
        return bytes(content)

    def film(self, place: int, camera: str) -> Path:
        """The file of the film that an episode is a stretch of. Raises NotReadable."""
        feature, row = self._feature(camera), self._row(place)
        try:
            where = {part: int(row[f"videos/{feature}/{part}"]) for part in ("chunk_index", "file_index")}
            return self.directory / str(self._info["video_path"]).format(video_key=feature, **where)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise NotReadable(f"{self.directory} states no film of {camera}: {error}") from error

    def _feature(self, camera: str) -> str:
        if camera not in self._cameras:
            raise NotReadable(f"{self.directory} has no camera {camera!r}, only {[*self._cameras]}")
        return camera if camera == IMAGE else IMAGES + camera

    def _row(self, place: int) -> dict[str, Any]:
        if not 0 <= place < len(self._rows):
            raise NotReadable(f"{self.directory} has episodes 0 to {len(self._rows) - 1}, and no {place}")
        return self._rows[place]

    def _episodes(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for file in sorted((self.directory / "meta" / "episodes").glob("chunk-*/file-*.parquet")):
            found += self._table(file, None, None).to_pylist()
        return found

    def _columns(self, place: int, names: list[str], step: int | None = None) -> dict[str, list[Any]]:
        """Columns of an episode's steps in their order, or of one step."""
        row = self._row(place)
        only = [("episode_index", "==", int(row["episode_index"]))]
        if step is not None:
            only.append(("frame_index", "==", step))
        where = {"chunk_index": int(row["data/chunk_index"]), "file_index": int(row["data/file_index"])}
        file = self.directory / str(self._info["data_path"]).format(**where)
        table = self._table(file, [*names, "frame_index"], only).sort_by("frame_index")
        return {name: table[name].to_pylist() for name in names}

    def _table(self, file: Path, columns: list[str] | None, only: Any) -> Any:
        try:
            import pyarrow as pa
            import pyarrow.parquet as pq
        except ImportError as error:
            fix = "pip install 'headrace-coordinator[datasets]' where the coordinator runs"
            raise NotReadable(f"demonstrations are read by pyarrow, which is not there: {fix}") from error
        try:
            with read_below(self.directory, file) as opened:
                if columns is None:  # without the statistics, of which there are many columns
                    known = pq.ParquetFile(opened).schema_arrow.names
                    columns = [name for name in known if not name.startswith("stats/")]
                return pq.read_table(opened, columns=columns, filters=only)
        except (OSError, KeyError, ValueError, pa.ArrowException) as error:
            raise NotReadable(f"{file} cannot be read: {error}") from error


def _flat(cell: Any) -> list[Any]:
    return cell if isinstance(cell, list) else [cell]
