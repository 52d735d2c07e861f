"""An HTTP server that answers as Kubernetes' API server does for scales and pods.

Its account may do what a Role says; what it takes and gives are objects that Kubernetes' own schemas take.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import yaml

PATCHES = ("application/merge-patch+json", "application/strategic-merge-patch+json")
TOKEN = "of-the-account"


class KubernetesApi:
    """One namespace with the Deployments, StatefulSets and pods that a test puts there."""

    def __init__(self, namespace: str, rules: list[dict], check: Callable[[str, dict], None]) -> None:
        """`rules` are a Role's; `check(schema's name, object)` raises for what Kubernetes would refuse."""
        self.namespace, self.rules, self.check = namespace, rules, check
        self.replicas: dict[str, int] = {}
        """By "deployments/NAME"."""
        self.pods: list[dict] = []
        self.most = 1000
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        """Ends the server."""
        self._server.shutdown()
        self._server.server_close()

    def write_kubeconfig(self, path: Path, token: str = TOKEN) -> Path:
        """What `KUBECONFIG` names for this cluster's account."""
        server = f"http://127.0.0.1:{self._server.server_port}"
        path.write_text(
            yaml.safe_dump(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "clusters": [{"name": "here", "cluster": {"server": server}}],
                    "users": [{"name": "scaler", "user": {"token": token}}],
                    "contexts": [{"name": "here", "context": {"cluster": "here", "user": "scaler"}}],
                    "current-context": "here",
                }
            )
        )
        return path

    def pod(self, name: str, labels: dict[str, str], phase: str = "Running") -> dict:
        """A pod as the API server shows it."""
        made = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "namespace": self.namespace, "labels": labels},
            "spec": {"containers": [{"name": "one", "image": "one"}]},
            "status": {"phase": phase},
        }
        self.check("pod-v1", made)
        return made

    def answer(self, method: str, url: str, kind: str, body: dict) -> tuple[int, dict]:
        """Status and object of one request."""
        address = urlsplit(url)
        parts = address.path.strip("/").split("/")
        group = parts[1] if parts[0] == "apis" else ""
        namespace, resource, *rest = parts[parts.index("namespaces") + 1 :]
        name, what = (rest[0] if rest else ""), "/".join([resource, *rest[1:]])
        verb = {"GET": "get" if name else "list", "PATCH": "patch"}[method]
        if namespace != self.namespace or not self._may(verb, group, what, name):
            whom = f'{what} "{name}"' if name else what
            return _status(
                403, "Forbidden", f'{whom} is forbidden: the account cannot {verb} resource "{what}"'
            )
        if what == "pods" and verb == "list":
            wanted = dict(
                item.split("=")
                for item in parse_qs(address.query).get("labelSelector", [""])[0].split(",")
                if item
            )
            items = [pod for pod in self.pods if wanted.items() <= pod["metadata"]["labels"].items()]
            return 200, {"apiVersion": "v1", "kind": "PodList", "metadata": {}, "items": items}
        target = f"{resource}/{name}"
        if target not in self.replicas:
            return _status(404, "NotFound", f'{resource} "{name}" not found')
        if kind not in PATCHES:
            return _status(415, "UnsupportedMediaType", f"the body is {kind}")
        meta = {"name": name, "namespace": namespace}
        scale = {"apiVersion": "autoscaling/v1", "kind": "Scale", "metadata": meta, **body}
        try:
            self.check("scale-autoscaling-v1", scale)
        except ValueError as error:
            return _status(422, "Invalid", str(error))
        if scale["spec"]["replicas"] > self.most:
            return _status(422, "Invalid", "spec.replicas: exceeded quota: gpus")
        self.replicas[target] = scale["spec"]["replicas"]
        return 200, scale

    def _may(self, verb: str, group: str, what: str, name: str) -> bool:
        return any(
            verb in rule["verbs"]
            and group in rule["apiGroups"]
            and what in rule["resources"]
            and (not rule.get("resourceNames") or name in rule["resourceNames"])
            for rule in self.rules
        )


def _status(code: int, reason: str, message: str) -> tuple[int, dict]:
    status = {"apiVersion": "v1", "kind": "Status", "metadata": {}, "status": "Failure"}
    return code, {**status, "message": message, "reason": reason, "code": code}


def _handler(api: KubernetesApi) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer()

        def do_PATCH(self) -> None:
            self._answer()

        def _answer(self) -> None:
            size = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(size)) if size else {}
            if self.headers["Authorization"] == f"Bearer {TOKEN}":
                code, said = api.answer(self.command, self.path, self.headers.get("Content-Type", ""), body)
            else:
                code, said = _status(401, "Unauthorized", "Unauthorized")
            payload = json.dumps(said).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)

        def log_message(self, *_: object) -> None:
            pass

    return Handler
