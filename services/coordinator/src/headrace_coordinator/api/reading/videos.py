"""Recorded episodes of evaluations and of training, as people read them."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING

from headrace_schema.resources.evaluations import EpisodeView, VideoListView, VideoView

from headrace_coordinator.api.reading.reads import Reads
from headrace_coordinator.api.refusal import Refused
from headrace_coordinator.projections.videos import FOLDER, episode_name, list_videos, read_episode

if TYPE_CHECKING:
    from headrace_servicekit.rpc.episodes import Episode


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
        return directory / FOLDER / name

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
