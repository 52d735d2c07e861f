"""Fixtures: the CLI as a process, a scripted coordinator, and fleets of stand-in services."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from headrace_servicekit.rpc import addresses

STANDINS = Path(__file__).parent / "standins"
# Before what is there: a work tree that is not installed puts its own sources there.
WITH_STANDINS = os.pathsep.join([str(STANDINS), os.environ.get("PYTHONPATH", "")])


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
            status, body, *more = route(got) if callable(route) else route
            self.answer(status, body, *more)

        def answer(self, status: int, body: Any, more: Mapping[str, str] = MappingProxyType({})) -> None:
            kinds = {str: "text/event-stream", bytes: "application/octet-stream"}
            kind = kinds.get(type(body), "application/json")
            text = body if isinstance(body, str | bytes) else json.dumps(body)
            data = text.encode() if isinstance(text, str) else text
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            for name, value in more.items():
                self.send_header(name, value)
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
    poll_s = 0.01  # how soon it notices its end
    thread = threading.Thread(target=server.serve_forever, args=(poll_s,), daemon=True)
    thread.start()
    yield fake
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def free_port() -> int:
    return addresses.free_port()


def _environment(**extra: str) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("HEADRACE_")}
    return {**kept, "COLUMNS": "160", "NO_COLOR": "1", **extra}


@dataclass
class Outcome:
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def headrace(
    coordinator: FakeCoordinator,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Iterator[Callable[..., Outcome]]:
    """Runs `headrace …` against the scripted coordinator: the entry point, in this process to be quick."""
    from headrace_cli.main import main

    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str, **environment: str) -> Outcome:
        capsys.readouterr()
        for key, value in _environment(**{"HEADRACE_URL": coordinator.url, **environment}).items():
            monkeypatch.setenv(key, value)
        monkeypatch.setattr(sys, "argv", ["headrace", *arguments])
        code = 0
        try:
            main()
        except SystemExit as ended:
            code = int(ended.code or 0)
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    yield run
    for number, handler in handlers.items():
        signal.signal(number, handler)


@dataclass
class Fleet:
    """The CLI on a data directory of its own, with stand-ins for the services."""

    data_dir: Path
    port: int
    environment: dict[str, str] = field(
        default_factory=lambda: _environment(PYTHONPATH=WITH_STANDINS, HEADRACE_TEMPLATE="0")
    )

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "headrace_cli", *arguments, "--data-dir", str(self.data_dir)]

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


ANSWER = {"reward": 1.0, "prompt": "2 + 2 =", "completion": "four"}


class ScriptedRun:
    """A run that advances by itself on a scripted coordinator: a step every `step_s` seconds."""

    def __init__(
        self, coordinator: FakeCoordinator, steps: int, step_s: float, final: str = "SUCCEEDED"
    ) -> None:
        self.steps, self.step_s, self.final = steps, step_s, final
        self.submitted_at = 0.0
        self.cancelled = False
        self.spec: dict[str, Any] = {}
        self.trained_shown = 0
        path = "/v1/runs/r-1"
        coordinator.routes |= {
            "GET /healthz": (200, {"status": "ok"}),
            "POST /v1/runs": self.submit,
            f"GET {path}": lambda got: (200, self.view()),
            f"POST {path}:cancel": self.cancel,
            f"GET {path}/metrics": lambda got: (200, {"steps": [self.step(n + 1) for n in range(self.done)]}),
            f"GET {path}/certificates": lambda got: (200, {"certificates": self.certificates()}),
            f"GET {path}/events": lambda got: (200, self.events(int(got.headers.get("last-event-id", 0)))),
            f"GET {path}/trajectories": lambda got: (200, {"trajectories": [ANSWER | {"step": self.done}]}),
            "GET /v1/leases": lambda got: (200, self.leases()),
        }

    def submit(self, got: Received) -> tuple[int, Any]:
        self.spec, self.submitted_at = got.body, time.time()
        return 201, self.view()

    def cancel(self, got: Received) -> tuple[int, Any]:
        self.cancelled = True
        return 200, self.view()

    @property
    def done(self) -> int:
        return min(self.steps, int((time.time() - self.submitted_at) / self.step_s))

    @property
    def state(self) -> str:
        if self.cancelled:
            return "CANCELLED"
        return self.final if self.done == self.steps else "RUNNING"

    def step(self, number: int) -> dict[str, Any]:
        stages = {"generate": 2.1, "score": 0.02, "learn": 6.9, "sync": 0.3, "switch": 0.05, "protocol": 0.08}
        devices = {f"host/cpu:{core}": {"generate": 2.1, "learn": 6.9} for core in (0, 1)}
        return {
            "step": number, "version": number, "wall_s": 9.4, "reward_mean": 0.3 + 0.5 * number / self.steps,
            "tokens": 320, "tokens_per_s": 140.0, "stage_s": stages, "devices": devices, "trained": 32,
            "dropped": 0, "max_staleness": 0, "figures": {"loss": None},
        }  # fmt: skip

    def certificates(self) -> list[dict[str, Any]]:
        made = []
        for number in range(1, self.done + 1):
            policy = {"number": number, "parent": number - 1, "ordinal": number, "digest": "d"}
            slots = [[number * 4 + index // 8, index % 8, 0] for index in range(32)]
            made.append({"version": policy, "step": number, "attempt": 0, "live": True, "trained": slots,
                         "dropped": [], "set_digest": "s", "tokens": 320, "max_staleness": 0,
                         "log_prob_mismatch_mean": 0.001})  # fmt: skip
        return made

    def evaluation(self, step: int) -> dict[str, Any]:
        score = 0.35 + 0.4 * step / self.steps
        prompt = "user\nCalculate 3 + 5.\nExamples: 4 + 4 = 8\n3 + 5 =<|im_end|>\nassistant\n"
        answer = "8" if step else "The answer to this is that you need to add the numbers"
        example = {"prompt": prompt, "completion": answer, "reference": "8", "reward": float(step > 0)}
        return {"kind": "heldout", "step": step, "version": step, "score": score, "answers": 80,
                "parts": {"last_number": score, "exact": score / 2}, "examples": [example]}  # fmt: skip

    def view(self) -> dict[str, Any]:
        done = self.done
        marks = [0, *(n for n in range(1, done + 1) if n % 5 == 0 or n == self.steps)]
        return {
            "name": "runs/r-1", "id": "r-1", "state": self.state, "reason": "", "step": done,
            "steps": self.steps,
            "created_at": self.submitted_at, "started_at": self.submitted_at,
            "finished_at": time.time() if self.state != "RUNNING" else None,
            "waiting_for": ["lease on host/cpu:0, held by trainer-0 for learn"] if 0 < done < 3 else [],
            "policy": {"number": done, "parent": 0, "ordinal": done, "digest": "abcdef"}, "warmup_steps": 0,
            "baseline_prefill": {**self.evaluation(0), "kind": "baseline_prefill", "score": 0.62},
            "evaluations": [self.evaluation(n) for n in marks],
            "last_step": self.step(done) if done else None,
            "counts": {"trained": 32 * done + self.trained_shown, "dropped": 0, "duplicates": 0,
                       "max_staleness": 0, "frontier": 32 * done},
            "recoveries": 0, "run_directory": "/data/runs/r-1", "export_path": "/data/runs/r-1/export",
            "spec": self.spec,
        }  # fmt: skip

    def events(self, after: int) -> str:
        events = [
            {"id": n, "type": "step", "time": 0.0, "run": "runs/r-1", "data": {"step": n}}
            for n in range(1, 5)
        ]
        return "".join(
            f"id: {e['id']}\nevent: step\ndata: {json.dumps(e)}\n\n" for e in events if e["id"] > after
        )

    def leases(self) -> dict[str, Any]:
        names = ["host/cpu:0", "host/cpu:1"]
        learning = int(time.time() * 2) % 2
        instance, stage = ("trainer-0", "learn") if learning else ("rollout-0", "generate")
        lease = {"epoch": 7, "state": "HELD", "instance": instance, "run": "runs/r-1", "stage": stage,
                 "devices": names, "expires_in_s": 25.0}  # fmt: skip
        devices = [{"name": name, "state": "LEASED", "holder": instance, "reason": ""} for name in names]
        return {"leases": [lease], "devices": devices}


@pytest.fixture
def scripted_run(coordinator: FakeCoordinator) -> Callable[..., ScriptedRun]:
    """Makes a run that `POST /v1/runs` starts."""
    return lambda steps=4, step_s=0.3, **options: ScriptedRun(coordinator, steps, step_s, **options)
