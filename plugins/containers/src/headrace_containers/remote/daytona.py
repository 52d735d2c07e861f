"""Containers of Daytona, by the package daytona: sandboxes of images, which it builds and keeps."""

from __future__ import annotations

import math
import shlex
from contextlib import suppress

import daytona
from typing_extensions import override

from headrace_containers.provider import BadSpec, ContainerError, ContainerLost, Spec
from headrace_containers.remote.adapter import Machine
from headrace_containers.remote.options import RemoteOptions
from headrace_containers.remote.provider import RemoteProvider, reason, unanswered

_SPARE_MINUTES = 5
"""Of the service's own clock, beyond the spec's."""
_GIB = 1024
_GONE = (daytona.DaytonaNotFoundError, daytona.DaytonaGoneError)
_NO_ANSWER = (
    *(daytona.DaytonaAuthenticationError, daytona.DaytonaAuthorizationError, daytona.DaytonaRateLimitError),
    *(daytona.DaytonaConnectionError, daytona.DaytonaTimeoutError, daytona.DaytonaInternalServerError),
    *(daytona.DaytonaServiceUnavailableError, daytona.DaytonaBadGatewayError),
)


class DaytonaMachine(Machine):
    """A sandbox."""

    def __init__(self, provider: DaytonaProvider, sandbox: daytona.Sandbox) -> None:
        self.id, self._provider, self._sandbox = sandbox.id, provider, sandbox

    @override
    def run(self, script: str, timeout_s: float) -> tuple[int, str]:
        # Its shell may be another, and its result has both streams.
        command = f"/bin/sh -c {shlex.quote(f'exec 2>/dev/null; cd /{chr(10)}{script}')}"
        with self._provider.asked("a command cannot be run"):
            ran = self._sandbox.process.exec(command, timeout=math.ceil(timeout_s))
        return int(ran.exit_code), ran.result

    @override
    def end(self) -> None:
        with suppress(daytona.DaytonaError):
            self._sandbox.delete()


class DaytonaProvider(RemoteProvider):
    """See the module. The key is DAYTONA_API_KEY's."""

    NAME, HOLDS = "daytona", ("cpus", "memory_mib", "disk_mib")

    def __init__(self, options: RemoteOptions) -> None:
        super().__init__(options)
        self._timeout_s = options.timeout_s
        with self.asked("no client can be made"):
            self._client = daytona.Daytona()

    @override
    def check(self, spec: Spec) -> None:
        super().check(spec)
        limits = spec.limits
        if limits.cpus != int(limits.cpus):
            raise BadSpec("limits.cpus", "daytona gives whole cores; give a whole number")
        for name in ("memory_mib", "disk_mib"):
            if getattr(limits, name) % _GIB:
                raise BadSpec(f"limits.{name}", f"daytona gives whole GiB; give a multiple of {_GIB}")

    @override
    def open(self, spec: Spec) -> DaytonaMachine:
        limits = spec.limits
        params = daytona.CreateSandboxFromImageParams(
            image=daytona.Image.base(spec.image).entrypoint(["sleep", "infinity"]),
            os_user="root",
            resources=daytona.Resources(
                cpu=int(limits.cpus), memory=limits.memory_mib // _GIB, disk=limits.disk_mib // _GIB
            ),
            labels={"made-by": "headrace"},
            network_block_all=True,
            auto_stop_interval=0,
            auto_delete_interval=0,
            ttl_minutes=math.ceil(limits.wall_s / 60) + _SPARE_MINUTES,
        )
        with self.asked(f"a container of {spec.image} cannot be started"):
            try:
                sandbox = self._client.create(params, timeout=self._timeout_s)
            except _NO_ANSWER:
                raise
            except daytona.DaytonaError as error:
                raise BadSpec("image", f"daytona cannot start {spec.image}: {reason(error)}") from error
        return DaytonaMachine(self, sandbox)

    @override
    def wrong(self, error: Exception, what: str) -> ContainerError | None:
        if isinstance(error, _GONE):
            return ContainerLost(f"{what}: {reason(error)}")
        return unanswered("daytona", what, error) if isinstance(error, daytona.DaytonaError) else None


def build(options: RemoteOptions) -> DaytonaProvider:
    """The provider. Raises EngineLost."""
    return DaytonaProvider(options)
