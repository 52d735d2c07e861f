"""What is kept of runs beside their figures, as people read it: recordings of steps, and videos of episodes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import asdict
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING

from headrace_schema.resources.evaluations import EpisodeView, VideoListView, VideoView
from headrace_schema.resources.views import RecordingListView, RecordingView
from headrace_servicekit.recording.files import SUFFIX, BadRecording, read_header
from headrace_servicekit.recording.recorder import Recorder, read_wanted, write_wanted

from headrace_coordinator.api.reading.reads import Reads
from headrace_coordinator.api.refusal import Refused
from headrace_coordinator.domain.run_states import TERMINAL
from headrace_coordinator.projections.videos import FOLDER as VIDEOS
from headrace_coordinator.projections.videos import episode_name, list_videos, read_episode
from headrace_coordinator.run.recording import FOLDER

if TYPE_CHECKING:
    from headrace_servicekit.rpc.episodes import Episode


class Recordings:
    """The recordings of all runs; `recorder` has those of the runs that work."""

    def __init__(self, reads: Reads, recorder: Recorder) -> None:
        self._reads, self._recorder = reads, recorder

    def all(self, run_id: str) -> RecordingListView:
        """Those of a run, newest first, and the steps that were asked for and are not made yet."""
        directory = self._directory(run_id)
        found = sorted(_views(directory), key=lambda view: (view.kept_at, view.name), reverse=True)
        ended = self._reads.run(run_id).state in TERMINAL
        return RecordingListView(recordings=found, wanted=[] if ended else sorted(read_wanted(directory)))

    def path(self, run_id: str, name: str) -> Path:
        """The file of one; Refused NOT_FOUND names those that there are."""
        return self._directory(run_id) / self._named(run_id, name).name

    def checkpoint(self, run_id: str, name: str) -> Path:
        """The folder of the checkpoint that one begins with, which stays as long as it; Refused NOT_FOUND without."""
        found = self._named(run_id, name)
        if not found.checkpoint:
            raise Refused("NOT_FOUND", f"{name} of run {run_id} begins with no checkpoint")
        return self._directory(run_id).parent / "checkpoints" / found.checkpoint

    def _named(self, run_id: str, name: str) -> RecordingView:
        known = {view.name: view for view in self.all(run_id).recordings}
        if name not in known:
            have = f"it has {', '.join([*known][:5])}" if known else "it has none"
            raise Refused("NOT_FOUND", f"run {run_id} has no recording {name!r}; {have}")
        return known[name]

    def ask(self, run_id: str, step: int) -> RecordingListView:
        """Has a step that is not made yet recorded; durable. What is asked for twice is recorded once.

        Raises:
            Refused: CONFLICT for an evaluation, an ended run, or a step that is made already or too late to be heard;
                also where the disk refuses the note.
        """
        run = self._reads.run(run_id)
        if run.state in TERMINAL:
            raise Refused(
                "CONFLICT", f"run {run_id} is {run.state}: none of its steps can be recorded any more"
            )
        state = self._reads.find(run_id)
        if state.evaluation is not None:
            raise Refused("CONFLICT", f"{run_id} is an evaluation: it makes no steps that could be recorded")
        recorder, steps = self._recorder.of(f"runs/{run_id}"), int(state.spec["steps"])
        first = state.ledger.step + 1 if recorder is None else recorder.first_step(state.ledger.step + 1)
        if not first <= step <= steps:
            made = (
                f"step {step} is made, or begun, and was not recorded"
                if step < first
                else "there is no such step"
            )
            fix = f"ask for one of {first} to {steps}" if first <= steps else "its last step has begun"
            raise Refused("CONFLICT", f"{made}; {fix}, or set recording.keep in the run's spec")
        try:
            if recorder is not None:
                recorder.ask([step])
            else:
                directory = self._directory(run_id)
                write_wanted(directory, read_wanted(directory) | {step})
        except OSError as error:
            raise Refused(
                "CONFLICT", f"the disk refuses it: {error.strerror}; mend that, then ask again"
            ) from error
        return self.all(run_id)

    def _directory(self, run_id: str) -> Path:
        return Path(self._reads.run(run_id).run_directory) / FOLDER


def _views(directory: Path) -> Iterator[RecordingView]:
    for path in directory.glob(f"*{SUFFIX}"):
        try:
            header, size = read_header(path), path.stat().st_size
        except (BadRecording, OSError):
            continue  # Dropped meanwhile, or of another version.
        yield RecordingView(
            name=path.name,
            step=header.step,
            reason=header.reason,
            size_bytes=size,
            kept_at=header.kept_at,
            checkpoint=header.base.checkpoint,
            incomplete=header.incomplete,
        )


class Videos:
    """The videos of a run or an evaluation, and what was done in their episodes."""

    def __init__(self, reads: Reads) -> None:
        self._reads = reads

    async def run_videos(self, run_id: str) -> VideoListView:
        """The videos of a run or an evaluation; NOT_FOUND names the nearest id."""
        found = await asyncio.to_thread(list_videos, self._directory(run_id))
        return VideoListView(videos=[VideoView(**asdict(video)) for video in found])

    async def run_video(self, run_id: str, name: str) -> Path:
        """The file of a video; NOT_FOUND names those that there are."""
        directory = self._directory(run_id)
        names = [video.name for video in await asyncio.to_thread(list_videos, directory)]
        if name not in names:
            have = f"it has {', '.join(names[:5])}" if names else "it has none"
            raise Refused("NOT_FOUND", f"{run_id} has no video {name!r}; {have}")
        return directory / VIDEOS / name

    async def run_episode(self, run_id: str, name: str) -> Path:
        """The file of the episode that a video shows, an ActionSegment; NOT_FOUND as `run_video`."""
        video = await self.run_video(run_id, name)
        path = video.with_name(episode_name(video.name))
        if not await asyncio.to_thread(path.is_file):
            reason = f"{run_id} kept the video {name!r} alone"
            raise Refused("NOT_FOUND", reason)
        return path

    async def run_steps(self, run_id: str, name: str) -> EpisodeView:
        """The episode that a video shows, step by step; NOT_FOUND as `run_episode`."""
        path = await self.run_episode(run_id, name)
        try:
            return steps_of(await asyncio.to_thread(read_episode, path))
        except ValueError as error:
            raise Refused("NOT_FOUND", str(error)) from error

    def _directory(self, run_id: str) -> Path:
        return Path(self._reads.run(run_id).run_directory)


def steps_of(episode: Episode) -> EpisodeView:
    """What was done in it, action by action."""
    valid_TC, values_T = episode.valid_TC, episode.values_T
    lengths = valid_TC.sum(1)
    return EpisodeView(
        actions=episode.executed_TCA[valid_TC].astype(float).tolist(),
        rewards=episode.rewards_TC[valid_TC].astype(float).tolist(),
        successes=episode.successes_TC[valid_TC].tolist(),
        chunk_starts=(lengths.cumsum() - lengths).tolist(),
        values=None if values_T is None or not isfinite(values_T.sum()) else values_T.astype(float).tolist(),
        truncated=episode.truncated,
    )
