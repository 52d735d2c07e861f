"""Routes under /v1/runs/{run}/videos and /v1/evaluations/{evaluation}/videos."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import APIRouter, Depends, Response
from fastapi.responses import FileResponse
from headrace_schema.resources.evaluations import EpisodeView, VideoListView

from headrace_coordinator.api.http.requests import known_parameters, view_response
from headrace_coordinator.projections.videos import EPISODE_MEDIA_TYPE, MEDIA_TYPE

if TYPE_CHECKING:
    from headrace_coordinator.app import Coordinator


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
        return FileResponse(await coordinator.videos.run_video(run_id, video), media_type=MEDIA_TYPE)

    @routes.get(
        "/{run_id}/videos/{video}/episode",
        name=f"get_{of}_episode",
        response_class=FileResponse,
        responses={200: {"content": {EPISODE_MEDIA_TYPE: {}}, "description": "The message."}},
    )
    async def get_episode(run_id: str, video: str) -> Response:
        """What the policy read and did in the episode of a video: a `headrace.common.v1.ActionSegment`."""
        path = await coordinator.videos.run_episode(run_id, video)
        return FileResponse(path, media_type=EPISODE_MEDIA_TYPE)

    @routes.get("/{run_id}/videos/{video}/steps", name=f"get_{of}_steps", response_model=EpisodeView)
    async def get_steps(run_id: str, video: str) -> Response:
        """Actions, rewards and values of the episode of a video, step by step."""
        return view_response(await coordinator.videos.run_steps(run_id, video))

    return routes
