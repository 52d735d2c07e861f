"""Options of Docker containers."""

from __future__ import annotations

from typing import Literal

from headrace_servicekit.registry import Options
from pydantic import Field, PositiveFloat


class DockerOptions(Options):
    """Options of the provider `docker`."""

    host: str = Field(
        "", description="address of the engine, such as unix:///run/docker.sock; empty: DOCKER_HOST's"
    )
    pull: Literal["missing", "never"] = Field(
        "missing", description="whether images that are missing are pulled"
    )
    relay_image: str = Field(
        "python:3.11-slim",
        description="an image with python3, in which the relay of a container with `network` runs",
    )
    timeout_s: PositiveFloat = Field(60.0, description="seconds in which the engine answers")
