"""Keeps the recorded episodes of training, as far as environment.videos gives them room."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from headrace.common.v1 import common_pb2 as common
from headrace.rollout.v1 import rollout_pb2 as rollout
from headrace_servicekit.rpc.trajectories import segments_of

from headrace_coordinator.domain.episode_figures import told_of
from headrace_coordinator.projections.videos import Recording, Video, keep_within, write_recordings
from headrace_coordinator.run.context import RunContext
from headrace_coordinator.run.workers.clients import slot_key

log = logging.getLogger(__name__)


async def write_videos(
    context: RunContext, step_of: Callable[[int], int], response: rollout.RunEpisodesResponse
) -> None:
    """Writes the videos of a response beside their episodes; a full disk costs the videos alone."""
    environment = context.spec.environment
    if environment is None or environment.videos is None:
        return
    finished = {
        slot_key(chunk.sample): chunk.finished for chunk in response.chunks if chunk.HasField("finished")
    }
    recordings = []
    for video in response.videos:
        prompt, sample = key = slot_key(video.sample)
        if (trajectory := finished.get(key)) is None or (told := told_of(trajectory.completion_text)) is None:
            continue
        shown = Video.of(
            prompt, sample, context.item(prompt), success=bool(told.success), step=step_of(prompt) + 1
        )
        recordings.append(Recording(shown, video.content, episode_of(trajectory)))
    directory, limit = Path(context.state.directory), environment.videos.mib << 20

    def write() -> None:
        write_recordings(directory, recordings)
        keep_within(directory, limit)

    try:
        await asyncio.to_thread(write)
    except OSError as error:
        log.warning("run %s: videos of its episodes cannot be written: %s", context.run_id, error)


def episode_of(trajectory: common.Trajectory) -> bytes:
    """The serialized ActionSegment of an episode; empty for one that failed.

    What was seen stays out where it is elsewhere: the video shows it.
    """
    episodes = [segment.actions for segment in segments_of(trajectory) if segment.HasField("actions")]
    if not episodes:
        return b""
    kept = common.ActionSegment()
    kept.CopyFrom(episodes[-1])
    for tensors in (kept.observation, kept.final_observation):
        for name in [name for name, tensor in tensors.items() if tensor.WhichOneof("body") == "blob"]:
            del tensors[name]
    return kept.SerializeToString()
