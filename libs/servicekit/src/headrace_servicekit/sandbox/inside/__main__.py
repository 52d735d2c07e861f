"""The forker starts a supervisor for each request; the supervisor reads it on stdin, shuts itself in, runs each case in
a process, and writes a line a case.

The forker has imported what both need, which is most of the time that a start takes, and reads nothing of a request.
The supervisor lives behind the same walls as what it runs, which cannot reach it: another process, not to be signalled
or read. What it has in memory its children inherit, so it never reads what code must not know: tests go to their own
process.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from headrace_servicekit.sandbox.inside import judging, programs
from headrace_servicekit.sandbox.inside.frames import read_case
from headrace_servicekit.sandbox.inside.seccomp import filter_of, supported
from headrace_servicekit.sandbox.inside.tree import (
    can_become_nobody,
    enter_namespaces,
    enter_tree,
    scratch_of,
)
from headrace_servicekit.sandbox.inside.walls import drop_privileges, landlock_version, limit_process, shut_in

_PR_SET_PDEATHSIG = 1
_STDIN, _STDOUT = 0, 1
_ERROR_CHARACTERS = 2000
_MOST_HANDLES = 256


@dataclass
class Place:
    """Where foreign code runs, for all requests."""

    path: list[str]
    """Folders of packages."""
    readable: list[str]
    namespaces: bool
    scratch: str = ""
    """The folder that it may write to; empty: none."""
    other_user: bool = False

    def enter(self) -> None:
        """Once, before the first request. OSError where there are no namespaces."""
        if self.namespaces:
            self.scratch = scratch_of(self.readable)
            enter_tree(self.readable)
        self.other_user = os.getuid() == 0 and (self.namespaces or can_become_nobody(self.readable))


_place = Place([], [], False)


class Case:
    """The files of one case, in memory; a process gets those that it is given, as descriptors from 0 on."""

    def __init__(self, request: dict[str, Any]) -> None:
        self._request = request
        self.out, self.err, self.result = (os.memfd_create(name) for name in ("out", "err", "result"))

    def start(self, handles: list[int], body: Callable[[], None]) -> int:
        """Forks a process with these descriptors and all walls, in which `body` runs; returns its pid."""
        supervisor = os.getpid()
        pid = os.fork()
        if pid:
            return pid
        status = 1
        try:
            _end_with(supervisor)
            safe = [os.dup(handle) for handle in handles]  # none is overwritten before it is moved
            for place, handle in enumerate(safe):
                os.dup2(handle, place)
            os.closerange(len(handles), _MOST_HANDLES)
            programs.fresh_streams(_place.path)
            limits = self._request["limits"]
            limit_process(
                memory_bytes=limits["memory_bytes"],
                file_bytes=limits["output_bytes"],
                cpu_s=limits["wall_s"],
                threads=limits["threads"],
            )
            shut_in(_place.readable, _place.scratch)
            status = programs.finish(body)
        finally:
            os._exit(status)

    def report(self, pid: int, wall_s: float) -> dict[str, Any]:
        """Waits for the process, ends it when its time is over, and says how it ended."""
        begun = time.monotonic()
        status = _wait(pid, wall_s)
        end = "time" if status is None or -status == signal.SIGXCPU else "exit" if status >= 0 else "signal"
        most = self._request["limits"]["output_bytes"]
        if max(os.fstat(handle).st_size for handle in (self.out, self.err, self.result)) >= most:
            end = "output"
        said = {
            "end": end,
            "status": status or 0,
            "out": _content(self.out, most),
            "err": _content(self.err, most)[-_ERROR_CHARACTERS:],
            "result": _content(self.result, most),
            "wall_s": time.monotonic() - begun,
        }
        return said

    def close(self) -> None:
        """Frees the files."""
        for handle in (self.out, self.err, self.result):
            os.close(handle)


def run_program(request: dict[str, Any], case: Case) -> dict[str, Any]:
    """A program with its input."""
    given = read_case(_STDIN).decode("utf-8", "surrogatepass")
    feed = os.memfd_create("in")
    os.truncate(feed, 0)
    with os.fdopen(os.dup(feed), "wb") as writer:
        writer.write(given.encode("utf-8", "surrogatepass"))
    os.lseek(feed, 0, os.SEEK_SET)
    pid = case.start(
        [feed, case.out, case.err],
        lambda: programs.run(request["code"], echo=request["echo"], lenient=request["lenient"]),
    )
    os.close(feed)
    return case.report(pid, request["limits"]["wall_s"])


def run_call(request: dict[str, Any], case: Case) -> dict[str, Any]:
    """A call of a function with its arguments; what it returns is in `result`."""
    given = json.loads(read_case(_STDIN))
    nothing = os.open(os.devnull, os.O_RDONLY)
    pid = case.start(
        [nothing, case.out, case.err, case.result],
        lambda: programs.call(request["code"], request["function"], given, 3),
    )
    os.close(nothing)
    return case.report(pid, request["limits"]["wall_s"])


def run_test(request: dict[str, Any], case: Case) -> dict[str, Any]:
    """A test in one process, what it tests in another one; `result` is "passed", or what was not."""
    nothing = os.open(os.devnull, os.O_RDWR)
    (to_read, to_write), (from_read, from_write) = os.pipe(), os.pipe()
    solution = case.start(
        [nothing, nothing, nothing, to_read, from_write],
        lambda: judging.serve(request["code"], request["before"], 3, 4),
    )
    test = case.start(
        [nothing, case.out, case.err, from_read, to_write, case.result, _STDIN],
        lambda: judging.judge(request["entry"], request["before"], 3, 4, 5, 6),
    )
    for handle in (nothing, to_read, to_write, from_read, from_write):
        os.close(handle)
    said = case.report(test, request["limits"]["wall_s"])
    _wait(solution, 0.0)
    return _of_test(said)


def examine_test(request: dict[str, Any], case: Case) -> dict[str, Any]:
    """A test without code; `result` is what it lacks to prove anything."""
    nothing = os.open(os.devnull, os.O_RDWR)
    test = case.start(
        [nothing, case.out, case.err, case.result, _STDIN],
        lambda: judging.examine(request["entry"], request["before"], 3, 4),
    )
    os.close(nothing)
    return _of_test(case.report(test, request["limits"]["wall_s"]))


def _of_test(said: dict[str, Any]) -> dict[str, Any]:
    if not said["result"].startswith(judging.READ):
        sys.exit("a test did not read its code in time")  # the next one would read it
    return said | {"result": said["result"].removeprefix(judging.READ)}


OPERATIONS: dict[str, Callable[[dict[str, Any], Case], dict[str, Any]]] = {
    "program": run_program,
    "call": run_call,
    "test": run_test,
    "examine": examine_test,
}


def main(handle: str, parent: str, place: str) -> None:
    """Forks a supervisor for each three descriptors (its stdin, stdout, stderr) that come, and tells its pid."""
    global _place
    _end_with(int(parent))
    _place = Place(**json.loads(place))
    _place.enter()
    if supported():
        filter_of(os.uname().machine)  # once, for all that are forked
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    forker, link = os.getpid(), socket.socket(fileno=int(handle))
    while True:
        message, streams, _, _ = socket.recv_fds(link, 1, 3)
        if not message:
            return
        pid = os.fork()
        if pid == 0:
            link.close()
            try:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                os.setsid()
                for target, stream in enumerate(streams):
                    os.dup2(stream, target)
                os.closerange(3, _MOST_HANDLES)
                supervise(forker)
            except BaseException:  # noqa: BLE001 - said on its stderr; it must not go on as a forker
                traceback.print_exc()
            finally:
                os._exit(0)
        for stream in streams:
            os.close(stream)
        link.send(pid.to_bytes(4, "little"))


def supervise(parent: int) -> None:
    """Serves one request and ends."""
    request = json.loads(read_case(_STDIN))
    _end_with(parent)
    if _place.namespaces:
        _become_first(request["limits"]["scratch_bytes"], parent)
    drop_privileges(other_user=_place.other_user)
    _end_with(0 if _place.namespaces else parent)  # again: another user id forgets it
    os.chdir(_place.scratch or "/")
    walls = {"landlock": landlock_version(), "seccomp": supported()}
    _say({"namespaces": _place.namespaces, "other_user": _place.other_user, **walls})
    for _ in range(request["count"]):
        case = Case(request)
        _say(OPERATIONS[request["operation"]](request, case))
        case.close()


def _become_first(scratch_bytes: int, parent: int) -> None:
    """Goes on as the first process of its own namespaces; what stays behind waits for it."""
    enter_namespaces(_place.scratch, scratch_bytes)
    inner = os.fork()
    if inner:
        _end_with(parent)
        os._exit(0 if os.waitpid(inner, 0)[1] == 0 else 1)
    _end_with(0)


def _end_with(parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _wait(pid: int, limit_s: float) -> int | None:
    """The exit status, or the signal as a negative number; None where the time was over and it was killed."""
    handle = os.pidfd_open(pid)
    waiting = select.poll()
    waiting.register(handle, select.POLLIN)
    ended = bool(waiting.poll(limit_s * 1000))
    os.close(handle)
    if not ended:
        os.kill(pid, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return status if ended else None


def _content(handle: int, most: int) -> str:
    return os.pread(handle, most, 0).decode("utf-8", "replace")


def _say(message: dict[str, Any]) -> None:
    line = (json.dumps(message) + "\n").encode()
    while line:
        line = line[os.write(_STDOUT, line) :]
