"""What providers of remote containers share: refusals of what their service cannot hold, and an end for all of them."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

from typing_extensions import override

from headrace_containers.provider import BadSpec, ContainerError, EngineLost, Provider, Spec
from headrace_containers.remote.adapter import Machine, RemoteContainer
from headrace_containers.remote.options import RemoteOptions

LIMITS = ("cpus", "memory_mib", "processes", "disk_mib")


class RemoteProvider(Provider):
    """Containers of a service; each ends by the service's own clock too, where this process has died.

    A subclass says what its service `holds`, makes a machine with `open`, and gives the service's errors to `asked`.
    """

    NAME: ClassVar[str]
    HOLDS: ClassVar[tuple[str, ...]] = ()
    """Of LIMITS."""

    def __init__(self, options: RemoteOptions) -> None:
        known = [f"limits.{each}" for each in LIMITS]
        if wrong := [each for each in options.unheld if each not in known]:
            raise BadSpec("provider_options.unheld", f"{wrong[0]!r} is none of {', '.join(known)}")
        self._unheld = options.unheld
        self._open: list[RemoteContainer] = []
        self._lock = threading.Lock()

    @abstractmethod
    def open(self, spec: Spec) -> Machine:
        """Starts a machine of a spec that was not refused, without a network. Raises BadSpec, EngineLost."""

    @abstractmethod
    def wrong(self, error: Exception, what: str) -> ContainerError | None:
        """An error of the service in our words; None: it is none of the service's."""

    def make(self, spec: Spec) -> None:
        """Makes what machines of a spec need: a first one, which is ended again. Raises BadSpec, EngineLost."""
        self.open(spec).end()

    def check(self, spec: Spec) -> None:
        """Raises BadSpec, with the key, for what the service cannot hold."""
        if spec.build is not None or spec.context:
            raise BadSpec("build", f"{self.NAME} builds no folder here; push its image, and give `image`")
        if not spec.image:
            raise BadSpec("image", "it is empty; give the image that containers start from")
        if spec.network.allow:
            raise BadSpec(
                "network.allow", f"{self.NAME} has no proxy with a list; leave it empty, or use docker"
            )
        if spec.network.endpoint:
            raise BadSpec("network.endpoint", f"a container of {self.NAME} cannot reach it; use docker")
        for name in LIMITS:
            if name not in self.HOLDS and not self.accepts(name):
                raise self.unheld(name, "has no such limit for one container")

    def accepts(self, name: str) -> bool:
        """Whether a limit may be the service's own."""
        return f"limits.{name}" in self._unheld

    def unheld(self, name: str, why: str) -> BadSpec:
        """The refusal of a limit."""
        key = f"limits.{name}"
        return BadSpec(key, f"{self.NAME} {why}; where its own will do, say provider_options.unheld: [{key}]")

    @contextmanager
    def asked(self, what: str) -> Iterator[None]:
        """Says the service's errors in our words."""
        try:
            yield
        except ContainerError:
            raise
        except Exception as error:
            if (said := self.wrong(error, what)) is None:
                raise
            raise said from error

    @override
    def prepare(self, spec: Spec) -> None:
        self.check(spec)
        self.make(spec)

    @override
    def start(self, spec: Spec) -> RemoteContainer:
        self.check(spec)
        container = RemoteContainer(self.open(spec), spec)
        with self._lock:
            self._open = [each for each in self._open if not each.is_closed] + [container]
        return container

    @override
    def reap(self) -> int:
        return 0

    @override
    def close(self) -> None:
        with self._lock:
            living, self._open = self._open, []
        for container in living:
            container.close()


def reason(error: BaseException) -> str:
    """The first line of an error."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]


def unanswered(name: str, what: str, error: BaseException) -> EngineLost:
    """The service does not do what it was asked."""
    return EngineLost(f"{what}: {name} does not answer: {reason(error)}")
