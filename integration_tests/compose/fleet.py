"""A fleet of containers: brought up, asked over HTTP and hurt through `docker compose`, all from outside."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.ledger import Audit, audit
from harness.processes import ROOT, clean_environment, free_port
from harness.specs import BATCH
from harness.waiting import wait_for
from headrace.client import Client, Event, HeadraceError, Instance, Run

HERE = Path(__file__).resolve().parent
PROJECT = "headrace-test"
RUN_S = 180.0
ENDLESS = 10_000
"""Steps of a run that no command to a container outlasts; see `ComposeFleet.goes_on`."""
KINDS = ("rollout", "trainer", "reward", "simulator")
KILL = """
import psutil, sys
for process in psutil.process_iter(["cmdline"]):  # None of a zombie
    if (process.info["cmdline"] or [])[1:3] == ["-m", sys.argv[1]]:
        process.kill()
"""


class ComposeFleet:
    """The containers of docker-compose.yml under a project name of the tests, on a free port."""

    def __init__(self, wheels: Path, project: str = PROJECT, **settings: str) -> None:
        self.project = project
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.token = ""  # known once the containers are up
        self.client = Client(self.url, self.token, patience_s=60.0)
        self._environment = clean_environment(
            HEADRACE_PORT=str(self.port),
            HEADRACE_WHEELS=str(wheels),
            HEADRACE_FILES=str(HERE),  # of users' code that tests bring
            PWD=str(ROOT),
            **{"HEADRACE_TAG": "test", **settings},
        )

    # --- docker

    def compose(self, *arguments: str, overlays: tuple[str, ...] = (), timeout_s: float = 180.0) -> str:
        """Output of `docker compose …`; fails the test unless it succeeds."""
        files = ["docker-compose.yml", *(str(HERE / name) for name in ("slow.yaml", *overlays))]
        chosen = [part for file in files for part in ("-f", file)]
        command = ["docker", "compose", "-p", self.project, "--profile", "embodied", *chosen, *arguments]
        return run(command, self._environment, timeout_s)

    def up(self, *arguments: str, timeout_s: float = 600.0, overlays: tuple[str, ...] = ()) -> None:
        """`docker compose up -d --wait …`, and every wanted instance is registered."""
        try:
            self.compose("up", "-d", "--wait", *arguments, overlays=overlays, timeout_s=timeout_s)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.logs()}") from error
        self.client.close()
        self.token = self.inside("coordinator", "cat", "/secrets/http/http-token").strip()
        self.client = Client(self.url, self.token, patience_s=60.0)
        self.ready()

    def down(self) -> None:
        """Containers, networks and volumes are gone."""
        self.compose("down", "--volumes", "--remove-orphans")
        self.client.close()

    def logs(self, lines: int = 25) -> str:
        """The end of every container's log."""
        return self.compose("logs", "--no-color", "--tail", str(lines))

    def containers(self, service: str) -> list[str]:
        """Ids of a service's running containers."""
        return self.compose("ps", "-q", service).split()

    def inspect(self, service: str) -> dict[str, Any]:
        """What the engine says of a service's first container."""
        identity = self.compose("ps", "-aq", service).split()[0]
        found: list[dict[str, Any]] = json.loads(run(["docker", "inspect", identity], self._environment))
        return found[0]

    def inside(self, service: str, *command: str, index: int = 1) -> str:
        """Output of a command in a service's container, the first or another one."""
        return self.compose("exec", "-T", "--index", str(index), service, *command)

    def image_bytes(self, service: str) -> int:
        """Size of a service's image."""
        image = self.inspect(service)["Image"]
        return int(run(["docker", "image", "inspect", "--format", "{{.Size}}", image], self._environment))

    # --- harm

    def kill_process(self, service: str) -> None:
        """SIGKILL to the instance; its supervisor lives."""
        self.inside(service, "python", "-c", KILL, f"headrace_{service}")

    def kill_supervisor(self, service: str) -> None:
        """SIGKILL to the parent: the container ends and its restart policy starts it again."""
        before = self.inspect(service)["RestartCount"]
        self._cut_short(service, "python", "-c", KILL, "headrace_servicekit.process.supervise")
        wait_for(lambda: self.inspect(service)["RestartCount"] > before, f"{service}'s restart")

    def kill_redis(self) -> None:
        """SIGKILL to the store."""
        before = self.inspect("redis")["RestartCount"]
        find = "grep -lx redis-server /proc/[0-9]*/comm 2>/dev/null | cut -d/ -f3"
        self._cut_short("redis", "sh", "-c", f"kill -9 $({find})")
        wait_for(lambda: self.inspect("redis")["RestartCount"] > before, "the store's restart")

    def _cut_short(self, service: str, *command: str) -> None:
        """A command that ends its own container, and so may fail itself."""
        try:
            self.inside(service, *command)
        except AssertionError:
            pass

    def remove(self, service: str) -> None:
        """Takes a service's container away, with its supervisor: nobody reports its end."""
        run(["docker", "rm", "-f", self.containers(service)[0]])

    def disconnect(self, service: str) -> None:
        """Takes a service's container off the network."""
        run(["docker", "network", "disconnect", f"{self.project}_fleet", self.containers(service)[0]])

    def connect(self, service: str) -> None:
        """Puts it back, under its name."""
        container = self.containers(service)[0]
        run(["docker", "network", "connect", "--alias", service, f"{self.project}_fleet", container])

    # --- the API

    def headrace(self, *arguments: str, timeout_s: float = RUN_S) -> str:
        """Output of `headrace …` on the host; fails the test unless it succeeds."""
        command = [sys.executable, "-m", "headrace_cli", *arguments]
        return run(command, clean_environment(HEADRACE_URL=self.url, HEADRACE_TOKEN=self.token), timeout_s)

    def submit(self, spec: Mapping[str, Any], **options: Any) -> Run:
        """Queues a run over HTTP."""
        return self.client.submit(dict(spec), **options)

    def events(self, asked: Run) -> list[Event]:
        """All events of a run that has ended."""
        return list(self.client.events(asked.id))

    def succeed(self, asked: Run) -> Run:
        """The run once it is SUCCEEDED; fails the test with its own words and the logs otherwise."""
        try:
            ended = self.client.wait(asked.id, RUN_S)
        except HeadraceError as error:
            raise AssertionError(f"{error}\n{self.client.get(asked.id)}\n{self.logs()}") from error
        assert ended.state == "SUCCEEDED", f"{ended.id} {ended.state}: {ended.reason}\n{self.logs()}"
        return ended

    def goes_on(self, asked: Run) -> Audit:
        """An endless run makes steps that began after now, and is then ended; its ledger is whole."""
        # One step may have been committed before the harm, and recorded since.
        self.reach(asked, self.client.get(asked.id).step + 2)
        self.client.cancel(asked.id)
        ended = self.client.wait(asked.id, RUN_S)
        assert ended.state == "CANCELLED", f"{ended.id} {ended.state}: {ended.reason}\n{self.logs()}"
        found = audit(self, ended)
        assert len(found.trained) == ended.step * BATCH
        return found

    def reach(self, asked: Run, step: int) -> Run:
        """The run once it has committed `step` steps."""

        def look() -> Run | None:
            now = self.client.get(asked.id)
            assert now.state != "FAILED", f"{now.id} failed: {now.reason}"
            return now if now.step >= step else None

        return wait_for(look, f"step {step} of {asked.id}", RUN_S)

    def instances(self, kind: str) -> list[Instance]:
        """Registered instances of a kind that are READY."""
        return [item for item in self.client.instances() if item.kind == kind and item.state == "READY"]

    def ready(self, timeout_s: float = 120.0) -> None:
        """Waits until every running container's instance is registered, and no other."""

        def look() -> bool:
            found = {item.name.removeprefix("instances/") for item in self.client.instances()}
            ready = {item.name.removeprefix("instances/") for kind in KINDS for item in self.instances(kind)}
            wanted = {f"{kind}-{container[:12]}" for kind in KINDS for container in self.containers(kind)}
            return found == ready == wanted

        wait_for(look, "every container's instance to be ready", timeout_s)


def run(command: list[str], environment: Mapping[str, str] | None = None, timeout_s: float = 60.0) -> str:
    """Output of a command run in the checkout; fails the test unless it succeeds."""
    done = subprocess.run(
        command,
        env={**(environment or os.environ)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout
