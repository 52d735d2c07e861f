"""A fleet on Ray, seen from its driver: a placement group, an actor a node, and what happens when one is gone."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from headrace_cli.errors import CommandError, user_error
from headrace_servicekit.rpc.certificates import fingerprint

from headrace_clusters.ray.node import DRAINED, Node
from headrace_clusters.ray.plan import (
    RayPlan,
    choose_slots,
    node_name,
    require_capacity,
    require_gpus,
    sized,
    too_busy,
)

TICK_S = 0.5
GROUP_S = 15.0
"""How long a placement group may take on a cluster with room: it is made in a second."""
THREADS = 16
"""Calls that an actor takes at once: a watch that Ray lost sight of, and another one, may be among them."""
FAILURES = 3
"""A head that has failed so often in a row ends the fleet."""
MAX_BACKOFF_S = 60.0
STOP_S = 60.0


@dataclass
class Member:
    """One node of the fleet.

    `stage` is placing, checking (a head that has moved, for its files), starting, up or lost; `waits` is Ray's promise
    of what ends the stage.
    """

    number: int
    group: Any
    bundle: int
    stage: str = "lost"
    actor: Any = None
    waits: Any = None
    about: dict[str, Any] = field(default_factory=dict)
    slots: list[str] = field(default_factory=list)
    failures: int = 0
    retry_at: float = 0.0
    error: CommandError | None = None
    """Why it was lost last."""

    @property
    def name(self) -> str:
        """In the fleet."""
        return node_name(self.number)


class RayFleet:
    """Takes nodes, starts the parts of a fleet, replaces those that are lost, and gives all back.

    `say` gets a sentence for everything that happens. Nothing here is asked what a run has done.
    """

    def __init__(self, ray: Any, plan: RayPlan, name: str, say: Callable[[str], None]) -> None:
        self._ray, self._say, self._name = ray, say, name
        self.plan = sized(plan, ray.nodes())
        self.head: dict[str, Any] = {}
        self.members: list[Member] = []
        self.fatal: CommandError | None = None
        """Why the fleet cannot go on."""
        self._going: set[str] = set()
        """Nodes that Ray drains: nothing is started there any more."""

    # --- the start

    def start(self) -> None:
        """Takes the nodes and starts the fleet. Raises CommandError with the first reason; nothing is left then."""
        plan, ray = self.plan, self._ray
        if not plan.wait_s:
            require_capacity(plan, ray.nodes())
        group = self._group(plan.nodes, self._name)
        patience = max(plan.wait_s, GROUP_S)
        if not _comes(group, patience, lambda: self._say("waiting for Ray to give the nodes")):
            ray.util.remove_placement_group(group)
            require_capacity(plan, ray.nodes())
            raise too_busy(plan, patience, ray.available_resources())
        self.members = [Member(number, group, number) for number in range(plan.nodes)]
        try:
            while any(member.stage != "up" for member in self.members):
                self.look()
                for member in self.members:
                    if member.error is not None:
                        raise member.error
                time.sleep(TICK_S)
        except BaseException:
            self.stop()
            raise

    def _group(self, count: int, name: str, away_from: list[str] | None = None) -> Any:
        """A placement group; `away_from`: on none of these nodes, which an earlier group has."""
        bundle = {"CPU": float(self.plan.cpus or 1)} | (
            {"GPU": float(self.plan.gpus)} if self.plan.gpus else {}
        )
        labels = [{"ray.io/node-id": f"!in({','.join(away_from)})"}] * count if away_from else None
        strategy = "PACK" if self.plan.pack else "STRICT_SPREAD"
        return self._ray.util.placement_group([bundle] * count, strategy, name, bundle_label_selector=labels)

    # --- what happens meanwhile

    def look(self) -> None:
        """Moves each member on: one look at what Ray says, without a wait."""
        for member in self.members:
            if member.stage == "lost":
                self._replace(member)
            elif self._ray.wait([member.waits], timeout=0)[0]:
                self._arrived(member)

    def _arrived(self, member: Member) -> None:
        try:
            found = self._ray.get(member.waits)
            if member.stage == "placing":
                self._begin(member, found)
            elif member.stage == "checking":
                self._require_files(member, found)
            elif member.stage == "starting":
                self._began(member, found)
            else:
                self._lose(member, CommandError(found), drained=found == DRAINED)
        except self._ray.exceptions.ActorUnavailableError as error:
            if member.stage != "up":
                self._lose(member, CommandError(_sentence(member, error)))
            else:  # The network between, for a moment; of a dead actor the next call says so.
                member.waits = member.actor.watch.remote()
        except self._ray.exceptions.RayError as error:
            self._lose(member, CommandError(_sentence(member, error)))
        except CommandError as error:
            self._lose(member, error)

    def _replace(self, member: Member) -> None:
        """A new actor in the member's bundle, once that is on a node that lives and stays."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        if time.monotonic() < member.retry_at:
            return
        place = self._ray.util.placement_group_table(member.group)["bundles_to_node_id"].get(member.bundle)
        alive = {node["NodeID"] for node in self._ray.nodes() if node["Alive"]}
        if place not in alive - self._going:
            return
        title = f"headrace {self._name} {member.name}: {self.plan.services_of(member.number)}"
        strategy = PlacementGroupSchedulingStrategy(member.group, member.bundle)
        options = {"num_cpus": self.plan.cpus, "num_gpus": self.plan.gpus or 0, "max_concurrency": THREADS}
        made = self._ray.remote(Node).options(name=title, scheduling_strategy=strategy, **options)
        try:
            member.actor = made.remote()
        except ValueError:  # The former actor of this name has not gone yet.
            member.retry_at = time.monotonic() + 1.0
            return
        member.stage, member.waits = "placing", member.actor.about.remote(self.plan.port)

    def _begin(self, member: Member, about: dict[str, Any]) -> None:
        """The node is known: its command can be said, once there is a head to join."""
        member.about = about
        if member.number and not self.head:
            return
        if self.plan.gpus:
            require_gpus(about, self.plan.gpus)
        else:
            beside = [
                each
                for each in self.members
                if each.about.get("boot_id") == about["boot_id"] and each is not member
            ]
            taken = {int(slot.partition(":")[2]) for each in beside for slot in each.slots}
            member.slots = choose_slots(about, self.plan.cpus or 1, taken)
        self._say(f"{member.name}: starting on {about['host']} ({about['address']})")
        if member.number or not self.head:
            self._order(member)
        else:
            member.stage = "checking"
            member.waits = member.actor.fleet_token.remote(self.plan.directory(0))

    def _require_files(self, head: Member, token: str) -> None:
        """A head that starts again must have the store, and so the runs, of the former one."""
        if token != self.head["token"]:
            where = f"{self.plan.node_dir} on {head.about['host']}"
            problem = f"{where} does not have the fleet's files, which were on a node that is gone"
            fix = "name a directory that all nodes see; checkpoints that are elsewhere can be continued by a new run"
            self.fatal = user_error("--node-dir", problem, fix)
            raise self.fatal
        self._order(head)

    def _order(self, member: Member) -> None:
        head = self.head if member.number else None
        port = self.head.get("port", member.about["port"])
        words = self.plan.words_of(member.number, member.slots, member.about["address"], port, head)
        files = {"head-token": self.head["token"]} if member.number else {}
        member.stage = "starting"
        awaited: dict[str, Any] = {}
        if member.number:
            names, token = self.plan.instances_of(member.number), self.head.get("http_token", "")
            awaited = {
                "names": names,
                "url": self.head["url"],
                "token": token,
                "timeout_s": self.plan.timeout_s,
            }
        directory = self.plan.directory(member.number)
        member.waits = member.actor.start.remote(words, directory, files, awaited)

    def _began(self, member: Member, found: dict[str, Any]) -> None:
        if "error" in found:
            raise CommandError(found["error"])
        member.stage, member.failures, member.error = "up", 0, None
        member.waits = member.actor.watch.remote()
        self._say(f"{member.name}: up")
        for warning in found["warnings"]:
            self._say(f"{member.name}: {warning}")
        if member.number:
            return
        before = self.head
        pin = fingerprint(found["authority"].encode()) if "authority" in found else ""
        port = int(found["url"].rpartition(":")[2])
        self.head = found | {"address": member.about["address"], "port": port, "fingerprint": pin}
        if before and before["url"] != found["url"]:
            for other in self.members[1:]:
                if other.stage in ("starting", "up"):
                    self._lose(other, CommandError(f"the head has moved to {found['url']}"))

    def _lose(self, member: Member, error: CommandError, *, drained: bool = False) -> None:
        self._say(f"{member.name}: lost on {member.about.get('host', 'its node')}: {error.message}")
        if drained:
            self._going.add(member.about["node"])
        was_up = member.stage == "up"
        self._ray.kill(member.actor)
        member.failures += 0 if was_up else 1
        member.stage, member.slots, member.error = "lost", [], error
        member.retry_at = time.monotonic() + min(2.0**member.failures, MAX_BACKOFF_S)
        if not member.number and self.head and member.failures >= FAILURES:
            self.fatal = CommandError(f"the head of the fleet does not come up again: {error.message}")

    def grow(self, nodes: int) -> None:
        """Asks Ray for more nodes, one group each: its autoscaler sees what is missing, and none waits for another.

        Fewer: those that were added last are given back; what the fleet began with stays.
        """
        while len(self.members) > max(nodes, self.plan.nodes):
            member = self.members.pop()
            self._stop([member])
            self._ray.util.remove_placement_group(member.group)
            self._say(f"{member.name}: given back")
        while len(self.members) < nodes:
            number = len(self.members)
            present = [each.about["node"] for each in self.members if each.about]
            group = self._group(1, f"{self._name} {node_name(number)}", None if self.plan.pack else present)
            self.members.append(Member(number, group, 0))
            self._say(f"{node_name(number)}: waiting for Ray to give a node")

    # --- the end

    def stop(self) -> None:
        """Ends the fleet in order on all nodes at once, and gives them back."""
        self._stop(self.members)
        for group in {member.group.id: member.group for member in self.members}.values():
            self._ray.util.remove_placement_group(group)

    def _stop(self, members: list[Member]) -> None:
        living = [member for member in members if member.stage in ("starting", "up")]
        ends = [member.actor.stop.remote() for member in living]
        if ends:
            self._ray.wait(ends, num_returns=len(ends), timeout=STOP_S)
        for member in members:
            if member.actor is not None:
                self._ray.kill(member.actor)


def _comes(group: Any, patience_s: float, say: Callable[[], None]) -> bool:
    """Whether a group gets its nodes in time."""
    deadline, told = time.monotonic() + patience_s, False
    while not group.wait(1):
        if time.monotonic() >= deadline:
            return False
        if not told:
            say()
            told = True
    return True


def _sentence(member: Member, error: Exception) -> str:
    """Why an actor is gone, or could not begin."""
    text = str(error)
    if "No module named" in text or "ModuleNotFoundError" in text:
        return (
            "its node has no headrace-clusters: install headrace[local,ray] of this release on every node, or run "
            "Ray from an image that has it"
        )
    node = member.about.get("host", "")
    words = next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)
    return f"{node}: {words}" if node else words
