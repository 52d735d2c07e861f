"""A hub of models on loopback that takes what huggingface_hub's client sends: repositories, LFS, commits, with a token.

Enforces the wire: the token, lines of a commit in their form, digests of large files, front matter that is YAML.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

import yaml

LARGE = (".safetensors", ".bin")


class Hub:
    """`files`: repository → path → content of what was committed."""

    def __init__(self, token: str) -> None:
        self.token, self.files = token, dict[str, dict[str, bytes]]()
        self.messages: list[str] = []
        self._large: dict[str, bytes] = {}
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_any(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                status, answer = hub.answer(self, body)
                content = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_PUT = do_POST = do_any

            def log_message(self, *_: Any) -> None:
                """Says nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, asked: BaseHTTPRequestHandler, body: bytes) -> tuple[int, Any]:
        """Status and JSON of an answer."""
        path = asked.path.partition("?")[0]
        if path.startswith("/large/"):
            oid = path.rpartition("/")[2]
            if hashlib.sha256(body).hexdigest() != oid:
                return 400, {"error": "the content has another digest"}
            self._large[oid] = body
            return 200, {}
        if asked.headers.get("Authorization") != f"Bearer {self.token}":
            return 401, {"error": "Invalid username or password."}
        if path == "/api/repos/create":
            given = json.loads(body)
            name = f"{given['organization']}/{given['name']}"
            self.files.setdefault(name, {})
            return 200, {"url": f"{self.address}/{name}", "name": name}
        if path == "/api/validate-yaml":
            return self._validated(json.loads(body)["content"])
        if path.endswith(".git/info/lfs/objects/batch"):
            objects = [
                {**each, "actions": {"upload": {"href": f"{self.address}/large/{each['oid']}"}}}
                for each in json.loads(body)["objects"]
            ]
            return 200, {"transfer": "basic", "objects": objects}
        name = "/".join(path.split("/")[3:5])
        if name not in self.files:
            return 404, {"error": "Repository not found"}
        if "/preupload/" in path:
            files = [
                {
                    "path": each["path"],
                    "uploadMode": "lfs" if each["path"].endswith(LARGE) else "regular",
                    "shouldIgnore": False,
                }
                for each in json.loads(body)["files"]
            ]
            return 200, {"files": files}
        if "/commit/" in path:
            return self._commit(name, body)
        return 200, {"id": name, "sha": "0" * 40, "siblings": []}

    @staticmethod
    def _validated(content: str) -> tuple[int, Any]:
        _, front, _ = content.split("---\n", 2)
        if not isinstance(yaml.safe_load(front), dict):
            return 400, {"errors": [{"message": "the front matter is no mapping"}]}
        return 200, {"errors": [], "warnings": []}

    def _commit(self, name: str, body: bytes) -> tuple[int, Any]:
        for line in body.splitlines():
            given = json.loads(line)
            kind, value = given["key"], given["value"]
            if kind == "header":
                self.messages.append(value["summary"])
            elif kind == "file":
                assert value["encoding"] == "base64"
                self.files[name][value["path"]] = base64.b64decode(value["content"])
            elif kind == "lfsFile":
                content = self._large.get(value["oid"])
                if content is None or len(content) != value["size"]:
                    return 400, {"error": f"{value['path']} was not uploaded"}
                self.files[name][value["path"]] = content
            else:
                return 400, {"error": f"unknown line {kind}"}
        return 200, {"commitUrl": f"{self.address}/{name}/commit/{'1' * 40}", "commitOid": "1" * 40}
