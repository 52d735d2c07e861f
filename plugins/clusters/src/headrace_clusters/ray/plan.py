"""What a fleet on Ray shall be, and what each node runs of it. Knows no Ray."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from headrace_cli.errors import CommandError, user_error
from headrace_cli.launcher.plan import KINDS
from headrace_servicekit.rpc.addresses import host_port

HEAD = "head"
ON_HEAD_ALONE = ("reward", "simulator")
SHOWN = 8
"""Nodes of a cluster that a sentence lists."""


@dataclass(frozen=True)
class RayPlan:
    """A fleet: `counts` is by kind; rollouts are on every node, trainers on the first `trainer_nodes`.

    The other services are at the head. `gpus` and `cpus` are a node's; None: what so many nodes have each.
    """

    address: str
    data_dir: str
    node_dir: str
    nodes: int = 1
    gpus: int | None = None
    cpus: int | None = None
    pack: bool = False
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 1))
    trainer_nodes: int = 1
    port: int = 8470
    wait_s: float = 0.0
    timeout_s: float = 600.0
    tls: bool = False
    no_token: bool = False
    words: list[str] = field(default_factory=list)
    """Options for `up` and `join` on every node."""

    def to_json(self) -> str:
        """The plan as the driver's argument."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> RayPlan:
        """Reads the driver's argument."""
        return cls(**json.loads(text))

    def directory(self, number: int) -> str:
        """A node's data directory; one that nodes share has room for all."""
        return f"{self.node_dir}/node-{number}" if number else self.node_dir

    def counts_of(self, number: int) -> dict[str, int]:
        """Instances on a node."""
        mine = dict(self.counts)
        if number:
            mine |= dict.fromkeys(ON_HEAD_ALONE, 0)
        if number >= self.trainer_nodes:
            mine["trainer"] = 0
        return mine

    def services_of(self, number: int) -> str:
        """What a node runs, as Ray's dashboard shows it: the coordinator, and instances by their names."""
        names = self.instances_of(number)
        return ", ".join(names if number else ["coordinator", *names]) or "no services yet"

    def instances_of(self, number: int) -> list[str]:
        """Names of a node's instances."""
        suffix = f".{node_name(number)}" if number else ""
        counts = self.counts_of(number).items()
        return [f"{kind}-{index}{suffix}" for kind, count in counts for index in range(count)]

    def words_of(
        self, number: int, devices: Sequence[str], address: str, port: int, head: Mapping[str, Any] | None
    ) -> list[str]:
        """The command of a node: `up` without a head, else `join`. Without `devices` it uses the GPUs that it sees."""
        counts = [
            word for kind, count in self.counts_of(number).items() for word in (f"--{kind}", str(count))
        ]
        shared = [*counts, *self.words, "--timeout", f"{self.timeout_s:g}", "--listen", address]
        if devices:
            shared += ["--devices", ",".join(devices)]
        if head is None:
            own = ["--tls"] if self.tls else []
            own += ["--no-token"] if self.no_token else []
            return ["up", *shared, "--name", node_name(number), "--port", str(port), *own]
        trust = ["--fingerprint", head["fingerprint"]] if head.get("fingerprint") else []
        place = host_port(head["address"], head["port"])
        token = f"{self.directory(number)}/head-token"
        return ["join", place, *shared, "--name", node_name(number), "--token-file", token, *trust]


def node_name(number: int) -> str:
    """A node's name in the fleet. Its replacement has the same: that proves the end of the former one's processes."""
    return f"node-{number}" if number else HEAD


def choose_slots(about: Mapping[str, Any], count: int, taken: set[int]) -> list[str]:
    """CPU slots for a node that other nodes on the same machine do not have.

    Ray counts CPUs and names none. Slots beyond a machine's cores share them, as where several nodes are one machine.
    """
    found: list[int] = []
    round_ = 0
    while len(found) < count:
        slots = (core + round_ * about["machine_cores"] for core in about["cores"])
        found += [slot for slot in slots if slot not in taken][: count - len(found)]
        round_ += 1
    return [f"cpu:{slot}" for slot in found]


def sized(plan: RayPlan, nodes: Sequence[Mapping[str, Any]]) -> RayPlan:
    """The plan with its GPUs and CPUs a node named: those that so many of the cluster's nodes have each."""
    alive = [node["Resources"] for node in nodes if node["Alive"]]

    def each(resource: str) -> int:
        values = sorted((int(node.get(resource, 0)) for node in alive), reverse=True)
        return values[plan.nodes - 1] if len(values) >= plan.nodes else 0

    gpus = each("GPU") if plan.gpus is None else plan.gpus
    cpus = plan.cpus if plan.cpus is not None else gpus or max(1, each("CPU"))
    return RayPlan(**{**asdict(plan), "gpus": gpus, "cpus": cpus})


def require_capacity(plan: RayPlan, nodes: Sequence[Mapping[str, Any]]) -> None:
    """Raises CommandError (exit code 2) where a cluster has too few nodes, whatever runs on them now."""

    def room(resources: Mapping[str, float]) -> int:
        parts = [int(resources.get("CPU", 0) // max(plan.cpus or 0, 1))]
        if plan.gpus:
            parts.append(int(resources.get("GPU", 0) // plan.gpus))
        return min(parts)

    living = [node for node in nodes if node["Alive"]]
    rooms = [room(node["Resources"]) for node in living]
    fitting = sum(rooms) if plan.pack else sum(each > 0 for each in rooms)
    if fitting >= plan.nodes:
        return
    each = [f"{node['NodeManagerAddress']}: {amounts(node['Resources'])}" for node in living[:SHOWN]]
    has = "; ".join(each) + ("; …" if len(living) > SHOWN else "") or "no node"
    problem = f"{plan.nodes} with {wanted(plan)} each are asked for, and the Ray cluster has room for {fitting} ({has})"
    fix = "ask for less (--nodes, --gpus, --cpus), or give its autoscaler time to add nodes: --wait 600"
    raise user_error("--nodes", problem, fix)


def wanted(plan: RayPlan) -> str:
    """What a node must have, for a sentence."""
    return amounts({"GPU": plan.gpus or 0, "CPU": plan.cpus or 1})


def amounts(resources: Mapping[str, float]) -> str:
    """GPUs, where there are any, and CPUs in words."""
    found = [(name, resources.get(name, 0)) for name in ("GPU", "CPU")]
    words = [
        f"{value:g} {name}{'' if value == 1 else 's'}" for name, value in found if value or name == "CPU"
    ]
    return ", ".join(words)


def too_busy(plan: RayPlan, waited_s: float, free: Mapping[str, float]) -> CommandError:
    """Of a cluster whose nodes are large enough and used by others."""
    asked = f"{plan.nodes} with {wanted(plan)} each"
    problem = f"{asked} were not free within {waited_s:g} s (free: {amounts(free)} in all)"
    return user_error(
        "--nodes", problem, "see `ray status` for who has them, ask for less, or wait longer: --wait 600"
    )


def require_gpus(about: Mapping[str, Any], count: int) -> None:
    """Raises CommandError where Ray gave GPUs that Headrace does not see on the node."""
    if about["gpus_seen"] < count:
        given = amounts({"GPU": about["gpus_given"], "CPU": 0}).partition(",")[0]
        problem = f"Ray gave {given} of {about['host']}, and Headrace sees {about['gpus_seen']} there"
        raise user_error(
            "--gpus", problem, "see `nvidia-smi` there, or correct the node's `ray start --num-gpus`"
        )
