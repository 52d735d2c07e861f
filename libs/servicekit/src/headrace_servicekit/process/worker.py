"""A worker: a child process for other people's code. Start, send, receive within a limit, kill."""

from __future__ import annotations

import asyncio
import atexit
import json
import os
import shutil
import signal
import sys
import tempfile
import uuid
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Generic

from headrace_schema import references

from headrace_servicekit.contained.groups import Group
from headrace_servicekit.contained.network import CONTAINED_VARIABLE, PROXY_PORT, Outlet
from headrace_servicekit.contained.settings import Containment, NotContained
from headrace_servicekit.process.confine import Confinement, other_user
from headrace_servicekit.process.spawn import TREE_VARIABLE, descendants, kill_tree
from headrace_servicekit.process.users_code import caches, environment_of, named_paths, own_caches
from headrace_servicekit.process.worker_pipes import (
    BUFFER_BYTES,
    CONFINED_VARIABLE,
    MEMORY_VARIABLE,
    PARENT_VARIABLE,
    Codec,
    FrameReader,
    Message,
    frame,
)

_REAP_TIMEOUT_S = 10.0
_EXIT_TIMEOUT_S = 1.0
# After a limit has passed: a reply that lies in the pipe counts, however late this process got to read it.
_GRACE_S = 0.05
_PROXIES = {
    CONTAINED_VARIABLE: "1",
    **dict.fromkeys(
        [each for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY") for each in (name, name.lower())],
        f"http://127.0.0.1:{PROXY_PORT}",
    ),
    **dict.fromkeys(("NO_PROXY", "no_proxy"), "localhost,127.0.0.1,::1"),
}
"""In a network of its own: a refusal of the proxy says what is not reached, and how it would be."""


_hidden: list[Path] = []
_containment: list[Containment] = []


def hide_from_workers(*own: Path) -> None:
    """Workers with users' code that are started from now on do not see these files and folders; see `confine`.

    No reference of a spec reads them.
    """
    _hidden[:] = [path.absolute() for path in own]
    references.keep_closed(_hidden)


def contain_workers(containment: Containment | None) -> None:
    """Workers with users' code that are started from now on are behind these walls, or again behind none."""
    _containment[:] = [containment] if containment else []


@dataclass(frozen=True)
class UsersCode:
    """What a worker's code was given, beside the installation."""

    names: object = None
    """A JSON value whose strings name files and folders that it may read (see `named_paths`), or refer to secrets."""
    base: Path = Path()
    """Where relative ones begin."""
    variables: Collection[str] = ()
    """Variables of this service's environment that a spec names for the code, beside those that `names` refers to."""
    writes: Sequence[Path] = ()
    """Folders of this service in which it may write."""
    reads: Sequence[Path] = ()
    """Folders of this service that it sees."""


class WorkerGone(Exception):
    """The worker ended, or broke the protocol; the message says how."""


class WorkerTimeout(Exception):
    """The worker did not reply within the limit."""


@dataclass
class Worker(Generic[Message]):
    """One running worker. `start` makes it, and its owner calls `kill`."""

    codec: Codec[Message]
    process: asyncio.subprocess.Process
    reader: FrameReader
    writer: asyncio.StreamWriter
    tree: str = ""
    """Name of the process tree of the worker and all that it starts, daemons too; see `spawn.TREE_VARIABLE`."""
    scratch: Path | None = None
    """A folder of the worker's own, which goes with it."""
    outlet: Outlet | None = None
    """What a contained one reaches."""
    group: Group | None = None
    _killed: bool = False

    @classmethod
    async def start(
        cls,
        module: str,
        codec: Codec[Message],
        memory_bytes: int = 0,
        variables: Mapping[str, str] | None = None,
        code: UsersCode | None = None,
    ) -> Worker[Message]:
        """Starts `python -m module` in a session of its own; without users' `code`, in this service's environment."""
        scratch: Path | None = None
        outlet: Outlet | None = None
        containment = _containment[0] if code and _containment else None
        if code is None:
            environment = dict(os.environ)
        else:
            scratch = _scratch()
            confinement = _confinement(code, scratch)
            if containment:
                outlet = Outlet(containment.hosts) if containment.network else None
                confinement = replace(
                    confinement,
                    link=outlet.link if outlet else -1,
                    home=str(scratch),
                    file_bytes=containment.settings.file_bytes,
                )
                if not containment.groups:
                    bounds = containment.settings.bounds
                    confinement = replace(
                        confinement, processes=bounds.processes, memory_bytes=bounds.memory_bytes
                    )
            user = confinement.user
            models = await asyncio.to_thread(own_caches, os.environ, scratch, user) if user else None
            environment = environment_of(
                os.environ, [*code.variables, *references.variables(code.names)], scratch, models
            )
            environment[CONFINED_VARIABLE] = json.dumps(asdict(confinement))
            environment |= _PROXIES if outlet else {}
        tree = f"{os.environ.get('HEADRACE_INCARNATION') or os.getpid()}/{uuid.uuid4().hex}"
        environment |= {**(variables or {}), TREE_VARIABLE: tree}
        environment |= {PARENT_VARIABLE: str(os.getpid()), MEMORY_VARIABLE: str(memory_bytes)}
        # -P: a file in the current directory must not stand in for a library.
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", module),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=environment,
            limit=BUFFER_BYTES,
            start_new_session=True,
            pass_fds=[outlet.link] if outlet else [],
        )
        if process.stdin is None or process.stdout is None:
            raise RuntimeError("the worker has no pipes")
        worker = cls(codec, process, FrameReader(process.stdout), process.stdin, tree, scratch, outlet)
        if outlet:
            outlet.started()
        if containment and containment.groups:
            try:
                worker.group = containment.groups.start(process.pid, containment.settings.bounds)
            except OSError as error:
                await worker.kill()
                raise NotContained(f"a worker gets no cgroup: {error}") from error
        return worker

    def send(self, message: Message) -> None:
        """Queues a message; a dead worker is noticed by the next `receive`."""
        self.writer.write(frame(self.codec.encode(message)))

    async def receive(self, timeout_s: float) -> Message:
        """The next message.

        Raises:
            WorkerTimeout: none came within `timeout_s`.
            WorkerGone: the worker ended or broke the protocol.
        """
        try:
            # A burst of replies costs one read and no timer each: what has come is taken first.
            body = self.reader.taken() or await self._next(timeout_s)
            return self.codec.decode(body)
        except ConnectionError as error:
            raise WorkerGone("the worker process ended") from error
        except ValueError as error:
            raise WorkerGone(f"the worker process broke the protocol: {error}") from error

    async def wait_or_kill(self) -> int:
        """For a worker that seems to have ended: its own exit status, if it comes soon."""
        await asyncio.wait({asyncio.ensure_future(self.process.wait())}, timeout=_EXIT_TIMEOUT_S)
        return await self.kill()

    async def kill(self) -> int:
        """Ends the worker and all that it started, daemons too; returns its exit status. May be called twice."""
        if not self._killed:
            self._killed = True
            started = descendants([self.process.pid])[1:]
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            for pid in started:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.writer.close()
            # Those whose parents had ended before: nothing but their environment tells whose they are.
            await asyncio.to_thread(kill_tree, self.tree)
            if self.outlet:
                self.outlet.close()
            if self.group:
                await asyncio.to_thread(self.group.end)
        async with asyncio.timeout(_REAP_TIMEOUT_S):
            status = await self.process.wait()
        if self.scratch is not None:
            await asyncio.to_thread(shutil.rmtree, self.scratch, ignore_errors=True)
        return status

    async def _next(self, timeout_s: float) -> bytes:
        for limit in (timeout_s, _GRACE_S):
            try:
                async with asyncio.timeout(limit):
                    if (body := await self.reader.next()) is not None:
                        return body
                raise WorkerGone("the worker process ended")
            except TimeoutError:
                continue
        raise WorkerTimeout(f"no reply within {timeout_s:g} s")


@cache
def _homes(_: int) -> Path:
    """The folder with the homes of this process's workers; a worker sees its own there."""
    folder = Path(tempfile.mkdtemp(prefix="headrace-homes-")).resolve()
    folder.chmod(0o711)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _scratch() -> Path:
    return Path(tempfile.mkdtemp(prefix="headrace-code-", dir=_homes(os.getpid())))


def _confinement(code: UsersCode, scratch: Path) -> Confinement:
    user = other_user()
    for path in (scratch, *code.writes):
        if user:
            os.chown(path, user, user)
    named = named_paths(code.names, _hidden, code.base.absolute())
    models = [str(path / "models") for path in _hidden]  # a fleet keeps those of `headrace demo` there
    return Confinement(
        base=str(code.base.absolute()),
        hidden=[str(path) for path in (*_hidden, scratch.parent)],
        read=[*named, *models, *caches(os.environ), *(str(path.resolve()) for path in code.reads)],
        write=[str(path.resolve()) for path in (scratch, *code.writes)],
        user=user,
    )


def exit_description(status: int) -> str:
    """What an exit status means, in words."""
    return f"was killed by signal {-status}" if status < 0 else f"ended with exit code {status}"
