"""What is said to a cluster of pods, and what it says of them."""

from __future__ import annotations

import math
from typing import Any

import yaml

from headrace_containers.provider import BadSpec, ContainerLost, Spec

LABELS = {"app.kubernetes.io/managed-by": "headrace-containers"}
_SPARE_S = 300
_NO_IMAGE = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull")
_ROOTS = ["CHOWN", "DAC_OVERRIDE", "FOWNER", "KILL", "SETGID", "SETPCAP", "SETUID"]
"""Of the pod; SETPCAP takes capabilities away from commands, and no command has it."""


def exit_code(said: str) -> int:
    """Of the status that ends a stream; none where the pod has ended first."""
    status = yaml.safe_load(said) if said else {}
    if status.get("status") == "Success":
        return 0
    causes = (status.get("details") or {}).get("causes") or []
    codes = [each["message"] for each in causes if each.get("reason") == "ExitCode"]
    if not codes:
        raise ContainerLost(f"the pod has ended: {status.get('message') or 'its stream has broken off'}")
    return int(codes[0])


def state_of(pod: Any, spec: Spec) -> str:
    """Its phase. Raises BadSpec for an image that cannot be pulled."""
    for each in pod.status.container_statuses or []:
        waiting = each.state.waiting if each.state else None
        if waiting is not None and waiting.reason in _NO_IMAGE:
            raise BadSpec("image", f"{spec.image} cannot be pulled: {waiting.message or waiting.reason}")
    return str(pod.status.phase)


def policy() -> dict[str, Any]:
    """That pods have no network, neither in nor out."""
    return {
        "metadata": {"name": "headrace-containers", "labels": LABELS},
        "spec": {"podSelector": {"matchLabels": LABELS}, "policyTypes": ["Ingress", "Egress"]},
    }


def pod_of(name: str, spec: Spec, runtime_class: str) -> dict[str, Any]:
    """A pod of a spec, whose deadline is somewhat after the spec's."""
    held = {
        "cpu": f"{math.ceil(spec.limits.cpus * 1000)}m",
        "memory": f"{spec.limits.memory_mib}Mi",
        "ephemeral-storage": f"{spec.limits.disk_mib}Mi",
    }
    container = {
        "name": "it",
        "image": spec.image,
        "command": ["/bin/sh", "-c", "while :; do sleep 3600; done"],
        "resources": {"limits": held, "requests": held},
        "securityContext": {
            "runAsUser": 0,
            "runAsNonRoot": False,
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"], "add": _ROOTS},
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }
    pod = {
        "containers": [container],
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "activeDeadlineSeconds": math.ceil(spec.limits.wall_s) + _SPARE_S,
        "terminationGracePeriodSeconds": 0,
        **({"runtimeClassName": runtime_class} if runtime_class else {}),
    }
    return {"metadata": {"name": name, "labels": LABELS}, "spec": pod}
