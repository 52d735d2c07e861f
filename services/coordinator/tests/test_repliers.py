"""Runs whose replies are made by instances of their own: who is granted, who holds what when, what a lost one costs."""

import asyncio
import random

import pytest
from headrace.rollout.v1 import rollout_pb2 as rollout
from headrace_coordinator.domain import events as ev
from headrace_coordinator.domain.devices.leases import REPLY, Quarantine
from headrace_coordinator.domain.devices.scheduling import plan_admission
from headrace_schema.spec import RunSpec
from headrace_simulation.virtual_time import run_virtual
from headrace_simulation.world import World
from places_parts import instance, state_of

CORES = [f"b/cpu:{core}" for core in range(4)]
PLACEMENTS = {
    "turns, apart": {"rollout,trainer": "0-3", "reply": "4-5"},
    "turns on all": {"rollout": "0-3", "reply": "4-5", "trainer": "all"},
    "resident": {"rollout": "0-3", "reply": "4-5", "trainer": "0-5", "memory": "resident"},
    "disaggregated": {"rollout": "0-1", "reply": "2-3", "trainer": "4-5"},
    "hybrid": {"mode": "hybrid", "rollout": "0-1", "reply": "2-3", "trainer": "4-5"},
}
STAGES = {"generate": "rollout", "reply": "rollout", "score": "reward", "learn": "trainer"}
TURNS = [("generate", "reply"), ("reply", "generate")]


def replied(placement: dict, instances: int = 1, rollouts: int = 1, path: str = "frozen") -> RunSpec:
    return RunSpec.model_validate(
        {
            "name": "run",
            "steps": 6,
            "export": False,
            "model": {"path": "imaginary"},
            "workflow": {
                "stages": {name: {"service": service} for name, service in STAGES.items()},
                "edges": [
                    *({"source": a, "target": b, "granularity": "turn"} for a, b in TURNS),
                    {"source": "generate", "target": "score"},
                    {"source": "score", "target": "learn"},
                ],
            },
            "reply": {"path": path, "instances": instances},
            "data": {"source": "copy_digits", "options": {"digits": 1}, "heldout": 2},
            "algorithm": {"group_size": 2, "prompts_per_step": 4},
            "reward": {"scorers": [{"name": "exact"}]},
            "rollout": {"instances": rollouts},
            "evaluation": {"every": 2},
            "placement": placement,
            "limits": {"max_drop_rate": 0.9},
        }
    )


def admitted(fleet, **more):
    spec = replied({"rollout,trainer": "0", "reply": "1-2"}, **more)
    asked = ev.RunSubmitted(at=0, run="r", spec=spec.model_dump(mode="json"), directory="d")
    return plan_admission(state_of(fleet, asked), 1.0)


def test_a_run_is_granted_its_repliers_and_their_devices_and_waits_for_them():
    fleet = [instance("trainer-0", "h", CORES, "trainer"), instance("rollout-0", "h", CORES)]
    short = admitted(fleet)
    assert short.waiting["r"] == "1 rollout instance (0 free)"
    (grant,) = admitted([*fleet, instance("rollout-1", "h", CORES)]).grants
    assert (grant.rollouts, grant.repliers) == (["rollout-0"], ["rollout-1"])
    assert sorted(grant.devices) == CORES[:3]
    pair = admitted([*fleet, instance("rollout-1", "h", CORES)], instances=2)
    assert pair.waiting["r"].startswith("1 rollout instance")


def test_an_instance_that_sees_no_device_for_replies_is_not_taken_for_them():
    fleet = [instance("trainer-0", "h", CORES, "trainer")]
    blind = [instance(name, "h", CORES[:1]) for name in ("rollout-0", "rollout-1")]
    plan = admitted([*fleet, *blind])
    assert plan.waiting["r"] == "1 rollout instance (0 free) to reply on 1, 2"
    (grant,) = admitted([*fleet, blind[1], instance("rollout-0", "h", CORES)]).grants
    assert (grant.rollouts, grant.repliers) == (["rollout-1"], ["rollout-0"])


def test_a_named_device_in_quarantine_is_waited_for_and_another_of_all_is_not():
    fleet = [instance("trainer-0", "h", CORES, "trainer")]
    fleet += [instance(name, "h", CORES) for name in ("rollout-0", "rollout-1")]
    for devices, waits in (("0", "b/cpu:0 to be free; in quarantine"), ("b/all", "")):
        spec = replied({"rollout,trainer": devices, "reply": "1-2"})
        asked = ev.RunSubmitted(at=0, run="r", spec=spec.model_dump(mode="json"), directory="d")
        state = state_of(fleet, asked)
        state.table.quarantined["b/cpu:0"] = Quarantine("gone", "revoked past notice")
        plan = plan_admission(state, 1.0)
        assert plan.waiting.get("r", "") == waits


class Replied(World):
    """A fleet for one run with repliers; counts who held what, and what streams were told."""

    def __init__(self, seed: int, placement: dict, strikes: int = 0, **more) -> None:
        super().__init__(seed, faults=False)
        self.spec = replied(placement, **more)
        self.strikes = strikes
        self.openings: list[rollout.GenerateOpen] = []
        self.installs: list[rollout.InstallPolicyRequest] = []
        self.together: set[tuple[str, ...]] = set()

    def heard(self, method: str, request: object) -> None:
        super().heard(method, request)
        if isinstance(request, rollout.InstallPolicyRequest):
            self.installs.append(request)

    def exclusive(self) -> None:
        super().exclusive()
        table = self.coordinator.event_log.state.table if self.coordinator else None
        if table is not None:
            self.together.add(tuple(sorted({lease.stage for lease in table.leases.values()})))

    def granted(self, stage: str) -> list[ev.LeaseGranted]:
        return [each for each in self.store.log if isinstance(each, ev.LeaseGranted) and each.stage == stage]

    @property
    def repliers(self):
        state = self.coordinator.event_log.state
        (run,) = state.runs.values()
        return [i for i in self.living("rollout") if run.grant and i.incarnation in run.grant.repliers]

    async def trouble(self) -> None:
        """Kills one that replies as often as asked, each time while an exchange is on."""
        rng = random.Random(f"{self.seed}/repliers")
        for _ in range(self.strikes):
            await asyncio.sleep(rng.uniform(1.0, 4.0))
            while not (any(i.running for i in self.living("rollout")) and self.repliers):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            await self.kill(rng.choice(self.repliers).incarnation)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_repliers_hold_their_devices_while_rollouts_hold_theirs(placement):
    world = Replied(1, PLACEMENTS[placement])
    outcome = run_virtual(world.live())
    assert (outcome.state, outcome.recoveries) == ("SUCCEEDED", 0)
    assert outcome.trained + outcome.dropped == 6 * 8 and outcome.trained > outcome.dropped
    turns = placement.startswith("turns") or placement == "resident"
    assert ("generate", REPLY) in world.together if turns else ("generate", "learn", REPLY) in world.together
    meets = any({"learn", REPLY} <= {*stages} for stages in world.together)
    assert meets == (placement in ("turns, apart", "disaggregated", "hybrid"))
    # One whose devices the trainer wants gives them back in every step; any other one keeps them.
    assert len(world.granted(REPLY)) >= 6 if not meets else len(world.granted(REPLY)) == 1
    assert len({event.incarnation for event in world.granted(REPLY)}) == 1
    frozen = [each for each in world.installs if each.HasField("files")]
    assert frozen and {each.version.number for each in frozen} == {1}
    assert not any(i.held for i in world.living("rollout"))


def test_a_policy_that_replies_to_itself_has_the_same_version_on_both_sides():
    world = Replied(1, PLACEMENTS["disaggregated"], path="")
    outcome = run_virtual(world.live())
    assert (outcome.state, outcome.recoveries) == ("SUCCEEDED", 0)
    assert not any(each.HasField("files") for each in world.installs)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("seed", range(3))
def test_a_lost_replier_is_replaced_and_costs_no_recovery(placement, seed, caplog):
    caplog.set_level("INFO")
    world = Replied(seed, PLACEMENTS[placement], strikes=3, instances=1 + seed % 2, rollouts=1 + seed // 2)
    outcome = run_virtual(world.live())
    assert (outcome.state, outcome.recoveries) == ("SUCCEEDED", 0)
    assert outcome.trained + outcome.dropped == 6 * 8 and outcome.trained > outcome.dropped
    assert len({event.incarnation for event in world.granted(REPLY)}) > 1
    assert "no more: silence" in caplog.text, "the run says who replied no more"


class Alone(Replied):
    """The one that replies is cut off, until it is proven gone and another process takes its place."""

    async def trouble(self) -> None:
        while not (any(i.running for i in self.living("rollout")) and self.repliers):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        (replier,) = self.repliers
        replier.cut_off = True
        while True:
            for run in self.states():
                self.said |= {*self.coordinator.fleet.waits.of(run.id)}
            await asyncio.sleep(0.5)


def test_a_run_without_anybody_to_reply_says_what_it_waits_for_and_goes_on():
    world = Alone(1, PLACEMENTS["disaggregated"])
    world.said = set()
    outcome = run_virtual(world.live())
    assert outcome.state == "SUCCEEDED"
    assert "1 ready rollout instance(s) to reply" in world.said


class Relieved(Replied):
    """The one that replies is told to stop, and another instance is there."""

    async def trouble(self) -> None:
        while not (any(i.running for i in self.living("rollout")) and self.repliers):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        (old,) = self.repliers
        await self.bear("rollout", "rollout-9", self.hosts[0])
        await self.terminate(old, 10.0)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_replier_that_is_told_to_stop_is_relieved(placement):
    world = Relieved(1, PLACEMENTS[placement])
    outcome = run_virtual(world.live())
    assert (outcome.state, outcome.recoveries) == ("SUCCEEDED", 0)
    assert len({event.incarnation for event in world.granted(REPLY)}) == 2
