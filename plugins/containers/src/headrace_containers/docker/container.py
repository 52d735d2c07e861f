"""One container of a Docker engine."""

from __future__ import annotations

import posixpath
import tarfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from docker.errors import DockerException, NotFound
from requests.exceptions import RequestException
from typing_extensions import override

from headrace_containers.docker.engine import Engine
from headrace_containers.docker.execs import Execs, Stream
from headrace_containers.docker.relay import Relay
from headrace_containers.files import UNPACK, absolute, folder_entry, folders_above, packed, unpacked
from headrace_containers.provider import (
    MIB,
    PROXY_PORT,
    BadPath,
    BadSpec,
    Container,
    ContainerError,
    ContainerLost,
    File,
    Output,
    Ran,
    Spec,
)

_WRITE_S, _KILLED = 300.0, 137
_LOOKS, _LOOK_S = 100, 0.1
_PROXY = f"http://127.0.0.1:{PROXY_PORT}"
_PROXIED = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), _PROXY)
_PROXIED |= {"NO_PROXY": "127.0.0.1,localhost", "no_proxy": "127.0.0.1,localhost"}


class DockerContainer(Container):
    """It lives as long as this process holds its standard input open."""

    def __init__(
        self, engine: Engine, id: str, attached: Stream, spec: Spec, image: Mapping[str, Any]
    ) -> None:
        self.id = id[:12]
        self.full_id, self.spec = id, spec
        self.ends_at = float("inf")
        """By the monotonic clock; see `Limits.wall_s`."""
        self.why = ""
        """Why it had to be ended; empty where it was not."""
        self.relay: Relay | None = None
        """Carries its connections, where its spec has a network."""
        self._engine, self._attached = engine, attached
        config = image.get("Config") or {}
        self.workdir = spec.workdir or config.get("WorkingDir") or "/workspace"
        self.command = (*(config.get("Entrypoint") or ()), *(config.get("Cmd") or ()))
        self._execs = Execs(engine, id, spec.user)
        self._closed = threading.Event()
        self._preparing: threading.Thread | None = None

    def open(self) -> None:
        """Finds the ids of its user, and makes its working directory. Raises as `exec`."""
        ids = self._execs.run(["/bin/sh", "-c", "id -u; id -g"], b"", "/", {}, "", 30.0, 100, None)
        if not (found := ids.stdout.split()) or ids.exit_code:
            raise BadSpec(
                "image",
                f"its /bin/sh does not run: {(ids.stdout + ids.stderr).decode(errors='replace')[:300]}",
            )
        if self._is_missing(self.workdir):
            self._put(folder_entry(self.workdir, *map(int, found)))
        self._prepare_next()

    def begin(self, spec: Spec) -> None:
        """Hands it over to who has this spec: its time runs from now on."""
        if self.relay is not None:
            self.relay.use(spec.network)
        self.spec = spec
        self.ends_at = time.monotonic() + spec.limits.wall_s

    @override
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
        proxied = _PROXIED if self.spec.network.allow else {}
        variables = {**proxied, **self.spec.env, **(env or {})}
        self._settle()
        with self._alive():
            folder = posixpath.join(self.workdir, cwd)
            ran = self._execs.run(command, stdin, folder, variables, user, timeout_s, most_bytes, on_output)
            if ran.exit_code == _KILLED and self._is_ending():
                raise ContainerLost("the container has ended, and its command with it")
        self._prepare_next()
        return ran

    def _prepare_next(self) -> None:
        """Has a shell wait for the next command, which nobody waits for meanwhile."""

        def wait_ahead() -> None:
            with suppress(ContainerError):  # the next command says so
                self._execs.wait_ahead()

        self._preparing = threading.Thread(target=wait_ahead, daemon=True)
        self._preparing.start()

    def _settle(self) -> None:
        if self._preparing is not None:
            self._preparing.join()
            self._preparing = None

    @override
    def write(self, files: Sequence[File], *, user: str = "") -> None:
        # It is the user who unpacks them, so that a link leads nowhere else for it.
        mine = user in ("", self.spec.user)
        above = [] if mine else folders_above(files, self.workdir)
        self._settle()
        with self._alive():
            script = ["/bin/sh", "-c", UNPACK, "write", *above]
            ran = self._execs.run(script, packed(files, self.workdir), "/", {}, user, _WRITE_S, 1 << 16, None)
        self._prepare_next()
        if ran.exit_code:
            said = ran.stderr.decode(errors="replace").strip().splitlines() or [ran.ended]
            raise BadPath(f"files cannot be written: {said[0][:500]}")

    @override
    def read(self, path: str, *, most_bytes: int = 64 * MIB) -> bytes:
        with self._alive():
            whole = absolute(path, self.workdir)
            for entry, content in unpacked(self._got(whole), most_bytes, path):
                if entry.isreg():
                    return content
                kinds = {tarfile.DIRTYPE: "a folder", tarfile.SYMTYPE: "a link", tarfile.LNKTYPE: "a link"}
                kind = kinds.get(entry.type, "a device")
                raise BadPath(f"{path} is {kind}, and no regular file")
        raise BadPath(f"{path} is empty")

    @override
    def read_folder(self, path: str, *, most_bytes: int = 64 * MIB) -> Iterator[File]:
        with self._alive():
            whole = absolute(path.rstrip("/"), self.workdir)
            for entry, content in unpacked(self._got(whole), most_bytes, path):
                name = entry.name.partition("/")[2]  # the archive begins with the folder itself
                if entry.isreg() and not name:
                    raise BadPath(f"{path} is a file, and no folder")
                if entry.isreg() and ".." not in name.split("/"):
                    yield File(name, content, entry.mode & 0o777)

    def end(self, why: str) -> None:
        """Kills it, for a reason that its next method tells; from any thread."""
        self.why = self.why or why
        self.close()

    @override
    def close(self) -> None:
        # The engine removes it as it ends.
        if self._closed.is_set():
            return
        self._closed.set()
        if self.relay is not None:
            self.relay.close()
        self._attached.close()
        with suppress(DockerException, RequestException, OSError):
            self._engine.api.remove_container(self.full_id, force=True, v=True)
        self._execs.close()

    def is_alive(self) -> bool:
        """Whether it still runs."""
        try:
            with self._engine.asked("it cannot be looked after"):
                return bool(self._engine.api.inspect_container(self.full_id)["State"]["Running"])
        except ContainerLost:
            return False

    def _is_ending(self) -> bool:
        """Whether it has ended, or does within a moment: a busy engine says so seconds after its processes are dead."""
        for _ in range(_LOOKS):
            if not self.is_alive():
                return True
            with suppress(BadSpec, ContainerLost):
                if self._execs.run(["/bin/sh", "-c", ":"], b"", "/", {}, "", 30.0, 100, None).exit_code == 0:
                    return False
            time.sleep(_LOOK_S)
        return False

    @property
    def is_closed(self) -> bool:
        """Whether it has ended, or is ending."""
        return self._closed.is_set()

    def disk_bytes(self) -> int:
        """What it has written to its file system. Raises EngineLost, ContainerLost."""
        api = self._engine.api
        with self._engine.asked("its disk cannot be measured"):
            url = api._url("/containers/{0}/json", self.full_id)
            found: dict[str, Any] = api._result(api._get(url, params={"size": 1}), True)
        return int(found.get("SizeRw") or 0)

    @contextmanager
    def _alive(self) -> Iterator[None]:
        """Says why it has ended, where that is known, in place of what the engine says."""
        try:
            if self._closed.is_set():
                raise ContainerLost(self.why or "the container was closed")
            yield
            if self._closed.is_set():
                raise ContainerLost(self.why or "the container was closed")
        except ContainerLost:
            why = self.why
            self.close()
            if why:
                raise ContainerLost(why) from None
            raise

    def _is_missing(self, path: str) -> bool:
        api = self._engine.api
        with self._engine.asked(f"{path} cannot be looked for"):
            url = api._url("/containers/{0}/archive", self.full_id)
            response = api.head(url, params={"path": path}, timeout=api.timeout)
            missing: bool = response.status_code == 404
        return missing

    def _running(self) -> None:
        """Raises NotFound where the container is gone: the engine says the same of a path that is not there."""
        self._engine.api.inspect_container(self.full_id)

    def _put(self, data: bytes) -> None:
        with self._engine.asked("its working directory cannot be made"):
            self._engine.api.put_archive(self.full_id, "/", data)

    def _got(self, path: str) -> Iterator[bytes]:
        with self._engine.asked(f"{path} cannot be read"):
            try:
                pieces, _ = self._engine.api.get_archive(self.full_id, path, chunk_size=MIB)
            except NotFound as error:
                self._running()
                raise BadPath(f"there is no {path}") from error
            yield from pieces
