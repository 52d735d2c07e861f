"""What every task in containers may say: `environment.options` of the backend `container`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headrace_servicekit.registry import Options
from headrace_simulator.backends.base import BackendError
from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from headrace_containers.client import Source
from headrace_containers.provider import DEFAULT_USER, BadSpec, ContainerError, Limits, Network, Spec


class LimitOptions(Options):
    """Limits of one container."""

    cpus: PositiveFloat = Field(Limits.cpus, description="cores that it may use at once")
    memory_mib: PositiveInt = Field(Limits.memory_mib, description="memory; swap is none beside it")
    processes: PositiveInt = Field(Limits.processes, description="processes and threads")
    disk_mib: PositiveInt = Field(
        Limits.disk_mib, description="what it writes to its file system, and the largest file"
    )
    wall_s: PositiveFloat = Field(
        Limits.wall_s, description="seconds of an episode until its container is ended"
    )


class NetworkOptions(Options):
    """What a container reaches; nothing by default."""

    allow: list[str] = Field(
        default_factory=list,
        description="HOST, HOST:PORT, *.HOST or an address, reached through an HTTP proxy that HTTP_PROXY names",
    )


class ContainerOptions(Options):
    """A container."""

    image: str = Field(
        "", description="image, as NAME:TAG or NAME@DIGEST; an item's field `image` goes first"
    )
    build: Path | None = Field(None, description="folder with a Dockerfile, in place of an image")
    user: str = Field(
        DEFAULT_USER,
        description="user of commands, as UID:GID or a name of the image; root has a few capabilities",
    )
    workdir: str = Field("", description="working directory; default: the image's own, or /workspace")
    env: dict[str, str] = Field(default_factory=dict, description="variables of commands")
    owned: list[str] = Field(
        default_factory=list, description="folders of the image that are made the user's"
    )
    limits: LimitOptions = Field(default_factory=lambda: LimitOptions.model_validate({}))
    network: NetworkOptions = Field(default_factory=NetworkOptions)
    provider: str = Field("docker", description="where containers run: docker, or what a plug-in brings")
    provider_options: dict[str, Any] = Field(default_factory=dict, description="options of the provider")
    warm: NonNegativeInt = Field(
        2, le=16, description="containers that are started before they are asked for"
    )

    def source(self) -> Source:
        """Where its containers come from."""
        return Source(self.provider, self.provider_options, self.warm)

    def spec(self, image: str = "", endpoint: str = "") -> Spec:
        """The container of an item, which may have its own image; `endpoint` is what it reaches beside `network`."""
        return Spec(
            image=image or self.image,
            build=None if image or self.build is None else self.build.absolute(),
            limits=Limits(**self.limits.model_dump()),
            network=Network(tuple(self.network.allow), endpoint),
            user=self.user,
            workdir=self.workdir,
            env=self.env,
            owned=tuple(self.owned),
        )

    def prepare(self) -> None:
        """Has the image pulled or built, where all items have one. Raises BackendError with the key to change."""
        if not self.image and self.build is None:
            return
        try:
            self.source().prepare(self.spec())
        except ContainerError as error:
            raise refusal(error) from error


def refusal(error: ContainerError) -> BackendError:
    """An error of a container as that of an environment that cannot be made."""
    if isinstance(error, BadSpec):
        return BackendError(f"options_json.{error.key}", error.message)
    return BackendError("environment.backend", str(error))
