"""`docker run` and `docker exec` of agents on this host, which lead into the container of their task and nowhere else.

An agent that keeps its work in a container (mini-swe-agent, and what is built on it) starts one by the command
`docker`. It gets this one: `run` starts nothing, as the task's container is there, and `exec` runs a command in it.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import socket
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from headrace_containers.provider import Container, ContainerError

ID = "task"
_WITH_VALUE = (
    "-w",
    "--workdir",
    "-e",
    "--env",
    "--name",
    "-u",
    "--user",
    "--platform",
    "--entrypoint",
    "--network",
)
_ENDING = ("stop", "rm", "kill", "cp", "ps", "pull", "inspect", "version", "info")
_EXEC_S = 600.0
_MOST_BYTES = 8 << 20
_CLIENT = """#!{python} -IS
import base64, json, os, socket, sys
with socket.socket(socket.AF_UNIX) as asked:
    asked.connect({socket!r})
    given = sys.stdin.buffer.read() if "-i" in sys.argv[2:5] else b""
    asked.sendall(json.dumps({{"argv": sys.argv[1:], "stdin": base64.b64encode(given).decode()}}).encode() + b"\\n")
    answer = json.loads(asked.makefile("rb").readline())
sys.stdout.buffer.write(base64.b64decode(answer["out"]))
sys.stderr.buffer.write(base64.b64decode(answer["err"]))
sys.stdout.flush()
sys.stderr.flush()
os._exit(answer["code"])
"""


class Shim:
    """The command, for as long as the block lasts."""

    def __init__(self, container: Container, workdir: str) -> None:
        self._container, self._workdir = container, workdir
        self._lock = threading.Lock()
        self.folder = Path(tempfile.mkdtemp(prefix="headrace-docker-"))
        program, address = self.folder / "docker", str(self.folder / "socket")
        program.write_text(_CLIENT.format(python=sys.executable, socket=address), encoding="utf-8")
        program.chmod(0o755)
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(address)
        self._listening.listen()

    @property
    def variables(self) -> dict[str, str]:
        """By which agents find it; mini-swe-agent asks nobody, and loads nothing."""
        return {
            "PATH": f"{self.folder}:{os.environ.get('PATH', '')}",
            "MSWEA_DOCKER_EXECUTABLE": str(self.folder / "docker"),
            "MSWEA_CONFIGURED": "true",
            "MSWEA_COST_TRACKING": "ignore_errors",
            "MSWEA_SILENT_STARTUP": "1",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "MSWEA_GLOBAL_CONFIG_DIR": str(self.folder),
        }

    def __enter__(self) -> Shim:
        threading.Thread(target=self._serve, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listening.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _serve(self) -> None:
        while True:
            try:
                asking, _ = self._listening.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(asking,), daemon=True).start()

    def _answer(self, asking: socket.socket) -> None:
        with asking, suppress(OSError, ValueError):
            given = json.loads(asking.makefile("rb").readline())
            code, out, err = self._carried_out(given["argv"], base64.b64decode(given["stdin"]))
            answer = {
                "code": code,
                "out": base64.b64encode(out).decode(),
                "err": base64.b64encode(err).decode(),
            }
            asking.sendall(json.dumps(answer).encode() + b"\n")

    def _carried_out(self, argv: Sequence[str], stdin: bytes) -> tuple[int, bytes, bytes]:
        word = argv[0] if argv else ""
        if word == "run":
            return 0, f"{ID}\n".encode(), b""
        if word in _ENDING:
            return 0, b"", b""
        if word != "exec":
            return 1, b"", f"docker {word}: the task's container takes run and exec alone\n".encode()
        options, rest = _parsed(argv[1:])
        env = dict(pair.partition("=")[::2] for pair in options.get("-e", []))
        try:
            with self._lock:  # one command at a time
                ran = self._container.exec(
                    rest[1:],
                    stdin=stdin,
                    cwd=(options.get("-w") or [self._workdir])[-1],
                    env=env,
                    timeout_s=_EXEC_S,
                    most_bytes=_MOST_BYTES,
                )
        except ContainerError as error:
            return 1, b"", f"{error}\n".encode()
        return min(ran.exit_code, 255), ran.stdout, ran.stderr


def _parsed(argv: Sequence[str]) -> tuple[dict[str, list[str]], list[str]]:
    """Options by their short names, and what follows them: the container, and the command.

    >>> _parsed(["-w", "/app", "-e", "A=1", "task", "bash", "-lc", "ls -w"])
    ({'-w': ['/app'], '-e': ['A=1']}, ['task', 'bash', '-lc', 'ls -w'])
    """
    short = {"--workdir": "-w", "--env": "-e"}
    found: dict[str, list[str]] = {}
    at = 0
    while at < len(argv) and argv[at].startswith("-"):
        name, equals, value = argv[at].partition("=")
        if name in _WITH_VALUE and not equals:
            at, value = at + 1, argv[at + 1] if at + 1 < len(argv) else ""
        found.setdefault(short.get(name, name), []).append(value)
        at += 1
    return found, list(argv[at:])
