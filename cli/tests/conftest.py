"""Fixtures: the CLI as a process, a scripted coordinator, and fleets of stand-in services that leave nothing behind."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

STANDINS = Path(__file__).parent / "standins"


@dataclass
class Received:
    method: str
    path: str
    query: dict[str, list[str]]
    headers: dict[str, str]
    body: Any


@dataclass
class FakeCoordinator:
    """Answers scripted routes; a route is (status, body), or a function of what was received."""

    url: str
    routes: dict[str, Any] = field(default_factory=dict)
    received: list[Received] = field(default_factory=list)

    def requests(self, route: str) -> list[Received]:
        return [item for item in self.received if f"{item.method} {item.path}" == route]


def _handler(coordinator: FakeCoordinator) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.serve()

        def do_POST(self) -> None:
            self.serve()

        def serve(self) -> None:
            parts = urlsplit(self.path)
            raw = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            headers = {key.lower(): value for key, value in self.headers.items()}
            got = Received(
                self.command, parts.path, parse_qs(parts.query), headers, json.loads(raw) if raw else None
            )
            coordinator.received.append(got)
            missing = (404, {"reason": "NOT_FOUND", "message": f"no {parts.path}", "problems": []})
            route = coordinator.routes.get(f"{self.command} {parts.path}", missing)
            status, body = route(got) if callable(route) else route
            self.answer(status, body)

        def answer(self, status: int, body: Any) -> None:
            stream = isinstance(body, str)
            data = body.encode() if stream else json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "text/event-stream" if stream else "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    return Handler


@pytest.fixture
def coordinator() -> Iterator[FakeCoordinator]:
    fake = FakeCoordinator("")
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(fake))
    fake.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield fake
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _environment(**extra: str) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("HEADRACE_")}
    return {**kept, "COLUMNS": "160", "NO_COLOR": "1", **extra}


@pytest.fixture
def headrace(coordinator: FakeCoordinator, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs `headrace …` against the scripted coordinator."""

    def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "headrace_cli", *arguments],
            env=_environment(**{"HEADRACE_URL": coordinator.url, **environment}),
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
        )

    return run


@dataclass
class Fleet:
    """The CLI on a data directory of its own, with stand-ins for the services."""

    data_dir: Path
    port: int

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "headrace_cli", *arguments, "--data-dir", str(self.data_dir)]

    @property
    def environment(self) -> dict[str, str]:
        return _environment(PYTHONPATH=str(STANDINS))

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*arguments), env=self.environment, capture_output=True, text=True, timeout=90
        )

    def up(self, *arguments: str) -> dict[str, Any]:
        result = self.run("up", "--port", str(self.port), "--json", *arguments)
        assert result.returncode == 0, result.stderr
        return json.loads(result.stdout)

    def state(self) -> dict[str, Any]:
        return json.loads((self.data_dir / "fleet.json").read_text())

    def processes(self) -> list[int]:
        """Every living process of this fleet, found by its mark or by the data directory in its arguments."""
        from headrace_cli.launcher.data_dir import DataDir
        from headrace_cli.launcher.tether import marked_processes

        marked = set(marked_processes(DataDir.at(self.data_dir).fleet_id))
        return sorted(marked | set(_launchers(self.data_dir)))


def _launchers(data_dir: Path) -> list[int]:
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                words = (folder / "cmdline").read_bytes()
            except OSError:
                continue
            if b"headrace_cli.launcher" in words and str(data_dir).encode() in words:
                found.append(int(folder.name))
    return found


@pytest.fixture
def fleet(tmp_path: Path, free_port: int) -> Iterator[Fleet]:
    made = Fleet(tmp_path / "data", free_port)
    yield made
    made.run("down")
    assert made.processes() == []
