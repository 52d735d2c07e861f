"""Fleets on a Ray cluster of this machine, seen from outside: by commands and by processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from headrace.client import Client, Event, Run

from harness.processes import ROOT, alive, clean_environment, mentioning, words_of
from harness.ray_cluster import RayCluster
from harness.waiting import wait_for


class RayFleet:
    """One data directory, and the folder below which its nodes keep theirs."""

    def __init__(self, cluster: RayCluster, folder: Path) -> None:
        self.cluster, self.data_dir, self.node_dir = cluster, folder / "data", folder / "nodes"

    def headrace(self, *words: str | Path, timeout_s: float = 300.0, **environment: str) -> Any:
        """`headrace …` on the data directory, in a shell on a node of the cluster."""
        variables = {"RAY_ADDRESS": self.cluster.address, **environment}
        own = () if words[:2] == ("ray", "submit") else ("--data-dir", self.data_dir)
        return subprocess.run(
            [sys.executable, "-m", "headrace_cli", *map(str, words), *map(str, own)],
            env=clean_environment(**variables),
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            stdin=subprocess.DEVNULL,
        )

    def json(self, *words: str | Path) -> Any:
        """What `headrace … --json` prints; fails the test unless it succeeds."""
        done = self.headrace(*words, "--json")
        assert done.returncode == 0, f"{words}: {done.stdout}\n{done.stderr}\n{self.logs()}"
        return json.loads(done.stdout)

    def up(self, *words: str) -> dict[str, Any]:
        """`headrace up --on ray`: what it says, as JSON."""
        found: dict[str, Any] = self.json("up", "--on", "ray", "--node-dir", self.node_dir, *words)
        return found

    @property
    def client(self) -> Client:
        """Of the fleet as its data directory says it."""
        state = json.loads((self.data_dir / "fleet.json").read_text())
        return Client(state["url"], (self.data_dir / "http-token").read_text().strip(), patience_s=60.0)

    def events(self, run: Run) -> list[Event]:
        """All events of a run that has ended."""
        return list(self.client.events(run.id))

    def nodes(self) -> dict[str, str]:
        """The stage of each node."""
        return {each["node"]: each["stage"] for each in self.json("ray", "nodes")["nodes"]}

    def wait_for_nodes(self, timeout_s: float = 120.0, **stages: str) -> None:
        """Until the nodes, with - for _, are in these stages."""
        wanted = {name.replace("_", "-"): stage for name, stage in stages.items()}
        wait_for(lambda: self.nodes() == wanted, f"{wanted}; {self.logs()}", timeout_s)

    def processes(self) -> list[Any]:
        """Living processes of its nodes."""
        return [each for each in mentioning(str(self.node_dir)) if alive(each)]

    def assert_gone(self, timeout_s: float) -> None:
        """No process of its nodes is left after a while."""
        left: list[Any] = []

        def gone() -> bool:
            left[:] = self.processes()
            return not left

        try:
            wait_for(gone, "the end of the nodes' processes", timeout_s)
        except AssertionError as error:
            raise AssertionError(f"left: {[words_of(each) for each in left]}") from error

    def member_of(self, ray_node: int) -> str:
        """The name of the fleet's node that is on a raylet, by that raylet's processes."""
        raylet = self.cluster.nodes[ray_node].all_processes["raylet"][0].process.pid
        import psutil

        below = {each.pid for each in psutil.Process(raylet).children(recursive=True)}
        for each in self.processes():
            words = words_of(each)
            if each.pid in below and "--name" in words and ("up" in words or "join" in words):
                return words[words.index("--name") + 1]
        raise AssertionError(f"no node of the fleet is on raylet {ray_node}")

    def logs(self) -> str:
        """The ends of the logs, the driver's and the nodes'."""
        files = [*self.data_dir.glob("logs/*.log"), *self.node_dir.rglob("logs/*.log")]
        return "\n".join(f"--- {file}\n{file.read_text(errors='replace')[-1500:]}" for file in files)
