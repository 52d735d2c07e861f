"""Simulators that hold devices: how they are divided, who holds what when, and what a lost holder costs."""

import asyncio
from collections import Counter

import pytest
from embodied_parts import Robots, Scaled, embodied
from headrace_coordinator.domain import events as ev
from headrace_coordinator.domain.devices.leases import SIMULATE
from headrace_coordinator.domain.devices.scheduling import plan_admission
from headrace_coordinator.domain.state import InstanceState
from headrace_coordinator.run.devices.beside import seats, sides
from headrace_schema.rules.acting import apart
from headrace_schema.sections.running import PlacementSection
from headrace_schema.spec import RunSpec
from headrace_simulation.virtual_time import run_virtual
from places_parts import instance, state_of

CORES = [f"b/cpu:{core}" for core in range(4)]
PLACEMENTS = {
    "collocated": {"rollout,simulator,trainer": "0-5"},
    "unlike": {"rollout": "0-1", "simulator": "2-5", "trainer": "0-5"},
    "disaggregated": {"rollout": "0-1", "simulator": "2-3", "trainer": "4-5"},
    "joint": {"rollout,simulator,trainer": "0-1", "joint": {"rollout": 0.6, "simulator": 0.4}},
    "joint_apart": {"rollout,simulator": "0-1", "trainer": "2", "joint": {"rollout": 0.5, "simulator": 0.5}},
    "hybrid": {"mode": "hybrid", "rollout": "0-1", "simulator": "2-3", "trainer": "4-5"},
    "gpus": {"mode": "hybrid", "rollout": "0-1", "simulator": "2-3", "trainer": "0-3"},
}


@pytest.mark.parametrize(
    ("generates", "simulates", "rollouts", "expected"),
    [
        ("01", "23", 1, ("01", "23")),
        ("0123", "0123", 1, ("01", "23")),
        ("0123", "0123", 3, ("012", "3")),
        ("01", "1", 1, ("0", "1")),
        ("0", "01", 1, ("0", "1")),
        ("012", "123", 2, ("01", "23")),
        ("0", "0", 1, ("", "0")),
    ],
)
def test_devices_that_both_sides_name_are_divided(generates, simulates, rollouts, expected):
    assert tuple(map("".join, apart([*generates], [*simulates], rollouts))) == expected


def seen_by(name: str, devices: list[str], host: str = "h") -> InstanceState:
    return instance(name, host, devices, "simulator")


def test_each_machine_has_its_sides_and_ungranted_devices_are_nobodys():
    other = [f"c/cpu:{core}" for core in range(2)]
    fleet = [instance("r", "h", CORES), seen_by("s", CORES), seen_by("s9", other, "i")]
    section = PlacementSection.model_validate({"rollout,simulator": "0-3", "trainer": "0"})
    assert sides(section, [*CORES[:2], *other], fleet, 1) == ({CORES[0], other[0]}, {CORES[1], other[1]})


def test_simulators_that_hold_devices_keep_them_and_one_without_room_has_none():
    pair = [seen_by("s0", CORES), seen_by("s1", CORES)]
    assert seats(pair, CORES, {}) == {"s0": (*CORES[:2],), "s1": (*CORES[2:],)}
    three = [*pair, seen_by("s2", CORES)]
    assert seats(three, CORES, {"s1": CORES[2:]}) == {
        "s1": (*CORES[2:],),
        "s0": (CORES[0],),
        "s2": (CORES[1],),
    }
    assert seats(three, CORES[:2], {}) == {"s0": (CORES[0],), "s1": (CORES[1],)}
    assert seats([seen_by("s0", CORES[:1])], CORES[1:], {}) == {}


def leased(**placement: object) -> RunSpec:
    spec = embodied(1, rollouts=1)
    return RunSpec.model_validate(spec.model_dump(mode="json") | {"placement": placement})


def test_a_run_is_granted_its_simulators_devices_and_waits_for_a_simulator_that_sees_them():
    spec = leased(rollout="0", trainer="1", simulator="2-3")
    asked = ev.RunSubmitted(at=0, run="r", spec=spec.model_dump(mode="json"), directory="d")
    fleet = [instance("rollout-0", "h", CORES), instance("trainer-0", "h", CORES, "trainer")]
    blind = plan_admission(state_of([*fleet, seen_by("simulator-0", [])], asked), 1.0)
    assert blind.waiting["r"] == "a simulator instance that has 2, 3 to register"
    (grant,) = plan_admission(state_of([*fleet, seen_by("simulator-0", CORES)], asked), 1.0).grants
    assert sorted(grant.devices) == CORES


def test_another_run_waits_for_the_devices_of_a_runs_simulators():
    asked = [
        ev.RunSubmitted(at=at, run=name, spec=spec.model_dump(mode="json"), directory="d")
        for at, name, spec in (
            (0, "a", leased(rollout="0", trainer="0", simulator="1")),
            (1, "b", leased(rollout="1", trainer="1", simulator="2")),
        )
    ]
    fleet = [
        instance(f"{kind}-{index}", "h", CORES, kind) for kind in ("rollout", "trainer") for index in (0, 1)
    ]
    plan = plan_admission(state_of([*fleet, seen_by("simulator-0", CORES)], *asked), 2.0)
    assert [grant.run for grant in plan.grants] == ["a"]
    assert plan.waiting == {"b": "b/cpu:1 to be free; held by a"}


class Leased(Robots):
    """Robots whose simulators hold devices; counts who held what at the same time."""

    def __init__(self, seed: int, placement: dict, **more) -> None:
        super().__init__(seed, **more)
        fields = self.spec.model_dump(mode="json") | {"placement": dict(placement)}
        if (
            placement is PLACEMENTS["gpus"]
        ):  # A rank on each; those that rollouts and simulators have, too, sleep.
            self.gpus, fields["trainer"]["ranks"] = True, 4
        self.spec = RunSpec.model_validate(fields)
        self.together: set[tuple[str, ...]] = set()
        self.doubled: set[str] = set()
        """Devices with two holders at once."""

    def exclusive(self) -> None:
        super().exclusive()
        self.together.add(tuple(sorted({i.KIND for i in self.instances.values() if i.using()})))
        used = Counter(device for i in self.instances.values() for device in i.using())
        self.doubled |= {device.rpartition(":")[2] for device, holders in used.items() if holders > 1}

    def granted(self, stage: str) -> list[ev.LeaseGranted]:
        return [event for event in self.events(ev.LeaseGranted) if event.stage == stage]


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_simulators_hold_their_devices_while_rollouts_hold_theirs(placement):
    world = Leased(1, PLACEMENTS[placement])
    outcome = run_virtual(world.live())
    assert (outcome.state, outcome.recoveries) == ("SUCCEEDED", 0)
    assert outcome.trained > outcome.dropped
    opened = [request for request in world.requests if hasattr(request, "max_episode_steps")]
    tried = [request for request in opened if "trial-" in request.header.run]  # as the run was submitted
    assert tried and all(request.leased for request in opened if request not in tried)
    turns = placement in ("collocated", "unlike", "joint", "gpus")
    assert world.doubled == ({"0", "1"} if "joint" in PLACEMENTS[placement] else set())
    simulating = {kinds for kinds in world.together if "simulator" in kinds}
    both = ("rollout", "simulator")
    assert both in simulating if turns else (*both, "trainer") in simulating
    if turns:
        assert not any("trainer" in kinds for kinds in simulating)
        # A step takes them once, and so does an evaluation before the first one.
        assert len({event.epoch for event in world.granted(SIMULATE)}) >= 2 * 6
    assert len({event.incarnation for event in world.granted(SIMULATE)}) == 2
    assert not world.living("simulator")[0].held


@pytest.mark.parametrize("placement", [name for name in PLACEMENTS if name != "joint_apart"])
@pytest.mark.parametrize("seed", range(2))
def test_a_lost_simulator_with_devices_costs_no_step_and_no_recovery(placement, seed):
    world = Leased(seed, PLACEMENTS[placement], strikes=3)
    outcome = run_virtual(world.live())
    assert (outcome.state, outcome.recoveries) == ("SUCCEEDED", 0)
    assert outcome.trained + outcome.dropped == 6 * 8
    assert outcome.trained > outcome.dropped


class Outscaled(Leased, Scaled):
    """Simulators come and go in the middle of a run, and hold devices."""


@pytest.mark.parametrize(
    "placement", [PLACEMENTS["collocated"], {"rollout": "0-1", "simulator": "2-4", "trainer": "5"}]
)
def test_simulators_with_devices_come_and_go(placement):
    world = Outscaled(2, placement)
    outcome = run_virtual(world.live())
    assert (outcome.state, outcome.recoveries) == ("SUCCEEDED", 0)
    assert outcome.trained + outcome.dropped == 6 * 8
    assert any(event.incarnation == world.newcomer.incarnation for event in world.granted(SIMULATE))


class Revoked(Leased):
    """In the middle of a stream the leases of all simulators are revoked from outside."""

    async def trouble(self) -> None:
        for _ in range(2):
            await asyncio.sleep(2.0)
            while not any(i.running for i in self.living("rollout")):  # type: ignore[attr-defined]  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            fleet = self._fleet()
            epochs = [epoch for each in self.living("simulator") for epoch in each.held]
            await fleet.lease_manager.release("run-0", epochs)


@pytest.mark.parametrize("placement", ["collocated", "disaggregated"])
def test_a_revoked_simulator_steps_no_more_and_takes_its_devices_again(placement):
    world = Revoked(1, PLACEMENTS[placement])
    outcome = run_virtual(world.live())
    assert (outcome.state, outcome.recoveries) == ("SUCCEEDED", 0)
    assert outcome.trained + outcome.dropped == 6 * 8
    ended = [event for event in world.events(ev.LeaseEnded) if event.cause == "released"]
    assert len(ended) > 4
