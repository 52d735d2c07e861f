"""Containers of a compose project, through the engine's API: more of a service are made like its first one.

Needs the extra `docker` and the engine's socket. Who holds that socket has the rights of root on the host.
"""

from __future__ import annotations

import threading
from typing import Any

PROJECT, SERVICE = "com.docker.compose.project", "com.docker.compose.service"
NUMBER, ONE_OFF = "com.docker.compose.container-number", "com.docker.compose.oneoff"
STOP_S = 60
"""A trainer saves a checkpoint."""


class Docker:
    """Scales services of one compose project that run at least one container."""

    def __init__(self, project: str, kinds: tuple[str, ...]) -> None:
        """Raises ValueError where the engine does not answer or the extra `docker` is missing."""
        try:
            import docker
            from docker.errors import DockerException
        except ImportError as error:
            raise ValueError(f"{error}: pip install 'headrace-servicekit[docker]'") from error
        try:
            self._client = docker.from_env()
            self._client.ping()
        except DockerException as error:
            raise ValueError(
                f"the engine does not answer: {error}; mount its socket, and add its group"
            ) from error
        self._errors = DockerException
        self._project, self._kinds = project, kinds

    @property
    def kinds(self) -> tuple[str, ...]:
        """Services that may be scaled."""
        return self._kinds

    def scale(self, kind: str, containers: int) -> str:
        """Starts containers like the service's first one, or stops those with the highest numbers."""
        try:
            there = self._containers(kind)
            if not there:
                return f"there is no container of {kind} to make others like: docker compose up -d --scale {kind}=1"
            if not containers:
                return f"scale {kind}=0: the last container stays, since others are made like it"
            taken = {_number(each) for each in there}
            for _ in range(containers - len(there)):
                number = next(each for each in range(1, 2000) if each not in taken)
                taken.add(number)
                self._start_like(there[0], kind, number)
        except self._errors as error:
            return f"the container engine refuses: {error}"
        for container in there[containers:]:
            threading.Thread(target=self._remove, args=(container,), daemon=True).start()
        return ""

    def _containers(self, kind: str) -> list[Any]:
        """Containers of a service, by their numbers."""
        labels = [f"{PROJECT}={self._project}", f"{SERVICE}={kind}", f"{ONE_OFF}=False"]
        there = self._client.containers.list(all=True, filters={"label": labels}, ignore_removed=True)
        return sorted(there, key=_number)

    def _start_like(self, model: Any, kind: str, number: int) -> None:
        """Its host name, and so the name of its instance, is its own id."""
        config, networks = dict(model.attrs["Config"]), model.attrs["NetworkSettings"]["Networks"]
        config.pop("Hostname", None)
        config["Labels"] = {**config["Labels"], NUMBER: str(number)}
        config["HostConfig"] = model.attrs["HostConfig"]
        config["NetworkingConfig"] = {"EndpointsConfig": {name: {"Aliases": [kind]} for name in networks}}
        made = self._client.api.create_container_from_config(config, f"{self._project}-{kind}-{number}")
        self._client.api.start(made["Id"])

    def _remove(self, container: Any) -> None:
        try:
            container.stop(timeout=STOP_S)
            container.remove()
        except self._errors:
            return  # Somebody else has removed it.


def _number(container: Any) -> int:
    return int(container.labels.get(NUMBER, "0"))
