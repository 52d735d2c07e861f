"""Containers for tests where no engine is: namespaces of this kernel over a copy-on-write view of this machine's files.

They keep what coding tasks count on, by the same means as an engine: an own file system, process tree and loopback, an
own user without capabilities, and an end that leaves nothing. Needs root, `unshare`, `nsenter`, `setpriv` and `tar`.
"""

from __future__ import annotations

import importlib.util
import io
import os
import re
import shutil
import signal
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

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

_LIKE_PACKAGE_MANAGERS = "+chown,+dac_override,+fowner,+setgid,+setuid"
_INIT = """
set -e
mount -t tmpfs -o size=$2m tmpfs "$1"
mkdir "$1/upper" "$1/work" "$1/root"
mount -t overlay overlay -o "lowerdir=/,upperdir=$1/upper,workdir=$1/work" "$1/root"
mount -t tmpfs tmpfs "$1/root/tmp" && chmod 1777 "$1/root/tmp"
for hidden in $3; do mount -t tmpfs tmpfs "$1/root$hidden"; done
mount -t proc proc "$1/root/proc"
mount -t tmpfs tmpfs "$1/root/dev"
for device in null zero random urandom; do
    touch "$1/root/dev/$device"; mount --bind /dev/$device "$1/root/dev/$device"
done
ip link set lo up
echo ready
exec chroot "$1/root" sleep infinity
"""


def missing() -> str:
    """Why such containers cannot be had here; empty where they can."""
    if os.geteuid():
        return "namespaces need root"
    for name in ("unshare", "nsenter", "setpriv", "tar", "ip"):
        if shutil.which(name) is None:
            return f"there is no {name}"
    ran = subprocess.run(["unshare", "-m", "-p", "-n", "-f", "true"], capture_output=True)
    return "this kernel gives no namespaces" if ran.returncode else ""


class Namespace:
    """A container; see `headrace_containers.provider.Container`."""

    command: tuple[str, ...] = ()

    def __init__(self, spec: Spec) -> None:
        self._spec, self._folder = spec, Path(tempfile.mkdtemp(prefix="headrace-namespace-"))
        hidden = " ".join(each for each in ("/root", "/home") if Path(each).is_dir())
        unshare = ("unshare", "-m", "-p", "-n", "-i", "-u", "-f", "--kill-child", "--propagation", "private")
        self._process = subprocess.Popen(
            [*unshare, "bash", "-c", _INIT, "init", str(self._folder), str(spec.limits.disk_mib), hidden],
            stdout=subprocess.PIPE,
        )
        assert self._process.stdout is not None
        if self._process.stdout.readline() != b"ready\n":
            self.close()
            raise ContainerLost("its namespaces cannot be made")
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        self._init, self.id = int(children[0]), f"namespace-{children[0]}"
        self.workdir = spec.workdir or WORKDIR

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
        """See the protocol."""
        if self._process.poll() is not None:
            raise ContainerLost("the container is gone")
        begun = time.monotonic()
        enter = ("nsenter", "-t", str(self._init), "-m", "-p", "-n", "-i", "-u", "--root", "--wd")
        variables = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/tmp", **self._spec.env, **(env or {})}
        given = [f"{name}={value}" for name, value in variables.items()]
        run = ("sh", "-c", 'cd "$0" && exec "$@"', cwd or self.workdir)
        ran = subprocess.Popen(
            [*enter, *_as(user or self._spec.user), "env", "-i", *given, *run, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        timed_out = False
        try:
            out, err = ran.communicate(stdin, timeout_s)
        except subprocess.TimeoutExpired:
            timed_out = True
            self._kill_all()
            out, err = ran.communicate()
        status = 137 if timed_out else ran.returncode if ran.returncode >= 0 else 128 - ran.returncode
        left_out = max(0, len(out) - most_bytes)
        if on_output is not None:
            on_output(1, out[:most_bytes])
        ended: Literal["time", "exit"] = "time" if timed_out else "exit"
        return Ran(status, out[:most_bytes], err[:most_bytes], ended, left_out, time.monotonic() - begun)

    def _kill_all(self) -> None:
        for each in Path("/proc").glob("[0-9]*/status"):
            try:
                found = re.search(r"^NSpid:\s+(\d+)\s+(\d+)$", each.read_text(), re.MULTILINE)
                same = os.readlink(each.parent / "ns/pid") == os.readlink(f"/proc/{self._init}/ns/pid")
            except OSError:
                continue
            if same and found is not None and found[2] != "1":
                os.kill(int(found[1]), signal.SIGKILL)

    def write(self, files: Sequence[File], *, user: str = "") -> None:
        """See the protocol."""
        owner = _ids(user or self._spec.user)
        made = io.BytesIO()
        with tarfile.open(fileobj=made, mode="w") as archive:
            for each in files:
                entry = tarfile.TarInfo(str(Path(self.workdir) / each.path).lstrip("/"))
                entry.size, entry.mode, entry.uid, entry.gid = len(each.data), each.mode, *owner
                archive.addfile(entry, io.BytesIO(each.data))
        ran = self.exec(("tar", "-C", "/", "-xpf", "-"), stdin=made.getvalue(), cwd="/", user="root")
        if ran.exit_code:
            raise BadPath(ran.stderr.decode())

    def read(self, path: str, *, most_bytes: int = 64 * MIB) -> bytes:
        """See the protocol."""
        ran = self.exec(
            ("sh", "-c", '[ -f "$0" ] && [ ! -L "$0" ] && cat -- "$0"', path),
            user="root",
            most_bytes=most_bytes,
        )
        if ran.exit_code or ran.left_out:
            raise BadPath(f"{path} is no regular file, or too large")
        return ran.stdout

    def read_folder(self, path: str, *, most_bytes: int = 64 * MIB) -> Iterator[File]:
        """See the protocol."""
        raise NotImplementedError

    def close(self) -> None:
        """See the protocol."""
        self._process.kill()
        self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


class Namespaces:
    """Starts them. Of a Dockerfile it knows COPY, RUN and WORKDIR; its image is this machine."""

    def __init__(self, *, pytest: bool = False) -> None:
        self.started: list[Namespace] = []
        self._files = pytest_files("/opt/site") if pytest else []

    def prepare(self, spec: Spec) -> None:
        """Nothing to do."""

    def start(self, spec: Spec) -> Container:
        """See the protocol."""
        if spec.image.startswith("missing"):
            raise BadSpec("image", f"there is no image {spec.image}")
        container = Namespace(spec)
        self.started.append(container)
        try:
            container.write(self._files, user="root")
            if spec.build is not None:
                _build(container, spec.build)
            for each in spec.owned or (container.workdir,):
                script = (
                    'mkdir -p "$0" && chown -R "$1" "$0"'
                    if spec.owned
                    else 'mkdir -p "$0" && chown "$1" "$0"'
                )
                container.exec(("sh", "-c", script, each, spec.user), cwd="/", user="root")
        except BaseException:
            container.close()
            raise
        return container

    def reap(self) -> int:
        """They end with their process."""
        return 0

    def close(self) -> None:
        """Ends all."""
        for each in self.started:
            each.close()


def pytest_files(into: str) -> list[File]:
    """The pytest of this environment, which is Python alone."""
    found = []
    for name in ("pytest", "_pytest", "py", "pluggy", "iniconfig", "packaging", "pygments"):
        source = importlib.util.find_spec(name)
        assert source is not None and source.origin is not None
        origin = Path(source.origin)
        paths = sorted(origin.parent.rglob("*.py")) if origin.name == "__init__.py" else [origin]
        above = origin.parent.parent if origin.name == "__init__.py" else origin.parent
        found += [File(f"{into}/{path.relative_to(above)}", path.read_bytes()) for path in paths]
    return found


def _build(container: Namespace, folder: Path) -> None:
    """Carries a Dockerfile out."""
    text, cwd = (folder / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " "), "/"
    for line in text.splitlines():
        word, _, rest = line.partition(" ")
        if word == "COPY":
            source, target = rest.split()
            files = [each for each in sorted((folder / source).rglob("*")) if each.is_file()]
            container.write(
                [File(f"{target}/{each.relative_to(folder / source)}", each.read_bytes()) for each in files],
                user="root",
            )
        elif word == "RUN":
            ran = container.exec(("sh", "-c", rest), cwd=cwd, user="root")
            assert ran.exit_code == 0, ran.stderr
        elif word == "WORKDIR":
            cwd = rest
            container.exec(("mkdir", "-p", cwd), cwd="/", user="root")
            if not container._spec.workdir:
                container.workdir = cwd


def _ids(user: str) -> tuple[int, int]:
    uid, _, gid = user.replace("root", "0").partition(":")
    return int(uid), int(gid or uid)


def _as(user: str) -> tuple[str, ...]:
    uid, gid = _ids(user)
    bounds = f"-all,{_LIKE_PACKAGE_MANAGERS}" if uid == 0 else "-all"
    return (
        *("setpriv", f"--reuid={uid}", f"--regid={gid}", "--clear-groups", "--no-new-privs"),
        *("--inh-caps=-all", f"--bounding-set={bounds}"),
    )


# mypy: the class has all of the protocol's methods.
_PROVIDER: type = Namespaces
