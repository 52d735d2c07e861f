"""Pictures of a LeRobot data set's episodes, decoded when they are asked for and kept up to a bound of bytes.

Pictures are frames of films, or files in the columns of parquet files. Knows no policy and no metadata.
Shapes: B pictures, H × W pixels.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from headrace_modelkit.pictures import decode_image
from torch import Tensor

Step = tuple[int, int]
"""An episode by its place in the metadata, and one of its steps."""
OPEN_FILES = 8
"""Files that stay open at once: to open one takes as long as to decode many frames."""
NEAR = 12
"""Frames that are decoded rather than sought behind: films of data sets have a key frame every second frame or so."""


class NotReadable(ValueError):
    """A file or a picture that cannot be read; the message says which."""


@dataclass(frozen=True)
class Stretch:
    """Where an episode's pictures of a camera are: in a file, from a time on where that is a film."""

    file: Path
    name: str
    episode: int
    length: int
    first_s: float = 0.0


class Camera(Protocol):
    """Reads pictures of one camera."""

    def read(self, steps: Sequence[Step]) -> Iterator[tuple[Step, np.ndarray]]:
        """(H, W, 3) of each of these steps, in any order. Raises NotReadable."""


class FilmCamera:
    """Frames of films; an episode is a stretch of one."""

    def __init__(self, stretch: Callable[[int], Stretch], fps: float) -> None:
        self._stretch, self._fps = stretch, fps
        self._films: OrderedDict[tuple[Path, int, int], Any] = OrderedDict()

    def read(self, steps: Sequence[Step]) -> Iterator[tuple[Step, np.ndarray]]:
        """As `Camera.read`, file by file in the order of time."""
        placed = [(self._stretch(place), step, (place, step)) for place, step in steps]
        placed.sort(key=lambda each: (each[0].file, each[0].first_s + each[1] / self._fps))
        for _, some in groupby(placed, key=lambda each: each[0].file):
            yield from self._of_file(list(some))

    def _of_file(self, placed: list[tuple[Stretch, int, Step]]) -> Iterator[tuple[Step, np.ndarray]]:
        name, half = placed[0][0].name, 0.5 / self._fps
        try:
            film = self._opened(placed[0][0].file)
            stream, frame, frames = film.streams.video[0], None, iter(())
            for stretch, step, key in placed:
                wanted_s = stretch.first_s + step / self._fps
                if frame is None or not -half <= wanted_s - frame.time <= NEAR / self._fps:
                    film.seek(max(0, int((wanted_s - half) / stream.time_base)), stream=stream)
                    frame, frames = None, film.decode(stream)
                while frame is None or frame.time < wanted_s - half:
                    if (frame := next(frames, None)) is None:
                        break
                if frame is None or frame.time > wanted_s + half:
                    raise NotReadable(
                        f"{name} has no frame {step} of episode {stretch.episode}, which has {stretch.length} steps"
                    )
                yield key, frame.to_ndarray(format="rgb24")
        except (av.FFmpegError, OSError, IndexError) as error:
            raise NotReadable(f"{name} cannot be read: {error}") from error

    def _opened(self, file: Path) -> Any:
        stated = file.stat()
        key = (file, stated.st_mtime_ns, stated.st_size)
        if (film := self._films.pop(key, None)) is None:
            film = av.open(str(file))
            film.streams.video[
                0
            ].thread_type = "SLICE"  # Threads by frame would decode far beyond what is wanted.
        self._films[key] = film
        while len(self._films) > OPEN_FILES:
            self._films.popitem(last=False)[1].close()
        return film


class PictureCamera:
    """Picture files in a column of parquet files, which are read a row group at a time."""

    def __init__(self, stretch: Callable[[int], Stretch], feature: str, kept: Kept) -> None:
        self._stretch, self._feature, self._kept = stretch, feature, kept
        self._opened = lru_cache(OPEN_FILES)(_Rows)

    def read(self, steps: Sequence[Step]) -> Iterator[tuple[Step, np.ndarray]]:
        """As `Camera.read`, row group by row group."""
        placed = sorted((*self._row(place, step), (place, step)) for place, step in steps)
        for (file, group), some in groupby(placed, key=lambda each: each[:2]):
            cells = self._cells(file, group)
            for _, _, row, (place, step) in some:
                try:
                    yield (
                        (place, step),
                        np.asarray(decode_image((cells[row].as_py() or {}).get("bytes") or b"")),
                    )
                except ValueError as error:
                    stretch = self._stretch(place)
                    where = f"{stretch.name}, episode {stretch.episode}, frame {step} of {self._feature}"
                    raise NotReadable(f"{where}: {error}") from error

    def _row(self, place: int, step: int) -> tuple[Path, int, int]:
        """(file, row group, place in it) of a step."""
        stretch = self._stretch(place)
        try:
            return stretch.file, *self._opened(stretch.file).place(stretch.episode, step)
        except (pa.ArrowException, OSError, KeyError) as error:
            raise NotReadable(f"{stretch.name} cannot be read: {error}") from error

    def _cells(self, file: Path, group: int) -> Any:
        key = (self._feature, file, group)
        if (cells := self._kept.get(key)) is None:
            try:
                cells = self._opened(file).table.read_row_group(group, columns=[self._feature])[self._feature]
            except (pa.ArrowException, OSError) as error:
                raise NotReadable(f"{file.name} cannot be read: {error}") from error
            self._kept.put(key, cells, cells.nbytes)
        return cells


class _Rows:
    """A parquet file, and where each step's row is in it."""

    def __init__(self, file: Path) -> None:
        self.table = pq.ParquetFile(file)
        counted = self.table.metadata
        sizes = [counted.row_group(group).num_rows for group in range(counted.num_row_groups)]
        self._starts = np.concatenate([[0], np.cumsum(sizes)])
        told = self.table.read(columns=["episode_index", "frame_index"])
        episodes, steps = told["episode_index"].to_numpy(), told["frame_index"].to_numpy()
        self._order = np.lexsort((steps, episodes))
        self._episodes, self._steps = episodes[self._order], steps[self._order]

    def place(self, episode: int, step: int) -> tuple[int, int]:
        """(row group, place in it). Raises KeyError."""
        first, end = np.searchsorted(self._episodes, [episode, episode + 1])
        place = first + np.searchsorted(self._steps[first:end], step)
        if place == end or self._steps[place] != step:
            raise KeyError(f"episode {episode} has no frame {step}")
        row = int(self._order[place])
        group = int(np.searchsorted(self._starts, row, side="right")) - 1
        return group, row - int(self._starts[group])


class Kept:
    """What was read last, up to a bound of bytes; what is larger by itself is not kept."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes, self.bytes = most_bytes, 0
        self._found: OrderedDict[Any, tuple[Any, int]] = OrderedDict()

    def get(self, key: Any) -> Any:
        """What is kept under a key, else None."""
        if (found := self._found.get(key)) is None:
            return None
        self._found.move_to_end(key)
        return found[0]

    def put(self, key: Any, value: Any, size: int) -> None:
        """Keeps a value, and drops those that nobody has asked for longest."""
        if size > self.most_bytes or key in self._found:
            return
        self._found[key] = value, size
        self.bytes += size
        while self.bytes > self.most_bytes:
            self.bytes -= self._found.popitem(last=False)[1][1]


class Films:
    """The pictures of a data set's cameras by step, decoded as they are asked for."""

    def __init__(
        self,
        cameras: Mapping[str, Camera],
        kept: Kept,
        beside: Callable[[int], Sequence[Step]] | None = None,
    ) -> None:
        """`beside` names the steps of an episode that are read with the first one of them that is asked for."""
        self.kept = kept
        self._cameras, self._beside = cameras, beside

    def take(self, camera: str, steps: Sequence[Step]) -> Tensor:
        """(B, H, W, 3) uint8 of these steps of a camera. Raises NotReadable."""
        found = {step: self.kept.get((camera, *step)) for step in steps}
        missing = [step for step, picture in found.items() if picture is None]
        if self._beside is not None:
            places = dict.fromkeys(place for place, _ in missing)
            missing = [step for place in places for step in self._beside(place)]
        for step, array in self._cameras[camera].read(missing) if missing else ():
            picture = torch.from_numpy(np.array(array))
            self.kept.put((camera, *step), picture, picture.nbytes)
            if step in found:
                found[step] = picture
        first = found[steps[0]].shape
        for (_, number), picture in found.items():
            if picture.shape != first:
                shapes = f"{tuple(picture.shape)}, the first one {tuple(first)}"
                raise NotReadable(f"frame {number} of camera {camera!r} has the shape {shapes}")
        return torch.stack([found[step] for step in steps])
