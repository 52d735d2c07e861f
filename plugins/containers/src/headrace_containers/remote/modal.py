"""Containers of Modal, by the package modal: sandboxes of one app, whose images Modal keeps."""

from __future__ import annotations

import math
from contextlib import suppress

import modal
import modal.exception
from modal.stream_type import StreamType
from typing_extensions import override

from headrace_containers.provider import BadSpec, ContainerError, ContainerLost, Spec
from headrace_containers.remote.adapter import Machine
from headrace_containers.remote.options import ModalOptions
from headrace_containers.remote.provider import RemoteProvider, reason, unanswered

_SPARE_S = 300
"""Of the service's own clock, beyond the spec's."""
_GONE = (
    modal.exception.NotFoundError,
    modal.exception.SandboxTerminatedError,
    modal.exception.SandboxTimeoutError,
    modal.exception.ConflictError,
)
_ERRORS = (modal.exception.Error, ConnectionError)


class ModalMachine(Machine):
    """A sandbox."""

    def __init__(self, provider: ModalProvider, sandbox: modal.Sandbox) -> None:
        self.id, self._provider, self._sandbox = sandbox.object_id, provider, sandbox

    @override
    def run(self, script: str, timeout_s: float) -> tuple[int, str]:
        with self._provider.asked("a command cannot be run"):
            ran = self._sandbox.exec(
                *("/bin/sh", "-c", script),
                stderr=StreamType.DEVNULL,
                timeout=math.ceil(timeout_s),
                workdir="/",
            )
            said, code = ran.stdout.read(), ran.wait()
            if code < 0:
                raise ContainerLost("a command of the container's shell did not end in time")
        return code, said

    @override
    def end(self) -> None:
        with suppress(*_ERRORS):
            self._sandbox.terminate()


class ModalProvider(RemoteProvider):
    """See the module. The key is MODAL_TOKEN_ID's and MODAL_TOKEN_SECRET's."""

    NAME, HOLDS = "modal", ("cpus", "memory_mib")

    def __init__(self, options: ModalOptions) -> None:
        super().__init__(options)
        with self.asked(f"the app {options.app} cannot be had"):
            self._app = modal.App.lookup(options.app, create_if_missing=True)

    @override
    def make(self, spec: Spec) -> None:
        self._image(spec)

    def _image(self, spec: Spec) -> modal.Image:
        """An image that Modal has; it builds it once."""
        with self.asked(f"{spec.image} cannot be had"):
            try:
                return modal.Image.from_registry(spec.image).build(self._app)
            except (modal.exception.RemoteError, modal.exception.NotFoundError) as error:
                raise BadSpec("image", f"modal cannot use {spec.image}: {reason(error)}") from error

    @override
    def open(self, spec: Spec) -> ModalMachine:
        image, limits = self._image(spec), spec.limits
        with self.asked(f"a container of {spec.image} cannot be started"):
            sandbox = modal.Sandbox.create(
                *("sleep", "infinity"),
                app=self._app,
                image=image,
                timeout=math.ceil(limits.wall_s) + _SPARE_S,
                cpu=(limits.cpus, limits.cpus),
                memory=(limits.memory_mib, limits.memory_mib),
                block_network=True,
                workdir="/",
            )
        return ModalMachine(self, sandbox)

    @override
    def wrong(self, error: Exception, what: str) -> ContainerError | None:
        if isinstance(error, _GONE):
            return ContainerLost(f"{what}: {reason(error)}")
        return unanswered("modal", what, error) if isinstance(error, _ERRORS) else None


def build(options: ModalOptions) -> ModalProvider:
    """The provider. Raises EngineLost."""
    return ModalProvider(options)
