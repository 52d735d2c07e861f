"""Code of a model, run in a process that is shut in, from the outside: programs, functions and tests.

    for outcome in run_programs("print(input()[::-1])", ["abc\n"], Limits()):
        assert outcome.out == "cba\n"

What a kernel or a container does not allow is left out, and `walls().missing` says what is then not held.
"""

from __future__ import annotations

import json
import os
import select
import signal
import site
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from headrace_servicekit.process.spawn import TREE_VARIABLE
from headrace_servicekit.sandbox.inside.frames import frame

_MEBIBYTE = 1 << 20
_SOURCE = Path(__file__).parents[2]
_BEGIN = (
    f"import sys; sys.path.append({str(_SOURCE)!r}); "
    "from headrace_servicekit.sandbox.inside.__main__ import main; main(*sys.argv[1:])"
)
_ENVIRONMENT = {
    "PYTHONHASHSEED": "0",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "LC_ALL": "C.UTF-8",
}
_STARTING_S, _GRACE_S = 10.0, 1.0
_PIECE = 1 << 16
_WAYS = (True, False)
"""With namespaces, else without."""
_REPLY_BYTES_PER_OUTPUT_BYTE = 24
"""JSON of a reply over the bytes in it: three files, each byte at most `\\ud83d\\ude00` long, with room."""


@dataclass(frozen=True)
class Limits:
    """Limits of one case, for everything that the foreign code does."""

    wall_s: float = 4.0
    """Seconds of wall time, and of CPU time."""
    memory_bytes: int = 512 * _MEBIBYTE
    """Address space. It starts no process, so this is all that it has."""
    output_bytes: int = _MEBIBYTE
    """Most bytes of each file and stream that it writes."""
    scratch_bytes: int = 16 * _MEBIBYTE
    """Most bytes of its folder for files, which is in memory."""
    threads: int = 64


@dataclass(frozen=True)
class Outcome:
    """How a case ended."""

    end: Literal["exit", "signal", "time", "output", "lost"]
    """`exit` by itself, even by an error; killed by a `signal`; out of `time`; too much `output`; `lost`: none came."""
    status: int = 0
    """Exit status, or the signal as a negative number."""
    out: str = ""
    err: str = ""
    """The end of what it wrote to standard error."""
    result: str = ""
    """Result of a call (see `inside.values`), or of a test: `passed`, what did not hold, or a fault of the test."""
    wall_s: float = 0.0


@dataclass(frozen=True)
class Walls:
    """What holds foreign code on this machine."""

    namespaces: bool
    """A root, processes, network and IPC of its own."""
    other_user: bool
    """Another user id than this service's, which root can give."""
    landlock: int
    """Version of the kernel's Landlock; 0: none."""
    seccomp: bool

    @property
    def missing(self) -> list[str]:
        """What is not held, in words; empty where all is."""
        found = []
        if not self.seccomp:
            found.append(
                "it can start processes, open sockets and signal this user's processes (no seccomp filter)"
            )
        if not self.landlock:
            found.append("it can read what this service's user can (no Landlock)")
        if not self.namespaces:
            found.append("it has no root, processes and folder of its own (no namespaces)")
            if not self.other_user:
                found.append("it has this service's user id")
        return found

    def __str__(self) -> str:
        up = [
            *(["namespaces"] if self.namespaces else []),
            *(["another user"] if self.other_user else []),
            *([f"Landlock {self.landlock}"] if self.landlock else []),
            *(["seccomp"] if self.seccomp else []),
            "limits",
        ]
        text = f"code runs behind {', '.join(up)}"
        return f"{text}; NOT HELD: {'; '.join(self.missing)}" if self.missing else text


Policy = Literal["required", "best_effort"]
"""Whether code runs only where all walls are up, or behind those that are."""
POLICY = (
    "required: refused where the machine does not allow every wall; best_effort: behind those that it allows"
)
_FIX = (
    "allow this process user namespaces and mounts (sysctl user.max_user_namespaces, kernel.unprivileged_userns_clone, "
    "kernel.apparmor_restrict_unprivileged_userns=0; in a container a seccomp profile with unshare, mount, open_tree, "
    "move_mount, mount_setattr and pivot_root), Linux 5.13 on x86_64 or aarch64, or set sandbox: best_effort"
)


class NotHeld(RuntimeError):
    """The machine does not allow every wall; the sentence names what is not held, and the fix."""


def require_walls(policy: Policy) -> Walls:
    """The walls of this machine. Raises NotHeld where they are `required` and some are missing."""
    try:
        found = walls()
    except RuntimeError as error:
        raise NotHeld(str(error)) from error
    if policy == "required" and found.missing:
        raise NotHeld(
            f"this machine does not hold a model's code: {'; '.join(found.missing)}. To mend it, {_FIX}"
        )
    return found


Outcomes = Generator[Outcome, None, None]
"""They come one by one. Close it to run no more."""


def run_programs(
    code: str,
    inputs: Sequence[str],
    limits: Limits,
    *,
    echo: bool = False,
    lenient: bool = False,
    total_s: float | None = None,
) -> Outcomes:
    """Runs the code as a program once for each input; see `Outcomes`.

    With `echo`, what the last line comes to is printed, as in a notebook. `lenient`: it may use without an import what
    judges of contests import. After `total_s` all that is left is `lost`.
    """
    yield from _run("program", code, inputs, limits, total_s, echo=echo, lenient=lenient)


def run_calls(
    code: str,
    function: str,
    arguments: Sequence[Sequence[Any]],
    limits: Limits,
    *,
    total_s: float | None = None,
) -> Outcomes:
    """Calls a function of the code once for each list of arguments, which are JSON as `inside.values` has it."""
    yield from _run("call", code, arguments, limits, total_s, function=function)


def run_tests(
    code: str,
    tests: Sequence[str],
    limits: Limits,
    *,
    entry: str = "",
    before: str = "",
    total_s: float | None = None,
) -> Outcomes:
    """Runs tests, which are code with assertions, in another process than what they test.

    `entry` is the one name that tests have of the code; left out, they have what they do not define themselves.
    `before` is code that stands before both.
    """
    yield from _run("test", code, tests, limits, total_s, entry=entry, before=before)


def examine_tests(tests: Sequence[str], limits: Limits, *, entry: str = "", before: str = "") -> str:
    """Tries tests on code that does nothing; why the first that cannot tell it from other code proves nothing."""
    (outcome,) = _run("examine", "", [json.dumps(tests)], limits, None, entry=entry, before=before)
    return outcome.result if outcome.end == "exit" else ""


def walls() -> Walls:
    """What this machine allows, tried once in this process. RuntimeError where nothing runs at all."""
    return _opened()[1]


@cache
def _opened() -> tuple[_Forker, Walls]:
    said = ""
    for namespaces in _WAYS:
        forker = _Forker(namespaces)
        request = _request("program", "pass", 1, Limits()) | {"echo": False, "lenient": False}
        with suppress(_NotStarted), _Supervisor(forker, request) as supervisor:
            supervisor.give("")
            first, outcome = supervisor.line(_STARTING_S, 1 << 16), supervisor.line(_STARTING_S, 1 << 16)
            if first and outcome and outcome["status"] == 0:
                return forker, Walls(**first)
            said = outcome["err"] if outcome else supervisor.last_words()
        forker.end()
    raise RuntimeError(f"the sandbox does not start: {said}")


def _run(
    operation: str, code: str, cases: Sequence[Any], limits: Limits, total_s: float | None, **more: Any
) -> Outcomes:
    ends = time.monotonic() + (len(cases) * limits.wall_s + _STARTING_S if total_s is None else total_s)
    request = _request(operation, code, len(cases), limits) | more
    longest = limits.output_bytes * _REPLY_BYTES_PER_OUTPUT_BYTE + (1 << 16)
    with _Supervisor(_opened()[0], request) as supervisor:
        told = supervisor.line(min(_STARTING_S, ends - time.monotonic()), 1 << 16)
        for index, case in enumerate(cases):
            # One at a time: what is judged and what is expected of it never wait in one pipe.
            supervisor.give(case if isinstance(case, str) else json.dumps(case))
            left = min(limits.wall_s + _GRACE_S, ends - time.monotonic())
            reply = supervisor.line(left, longest) if told else None
            if reply is None:
                yield from [Outcome("time" if time.monotonic() >= ends else "lost")] * (len(cases) - index)
                return
            yield Outcome(**reply)


def _request(operation: str, code: str, count: int, limits: Limits) -> dict[str, Any]:
    return {"operation": operation, "code": code, "count": count, "limits": asdict(limits)}


class _NotStarted(RuntimeError):
    """The process that starts supervisors has ended at once."""


class _Forker:
    """The process that starts supervisors: one in this process, made anew where it has ended."""

    def __init__(self, namespaces: bool) -> None:
        packages = [path for path in site.getsitepackages() if Path(path).is_dir()]
        readable = [*packages, os.path.join(sys.base_prefix, "lib")]
        self._place = json.dumps({"path": packages, "readable": readable, "namespaces": namespaces})
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._link: socket.socket | None = None

    def start(self, *streams: int) -> int:
        """Starts a supervisor with these standard streams; returns its pid."""
        with self._lock:
            for last in (False, True):
                link = self._running()
                with suppress(OSError):
                    socket.send_fds(link, [b"."], streams)
                    if len(pid := link.recv(4)) == 4:
                        return int.from_bytes(pid, "little")
                self._end()
                if last:
                    raise _NotStarted("the sandbox does not start")
        raise AssertionError

    def _running(self) -> socket.socket:
        if self._link is None:
            environment = dict(_ENVIRONMENT)
            if tree := os.environ.get(TREE_VARIABLE):
                environment[TREE_VARIABLE] = tree
            self._link, theirs = socket.socketpair()
            self._link.settimeout(_STARTING_S)
            python = getattr(sys, "_base_executable", sys.executable)
            self._process = subprocess.Popen(
                [python, "-s", "-S", "-P", "-c", _BEGIN, str(theirs.fileno()), str(os.getpid()), self._place],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=environment,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
            theirs.close()
        return self._link

    def end(self) -> None:
        """Ends it; what it has started ends with it."""
        with self._lock:
            self._end()

    def _end(self) -> None:
        if self._link is not None:
            self._link.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._link = self._process = None


class _Supervisor:
    """The process that shuts itself in and runs the cases of a request; see `inside.__main__`."""

    def __init__(self, forker: _Forker, request: Mapping[str, Any]) -> None:
        (stdin, self._stdin), (self._stdout, stdout), (self._stderr, stderr) = (os.pipe() for _ in range(3))
        self._process = -1
        try:
            pid = forker.start(stdin, stdout, stderr)
            with suppress(ProcessLookupError):
                self._process = os.pidfd_open(pid)
        finally:
            for handle in (stdin, stdout, stderr):
                os.close(handle)
        self._read_ahead = bytearray()
        self.give(json.dumps(request))

    def __enter__(self) -> _Supervisor:
        return self

    def give(self, text: str) -> None:
        """The request, then each case; one that ended is noticed by the next `line`."""
        left = memoryview(frame(text.encode("utf-8", "surrogatepass")))
        with suppress(BrokenPipeError):
            while left:
                left = left[os.write(self._stdin, left) :]

    def line(self, limit_s: float, longest: int) -> dict[str, Any] | None:
        """The next message; None where it ended, took too long, or said too much."""
        ends, handle = time.monotonic() + limit_s, self._stdout
        waiting = select.poll()
        waiting.register(handle, select.POLLIN)
        searched = 0
        while (end := self._read_ahead.find(b"\n", searched)) < 0:
            searched = len(self._read_ahead)
            if searched > longest or not waiting.poll(max(0.0, ends - time.monotonic()) * 1000):
                return None
            if not (piece := os.read(handle, _PIECE)):
                return None
            self._read_ahead += piece
        message: dict[str, Any] = json.loads(self._read_ahead[:end])
        del self._read_ahead[: end + 1]
        return message

    def last_words(self) -> str:
        """Ends it; the last line of its standard error."""
        self._kill()
        return os.read(self._stderr, 1 << 16).decode(errors="replace").strip().rpartition("\n")[2]

    def _kill(self) -> None:
        """What it started ends with it."""
        if self._process >= 0:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._process, signal.SIGKILL)

    def __exit__(self, *_: object) -> None:
        self._kill()
        # The pipe ends with the last that holds it: the supervisor, where it lives in namespaces.
        while self.line(_GRACE_S, 1 << 30) is not None:
            pass
        for handle in (self._stdin, self._stdout, self._stderr, self._process):
            if handle >= 0:
                os.close(handle)
