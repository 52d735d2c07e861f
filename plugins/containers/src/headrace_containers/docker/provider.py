"""Containers of a Docker engine: how they are made, watched and removed."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import Any

from docker.errors import APIError, DockerException
from requests.exceptions import RequestException
from typing_extensions import override

from headrace_containers.docker.container import DockerContainer
from headrace_containers.docker.engine import OWNER, UNTIL, Engine, Images, is_gone, owner
from headrace_containers.docker.execs import Stream
from headrace_containers.docker.options import DockerOptions
from headrace_containers.docker.relay import Relay
from headrace_containers.provider import MIB, ContainerError, Provider, Spec

_LIVES = "exec cat >/dev/null"
"""Of the first process: it ends with its standard input, which the engine closes once this process is gone."""
_NOBODY = "65534:65534"
_ROOTS = ["CHOWN", "DAC_OVERRIDE", "FOWNER", "KILL", "SETGID", "SETUID"]
"""Capabilities of a container whose user is root: what package managers need, and no more."""
_WATCH_S, _REAP_S, _AHEAD_S = 1.0, 60.0, 3600.0


class DockerProvider(Provider):
    """Containers of one engine; a thread of it watches their time and their disk."""

    def __init__(self, options: DockerOptions) -> None:
        self._engine = Engine(options)
        self._images = Images(self._engine)
        self._open: dict[str, DockerContainer] = {}
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._quota = self._engine.has_quota
        threading.Thread(target=self._watch, name="containers", daemon=True).start()

    @override
    def prepare(self, spec: Spec) -> None:
        self._images.forget(spec)
        self._images.of(spec)

    @override
    def start(self, spec: Spec) -> DockerContainer:
        container = self.start_ahead(spec)
        container.begin(spec)
        return container

    def start_ahead(self, spec: Spec) -> DockerContainer:
        """Starts a container that somebody may want; its clock runs from its `begin` on."""
        image = self._images.of(spec)
        name = spec.image or str(spec.build)
        with self._engine.asked(f"a container of {name} cannot be made", spec):
            try:
                id = self._create(spec, image)
            except APIError as error:
                if error.status_code != 404:
                    raise
                self._images.forget(spec)
                id = self._create(spec, self._images.of(spec))
            try:
                attached = Stream(self._engine.api.attach_socket(id, params={"stdin": 1, "stream": 1}))
                self._engine.api.start(id)
            except BaseException:
                self._remove(id)
                raise
        container = DockerContainer(self._engine, id, attached, spec, image)
        with self._lock:
            self._open[id] = container
        try:
            if not spec.network.is_off:
                container.relay = Relay(self._engine, self._images, id, self._labels(spec))
            container.open()
        except BaseException:
            container.close()
            raise
        return container

    @override
    def reap(self) -> int:
        # One whose owner's host is another goes once its time is over.
        removed = 0
        with self._engine.asked("containers cannot be listed"):
            found = self._engine.api.containers(all=True, filters={"label": OWNER})
        for each in found:
            labels = each.get("Labels") or {}
            over = float(labels.get(UNTIL) or 0) < time.time()
            if over or is_gone(labels.get(OWNER, "")):
                removed += self._remove(each["Id"])
        return removed

    @override
    def close(self) -> None:
        self._closed.set()
        for container in self._living():
            container.close()

    def _create(self, spec: Spec, image: dict[str, Any]) -> str:
        limits, api = spec.limits, self._engine.api
        root = spec.user.partition(":")[0] in ("root", "0")
        # What an image declares as volumes is memory of the container's: a volume's size has no limit.
        volumes = (image.get("Config") or {}).get("Volumes") or {}
        given = {
            "network_mode": "none",
            "ipc_mode": "private",
            "init": True,
            "auto_remove": True,
            "cap_drop": ["ALL"],
            "cap_add": _ROOTS if root else None,
            "security_opt": ["no-new-privileges"],
            "nano_cpus": int(limits.cpus * 1e9),
            "mem_limit": limits.memory_mib * MIB,
            "memswap_limit": limits.memory_mib * MIB,
            "pids_limit": limits.processes,
            "ulimits": [_ulimit("fsize", limits.disk_mib * MIB), _ulimit("core", 0)],
            "tmpfs": dict.fromkeys(volumes, f"size={limits.disk_mib}m,mode=1777"),
            "log_config": {"type": "none", "config": {}},
        }
        made = {
            "image": image["Id"],
            "entrypoint": ["/bin/sh", "-c", _LIVES],
            "user": _NOBODY,
            "working_dir": "/",
            "stdin_open": True,
            "labels": self._labels(spec),
        }
        if self._quota:
            try:
                config = api.create_host_config(**given, storage_opt={"size": f"{limits.disk_mib}m"})
                return str(api.create_container(**made, host_config=config)["Id"])
            except APIError as error:
                if "storage-opt" not in str(error.explanation):
                    raise
                self._quota = False
        return str(api.create_container(**made, host_config=api.create_host_config(**given))["Id"])

    def _labels(self, spec: Spec) -> dict[str, str]:
        return {OWNER: owner(), UNTIL: str(int(time.time() + spec.limits.wall_s + _AHEAD_S))}

    def _remove(self, id: str) -> bool:
        try:
            self._engine.api.remove_container(id, force=True, v=True)
        except (DockerException, RequestException, OSError):
            return False
        return True

    def _living(self) -> list[DockerContainer]:
        with self._lock:
            self._open = {id: each for id, each in self._open.items() if not each.is_closed}
            return list(self._open.values())

    def _watch(self) -> None:
        """Ends containers that are over their time, or have written more than they may; removes what others left."""
        reaps_at = measured_at = 0.0
        while not self._closed.wait(_WATCH_S):
            now, living = time.monotonic(), self._living()
            for container in living:
                if now > container.ends_at:
                    container.end(
                        f"the container was ended after {container.spec.limits.wall_s:g} s (limits.wall_s)"
                    )
            if not self._quota and now > measured_at:
                for container in living:
                    with suppress(ContainerError):
                        _measure(container)
                # Where there is much to measure, that takes a tenth of the time at most.
                measured_at = time.monotonic() + 9 * (time.monotonic() - now)
            if now > reaps_at:
                reaps_at = now + _REAP_S
                with suppress(ContainerError):
                    self.reap()


def _measure(container: DockerContainer) -> None:
    most = container.spec.limits.disk_mib
    if (size := container.disk_bytes()) > most * MIB:
        container.end(
            f"the container was ended: it wrote {size >> 20} MiB to its file system, where {most} are allowed "
            "(limits.disk_mib)"
        )


def _ulimit(name: str, most: int) -> dict[str, Any]:
    return {"Name": name, "Soft": most, "Hard": most}


def build(options: DockerOptions) -> DockerProvider:
    """The provider. Raises EngineLost, BadSpec."""
    return DockerProvider(options)
