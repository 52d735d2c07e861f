"""The provider `kubernetes` over its client's calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import yaml
from headrace_containers.provider import BadSpec, ContainerLost, EngineLost, File, Limits, Spec
from headrace_containers.providers import provider_of
from remote_local import Local
from remote_stubs import Service, Thing, check_recorded

OPTIONS = {"unheld": ["limits.processes"], "enforces_policies": True}
API, SOCKET = "kubernetes.client:CoreV1Api", "kubernetes.stream.ws_client:WSClient"
EXEC = f"{API}.connect_get_namespaced_pod_exec"
POLICY = "kubernetes.client:NetworkingV1Api.create_namespaced_network_policy"


class Cluster:
    """Pods, as the calls tell of them."""

    def __init__(self, service: Service, machine: Local) -> None:
        self.service, self.machine = service, machine
        self.pods: dict[str, Any] = {}
        self.waits: Any = None
        self.phases = ["Pending", "Running"]
        self.breaks_off = self.hangs = False

    def refuse(self, status: int, reason: str) -> Exception:
        """An error of the client's."""
        name = "kubernetes.client.exceptions:ApiException"
        return self.service.fails(
            name, reason, status=status, reason=reason, headers=None, body=None, data=None
        )

    def create(self, namespace: str, body: Any) -> None:
        self.pods[body["metadata"]["name"]] = body

    def read(self, name: str, namespace: str) -> Thing:
        state = Thing(waiting=self.waits)
        phase = self.phases.pop(0) if len(self.phases) > 1 else self.phases[0]
        return Thing(status=Thing(phase=phase, container_statuses=[Thing(state=state)]))

    def delete(self, name: str, namespace: str, grace_period_seconds: int) -> None:
        if self.pods.pop(name, None) is None:
            raise self.refuse(404, "Not Found")

    def stream(self, method: Callable[..., Any], *args: Any, _preload_content: bool, **given: Any) -> Thing:
        assert not _preload_content
        method(*args, **given)
        if args[0] not in self.pods:
            raise self.refuse(0, "Handshake status 404 Not Found")
        channels: dict[int, str] = {1: "", 3: ""}

        def write(data: str) -> None:
            if self.breaks_off:
                return
            code, channels[1] = self.machine.run(f"sh <<'END-OF-IT'\n{data}END-OF-IT\n", 60)
            cause = {"reason": "ExitCode", "message": str(code)}
            failed = {"status": "Failure", "reason": "NonZeroExitCode", "details": {"causes": [cause]}}
            channels[3] = yaml.safe_dump(failed if code else {"status": "Success"})

        stub = self.service.stub
        return Thing(
            write_stdin=stub(f"{SOCKET}.write_stdin", write),
            run_forever=stub(f"{SOCKET}.run_forever", lambda timeout: None),
            is_open=stub(f"{SOCKET}.is_open", lambda: self.hangs),
            read_channel=stub(f"{SOCKET}.read_channel", channels.__getitem__),
            close=stub(f"{SOCKET}.close", lambda: None),
        )


@pytest.fixture
def cluster(service_of: Callable[[str], Service], machine: Local) -> Cluster:
    """A cluster of one machine."""
    service = service_of("kubernetes")
    made = Cluster(service, machine)
    service.replace("kubernetes.config:load_config", lambda: None)
    service.replace(POLICY, lambda namespace, body: None)
    service.replace(f"{API}.create_namespaced_pod", made.create)
    service.replace(f"{API}.read_namespaced_pod", made.read)
    service.replace(f"{API}.delete_namespaced_pod", made.delete)
    service.replace(EXEC, lambda *args, **given: None)
    service.replace("kubernetes.stream:stream", made.stream)
    return made


def test_recorded_calls_are_the_packages() -> None:
    check_recorded("kubernetes")


def test_a_pod_of_its_own(cluster: Cluster, spec: Spec) -> None:
    provider = provider_of("kubernetes", {**OPTIONS, "namespace": "ours", "runtime_class": "gvisor"})
    container = provider.start(
        replace(spec, limits=Limits(cpus=0.5, memory_mib=512, disk_mib=100, wall_s=60))
    )
    ran = container.exec(("/bin/sh", "-c", "cat; id -u; echo e >&2; exit 7"), stdin=b"\xff in")
    assert (ran.exit_code, ran.stdout, ran.stderr) == (7, b"\xff in1000\n", b"e\n")
    container.write([File("a", b"\0data")])
    assert container.read("a") == b"\0data"
    (pod,) = cluster.pods.values()
    (one,) = pod["spec"]["containers"]
    held = {"cpu": "500m", "memory": "512Mi", "ephemeral-storage": "100Mi"}
    assert one["resources"] == {"limits": held, "requests": held}
    assert one["securityContext"]["capabilities"]["drop"] == ["ALL"]
    assert not one["securityContext"]["allowPrivilegeEscalation"]
    assert pod["spec"]["runtimeClassName"] == "gvisor" and pod["spec"]["activeDeadlineSeconds"] >= 60
    assert not pod["spec"]["automountServiceAccountToken"]
    (policy,) = cluster.service.calls.of("NetworkingV1Api.create_namespaced_network_policy")
    assert policy["namespace"] == "ours" and policy["body"]["spec"] == {
        "podSelector": {"matchLabels": pod["metadata"]["labels"]},
        "policyTypes": ["Ingress", "Egress"],
    }
    container.close()
    assert not cluster.pods


def test_the_manifests_are_the_clients(cluster: Cluster, spec: Spec) -> None:
    if not cluster.service.is_real:
        pytest.skip("needs the package kubernetes")
    from kubernetes import client

    provider_of("kubernetes", OPTIONS).start(spec)
    pod = next(iter(cluster.pods.values()))["spec"]

    def check(kind: Any, given: dict[str, Any]) -> None:
        assert set(given) <= set(kind.attribute_map.values()), (kind, given)

    check(client.V1PodSpec, pod)
    check(client.V1Container, pod["containers"][0])
    check(client.V1SecurityContext, pod["containers"][0]["securityContext"])
    (policy,) = cluster.service.calls.of("NetworkingV1Api.create_namespaced_network_policy")
    check(client.V1NetworkPolicySpec, policy["body"]["spec"])


def test_what_it_cannot_hold_is_refused(cluster: Cluster, spec: Spec) -> None:
    with pytest.raises(BadSpec) as caught:
        provider_of("kubernetes", {**OPTIONS, "enforces_policies": False})
    assert caught.value.key == "provider_options.enforces_policies"
    with pytest.raises(BadSpec, match=r"provider_options\.unheld") as caught:
        provider_of("kubernetes", {"enforces_policies": True}).start(spec)
    assert caught.value.key == "limits.processes" and not cluster.pods


def test_a_policy_that_is_there_is_used_and_one_that_cannot_be_made_refused(cluster: Cluster) -> None:
    for status in (409, 403):

        def fail(namespace: str, body: Any, status: int = status) -> None:
            raise cluster.refuse(status, "of the cluster")

        cluster.service.replace(POLICY, fail)
        if status == 409:
            provider_of("kubernetes", OPTIONS)
        else:
            with pytest.raises(EngineLost, match="403 of the cluster"):
                provider_of("kubernetes", OPTIONS)


def test_an_image_that_cannot_be_pulled_is_named_and_no_pod_left(cluster: Cluster, spec: Spec) -> None:
    cluster.phases, cluster.waits = ["Pending"], Thing(reason="ErrImagePull", message="not found")
    provider = provider_of("kubernetes", OPTIONS)
    for ask in (provider.prepare, provider.start):
        with pytest.raises(BadSpec, match="not found") as caught:
            ask(spec)
        assert caught.value.key == "image" and not cluster.pods


def test_a_pod_that_no_node_starts_or_that_ends_is_left_nowhere(cluster: Cluster, spec: Spec) -> None:
    provider = provider_of("kubernetes", {**OPTIONS, "timeout_s": 0.01})
    for phase, kind in (("Pending", EngineLost), ("Failed", ContainerLost)):
        cluster.phases = [phase]
        with pytest.raises(kind):
            provider.start(spec)
        assert not cluster.pods


def test_a_pod_that_is_gone_is_lost(cluster: Cluster, spec: Spec) -> None:
    provider = provider_of("kubernetes", OPTIONS)
    for how, said in (("gone", "404"), ("breaks_off", "broken off"), ("hangs", "did not end in time")):
        container = provider.start(spec)
        cluster.breaks_off, cluster.hangs = how == "breaks_off", how == "hangs"
        if how == "gone":
            cluster.pods.clear()
        with pytest.raises(ContainerLost, match=said):
            container.exec(("true",))
        cluster.breaks_off = cluster.hangs = False
        cluster.pods.clear()


def test_pods_that_have_ended_are_removed(cluster: Cluster, spec: Spec) -> None:
    provider = provider_of("kubernetes", OPTIONS)
    provider.start(spec)
    (name,) = cluster.pods
    other = Thing(metadata=Thing(name="other"), status=Thing(phase="Running"))
    ended = Thing(metadata=Thing(name=name), status=Thing(phase="Failed"))
    cluster.service.replace(
        f"{API}.list_namespaced_pod", lambda namespace, label_selector: Thing(items=[other, ended])
    )
    assert provider.reap() == 1 and not cluster.pods
