"""A real Ray cluster on this machine: one raylet a node, with a folder of its own, so that nobody else finds it."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness.processes import mentioning

STORE_BYTES = 80 * 1024 * 1024
"""Of each node's object store; nothing of a fleet goes through it."""
STARTS = 3


class RayCluster:
    """Raylets by number; the first one's node is Ray's head and has the GCS."""

    def __init__(self, cluster: Any, nodes: list[Any]) -> None:
        self.cluster, self.nodes = cluster, nodes

    @property
    def address(self) -> str:
        """For RAY_ADDRESS."""
        return str(self.cluster.address)

    def add(self, cpus: int = 1, **resources: Any) -> Any:
        """One more node."""
        node = self.cluster.add_node(
            num_cpus=cpus, object_store_memory=STORE_BYTES, include_dashboard=False, **resources
        )
        self.nodes.append(node)
        return node

    def kill(self, number: int) -> None:
        """A node's raylet gets SIGKILL: its workers end, and Ray says that the node is dead."""
        self.cluster.remove_node(self.nodes[number], allow_graceful=False)

    def node_id(self, number: int) -> str:
        """Ray's name of a node."""
        return str(self.nodes[number].node_id)


def _started(cluster: Any, folder: Path, **head: Any) -> Any:
    """The head's node. Ray waits 30 s for it, which a busy machine may need longer; so it is started again."""
    for _ in range(STARTS):
        try:
            return cluster.add_node(**head)
        except Exception as error:  # Ray raises no narrower one
            if "timed out during startup" not in str(error):
                raise
            late = error
            for process in mentioning(str(folder)):
                process.kill()
    raise late


@contextmanager
def ray_cluster(*cpus: int, dashboard: bool = False, **resources: Any) -> Iterator[RayCluster]:
    """A cluster of so many nodes, each with so many CPUs."""
    from ray.cluster_utils import Cluster

    folder = Path(tempfile.mkdtemp(prefix="hr-ray-", dir="/tmp"))  # paths of sockets are short
    (folder / "ray").mkdir()
    before = dict(os.environ)
    os.environ |= {
        "RAY_TMPDIR": str(folder),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{before['PATH']}",
    }
    cluster = Cluster()
    head = {"num_cpus": cpus[0], "object_store_memory": STORE_BYTES, "include_dashboard": dashboard}
    try:
        made = RayCluster(cluster, [_started(cluster, folder, **head, **resources)])
        for count in cpus[1:]:
            made.add(count, **resources)
        yield made
    finally:
        cluster.shutdown()
        os.environ["PATH"] = before["PATH"]
        del os.environ["RAY_TMPDIR"]
        shutil.rmtree(folder, ignore_errors=True)
