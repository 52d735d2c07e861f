"""What a provider of containers is: a container is started from an image, runs commands, takes and gives files, ends.

Third parties import this module alone. A provider is asked from several threads, one for each container at most; it
knows nothing of runs, pools and brokers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

MIB = 1 << 20
DEFAULT_USER = "1000:1000"
WORKDIR = "/workspace"
"""Working directory where neither the spec nor the image names one; the user's own."""
PROXY_PORT, ENDPOINT_PORT = 3128, 3129
"""Where a container reaches its proxy and its endpoint, at 127.0.0.1; see `Network`."""


class ContainerError(Exception):
    """Something about a container failed; the sentence says what, and where it can be told, what to change."""


class BadSpec(ContainerError):
    """A spec that cannot be had as it is: an image that is not there, a user that is none. `key` has to change."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(f"{key}: {message}")
        self.key, self.message = key, message


class ContainerLost(ContainerError):
    """The container is gone, or had to be ended: killed by a limit, by its engine's end, or by a full disk."""


class EngineLost(ContainerLost):
    """The engine that runs the containers does not answer, or has no room for another one."""


class BadPath(ContainerError):
    """A file that cannot be read or written: none, no regular file, too large, or outside the folder."""


@dataclass(frozen=True)
class Limits:
    """Of one container. Beyond `memory_mib` the kernel kills its processes; beyond `disk_mib` and `wall_s` it ends."""

    cpus: float = 1.0
    memory_mib: int = 1024
    """Swap is none beside it."""
    processes: int = 256
    """Processes and threads; further ones cannot be started."""
    disk_mib: int = 2048
    """What it writes to its file system; also the largest file."""
    wall_s: float = 3600.0
    """Seconds from its hand-over to its end."""


@dataclass(frozen=True)
class Network:
    """What a container reaches; nothing by default: it has a loopback device alone.

    `allow` lists HOST, HOST:PORT or *.HOST, which it reaches through an HTTP proxy at 127.0.0.1:PROXY_PORT (HTTP_PROXY
    and HTTPS_PROXY say so); names are resolved outside, and an address of the engine's host or its networks is reached
    only where `allow` lists it as an address. `endpoint` is one HOST:PORT, such as the policy's, that it reaches at
    127.0.0.1:ENDPOINT_PORT.
    """

    allow: tuple[str, ...] = ()
    endpoint: str = ""

    @property
    def is_off(self) -> bool:
        """Whether it reaches nothing."""
        return not (self.allow or self.endpoint)


@dataclass(frozen=True)
class Spec:
    """A container to have. Either `image` or `build`."""

    image: str = ""
    """NAME:TAG or NAME@DIGEST; pulled where the engine has none of it."""
    build: Path | None = None
    """A folder with a Dockerfile; its image is made once for its content."""
    context: bytes = field(default=b"", repr=False)
    """Such a folder's content as a tar, in its place: who may read the folder has packed it."""
    limits: Limits = Limits()
    network: Network = Network()
    user: str = DEFAULT_USER
    """UID[:GID] or a name that the image knows. "root" has only the capabilities that package managers need; any other
    user has none at all.
    """
    workdir: str = ""
    """Of commands that name none; made where it is not there. Empty: the image's own, or WORKDIR."""
    env: Mapping[str, str] = field(default_factory=dict)
    owned: tuple[str, ...] = ()
    """Folders of the image that are the user's: `chown -R` in a layer that is made once."""


@dataclass(frozen=True)
class File:
    """A file of a container. `path` is absolute, or relative to the working directory."""

    path: str
    data: bytes
    mode: int = 0o644


@dataclass(frozen=True)
class Ran:
    """How a command ended."""

    exit_code: int
    """128 + N where signal N killed it; 137 where a limit did."""
    stdout: bytes
    stderr: bytes
    ended: Literal["exit", "time", "output"] = "exit"
    """By itself, killed after `timeout_s`, or killed as it would not stop printing."""
    left_out: int = 0
    """Bytes of output beyond the limit, which were read and dropped."""
    seconds: float = 0.0


Output = Callable[[int, bytes], None]
"""Gets the stream (1 stdout, 2 stderr) and what came of it, as it comes, within the limit of bytes."""


class Container(Protocol):
    """A running container. One command at a time; its methods raise ContainerLost once it is gone."""

    id: str
    """Name of it at the provider, for messages and logs."""
    command: tuple[str, ...] = ()
    """What its image says to run, which nobody has started; empty where it says nothing."""

    def exec(
        self,
        command: Sequence[str],
        *,
        stdin: bytes = b"",
        cwd: str = "",
        env: Mapping[str, str] | None = None,
        user: str = "",
        timeout_s: float = 60.0,
        most_bytes: int = MIB,
        on_output: Output | None = None,
    ) -> Ran:
        """Runs a command to its end and returns its output; a script is `("sh", "-c", SCRIPT)`.

        It has the spec's user, working directory and variables where these name none. After `timeout_s` it and all
        that it started are killed. What it leaves in the background may live on until the container ends, and is not
        waited for once its output is closed. Of the output, `most_bytes` of both streams together are kept.

        Raises:
            BadSpec: no such user; a command, or a variable, that no process can be given.
            ContainerLost: the container ended meanwhile, or had to be ended.
        """
        ...

    def write(self, files: Sequence[File], *, user: str = "") -> None:
        """Writes files, with the folders above them, which belong to `user` (default: the spec's).

        Raises BadPath for a path that leads through a link out of where it says, or a full disk.
        """
        ...

    def read(self, path: str, *, most_bytes: int = 64 * MIB) -> bytes:
        """The content of a regular file. Raises BadPath: none, a link, a folder, a device, or larger."""
        ...

    def read_folder(self, path: str, *, most_bytes: int = 64 * MIB) -> Iterator[File]:
        """The regular files below a folder, by paths relative to it; links and devices are left out. Raises BadPath."""
        ...

    def close(self) -> None:
        """Ends the container with all that it holds. May be called twice; raises nothing."""
        ...


class Provider(Protocol):
    """Where containers run. Made of its options; `check` them first."""

    def prepare(self, spec: Spec) -> None:
        """Makes what containers of a spec need: pulls or builds the image, once for all that ask at the same time.

        Raises BadSpec, EngineLost.
        """
        ...

    def start(self, spec: Spec) -> Container:
        """Starts a container; `prepare`s where that was not done. Raises BadSpec, EngineLost, ContainerLost."""
        ...

    def reap(self) -> int:
        """Removes what owners that are gone have left: containers, networks, volumes. Returns how many."""
        ...

    def close(self) -> None:
        """Ends all containers of this provider."""
        ...


def spec_of(given: Mapping[str, Any]) -> Spec:
    """A Spec of its JSON form; raises BadSpec for keys and values that are none."""
    from pydantic import TypeAdapter, ValidationError

    try:
        return TypeAdapter(Spec).validate_python(dict(given))
    except ValidationError as error:
        first = error.errors()[0]
        raise BadSpec(".".join(map(str, first["loc"])), first["msg"]) from error
