"""What scales containers: Kubernetes' API server, or the container engine for a compose project.

Kubernetes: Deployments and StatefulSets through the scale subresource; needs `get` and `patch` on it. Docker: more of a
service are made like its first container; needs the extra `docker` and the engine's socket, whose holder has the rights
of root on the host.
"""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import quote
from urllib.request import HTTPSHandler, ProxyHandler, Request, build_opener

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

    def hosts(self) -> set[str]:
        """Host names of the services' living containers. Raises OSError where the engine does not answer."""
        try:
            there = [each for kind in self._kinds for each in self._containers(kind)]
            ended = ("exited", "dead", "removing", "created")
            return {each.attrs["Config"]["Hostname"] for each in there if each.status not in ended}
        except self._errors as error:
            raise OSError(f"the container engine does not answer: {error}") from error

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


ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
TIMEOUT_S = 15.0
CONTROLLERS = ("deployments", "statefulsets")


class Kubernetes:
    """Scales what `targets` names by kind, such as {"rollout": "deployments/post-rollout"}."""

    def __init__(
        self, api: str, targets: Mapping[str, str], account: Path = ACCOUNT, selector: str = ""
    ) -> None:
        """`account` has the files token, namespace and, for https, ca.crt; `selector` is of the fleet's pods by labels.

        Raises ValueError for a wrong target.
        """
        for kind, target in targets.items():
            controller, slash, name = target.partition("/")
            if controller not in CONTROLLERS or not slash or not name:
                raise ValueError(
                    f"{kind}={target}: write {' or '.join(f'{one}/NAME' for one in CONTROLLERS)}"
                )
        self._api, self._targets, self._account = api.rstrip("/"), dict(targets), account
        self._selector = selector
        context = (
            ssl.create_default_context(cafile=str(account / "ca.crt")) if api.startswith("https") else None
        )
        self._open = build_opener(
            ProxyHandler({}), *([HTTPSHandler(context=context)] if context else [])
        ).open

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds that have a target."""
        return tuple(self._targets)

    def scale(self, kind: str, containers: int) -> str:
        """Sets spec.replicas; returns why that cannot be, or ""."""
        target = self._targets[kind]
        try:
            answer = self._ask("apis/apps/v1", f"{target}/scale", {"spec": {"replicas": containers}})
            wanted = answer["spec"].get("replicas", 0)
        except HTTPError as error:
            return f"{target}: {_reason(error)}"
        except (URLError, OSError, ValueError) as error:
            return f"Kubernetes' API at {self._api} cannot be asked: {error}"
        return "" if wanted == containers else f"{target}: Kubernetes wants {wanted} pods, not {containers}"

    def hosts(self) -> set[str]:
        """Names of the fleet's pods that have not ended. Raises OSError where the API server does not say."""
        try:
            pods = self._ask("api/v1", f"pods?labelSelector={quote(self._selector)}")["items"]
            ended = ("Succeeded", "Failed")
            return {pod["metadata"]["name"] for pod in pods if pod["status"].get("phase") not in ended}
        except HTTPError as error:
            raise OSError(f"Kubernetes' API does not list pods: {_reason(error)}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise OSError(f"Kubernetes' API at {self._api} answers with no list of pods: {error}") from error

    def _ask(self, group: str, resource: str, patch: Any = None) -> Any:
        """GETs a resource of the namespace, or PATCHes it. Raises HTTPError, OSError, ValueError."""
        namespace = (self._account / "namespace").read_text(encoding="ascii").strip()
        # Read each time: a bound token is renewed while this process lives.
        token = (self._account / "token").read_text(encoding="ascii").strip()
        request = Request(
            f"{self._api}/{group}/namespaces/{namespace}/{resource}",
            data=None if patch is None else json.dumps(patch).encode(),
            headers={"Authorization": f"Bearer {token}", "Content-Type": "application/merge-patch+json"},
            method="GET" if patch is None else "PATCH",
        )
        with self._open(request, timeout=TIMEOUT_S) as answer:
            return json.load(answer)


def _reason(error: HTTPError) -> str:
    try:
        said = str(json.load(error)["message"])
    except (ValueError, KeyError, TypeError):
        said = str(error.reason)
    if error.code == 403:
        return f"the scaler may not: {said}; its Role needs `patch` on the subresource scale"
    return f"Kubernetes refuses ({error.code}): {said}"
