"""Reward instances that hold devices: what is named for them, who holds what when, and what a lost holder costs."""

import asyncio

import pytest
from headrace_coordinator.domain import events as ev
from headrace_coordinator.domain.devices.leases import SCORE
from headrace_coordinator.domain.devices.scheduling import plan_admission
from headrace_schema.problems import explain_value
from headrace_schema.spec import RunSpec
from headrace_simulation.virtual_time import run_virtual
from headrace_simulation.world import World
from places_parts import instance, state_of

GPUS = [f"GPU-{number}/gpu:{number}" for number in range(3)]
PLACEMENTS = {
    "in turns with the trainer": {"rollout": "0-1", "reward": "2-3", "trainer": "0-3"},
    "on devices of its own": {"mode": "collocated", "rollout,trainer": "0-1", "reward": "2"},
    "beside both": {"rollout": "0-1", "reward": "2", "trainer": "3-4"},
}


def scored(seed: int, placement: dict, rollouts: int = 2) -> RunSpec:
    return RunSpec.model_validate(
        {
            "name": "scored",
            "seed": seed,
            "steps": 6,
            "model": {"path": "model"},
            "data": {"source": "copy_digits", "heldout": 4},
            "reward": {"scorers": [{"name": "exact"}]},
            "algorithm": {"group_size": 4, "prompts_per_step": 4},
            "rollout": {"instances": rollouts},
            "evaluation": {"every": 2},
            "placement": placement,
        }
    )


class Scored(World):
    """A fleet whose reward instances see the devices; counts who held what at the same time."""

    def __init__(self, seed: int, placement: dict, rewards: int = 1) -> None:
        super().__init__(seed, faults=False)
        self.spec = scored(seed, placement)
        self.counts = {"reward": rewards}
        self.together: set[tuple[str, ...]] = set()

    def exclusive(self) -> None:
        super().exclusive()
        self.together.add(tuple(sorted({i.KIND for i in self.instances.values() if i.using()})))

    async def holding(self) -> list:
        """Reward instances that hold devices, as soon as there are some."""
        while not (held := [i for i in self.living("reward") if i.held]):  # noqa: ASYNC110  # virtual time
            await asyncio.sleep(0.05)
        return held

    def granted(self) -> list[ev.LeaseGranted]:
        return [e for e in self.store.log if isinstance(e, ev.LeaseGranted) and e.stage == SCORE]


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_scorers_hold_their_devices_while_rollouts_hold_theirs(placement):
    world = Scored(1, PLACEMENTS[placement])
    outcome = run_virtual(world.live())
    assert (outcome.state, outcome.recoveries) == ("SUCCEEDED", 0)
    assert outcome.trained > outcome.dropped
    scoring = {kinds for kinds in world.together if "reward" in kinds}
    both = ("reward", "rollout")
    assert both in scoring or (*both, "trainer") in scoring
    assert any("trainer" in kinds for kinds in scoring) == (placement != "in turns with the trainer")
    granted = world.granted()
    taken = len({event.epoch for event in granted})
    assert taken >= 6 if placement == "in turns with the trainer" else taken == 1
    assert not world.living("reward")[0].held, "it released what it held with the run's end"


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_lost_scorer_with_devices_costs_no_step_and_no_recovery(placement):
    class Struck(Scored):
        async def trouble(self) -> None:
            for _ in range(2):
                await asyncio.sleep(2.0)
                held = await self.holding()
                await self.kill(held[0].incarnation)

    world = Struck(2, PLACEMENTS[placement], rewards=2)
    outcome = run_virtual(world.live())
    assert (outcome.state, outcome.recoveries) == ("SUCCEEDED", 0)
    assert outcome.trained + outcome.dropped == 6 * 16
    assert len({event.incarnation for event in world.granted()}) >= 2


def test_a_revoked_scorer_takes_its_devices_again():
    class Revoked(Scored):
        async def trouble(self) -> None:
            for _ in range(2):
                await asyncio.sleep(2.0)
                held = await self.holding()
                fleet = self._fleet()
                await fleet.lease_manager.release("run-0", [epoch for each in held for epoch in each.held])

    world = Revoked(3, PLACEMENTS["beside both"])
    outcome = run_virtual(world.live())
    assert (outcome.state, outcome.recoveries) == ("SUCCEEDED", 0)
    assert len(world.granted()) >= 3


def test_a_run_on_gpus_is_granted_its_scorers_gpu_and_waits_for_an_instance_that_sees_it():
    spec = scored(0, {"rollout": "gpu:0", "trainer": "gpu:1", "reward": "gpu:2"}, rollouts=1)
    asked = ev.RunSubmitted(at=0, run="r", spec=spec.model_dump(mode="json"), directory="d")
    fleet = [instance("rollout-0", "h", GPUS), instance("trainer-0", "h", GPUS, "trainer")]
    blind = plan_admission(state_of(fleet, asked), 1.0)
    assert blind.waiting["r"] == "a reward instance that has gpu:2 to register"
    seeing = state_of([*fleet, instance("reward-1", "h", GPUS, "reward")], asked)
    (grant,) = plan_admission(seeing, 1.0).grants
    assert sorted(grant.devices) == GPUS
    other = ev.RunSubmitted(at=1, run="s", spec=spec.model_dump(mode="json"), directory="d")
    fleet += [instance("rollout-1", "h", GPUS), instance("trainer-1", "h", GPUS, "trainer")]
    both = plan_admission(state_of([*fleet, instance("reward-1", "h", GPUS, "reward")], asked, other), 2.0)
    assert [each.run for each in both.grants] == ["r"] and "held by r" in both.waiting["s"]


WRONG = [
    ({"reward": "2"}, "placement.rollout", "is not guessed"),
    ({"rollout": "0", "trainer": "1", "reward": "0"}, "placement.reward", "0 generates too"),
    (
        {"rollout": "0", "trainer": "1", "reward": "1", "mode": "disaggregated"},
        "placement.reward",
        "1 learns too",
    ),
    ({"rollout,trainer": "0", "reward": "1", "share": True}, "placement.share", "would be lost"),
]


@pytest.mark.parametrize(("placement", "key", "words"), WRONG)
def test_placements_that_cannot_work_are_refused_with_their_key(placement, key, words):
    document = scored(0, PLACEMENTS["beside both"]).model_dump(mode="json", exclude_unset=True)
    document |= {"rollout": {"instances": 1}, "placement": placement}
    found = {each.key: each.problem for each in explain_value(RunSpec, document)}
    assert words in found.get(key, ""), found
