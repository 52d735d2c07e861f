"""Deployments and StatefulSets through the scale subresource of the API server. Needs `get` and `patch` on it."""

from __future__ import annotations

import json
import ssl
from collections.abc import Mapping
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import HTTPSHandler, ProxyHandler, Request, build_opener

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
TIMEOUT_S = 15.0
CONTROLLERS = ("deployments", "statefulsets")


class Kubernetes:
    """Scales what `targets` names by kind, such as {"rollout": "deployments/post-rollout"}."""

    def __init__(self, api: str, targets: Mapping[str, str], account: Path = ACCOUNT) -> None:
        """`account` has the files token, namespace and, for https, ca.crt. Raises ValueError for a wrong target."""
        for kind, target in targets.items():
            controller, slash, name = target.partition("/")
            if controller not in CONTROLLERS or not slash or not name:
                raise ValueError(
                    f"{kind}={target}: write {' or '.join(f'{one}/NAME' for one in CONTROLLERS)}"
                )
        self._api, self._targets, self._account = api.rstrip("/"), dict(targets), account
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
        namespace = (self._account / "namespace").read_text(encoding="ascii").strip()
        # Read each time: a bound token is renewed while this process lives.
        token = (self._account / "token").read_text(encoding="ascii").strip()
        request = Request(
            f"{self._api}/apis/apps/v1/namespaces/{namespace}/{target}/scale",
            data=json.dumps({"spec": {"replicas": containers}}).encode(),
            headers={"Authorization": f"Bearer {token}", "Content-Type": "application/merge-patch+json"},
            method="PATCH",
        )
        try:
            with self._open(request, timeout=TIMEOUT_S) as answer:
                wanted = json.load(answer)["spec"].get("replicas", 0)
        except HTTPError as error:
            return f"{target}: {_reason(error)}"
        except (URLError, OSError, ValueError) as error:
            return f"Kubernetes' API at {self._api} cannot be asked: {error}"
        return "" if wanted == containers else f"{target}: Kubernetes wants {wanted} pods, not {containers}"


def _reason(error: HTTPError) -> str:
    try:
        said = str(json.load(error)["message"])
    except (ValueError, KeyError, TypeError):
        said = str(error.reason)
    if error.code == 403:
        return f"the scaler may not: {said}; its Role needs `patch` on the subresource scale"
    return f"Kubernetes refuses ({error.code}): {said}"
