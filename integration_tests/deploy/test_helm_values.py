"""What values of the Helm chart do to its pods, and what is refused by its key."""

from __future__ import annotations

import json
import os
import subprocess

import pytest
from harness.chart import helm, objects_of, variables, workloads
from harness.processes import ROOT

DEVICES = ("rollout", "trainer")
PRIVILEGED = "--set=podSecurity=privileged"


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("rollout.replica=2", "replica"),
        ("pod.nodeSelectors.a=b", "nodeSelectors"),
        ("trainr.replicas=2", "trainr"),
        ("images.tag=1.5e", ""),
        ("rollout.gpus=-1", "/rollout/gpus"),
        ("rollout.gpus=one", "/rollout/gpus"),
        ("rollout.weights=4gigs", "/rollout/weights"),
        ("rollout.rdma.resource=hca", "/rollout/rdma/resource"),
        ("reward.gpus=1", "gpus"),
        ("pod.extraEnv[0].value=x", "name"),
        ("logLevel=loud", "/logLevel"),
        ("otlp.endpoint=collector:4317", "/otlp/endpoint"),
        ("podSecurity=none", "'restricted', 'baseline', 'privileged'"),
        ("redis.enabled=false", "redis.url: name your Redis"),
        ("trainer.instancesPerPod=devices", "needs trainer.gpus"),
        ("scaler.enabled=true,autoscaling.rollout.by=hpa", "would both set the number of pods"),
        ("autoscaling.rollout.by=keda,coordinator.env.HEADRACE_AUTOSCALE=reward=1:2", "choose one"),
        ("autoscaling.rollout.by=keda,autoscaling.rollout.min=9", "min is above max"),
        ("kueue.queue=team,scaler.enabled=true", "set scaler.enabled to false"),
        ("kueue.priorityClass=high", "kueue.queue: name the LocalQueue"),
        ("serviceAccount.create=true", "serviceAccount.name: name the account"),
        ("ingress.enabled=true", "ingress.host: write the name"),
        ("httpRoute.enabled=true", "httpRoute: write parentRefs"),
        ("storage.cache.hostPath=/var/cache/headrace", "`restricted` refuses storage.cache.hostPath"),
        (
            "podSecurity=baseline,storage.weights.hostPath=/dev/shm/headrace",
            "`baseline` refuses storage.weights",
        ),
        ("usersCode.trust=closed", "'open', 'contained'"),
        ("usersCode.allow.data=x", "/usersCode/allow/data"),
        ("usersCode.network=none", "'required', 'best_effort'"),
        ("oidc.audience=headrace", "issuer"),
        ("oidc.issuer=login.example.com,oidc.audience=headrace", "/oidc/issuer"),
        ("usersCode.ownUser=true", "`restricted` refuses usersCode.ownUser"),
        ("trainer.rdma.resource=rdma/hca", "`restricted` refuses trainer.rdma"),
        ("podSecurity=privileged,trainer.hostNetwork=true", "networkPolicy.nodes: trainer.hostNetwork"),
        ("pod.extraVolumes[0].name=x,pod.extraVolumes[0].hostPath.path=/x", "coordinator.extraVolumes (x)"),
        ("modelGiB=60,storage.data.size=1Ti", "storage.data.size: 1Ti is below the 1080 GiB"),
        ("modelGiB=60,storage.models.size=50Gi", "storage.models.size: 50Gi is below the 60 GiB"),
        ("rollout.shm=8Gi,rollout.resources.limits.memory=1Pi", ""),
        ("rollout.shm=8Gi", "rollout.resources.limits.memory: 12Gi holds the pod's /dev/shm (8Gi)"),
    ],
)
def test_a_value_that_cannot_be_is_refused_by_its_key(tools, option, words):
    done = helm(tools, "--set", option)
    if words:
        assert done.returncode != 0 and words in done.stderr, done.stderr
    else:
        assert done.returncode == 0, done.stderr


def test_a_tag_of_digits_is_the_tag_that_was_written_and_a_fraction_refused(tools, tmp_path):
    """A file's `tag: 1.10` is the number 1.1: nobody may guess which image was meant."""
    (tmp_path / "values.yaml").write_text("images: {tag: 20261129}")
    for option in (
        "--set=images.tag=20261129",
        "--set-string=images.tag=20261129",
        f"--values={tmp_path}/values.yaml",
    ):
        pods = workloads(objects_of(helm(tools, option)))
        assert pods["trainer"]["spec"]["containers"][0]["image"] == "headrace/trainer:20261129"
    (tmp_path / "values.yaml").write_text("images: {tag: 1.10}")
    done = helm(tools, f"--values={tmp_path}/values.yaml")
    assert done.returncode != 0 and "/images/tag" in done.stderr and "got number, want string" in done.stderr


def test_a_rendering_without_a_cluster_makes_no_secrets_and_with_a_secret_is_always_the_same(tools):
    done = helm(tools, cluster=False)
    assert done.returncode != 0 and "kubectl -n training create secret generic post-secrets" in done.stderr
    first, second = (helm(tools, "--set=secret.existing=mine", cluster=False) for _ in range(2))
    assert first.stdout == second.stdout
    objects = objects_of(first)
    assert not [each for each in objects if each["kind"] == "Secret"]
    (made,) = [each for each in objects_of(helm(tools)) if each["kind"] == "Secret"]
    assert made["immutable"], "who applies another rendering is refused by the API server"
    assert made["metadata"]["name"] == "post-secrets" and len(made["data"]) == 3


def test_keys_of_pod_reach_every_pod_and_those_of_a_service_stand_above_them(render):
    pods = workloads(
        render(
            "",
            "--set=scaler.enabled=true,simulator.replicas=1,pod.priorityClassName=low,trainer.priorityClassName=high",
            "--set=pod.podLabels.team=a,pod.podAnnotations.note=b,pod.nodeSelector.zone=c,rollout.nodeSelector.gpu=d",
            "--set=serviceAccount.create=true,serviceAccount.name=fleet,simulator.serviceAccountName=pods",
            "--set=simulator.automountServiceAccountToken=true,pod.env.HTTPS_PROXY=http://proxy:3128",
            '--set-json=pod.initContainers=[{"name":"first","image":"busybox"}]',
            '--set-json=pod.topologySpreadConstraints=[{"maxSkew":1,"topologyKey":"zone","whenUnsatisfiable":"ScheduleAnyway"}]',
            '--set-json=reward.extraEnv=[{"name":"KEY","valueFrom":{"secretKeyRef":{"name":"judge","key":"k"}}}]',
            '--set-json=reward.envFrom=[{"secretRef":{"name":"judge"}}]',
            '--set-json=trainer.extraVolumes=[{"name":"more","emptyDir":{}}]',
            '--set-json=trainer.extraVolumeMounts=[{"name":"more","mountPath":"/more"}]',
        )
    )
    assert len(pods) == 8
    for kind, pod in pods.items():
        spec = pod["spec"]
        assert spec["priorityClassName"] == ("high" if kind == "trainer" else "low")
        assert pod["metadata"]["labels"]["team"] == "a" and pod["metadata"]["annotations"] == {"note": "b"}
        assert spec["nodeSelector"] == {"zone": "c"} | ({"gpu": "d"} if kind == "rollout" else {})
        accounts = {"scaler": "post-scaler", "simulator": "pods"}
        assert spec["serviceAccountName"] == accounts.get(kind, "fleet")
        assert spec["automountServiceAccountToken"] is (kind in ("scaler", "simulator"))
        assert [each["name"] for each in spec["initContainers"]] == ["first"]
        (spread,) = spec["topologySpreadConstraints"]
        assert spread["labelSelector"]["matchLabels"]["app.kubernetes.io/component"] == kind
        assert variables(pod)["HTTPS_PROXY"] == "http://proxy:3128"
    (reward,) = pods["reward"]["spec"]["containers"]
    assert {"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "judge", "key": "k"}}} in reward["env"]
    assert reward["envFrom"] == [{"secretRef": {"name": "judge"}}]
    trainer = pods["trainer"]["spec"]
    assert {"name": "more", "mountPath": "/more"} in trainer["containers"][0]["volumeMounts"]
    assert {"name": "more", "emptyDir": {}} in trainer["volumes"]


def test_a_quota_on_limits_of_cpu_finds_one_at_every_container(render):
    pods = workloads(
        render(
            "1-gpu",
            "--set=scaler.enabled=true,simulator.replicas=1,cpuLimits=true,reward.resources.limits.cpu=3",
            "--set=storage.weights.hostPath=/dev/shm/headrace",
            PRIVILEGED,
        )
    )
    assert len(pods) == 8
    for kind, pod in pods.items():
        for each in [*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"]]:
            held = each["resources"]
            assert held["limits"]["cpu"] and held["limits"]["memory"], f"{kind}: {each['name']}"
            wanted = 3 if kind == "reward" else held["requests"]["cpu"]
            assert held["limits"]["cpu"] == wanted
    bare = workloads(render())["rollout"]["spec"]["containers"][0]["resources"]
    assert "cpu" not in bare["limits"], "a limit of CPU slows a service down: only who has to has one"


def test_pods_of_a_node_share_a_folder_of_weights_that_they_make_themselves(render, tmp_path):
    pods = workloads(
        render("8-gpu", "--set=storage.weights.hostPath=/dev/shm/headrace,simulator.replicas=1", PRIVILEGED)
    )
    for kind in DEVICES:
        spec = pods[kind]["spec"]
        (volume,) = [each for each in spec["volumes"] if each["name"] == "weights"]
        assert volume["hostPath"] == {"path": "/dev/shm/headrace", "type": "DirectoryOrCreate"}
        (folders,) = spec["initContainers"]
        assert folders["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["CHOWN"]}
        assert folders["volumeMounts"] == [{"name": "weights", "mountPath": "/weights"}]
        assert folders["image"] == spec["containers"][0]["image"], "which the node has to pull anyway"
        # The command itself, on a folder as kubelet makes it.
        made = tmp_path / kind
        made.mkdir(mode=0o755)
        script = folders["command"][2].replace("/weights", str(made))
        if made.stat().st_uid == 0:
            for _ in range(2):
                subprocess.run(["sh", "-ec", script], check=True)
                assert (made.stat().st_uid, made.stat().st_gid, made.stat().st_mode & 0o777) == (
                    10001,
                    10001,
                    0o700,
                )
    assert (
        "initContainers" not in pods["simulator"]["spec"] and "initContainers" not in pods["reward"]["spec"]
    )


@pytest.mark.parametrize("values", ["", "1-gpu", "8-gpu", "32-gpu"])
def test_restricted_pod_security_takes_every_pod(render, values):
    """The volumes, networks and users that Kubernetes' page of Pod Security Standards names for this level."""
    allowed = {
        "configMap",
        "csi",
        "downwardAPI",
        "emptyDir",
        "ephemeral",
        "persistentVolumeClaim",
        "projected",
        "secret",
    }
    pods = workloads(render(values, "--set=scaler.enabled=true,simulator.replicas=1,tls.existing=mine"))
    assert len(pods) == 8
    for pod in pods.values():
        spec = pod["spec"]
        assert {kind for volume in spec["volumes"] for kind in volume.keys() - {"name"}} <= allowed
        assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys() and "initContainers" not in spec
        (container,) = spec["containers"]
        assert not any("hostPort" in port for port in container.get("ports", ()))
        held = {**spec["securityContext"], **container["securityContext"]}
        assert (
            held["runAsNonRoot"] and held["runAsUser"] and held["seccompProfile"]["type"] == "RuntimeDefault"
        )
        assert held["capabilities"] == {"drop": ["ALL"]} and held["allowPrivilegeEscalation"] is False


def test_rdma_gives_the_right_to_lock_memory_and_the_devices_and_the_nodes_network(render):
    objects = render(
        "32-gpu",
        "--set=trainer.rdma.resource=rdma/hca,trainer.rdma.count=8,trainer.hostNetwork=true,trainer.interface=bond0",
        "--set=networkPolicy.nodes[0]=10.0.0.0/16",
        PRIVILEGED,
    )
    pods = workloads(objects)
    spec, (container,) = pods["trainer"]["spec"], pods["trainer"]["spec"]["containers"]
    assert spec["hostNetwork"] is True and spec["dnsPolicy"] == "ClusterFirstWithHostNet"
    assert container["resources"]["limits"]["rdma/hca"] == "8"
    assert container["securityContext"]["capabilities"]["add"] == ["IPC_LOCK", "SETGID", "SETUID"]
    given = variables(pods["trainer"])
    assert given["HEADRACE_CAPABILITIES"] == "ipc_lock" and given["NCCL_SOCKET_IFNAME"] == "=bond0"
    starts = (ROOT / "deploy/Dockerfile").read_text().split("ENTRYPOINT ")
    assert all(each.startswith('["as_service"') for each in starts if '"--kind", "trainer"' in each)
    if os.geteuid() == 0:
        # The entry point itself, with the rights of that container.
        rights = ",".join(
            ["-all", *(f"+{each.lower()}" for each in container["securityContext"]["capabilities"]["add"])]
        )
        command = ["setpriv", "--no-new-privs", "--inh-caps=-all", f"--bounding-set={rights}"]
        command += ["sh", ROOT / "deploy/as_service.sh", "sh", "-c", "id -u; grep CapEff /proc/self/status"]
        ran = subprocess.run(command, env={**os.environ, **given}, capture_output=True, text=True, check=True)
        assert ran.stdout.split() == ["10001", "CapEff:", f"{1 << 14:016x}"], "CAP_IPC_LOCK alone"
    assert pods["rollout"]["spec"].get("hostNetwork") is None
    for each in objects:
        kind = each["metadata"]["labels"]["app.kubernetes.io/component"]
        if each["kind"] == "NetworkPolicy" and kind in ("coordinator", "rollout", "trainer"):
            assert {"ipBlock": {"cidr": "10.0.0.0/16"}} in each["spec"]["ingress"][0]["from"]
            assert {"ipBlock": {"cidr": "10.0.0.0/16"}} in each["spec"]["egress"][1]["to"]


def test_no_two_services_have_a_port_of_a_node_in_common(render):
    """With hostNetwork; 50 instances a pod are the most."""
    pods, used = workloads(render("", "--set=simulator.replicas=1")), {}
    for kind, pod in pods.items():
        for port in pod["spec"]["containers"][0].get("ports", ()):
            first = port["containerPort"]
            if port["name"].startswith(("grpc-", "metrics-")):
                used[kind, port["name"]] = range(first, first + 50)
    taken = [number for each in used.values() for number in each]
    assert len(used) == 8 and len(taken) == len({*taken} | {8470, 8471, 9100}) - 3


def test_an_upgrade_keeps_the_coordinator_until_the_trainers_have_saved(render):
    """All pods get SIGTERM at one moment: a checkpoint of a drain is made through the coordinator of before."""
    pods = workloads(render("32-gpu", "--set=scaler.enabled=true"))
    coordinator, trainer = pods["coordinator"]["spec"], pods["trainer"]["spec"]
    wait = coordinator["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    assert wait[0] == "sleep" and int(wait[1]) >= trainer["terminationGracePeriodSeconds"]
    assert coordinator["terminationGracePeriodSeconds"] >= int(wait[1]) + 40
    assert all(
        "lifecycle" not in pods[kind]["spec"]["containers"][0] for kind in ("scaler", "trainer", "rollout")
    )
    (service,) = [
        each
        for each in render("32-gpu")
        if each["kind"] == "Service" and each["metadata"]["name"] == "post-coordinator"
    ]
    assert service["spec"]["publishNotReadyAddresses"], "pods that end stay reachable"


def test_kueue_admits_the_trainers_as_one_group_and_no_pod_without_devices_of_a_run(render):
    queued = {
        each["metadata"]["name"]: each["metadata"]["labels"].get("kueue.x-k8s.io/queue-name")
        for each in render("32-gpu", "--set=kueue.queue=team,kueue.priorityClass=low")
        if each["kind"] in ("Deployment", "StatefulSet", "Job")
    }
    assert queued == {
        "post-trainer": "team",
        "post-rollout": "team",
        "post-reward": "team",
        "post-coordinator": None,
        "post-redis": None,
        "post-models-1": None,
    }


def test_autoscalers_ask_the_coordinators_api_for_what_it_answers(render):
    """KEDA's `metrics-api`: its path chooses the kind in an answer of GET /v1/services."""
    objects = render(
        "8-gpu", *(f"--set=autoscaling.{kind}.by=keda" for kind in ("rollout", "reward", "trainer"))
    )
    found = {each["metadata"]["name"]: each["spec"] for each in objects if each["kind"] == "ScaledObject"}
    assert found.keys() == {"post-rollout", "post-reward", "post-trainer"}
    trainer = found["post-trainer"]
    assert trainer["scaleTargetRef"]["kind"] == "StatefulSet"
    (trigger,) = trainer["triggers"]
    asked = trigger["metadata"]
    assert asked["url"] == "http://post-coordinator.training:8470/v1/services"
    assert asked["valueLocation"] == 'services.#(kind=="trainer").wanted' and asked["targetValue"] == "4"
    answer = json.loads((ROOT / "services/coordinator/openapi.json").read_text())
    shown = answer["components"]["schemas"]["ServiceView"]["properties"]
    listed = answer["paths"]["/v1/services"]["get"]["responses"]["200"]["content"]["application/json"][
        "schema"
    ]
    assert "services" in answer["components"]["schemas"][listed["$ref"].rpartition("/")[2]]["properties"]
    assert {"kind", "wanted"} <= shown.keys() and shown["wanted"]["type"] == "integer"
    scaled = [each for each in objects if each["metadata"]["name"] in found and "template" in each["spec"]]
    assert len(scaled) == 3 and not any("replicas" in each["spec"] for each in scaled), (
        "who scales says how many"
    )


def test_values_for_gpus_need_no_operator_but_cert_manager(render):
    own = {"apps/v1", "v1", "batch/v1", "networking.k8s.io/v1", "policy/v1", "cert-manager.io/v1"}
    for values in ("1-gpu", "8-gpu", "32-gpu"):
        assert {each["apiVersion"] for each in render(values)} <= own
    kinds = {each["kind"] for each in render("operators")}
    assert {"ServiceMonitor", "PrometheusRule", "ScaledObject", "TriggerAuthentication"} <= kinds


def test_memory_of_pods_follows_the_models_size(render):
    """Of 7B in bfloat16: two versions of 14.2 GiB, and of trainers what lies on the host beside them."""

    def sizes(*arguments, values="8-gpu"):
        found = {}
        for each in render(values, *arguments):
            kind = each.get("metadata", {}).get("labels", {}).get("app.kubernetes.io/component")
            if each["kind"] not in ("Deployment", "StatefulSet") or kind not in ("rollout", "trainer"):
                continue
            pod = each["spec"]["template"]["spec"]
            volume = next(one for one in pod["volumes"] if one["name"] == "weights")
            (container,) = pod["containers"]
            resources = container["resources"]
            assert resources["requests"]["memory"] == resources["limits"]["memory"] or values == ""
            found[kind] = (volume["emptyDir"]["sizeLimit"], resources["limits"]["memory"])
        return found

    small, large = sizes(), sizes("--set-json=modelGiB=61.5")
    assert small == {
        "rollout": ("33Gi", "65Gi"),
        "trainer": ("33Gi", "290Gi"),
    }
    assert large["trainer"] == ("136Gi", "1090Gi") and large["rollout"] == ("136Gi", "168Gi")
    assert sizes(values="32-gpu")["trainer"][1] == "614Gi", "two pods have half each of what is divided"
    assert sizes("--set=trainer.weights=5Gi", values="")["trainer"] == ("5Gi", "12Gi")
    claims = {
        each["metadata"]["name"]: each["spec"]["resources"]["requests"]["storage"]
        for each in render("1-gpu")
        if each["kind"] == "PersistentVolumeClaim"
    }
    assert claims == {"post-data": "175Gi", "post-models": "106Gi"}, (
        "four checkpoints of 1.5B, and two models"
    )
