"""A container of anything that runs a shell script as root and says its exit code and text.

A command runs apart from the call that starts it, with files for its input and output, which later calls look at: so
it needs no stream, no input and no signals of a service, and a call that breaks off loses nothing.
"""

from __future__ import annotations

import base64
import posixpath
import shlex
import tarfile
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal, Protocol

from typing_extensions import override

from headrace_containers.commands import KILL, MARK, MOST_DROPPED, Collected, check
from headrace_containers.files import UNPACK, absolute, folders_above, packed, unpacked
from headrace_containers.provider import (
    MIB,
    WORKDIR,
    BadPath,
    BadSpec,
    Container,
    ContainerLost,
    File,
    Output,
    Ran,
    Spec,
)

_FOLDER = "/.headrace"
"""Of commands' input and output; root's."""
_TOOLS = "setpriv setsid base64 tar tail head"
_PIECE, _MOST_SCRIPT, _SAID = 24 * 1024, 50_000, 192 * 1024
"""Bytes that a call brings, characters of its script, and bytes of a stream that it says."""
_CALL_S, _KILL_S, _WRITE_S = 60.0, 10.0, 300.0
_LOOKS, _LOOK_S = 20, 0.05
_NO_FOLDER, _NO_USER = 125, "user"
_ARCHIVE = 4 * MIB
"""What an archive may have beside its files."""

_WHO = """n={user} g={group}; u=$n
case $n in ''|*[!0-9]*) u=$(id -u -- "$n" 2>/dev/null) || u=;; esac
g=${{g:-$(id -g -- "$n" 2>/dev/null || echo "$u")}}
b=-all; [ "$u" != 0 ] || b=-all,+chown,+dac_override,+fowner,+kill,+setgid,+setuid
as="setpriv --reuid=$u --regid=$g --clear-groups --no-new-privs --inh-caps=-all --bounding-set=$b"
"""
"""Finds a user's ids, and what becomes it, with an engine's few capabilities at most."""
_RUN = """D={folder}
{who}
[ -n "$u" ] || {{ mv "$D/code" "$D/code.{no_user}"; exit; }}
h=$(grep "^[^:]*:[^:]*:$u:" /etc/passwd | head -n 1 | cut -d: -f6)
HOME=${{h:-/}}; export HOME
. "$D/command"
$as "$@" <"$D/in" >>"$D/out" 2>>"$D/err"
mv "$D/code" "$D/code.$?"
"""
"""Runs a command to its end. A file's name says its exit code: that can be changed on a full disk too."""
_START = """umask 077; rm -rf {old}; mkdir -p {folder} && cd {folder} && : >code && : >in && : >out && : >err || exit 90
"""
_LOOK = """cd {folder} || exit 90; i=0
while set -- code.*; c=${{1#code.}}; a=$(wc -c <out); b=$(wc -c <err)
  [ "$c" = '*' ] && [ $((a)) -eq {out} ] && [ $((b)) -eq {err} ] && [ $i -lt {looks} ]
do sleep {look_s}; i=$((i+1)); done
echo "$c" $((a)) $((b))
tail -c +{from_out} out | head -c {most} | base64 | tr -d '\\n'; echo
tail -c +{from_err} err | head -c {most} | base64 | tr -d '\\n'; echo
"""
_OPEN = """for t in {tools}; do command -v $t >/dev/null || {{ echo "tool $t"; exit; }}; done
[ "$(id -u)" = 0 ] || {{ echo "root"; exit; }}
{who}
[ -n "$u" ] || {{ echo {no_user}; exit; }}
mkdir -p -m 700 {folder} || exit 90
for d in {workdir}; do [ -d "$d" ] || {{ mkdir -p "$d" && chown "$u:$g" "$d" || exit 90; }}; done
for d in {owned}; do chown -R "$u:$g" "$d" || exit 90; done
$as true && echo ready
"""


class Machine(Protocol):
    """What a service has: one container, from any thread."""

    id: str

    def run(self, script: str, timeout_s: float) -> tuple[int, str]:
        """Runs a script of /bin/sh, of at most 60,000 characters, as root without input; its exit code and stdout.

        Raises ContainerLost: it is gone; EngineLost: the service does not answer.
        """
        ...

    def end(self) -> None:
        """Ends it at the service; may be called twice. Raises nothing."""
        ...


class RemoteContainer(Container):
    """See the module. Raises BadSpec, ContainerLost where it cannot be opened, and has ended it then."""

    def __init__(self, machine: Machine, spec: Spec) -> None:
        self.id, self.workdir = machine.id, spec.workdir or WORKDIR
        self._machine, self._spec, self._old = machine, spec, ""
        self._closed, self._why = threading.Event(), ""
        self._timer = threading.Timer(spec.limits.wall_s, self._late)
        self._timer.daemon = True
        self._timer.start()
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        script = _OPEN.format(
            tools=_TOOLS,
            who=_who(self._spec.user),
            no_user=_NO_USER,
            folder=_FOLDER,
            workdir=shlex.quote(self.workdir),
            owned=shlex.join(self._spec.owned),
        )
        with self._alive():
            code, said = self._machine.run(script, _CALL_S)
        match said.split():
            case ["ready"] if code == 0:
                return
            case ["tool", name]:
                raise BadSpec(
                    "image", f"it has no {name}; a remote container needs {_TOOLS.replace(' ', ', ')}"
                )
            case ["root"]:
                raise BadSpec("image", "its commands do not run as root, who hides the check from the user")
            case [found] if found == _NO_USER:
                raise BadSpec("user", f"the image knows no user {self._spec.user!r}; give UID:GID")
        raise ContainerLost(f"the container cannot be set up (exit code {code}): {said[:300]}")

    def _late(self) -> None:
        self._why = f"the container was ended after {self._spec.limits.wall_s:g} s (limits.wall_s)"
        self.close()

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
        variables = {**self._spec.env, **(env or {})}
        check(command, variables)
        begun, mark = time.monotonic(), uuid.uuid4().hex
        folder, who = f"{_FOLDER}/{mark}", _who(user or self._spec.user)
        whole = posixpath.join(self.workdir, cwd)
        found = Collected(most_bytes, on_output)
        with self._alive():
            self._start(folder, who, _words(command, whole, variables, mark), stdin)
            late, ended, code, sizes = begun + timeout_s, "exit", "", (0, 0)
            while True:
                now = time.monotonic()
                if ended == "exit" and (now > late or sum(sizes) > most_bytes + MOST_DROPPED):
                    ended, late = "time" if now > late else "output", now + _KILL_S
                    self._kill(who, mark)
                elif now > late:
                    raise ContainerLost("a command could not be killed, so its container was")
                code, sizes, is_whole = self._look(folder, found, sizes, max(late - now, _LOOK_S))
                if code != "*" and is_whole:
                    break
        if code == _NO_USER:
            raise BadSpec("user", f"the container knows no user {user or self._spec.user!r}")
        if code == str(_NO_FOLDER) and found.stderr == f"{mark}\n".encode():
            raise BadSpec("cwd", f"the container has no folder {whole}")
        kept = len(found.stdout) + len(found.stderr)
        how: Literal["exit", "time", "output"] = ended  # type: ignore[assignment]
        status = int(code) if ended == "exit" else 137
        return Ran(
            status, bytes(found.stdout), bytes(found.stderr), how, sum(sizes) - kept, time.monotonic() - begun
        )

    @override
    def write(self, files: Sequence[File], *, user: str = "") -> None:
        # It is the user who unpacks them, so that a link leads nowhere else for it.
        above = [] if user in ("", self._spec.user) else folders_above(files, self.workdir)
        script = ("/bin/sh", "-c", UNPACK, "write", *above)
        data = packed(files, self.workdir)
        ran = self.exec(script, stdin=data, cwd="/", user=user, timeout_s=_WRITE_S, most_bytes=1 << 16)
        if ran.exit_code:
            said = ran.stderr.decode(errors="replace").strip().splitlines() or [ran.ended]
            raise BadPath(f"files cannot be written: {said[0][:500]}")

    @override
    def read(self, path: str, *, most_bytes: int = 64 * MIB) -> bytes:
        for entry, content in self._archive(absolute(path, self.workdir), path, most_bytes):
            if entry.isreg():
                return content
            kinds = {tarfile.DIRTYPE: "a folder", tarfile.SYMTYPE: "a link", tarfile.LNKTYPE: "a link"}
            raise BadPath(f"{path} is {kinds.get(entry.type, 'a device')}, and no regular file")
        raise BadPath(f"{path} is empty")

    @override
    def read_folder(self, path: str, *, most_bytes: int = 64 * MIB) -> Iterator[File]:
        for entry, content in self._archive(absolute(path.rstrip("/"), self.workdir), path, most_bytes):
            name = entry.name.partition("/")[2]  # the archive begins with the folder itself
            if entry.isreg() and not name:
                raise BadPath(f"{path} is a file, and no folder")
            if entry.isreg() and ".." not in name.split("/"):
                yield File(name, content, entry.mode & 0o777)

    def _archive(self, whole: str, path: str, most_bytes: int) -> Iterator[tuple[tarfile.TarInfo, bytes]]:
        folder, name = posixpath.split(whole)
        script = '[ -e "$1" ] || [ -L "$1" ] || exit 3; exec tar --hard-dereference -cf - -- "$1"'
        ran = self.exec(
            ("/bin/sh", "-c", f'cd -- "$2" 2>/dev/null || exit 3; {script}', "read", name or ".", folder),
            cwd="/",
            user="root",
            timeout_s=_WRITE_S,
            most_bytes=most_bytes + _ARCHIVE,
        )
        if ran.exit_code == 3 and not ran.stdout:
            raise BadPath(f"there is no {whole}")
        return unpacked([ran.stdout], most_bytes, path)

    @override
    def close(self) -> None:
        if not self._closed.is_set():
            self._closed.set()
            self._timer.cancel()
            self._machine.end()

    @property
    def is_closed(self) -> bool:
        """Whether it has ended."""
        return self._closed.is_set()

    @contextmanager
    def _alive(self) -> Iterator[None]:
        """Says why it has ended, where that is known, in place of what the service says."""
        try:
            if self._closed.is_set():
                raise ContainerLost("the container was closed")
            yield
            if self._closed.is_set():
                raise ContainerLost("the container was closed")
        except ContainerLost:
            self.close()
            if self._why:
                raise ContainerLost(self._why) from None
            raise

    def _start(self, folder: str, who: str, words: str, stdin: bytes) -> None:
        """Starts a command; all but the last of its parts go ahead in calls of their own, where they are large."""
        run = _RUN.format(folder=folder, who=who, no_user=_NO_USER)
        script = _START.format(folder=folder, old=self._old)
        self._old = folder
        contents = {"run": run.encode(), "command": words.encode(errors="surrogateescape"), "in": stdin}
        for name, content in contents.items():
            for start in range(0, len(content), _PIECE):
                text = base64.b64encode(content[start : start + _PIECE]).decode()
                line = f"cd {folder} && printf %s {text} | base64 -d >>{name} || exit 90\n"
                if len(script) + len(line) > _MOST_SCRIPT:
                    self._call(script)
                    script = ""
                script += line
        self._call(f"{script}setsid sh {folder}/run </dev/null >/dev/null 2>&1 &\n")

    def _call(self, script: str, timeout_s: float = _CALL_S) -> str:
        code, said = self._machine.run(script, timeout_s)
        if code:
            raise ContainerLost(f"the container's shell fails (exit code {code}); its disk may be full")
        return said

    def _look(
        self, folder: str, found: Collected, sizes: tuple[int, int], left_s: float
    ) -> tuple[str, tuple[int, int], bool]:
        """The exit code or "*", the sizes of the output, and whether all that is kept of it has been had."""
        had = len(found.stdout), len(found.stderr)
        looks = min(_LOOKS, int(left_s / _LOOK_S)) if had == sizes or not found.left else 0
        script = _LOOK.format(
            folder=folder,
            out=sizes[0],
            err=sizes[1],
            looks=looks,
            look_s=_LOOK_S,
            from_out=had[0] + 1,
            from_err=had[1] + 1,
            most=min(_SAID, found.left),
        )
        lines = self._call(script).split("\n")
        try:
            code, out, err = lines[0].split()
            pieces, sizes = [base64.b64decode(lines[n], validate=True) for n in (1, 2)], (int(out), int(err))
        except (ValueError, IndexError) as error:
            raise ContainerLost(f"the container's shell says no output: {lines[0][:200]}") from error
        for number, piece in enumerate(pieces, 1):
            found.add(number, piece)
        found.left_out = 0
        is_whole = not found.left or (len(found.stdout), len(found.stderr)) == sizes
        return code, sizes, is_whole

    def _kill(self, who: str, mark: str) -> None:
        """Kills all processes of a command, as its user; thrice, as they may start others meanwhile."""
        kill = shlex.join(["sh", "-c", KILL, "kill", mark])
        self._call(f"{who}for i in 1 2 3; do $as {kill}; done; true\n")


def _who(user: str) -> str:
    name, _, group = user.partition(":")
    return _WHO.format(user=shlex.quote(name), group=shlex.quote(group))


def _words(command: Sequence[str], cwd: str, env: Mapping[str, str], mark: str) -> str:
    """A script that makes the command its arguments; variables are the user's, not those of what becomes it."""
    folder = f'cd -- "$0" 2>/dev/null || {{ echo "${MARK}" >&2; exit {_NO_FOLDER}; }}; exec "$@"'
    given = [f"{name}={value}" for name, value in {**env, MARK: mark}.items()]
    return "set -- " + shlex.join(["env", *given, "sh", "-c", folder, cwd, *command]) + "\n"
