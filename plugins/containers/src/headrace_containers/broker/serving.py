"""Serves containers to the children of a simulator: a connection is a container, which ends with it."""

from __future__ import annotations

import json
import select
import socket
import struct
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from headrace_servicekit.causes import raised
from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveFloat, PositiveInt

from headrace_containers import wire
from headrace_containers.broker.reaper import Reaper
from headrace_containers.broker.warm import IDLE_S, Warm
from headrace_containers.provider import (
    BadSpec,
    Container,
    ContainerError,
    EngineLost,
    File,
    Provider,
    Spec,
    spec_of,
)
from headrace_containers.providers import provider_of


class Settings(BaseModel):
    """Limits of the operator's; from the environment, `HEADRACE_CONTAINERS_<FIELD>`."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    most: PositiveInt = 64
    """Containers at once."""
    most_warm: NonNegativeInt = 16
    """Containers that are started before they are asked for."""
    most_memory_mib: PositiveInt = 65_536
    """Of one container."""
    engines: str = ""
    """Addresses of engines that a run may name, separated by commas, beside that of DOCKER_HOST."""
    place_s: PositiveFloat = 60.0
    """How long one waits for another one's end where there are too many."""


class Server:
    """Listens in a folder, to processes of these users alone."""

    def __init__(self, settings: Settings, folder: Path, users: Sequence[int]) -> None:
        self._settings, self._path, self._users = settings, folder / wire.SOCKET, {*users}
        self._places = threading.BoundedSemaphore(settings.most)
        self._providers: dict[str, tuple[Provider, Warm | None]] = {}
        self._lock = threading.Lock()
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._sessions: dict[int, Session] = {}
        self._hangups = select.poll()
        self._closed = threading.Event()
        self._reaper = Reaper()

    def start(self) -> None:
        """Listens from here on, in threads."""
        self._path.unlink(missing_ok=True)
        self._listening.bind(str(self._path))
        self._path.chmod(0o666)  # who may connect is asked of the kernel, below
        self._listening.listen(128)
        for target in (self._accept, self._watch):
            threading.Thread(target=target, daemon=True).start()

    def close(self) -> None:
        """Ends all containers."""
        self._closed.set()
        self._listening.close()
        for session in list(self._sessions.values()):
            session.end()
        for provider, warm in list(self._providers.values()):
            if warm is not None:
                warm.close()
            provider.close()
        self._reaper.close()

    def had(self, name: str, options: Mapping[str, Any]) -> tuple[Provider, Warm | None]:
        """The one provider of a name and these options. Raises BadSpec, EngineLost."""
        host = options.get("host") or ""
        if host and host not in self._settings.engines.split(","):
            known = self._settings.engines or "none"
            reason = f"{host} is not among HEADRACE_CONTAINERS_ENGINES of the simulator ({known})"
            raise BadSpec(
                "provider_options.host", f"{reason}; leave it out for the engine that DOCKER_HOST names"
            )
        key = json.dumps([name, options], sort_keys=True)
        with self._lock:
            if key not in self._providers:
                provider = provider_of(name, options)
                can = hasattr(provider, "start_ahead")
                self._reaper.tell(name, options)
                self._providers[key] = provider, Warm(provider, self._has_room) if can else None  # type: ignore[arg-type]
            return self._providers[key]

    def started(self, asked: Mapping[str, Any], context: bytes) -> Container:
        """A container as it is asked for. Raises BadSpec, EngineLost, ContainerLost."""
        spec, most = _spec(asked, context), self._settings.most_memory_mib
        if spec.limits.memory_mib > most:
            raise BadSpec(
                "limits.memory_mib", f"{spec.limits.memory_mib} is more than {most}, the most of one here"
            )
        provider, warm = self.had(asked["provider"], asked["options"])
        if not self._places.acquire(timeout=self._settings.place_s):
            raise EngineLost(
                f"{self._settings.most} containers run here already; lower environment.count, or raise "
                "HEADRACE_CONTAINERS_MOST"
            )
        try:
            ahead = int(asked.get("warm", 0))
            container = warm.start(spec, ahead) if warm is not None else provider.start(spec)
        except BaseException:
            self._places.release()
            raise
        return container

    def prepare(self, asked: Mapping[str, Any], context: bytes) -> None:
        """Makes what containers need, and starts some ahead."""
        spec = _spec(asked, context)
        provider, warm = self.had(asked["provider"], asked["options"])
        provider.prepare(spec)
        if warm is not None:
            warm.fill(spec, int(asked.get("warm", 0)))

    def ended(self, session: Session) -> None:
        """Forgets a session whose connection is over."""
        with self._lock:
            self._sessions.pop(session.number, None)
            with suppress(KeyError, ValueError):
                self._hangups.unregister(session.number)
        if session.container is not None:
            self._places.release()

    def _has_room(self) -> bool:
        warm = [each for _, each in list(self._providers.values()) if each is not None]
        return sum(each.count() for each in warm) <= self._settings.most_warm

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                connection, _ = self._listening.accept()
            except OSError:
                return
            peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            _, user, _ = struct.unpack("3i", peer)
            if user not in self._users:
                connection.close()
                continue
            session = Session(self, connection)
            with self._lock:
                self._sessions[session.number] = session
                self._hangups.register(session.number, select.POLLRDHUP)
            threading.Thread(target=session.serve, daemon=True).start()

    def _watch(self) -> None:
        """Ends the containers of connections that end, whatever runs in them; and warm ones that nobody wants."""
        idle = 0.0
        while not self._closed.is_set():
            for number, events in self._hangups.poll(200):
                session = self._sessions.get(number)
                if session is not None and events:
                    with self._lock, suppress(KeyError, ValueError):
                        self._hangups.unregister(number)
                    threading.Thread(target=session.end, daemon=True).start()
            idle += 0.2
            if idle > IDLE_S / 10:
                idle = 0.0
                for _, warm in list(self._providers.values()):
                    if warm is not None:
                        warm.drop()


def _spec(asked: Mapping[str, Any], context: bytes) -> Spec:
    """What is asked for. No path of this host is read for it: the asker has packed what an image is built of."""
    return replace(spec_of(asked["spec"]), build=None, context=context)


class Session:
    """One connection, and its container once it was asked for."""

    def __init__(self, server: Server, connection: socket.socket) -> None:
        self._server, self._connection = server, connection
        self.number = connection.fileno()
        self.container: Container | None = None
        self._ended = threading.Event()

    def serve(self) -> None:
        """Answers until the connection ends."""
        try:
            while True:
                header, payload = wire.receive(self._connection)
                try:
                    self._answer(header, payload)
                except ContainerError as error:
                    wire.send(self._connection, wire.error_header(error))
                if self._ended.is_set():
                    return
        except (wire.Closed, ValueError, KeyError, TypeError) as error:
            if not isinstance(error, wire.Closed):
                sys.stderr.write(f"a connection was closed: {raised(error)}\n")
        finally:
            self.end()
            self._server.ended(self)
            self._connection.close()

    def end(self) -> None:
        """Ends the container; what runs in it raises."""
        self._ended.set()
        if self.container is not None:
            self.container.close()

    def _answer(self, header: Mapping[str, Any], payload: bytes) -> None:
        ask = header["ask"]
        if ask == "prepare":
            self._server.prepare(header, payload)
            wire.send(self._connection, {})
            return
        if ask == "start":
            if self.container is not None:
                raise BadSpec("ask", "this connection has a container")
            self.container = self._server.started(header, payload)
            wire.send(self._connection, {"id": self.container.id, "command": self.container.command})
            return
        if self.container is None:
            raise BadSpec("ask", "this connection has no container")
        getattr(self, f"_{ask}", self._unknown)(self.container, header, payload)

    def _unknown(self, container: Container, header: Mapping[str, Any], payload: bytes) -> None:
        raise BadSpec("ask", f"there is no {str(header['ask'])[:40]!r}")

    def _exec(self, container: Container, header: Mapping[str, Any], payload: bytes) -> None:
        def on_output(number: int, piece: bytes) -> None:
            wire.send(self._connection, {"stream": number}, piece)

        options = {**header["options"], "most_bytes": min(header["options"]["most_bytes"], wire.MOST_BYTES)}
        ran = container.exec(header["command"], stdin=payload, on_output=on_output, **options)
        left = {
            "exit_code": ran.exit_code,
            "ended": ran.ended,
            "left_out": ran.left_out,
            "seconds": ran.seconds,
        }
        wire.send(self._connection, left)

    def _write(self, container: Container, header: Mapping[str, Any], payload: bytes) -> None:
        files, at = list[File](), 0
        for path, size, mode in header["files"]:
            files.append(File(path, payload[at : at + size], mode))
            at += size
        container.write(files, user=header["user"])
        wire.send(self._connection, {})

    def _read(self, container: Container, header: Mapping[str, Any], payload: bytes) -> None:
        data = container.read(header["path"], most_bytes=min(header["most_bytes"], wire.MOST_BYTES // 2))
        wire.send(self._connection, {}, data)

    def _read_folder(self, container: Container, header: Mapping[str, Any], payload: bytes) -> None:
        for file in container.read_folder(header["path"], most_bytes=header["most_bytes"]):
            wire.send(self._connection, {"path": file.path, "mode": file.mode}, file.data)
        wire.send(self._connection, {"over": True})
