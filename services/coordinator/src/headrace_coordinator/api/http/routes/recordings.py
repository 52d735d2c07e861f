"""Routes of what is kept of runs: recordings of steps, and videos of episodes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from fastapi import APIRouter, Depends, Query, Response
from fastapi.responses import FileResponse, StreamingResponse
from headrace_schema.resources.evaluations import DemonstrationListView, EpisodeView, VideoListView
from headrace_schema.resources.views import RecordingListView
from headrace_schema.stores import is_remote
from headrace_schema.workflow import LEROBOT

from headrace_coordinator.api.http.downloads import TAR_ANSWER, FileAnswer, folder_answer
from headrace_coordinator.api.http.requests import (
    Key,
    PageSize,
    PageToken,
    foreign_token,
    keyed_response,
    known_parameters,
    view_response,
)
from headrace_coordinator.api.refusal import Refused
from headrace_coordinator.projections.demonstrations import DemonstrationSet, NotReadable
from headrace_coordinator.projections.videos import EPISODE_MEDIA_TYPE, MEDIA_TYPE

if TYPE_CHECKING:
    from headrace_coordinator.app import Coordinator

T = TypeVar("T")
GZIP = "application/gzip"
ANSWER: dict[int | str, dict[str, Any]] = {
    200: {"content": {GZIP: {}}, "description": "The recording, for headrace replay."}
}


def recording_routes(coordinator: Coordinator) -> APIRouter:
    """The routes of recordings."""
    routes = APIRouter(prefix="/v1/runs", tags=["runs"], dependencies=[Depends(known_parameters)])

    @routes.post("/{run_id}:record", response_model=RecordingListView)
    async def record_step(
        run_id: str,
        step: Annotated[int, Query(ge=1, description="a step that is not made yet")],
        key: Key,
    ) -> Response:
        """Keeps what is said to the services in a step, as a file to download."""
        return keyed_response(coordinator.recordings.ask(run_id, step), key)

    @routes.get("/{run_id}/recordings", response_model=RecordingListView)
    async def list_recordings(run_id: str) -> Response:
        """Recordings of a run's steps, newest first, and the steps of which one was asked for."""
        return view_response(await asyncio.to_thread(coordinator.recordings.all, run_id))

    @routes.get("/{run_id}/recordings/{name}", response_class=FileResponse, responses=ANSWER)
    async def get_recording(run_id: str, name: str) -> Response:
        """One recording."""
        path = await asyncio.to_thread(coordinator.recordings.path, run_id, name)
        return FileAnswer(path.parents[2], path, GZIP, f"{run_id}-{name}")

    @routes.get(
        "/{run_id}/recordings/{name}/checkpoint", response_class=StreamingResponse, responses=TAR_ANSWER
    )
    async def get_recorded_checkpoint(run_id: str, name: str) -> Response:
        """All files of the checkpoint that a recording begins with, as a tar file."""
        folder = await asyncio.to_thread(coordinator.recordings.checkpoint, run_id, name)
        label = f"{run_id}-{folder.parent.name}-{folder.name}"
        return await folder_answer(folder.parents[3], folder, label, f"the checkpoint of {name}")

    return routes


def demonstration_routes(coordinator: Coordinator) -> APIRouter:
    """The routes of the demonstrations that a run's policy imitates."""
    routes = APIRouter(prefix="/v1/runs", tags=["runs"], dependencies=[Depends(known_parameters)])

    @routes.get("/{run_id}/demonstrations", response_model=DemonstrationListView)
    async def list_demonstrations(
        run_id: str, page_size: PageSize = 50, page_token: PageToken = ""
    ) -> Response:
        """Episodes of the data set that trainer.warmup.demonstrations names, in its order."""
        if page_token and not page_token.isdecimal():
            raise foreign_token(page_token)
        first = int(page_token or 0)
        return view_response(await _look(coordinator, run_id, lambda found: found.page(first, page_size)))

    @routes.get("/{run_id}/demonstrations/{episode}/steps", response_model=EpisodeView)
    async def get_demonstration_steps(run_id: str, episode: int) -> Response:
        """Actions of one, and rewards where the data set states them, step by step."""
        return view_response(await _look(coordinator, run_id, lambda found: found.steps(episode)))

    @routes.get("/{run_id}/demonstrations/{episode}/pictures/{camera}/{step}", response_class=Response)
    async def get_demonstration_picture(run_id: str, episode: int, camera: str, step: int) -> Response:
        """What a camera saw before an action, where the data set has pictures."""
        content = await _look(coordinator, run_id, lambda found: found.picture(episode, camera, step))
        return Response(content, media_type="image/png" if content.startswith(b"\x89PNG") else "image/jpeg")

    @routes.get("/{run_id}/demonstrations/{episode}/films/{camera}", response_class=FileResponse)
    async def get_demonstration_film(run_id: str, episode: int, camera: str) -> Response:
        """The film of a camera that the episode is a stretch of, an MP4 file."""
        directory, path = await _look(
            coordinator, run_id, lambda found: (found.directory, found.film(episode, camera))
        )
        return FileAnswer(directory, path, MEDIA_TYPE)

    return routes


async def _look(coordinator: Coordinator, run_id: str, look: Callable[[DemonstrationSet], T]) -> T:
    """What is found in a run's demonstrations. NOT_FOUND where the coordinator's host has none that can be read."""
    spec = coordinator.reads.run(run_id).spec
    named = (spec.get("trainer") or {}).get("warmup", {}).get("demonstrations")
    if (data := spec.get("data") or {}).get("source") == LEROBOT:
        named = data["options"].get("path")
    if not named or is_remote(named):
        reason = f"its demonstrations are at {named}" if named else "imitates no demonstrations"
        fix = "trainer.warmup.demonstrations or data.options.path names no directory"
        raise Refused("NOT_FOUND", f"run {run_id} {reason}: {fix}")
    try:
        return await asyncio.to_thread(lambda: look(DemonstrationSet(Path(named))))
    except NotReadable as error:
        raise Refused("NOT_FOUND", str(error)) from error


def video_routes(coordinator: Coordinator, kind: str) -> APIRouter:
    """The routes of videos of `kind`, runs or evaluations."""
    of = kind.removesuffix("s")
    routes = APIRouter(prefix=f"/v1/{kind}", tags=[kind], dependencies=[Depends(known_parameters)])

    @routes.get("/{run_id}/videos", name=f"list_{of}_videos", response_model=VideoListView)
    async def list_videos(run_id: str) -> Response:
        """Videos of episodes, by step and item; none where none was recorded."""
        return view_response(await coordinator.videos.run_videos(run_id))

    @routes.get(
        "/{run_id}/videos/{video}",
        name=f"get_{of}_video",
        response_class=FileResponse,
        responses={200: {"content": {MEDIA_TYPE: {}}, "description": "The file."}},
    )
    async def get_video(run_id: str, video: str) -> Response:
        """One video, an MP4 file (H.264)."""
        path = await coordinator.videos.run_video(run_id, video)
        return FileAnswer(path.parents[2], path, MEDIA_TYPE)

    @routes.get(
        "/{run_id}/videos/{video}/episode",
        name=f"get_{of}_episode",
        response_class=FileResponse,
        responses={200: {"content": {EPISODE_MEDIA_TYPE: {}}, "description": "The message."}},
    )
    async def get_episode(run_id: str, video: str) -> Response:
        """What the policy read and did in the episode of a video: a `headrace.common.v1.ActionSegment`."""
        path = await coordinator.videos.run_episode(run_id, video)
        return FileAnswer(path.parents[2], path, EPISODE_MEDIA_TYPE)

    @routes.get("/{run_id}/videos/{video}/steps", name=f"get_{of}_steps", response_model=EpisodeView)
    async def get_steps(run_id: str, video: str) -> Response:
        """Actions, rewards and values of the episode of a video, step by step."""
        return view_response(await coordinator.videos.run_steps(run_id, video))

    return routes
