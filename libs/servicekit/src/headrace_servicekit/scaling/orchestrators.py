"""What scales containers: Kubernetes' API server, or the container engine for a compose project.

Kubernetes: Deployments and StatefulSets through the scale subresource; needs the extra `kubernetes`, and the rights
`get` and `patch` on it. Docker: more of a service are made like its first container; needs the extra `docker` and the
engine's socket, whose holder has the rights of root on the host.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping
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


TIMEOUT_S = 15.0
CONTROLLERS = {"deployments": "deployment", "statefulsets": "stateful_set"}
"""Resources that have a scale, as the client library's calls name them."""


class Kubernetes:
    """Scales what `targets` names by kind, such as {"rollout": "deployments/post-rollout"}, in one namespace."""

    def __init__(self, targets: Mapping[str, str], namespace: str, selector: str = "") -> None:
        """The cluster is that of this pod, else that of KUBECONFIG; `selector` is of the fleet's pods by labels.

        Raises ValueError for a wrong target, without a cluster, or without the extra `kubernetes`.
        """
        for kind, target in targets.items():
            controller, slash, name = target.partition("/")
            if controller not in CONTROLLERS or not slash or not name:
                raise ValueError(
                    f"{kind}={target}: write {' or '.join(f'{one}/NAME' for one in CONTROLLERS)}"
                )
        if not namespace:
            raise ValueError(
                "--namespace (HEADRACE_SCALER_NAMESPACE): name the namespace of the fleet's pods"
            )
        try:
            import urllib3.exceptions
            from kubernetes import client, config
        except ImportError as error:
            raise ValueError(f"{error}: pip install 'headrace-servicekit[kubernetes]'") from error
        inside = "KUBERNETES_SERVICE_HOST" in os.environ
        try:
            if inside:
                config.load_incluster_config()
            else:
                config.load_kube_config(os.environ.get("KUBECONFIG"))
        except config.ConfigException as error:
            raise ValueError(
                f"there is no cluster to ask: {error}; run in a pod with a service account, or set KUBECONFIG"
            ) from error
        settings = client.Configuration.get_default_copy()
        settings.proxy = None if inside else settings.proxy  # no proxy knows the cluster's own addresses
        caller = client.ApiClient(settings)
        self._refused, self._away = client.ApiException, (urllib3.exceptions.HTTPError, OSError)
        self._apps, self._core = client.AppsV1Api(caller), client.CoreV1Api(caller)
        self._targets, self._namespace, self._selector = dict(targets), namespace, selector

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds that have a target."""
        return tuple(self._targets)

    def scale(self, kind: str, containers: int) -> str:
        """Sets spec.replicas; returns why that cannot be, or ""."""
        controller, _, name = self._targets[kind].partition("/")
        patch = getattr(self._apps, f"patch_namespaced_{CONTROLLERS[controller]}_scale")
        try:
            wanted = patch(
                name, self._namespace, {"spec": {"replicas": containers}}, _request_timeout=TIMEOUT_S
            ).spec.replicas
        except self._refused as error:
            return f"{controller}/{name}: {_reason(error)}"
        except self._away as error:
            return f"Kubernetes' API cannot be asked: {error}"
        if (wanted or 0) == containers:
            return ""
        return f"{controller}/{name}: Kubernetes wants {wanted} pods, not {containers}"

    def hosts(self) -> set[str]:
        """Names of the fleet's pods that have not ended. Raises OSError where the API server does not say."""
        try:
            pods = self._core.list_namespaced_pod(
                self._namespace, label_selector=self._selector, _request_timeout=TIMEOUT_S
            ).items
        except self._refused as error:
            raise OSError(f"Kubernetes' API does not list pods: {_reason(error)}") from error
        except (*self._away, ValueError, TypeError) as error:
            raise OSError(f"Kubernetes' API cannot be asked for pods: {error}") from error
        return {pod.metadata.name for pod in pods if pod.status.phase not in ("Succeeded", "Failed")}


def _reason(error: Any) -> str:
    try:
        said = str(json.loads(error.body)["message"])
    except (ValueError, KeyError, TypeError):
        said = str(error.reason)
    if not error.status:
        return f"Kubernetes' API cannot be asked: {said}"
    if error.status == 403:
        return (
            f"the scaler may not: {said}; its Role needs `patch` on the subresource scale, and `list` on pods"
        )
    return f"Kubernetes refuses ({error.status}): {said}"
