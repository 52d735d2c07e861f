"""Pods of a Kubernetes cluster, by its client library: one pod for each container, in a namespace without a network."""

from __future__ import annotations

import time
import uuid
from contextlib import suppress

import urllib3.exceptions
from kubernetes import client, config
from kubernetes.client.exceptions import ApiException
from kubernetes.config import ConfigException
from kubernetes.stream import stream
from typing_extensions import override

from headrace_containers.provider import BadSpec, ContainerError, ContainerLost, EngineLost, Spec
from headrace_containers.remote.adapter import Machine
from headrace_containers.remote.options import KubernetesOptions
from headrace_containers.remote.pods import LABELS, exit_code, pod_of, policy, state_of
from headrace_containers.remote.provider import RemoteProvider, unanswered

_POLL_S = 0.2
_ERRORS = (ApiException, ConfigException, urllib3.exceptions.HTTPError, OSError)


class Pod(Machine):
    """A pod."""

    def __init__(self, provider: KubernetesProvider, name: str) -> None:
        self.id, self._provider = name, provider

    @override
    def run(self, script: str, timeout_s: float) -> tuple[int, str]:
        # By standard input: a command is part of an URL, whose length proxies limit.
        with self._provider.asked("a command cannot be run"):
            ran = stream(
                client.CoreV1Api().connect_get_namespaced_pod_exec,
                *(self.id, self._provider.namespace),
                command=["/bin/sh"],
                stdin=True,
                stdout=True,
                stderr=True,
                tty=False,
                _preload_content=False,
            )
            try:
                ran.write_stdin(f"cd /\n{script}\nexit\n")
                ran.run_forever(timeout=timeout_s)
                if ran.is_open():
                    raise EngineLost("a command of the container's shell did not end in time")
                said = ran.read_channel(1)
                return exit_code(ran.read_channel(3)), said
            finally:
                ran.close()

    @override
    def end(self) -> None:
        with suppress(*_ERRORS):
            self._provider.delete(self.id)


class KubernetesProvider(RemoteProvider):
    """See the module. The cluster is that of the pod it runs in, or of KUBECONFIG."""

    NAME, HOLDS = "kubernetes", ("cpus", "memory_mib", "disk_mib")

    def __init__(self, options: KubernetesOptions) -> None:
        super().__init__(options)
        self._options, self.namespace = options, options.namespace
        if not options.enforces_policies:
            raise BadSpec(
                "provider_options.enforces_policies",
                "pods reach everything where the cluster's network ignores NetworkPolicy; make sure that it does not, "
                "and say true",
            )
        with self.asked("the cluster cannot be used"):
            config.load_config()
            try:
                client.NetworkingV1Api().create_namespaced_network_policy(self.namespace, policy())
            except ApiException as error:
                if error.status != 409:  # it is there
                    raise

    @override
    def open(self, spec: Spec) -> Pod:
        name, api = f"headrace-{uuid.uuid4().hex[:20]}", client.CoreV1Api()
        pod = Pod(self, name)
        with self.asked(f"a container of {spec.image} cannot be started"):
            try:
                api.create_namespaced_pod(self.namespace, pod_of(name, spec, self._options.runtime_class))
                late = time.monotonic() + self._options.timeout_s
                while (found := state_of(api.read_namespaced_pod(name, self.namespace), spec)) != "Running":
                    if found != "Pending":
                        raise ContainerLost(f"the pod of {spec.image} has ended: {found}")
                    if time.monotonic() > late:
                        raise EngineLost(
                            f"no node has started the pod of {spec.image} in {self._options.timeout_s:g} s"
                        )
                    time.sleep(_POLL_S)
            except BaseException:
                pod.end()
                raise
        return pod

    def delete(self, name: str) -> None:
        """Deletes a pod at once."""
        client.CoreV1Api().delete_namespaced_pod(name, self.namespace, grace_period_seconds=0)

    @override
    def reap(self) -> int:
        # What its owner has left ends by its deadline, and stays as an entry.
        selector = ",".join(f"{key}={value}" for key, value in LABELS.items())
        with self.asked("pods cannot be listed"):
            found = client.CoreV1Api().list_namespaced_pod(self.namespace, label_selector=selector).items
            ended = [each for each in found if each.status.phase in ("Succeeded", "Failed")]
            for each in ended:
                with suppress(ApiException):
                    self.delete(each.metadata.name)
        return len(ended)

    @override
    def wrong(self, error: Exception, what: str) -> ContainerError | None:
        # A stream that was refused has its status in words alone.
        if isinstance(error, ApiException) and (error.status == 404 or "status 404" in str(error.reason)):
            return ContainerLost(f"{what}: {error.reason}")
        if isinstance(error, ApiException):
            return EngineLost(
                f"{what}: the cluster says {error.status} {error.reason} {error.body or ''}"[:500]
            )
        return unanswered("kubernetes", what, error) if isinstance(error, _ERRORS) else None


def build(options: KubernetesOptions) -> KubernetesProvider:
    """The provider. Raises EngineLost, BadSpec."""
    return KubernetesProvider(options)
