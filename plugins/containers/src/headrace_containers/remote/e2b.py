"""Containers of E2B, by the package e2b: a template is made of an image once, and sandboxes start from it."""

from __future__ import annotations

import hashlib
import threading
from contextlib import suppress

import e2b
import httpx
from typing_extensions import override

from headrace_containers.provider import BadSpec, ContainerError, ContainerLost, Spec
from headrace_containers.remote.adapter import Machine
from headrace_containers.remote.options import RemoteOptions
from headrace_containers.remote.provider import RemoteProvider, reason, unanswered

_SPARE_S = 300
"""Of the service's own clock, beyond the spec's."""
_GONE = (e2b.SandboxNotFoundException, e2b.NotFoundException)
_ERRORS = (
    *(e2b.SandboxException, e2b.AuthenticationException, e2b.BuildException, e2b.ServiceBusyException),
    httpx.HTTPError,
)


class E2bMachine(Machine):
    """A sandbox."""

    def __init__(self, provider: E2bProvider, sandbox: e2b.Sandbox) -> None:
        self.id, self._provider, self._sandbox = sandbox.sandbox_id, provider, sandbox

    @override
    def run(self, script: str, timeout_s: float) -> tuple[int, str]:
        with self._provider.asked("a command cannot be run"):
            try:
                ran = self._sandbox.commands.run(f"cd /\n{script}", user="root", timeout=timeout_s)
            except e2b.CommandExitException as ended:
                return ended.exit_code, ended.stdout
        return ran.exit_code, ran.stdout

    @override
    def end(self) -> None:
        with suppress(*_ERRORS):
            self._sandbox.kill()


class E2bProvider(RemoteProvider):
    """See the module. The key is E2B_API_KEY's."""

    NAME, HOLDS = "e2b", ("cpus", "memory_mib")

    def __init__(self, options: RemoteOptions) -> None:
        super().__init__(options)
        self._timeout_s = options.timeout_s
        self._made: set[str] = set()
        self._making = threading.Lock()

    @override
    def check(self, spec: Spec) -> None:
        super().check(spec)
        if spec.limits.cpus != int(spec.limits.cpus):
            raise BadSpec("limits.cpus", "e2b gives whole cores; give a whole number")
        if spec.limits.memory_mib % 2:
            raise BadSpec("limits.memory_mib", "e2b gives an even number of MiB; give one")

    @override
    def make(self, spec: Spec) -> None:
        name = _template(spec)
        with self._making, self.asked(f"no template can be made of {spec.image}"):
            if name in self._made:
                return
            if not e2b.Template.exists(name):
                limits = spec.limits
                try:
                    e2b.Template.build(
                        e2b.Template().from_image(spec.image),
                        name,
                        cpu_count=int(limits.cpus),
                        memory_mb=limits.memory_mib,
                    )
                except e2b.BuildException as error:
                    raise BadSpec("image", f"e2b cannot use {spec.image}: {reason(error)}") from error
            self._made.add(name)

    @override
    def open(self, spec: Spec) -> E2bMachine:
        self.make(spec)
        with self.asked(f"a container of {spec.image} cannot be started"):
            try:
                sandbox = e2b.Sandbox.create(
                    _template(spec),
                    timeout=int(spec.limits.wall_s) + _SPARE_S,
                    metadata={"made-by": "headrace"},
                    secure=True,
                    allow_internet_access=False,
                    request_timeout=self._timeout_s,
                )
            except _GONE:
                self._made.discard(_template(spec))  # somebody has removed it; it is made anew
                raise
        return E2bMachine(self, sandbox)

    @override
    def wrong(self, error: Exception, what: str) -> ContainerError | None:
        if isinstance(error, (*_GONE, e2b.SandboxNotRunningException)):
            return ContainerLost(f"{what}: {reason(error)}")
        return unanswered("e2b", what, error) if isinstance(error, _ERRORS) else None


def _template(spec: Spec) -> str:
    of = f"{spec.image} {spec.limits.cpus:g} {spec.limits.memory_mib}"
    return "headrace-" + hashlib.sha256(of.encode()).hexdigest()[:24]


def build(options: RemoteOptions) -> E2bProvider:
    """The provider."""
    return E2bProvider(options)
