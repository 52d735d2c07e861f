"""The connection with a Docker engine: its errors as ours, whose its containers are, and its images."""

from __future__ import annotations

import hashlib
import io
import os
import re
import tarfile
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import docker
from docker.errors import APIError, DockerException, NotFound
from requests.exceptions import RequestException

from headrace_containers.docker.options import DockerOptions
from headrace_containers.files import packed_folder
from headrace_containers.provider import BadSpec, ContainerLost, EngineLost, Spec

OWNER, UNTIL = "headrace.owner", "headrace.until"
"""Labels of what is made: the process that made it, and the unix time after which nobody has a use for it."""
BUILT = "headrace.built"
"""Label of images that are made here."""
_IMAGE_S = 3600
"""Most seconds of a pull or of a step of a build that says nothing."""


class Engine:
    """An engine, from any thread. Raises EngineLost where it does not answer."""

    def __init__(self, options: DockerOptions) -> None:
        self.options = options
        try:
            self.api = self._client(options.timeout_s)
            info = self.api.info()
        except (DockerException, RequestException, OSError) as error:
            raise EngineLost(
                f"{self._where} does not answer: {_reason(error)}; start it, or set DOCKER_HOST"
            ) from error
        security = info.get("SecurityOptions") or []
        if not any("seccomp" in each and "unconfined" not in each for each in security):
            raise EngineLost(
                f"{self._where} has no seccomp filter for its containers; run it with the default one"
            )
        backing = dict(info.get("DriverStatus") or []).get("Backing Filesystem", "")
        self.has_quota = info.get("Driver") == "overlay2" and backing == "xfs"
        """Whether it may be able to limit what a container writes; else that is watched."""

    @property
    def _where(self) -> str:
        return f"the Docker engine {self.options.host or os.environ.get('DOCKER_HOST', '')}".rstrip()

    def _client(self, timeout_s: float) -> Any:
        host = {"base_url": self.options.host} if self.options.host else docker.utils.kwargs_from_env()
        return docker.APIClient(version="auto", timeout=timeout_s, max_pool_size=64, **host)

    def patient(self) -> Any:
        """A client of one's own for pulls and builds; close it."""
        return self._client(_IMAGE_S)

    @contextmanager
    def asked(self, what: str, spec: Spec | None = None) -> Iterator[None]:
        """Says the engine's errors in our words. `what` was done: "a container cannot be started"."""
        try:
            yield
        except APIError as error:
            said = _reason(error)
            if "no space left" in said.lower():
                raise EngineLost(
                    f"{what}: {self._where} has no space left ({said}); free its disk"
                ) from error
            if re.search(r"unable to find (user|group)|no matching entries in passwd", said):
                raise BadSpec("user", f"the image knows no such user: {said}; give UID:GID") from error
            if isinstance(error, NotFound) or "is not running" in said:
                raise ContainerLost(f"{what}: {said}") from error
            if error.is_client_error():
                raise BadSpec("image" if spec is None else "(spec)", f"{what}: {said}") from error
            raise EngineLost(f"{what}: {self._where}: {said}") from error
        except (DockerException, RequestException, OSError) as error:
            raise EngineLost(f"{what}: {self._where} does not answer ({_reason(error)})") from error


def _reason(error: BaseException) -> str:
    if isinstance(error, APIError):
        return str(error.explanation or error)
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def owner(pid: int = 0) -> str:
    """A process, by default this one, as a label: the host's boot, its namespace of processes, id, and start."""
    pid = pid or os.getpid()
    return f"{_place()}/{pid}/{_started(pid)}"


def is_gone(label: str) -> bool:
    """Whether the process of a label has surely ended; of another host, or another namespace, nobody can say."""
    place, _, process = label.partition("/")
    pid, _, started = process.partition("/")
    return place == _place() and pid.isdigit() and _started(int(pid)) != started


def _place() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}:{os.stat('/proc/self/ns/pid').st_ino}"


def _started(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


class Images:
    """The images of an engine that specs name: pulled, built or changed once, and by their ids from then on."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._locks: defaultdict[tuple[object, ...], threading.Lock] = defaultdict(threading.Lock)
        self._had: dict[tuple[object, ...], dict[str, Any]] = {}

    def of(self, spec: Spec) -> dict[str, Any]:
        """What the engine says of the image of a spec, as `docker inspect` does. Raises BadSpec, EngineLost."""
        key = _key(spec)
        with self._locks[key]:
            if key not in self._had:
                self._had[key] = self._owned(self._base(spec), spec)
            return self._had[key]

    def named(self, name: str, key: str) -> dict[str, Any]:
        """An image by its name, pulled where it is missing. `key` is the spec's."""
        with self._locks[(name,)]:
            found = self._found(name)
            if found is None and self._engine.options.pull == "missing":
                self._pull(name, key)
                found = self._found(name)
            if found is None:
                raise BadSpec(key, f"the engine has no image {name}; make or pull it, or set pull: missing")
            return found

    def forget(self, spec: Spec) -> None:
        """Looks for the image of a spec anew next time: somebody may have removed it, or made another one."""
        self._had.pop(_key(spec), None)

    def _found(self, name: str) -> dict[str, Any] | None:
        with self._engine.asked(f"the image {name} cannot be looked for"):
            try:
                found: dict[str, Any] = self._engine.api.inspect_image(name)
            except NotFound:
                return None
            return found

    def _base(self, spec: Spec) -> dict[str, Any]:
        if bool(spec.image) == bool(spec.build or spec.context):
            raise BadSpec("image", "give an image, or a folder to build one of, and not both")
        if spec.context:
            return self._made("build", lambda: spec.context)
        if spec.build is None:
            return self.named(spec.image, "image")
        if not (spec.build / "Dockerfile").is_file():
            raise BadSpec("build", f"there is no {spec.build / 'Dockerfile'}")
        return self._made("build", lambda: packed_folder(spec.build or Path()))

    def _owned(self, base: dict[str, Any], spec: Spec) -> dict[str, Any]:
        if not spec.owned or spec.user == "root":
            return base
        for folder in spec.owned:
            if not folder.startswith("/") or not folder.isprintable():
                raise BadSpec("owned", f"{folder!r} is no absolute path")
        folders = " ".join("'" + folder.replace("'", "'\\''") + "'" for folder in spec.owned)
        text = f"FROM {base['Id']}\nUSER root\nRUN chown -R -- {spec.user} {folders}\n"
        return self._made("owned", lambda: _tar({"Dockerfile": text.encode()}))

    def _made(self, key: str, context: Any) -> dict[str, Any]:
        """The image that the engine makes of a context, by the context's digest."""
        data = context()
        tag = f"headrace-{key}:{hashlib.sha256(data).hexdigest()[:32]}"
        if found := self._found(tag):
            return found
        client = self._engine.patient()
        said: list[str] = []
        try:
            with self._engine.asked(f"{key}: the image cannot be made"):
                lines = client.build(
                    fileobj=io.BytesIO(data),
                    custom_context=True,
                    tag=tag,
                    rm=True,
                    forcerm=True,
                    decode=True,
                    labels={BUILT: key},
                )
                for line in lines:
                    said.append(str(line.get("stream", "")).strip())
                    if error := line.get("error"):
                        last = "; ".join([each for each in said if each][-3:])
                        raise BadSpec(key, f"the image cannot be made: {error} (after: {last[:500]})")
        finally:
            client.close()
        found = self._found(tag)
        if found is None:
            raise BadSpec(key, f"the engine made no image {tag}")
        return found

    def _pull(self, name: str, key: str) -> None:
        client, fix = self._engine.patient(), "correct its name, or make it on the engine's host"
        try:
            for line in client.pull(
                name,
                tag=None if ":" in name.rpartition("/")[2] or "@" in name else "latest",
                stream=True,
                decode=True,
            ):
                if error := line.get("error"):
                    raise BadSpec(key, f"{name} is not on the engine and cannot be pulled: {error}; {fix}")
        except APIError as error:
            raise BadSpec(
                key, f"{name} is not on the engine and cannot be pulled: {_reason(error)}; {fix}"
            ) from error
        except (DockerException, RequestException, OSError) as error:
            raise EngineLost(f"{name} cannot be pulled: {_reason(error)}") from error
        finally:
            client.close()


def _key(spec: Spec) -> tuple[object, ...]:
    """What an image is made of; of a folder, what tells that it was changed."""
    paths = sorted(spec.build.rglob("*")) if spec.build is not None else []
    found = [(str(path), path.lstat().st_mtime_ns, path.lstat().st_size) for path in paths]
    found.append((hashlib.sha256(spec.context).hexdigest(), 0, 0))
    return spec.image, tuple(found), spec.user, spec.owned


def _tar(files: dict[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(data), 0o644
            archive.addfile(entry, io.BytesIO(data))
    return packed.getvalue()
