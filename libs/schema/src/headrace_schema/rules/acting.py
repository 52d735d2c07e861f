"""What cannot work where a spec names devices for simulators or for scorers.

Both act beside the rollouts on devices of their own, while answers are made.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from headrace_schema.problems import problem
from headrace_schema.resources.views import KeyProblemView
from headrace_schema.sections.run import RunSections
from headrace_schema.sections.running import EVERY, PlacementSection, overlap

SIMULATOR = "placement.simulator"
REWARD = "placement.reward"
JOINT = "placement.joint"
PART_ERROR = 1e-6
"""By how much the sum of parts of a device's memory may be off as numbers are rounded."""


def simulator_problems(spec: RunSections) -> Iterator[KeyProblemView]:
    """Problems of `placement.simulator`; none where it is left out."""
    placement = spec.placement
    if placement.joint is not None:
        yield from _joint_problems(spec)
    if not placement.simulator:
        return
    if spec.environment is None:
        yield problem(SIMULATOR, "the run has no environment, and so no simulator", "remove it")
        return
    if missing := list(missing_devices(placement, SIMULATOR)):
        yield from missing
        return
    yield from refuse_sharing(placement, SIMULATOR, "an episode")
    yield from _turns_of_simulators(spec)
    yield from _room_for_simulators(spec)


def scorer_problems(spec: RunSections) -> Iterator[KeyProblemView]:
    """Problems of `placement.reward`; none where it is left out."""
    placement = spec.placement
    if not placement.reward:
        return
    if missing := list(missing_devices(placement, REWARD)):
        yield from missing
        return
    yield from refuse_sharing(placement, REWARD, "what a reward model computes")
    if len({*placement.reward}) < len(placement.reward):
        yield problem(REWARD, "a device is named twice", "name each device once")
    for side in ("rollout", "simulator"):
        names: list[str] = getattr(placement, side)
        if overlap(names, placement.reward):
            yield scores_beside(sorted({*names} & {*placement.reward}) or placement.reward, side)
    if placement.mode == "disaggregated" and (both := sorted({*placement.trainer} & {*placement.reward})):
        yield overlaps_trainer(REWARD, both, placement.mode)
    others = [*placement.simulator, *placement.reward]
    yield from refuse_trainer_elsewhere(placement, REWARD, others, "score")


def scores_beside(devices: Collection[str], side: str) -> KeyProblemView:
    """The problem of devices that scorers and another side would have at the same time."""
    does = {"rollout": "generates", "simulator": "simulates"}[side]
    reason = (
        f"{', '.join(devices)} {does} too, and a device is leased to one process at a time: answers are scored while "
        "others are made"
    )
    return problem(REWARD, reason, "name other devices, such as the trainer's in collocated placement")


def _turns_of_simulators(spec: RunSections) -> Iterator[KeyProblemView]:
    placement = spec.placement
    if placement.mode == "disaggregated" and (both := sorted({*placement.trainer} & {*placement.simulator})):
        yield overlaps_trainer(SIMULATOR, both, placement.mode)
    yield from refuse_trainer_elsewhere(placement, SIMULATOR, placement.simulator, "simulate")


def _room_for_simulators(spec: RunSections) -> Iterator[KeyProblemView]:
    placement, rollouts = spec.placement, spec.rollout.instances * spec.engines
    names = [*placement.rollout, *placement.simulator]
    if len({*placement.simulator}) < len(placement.simulator):
        yield problem(SIMULATOR, "a device is named twice", "name each device once")
    elif (
        placement.joint is None
        and not any(name.rpartition("/")[2] == EVERY for name in names)
        and len({*names}) <= rollouts
    ):
        yield too_few_to_simulate(len({*names}), rollouts)


def _joint_problems(spec: RunSections) -> Iterator[KeyProblemView]:
    placement = spec.placement
    if spec.workflow != "embodied":
        yield problem(
            JOINT, "only simulators of robots compute on devices", "remove it, or set workflow: embodied"
        )
    elif {*placement.simulator} != {*placement.rollout} or not placement.simulator:
        reason = (
            "a rollout and a simulator hold each of these devices together, and the two sides name others"
        )
        yield problem(JOINT, reason, 'name the same ones, as in placement: {"rollout,simulator": 0}')
    parts = placement.joint
    if parts is not None and parts.rollout + parts.simulator > 1 + PART_ERROR:
        total = f"{parts.rollout:g} and {parts.simulator:g} are {parts.rollout + parts.simulator:g}"
        yield problem(JOINT, f"{total} of a device's memory", "lower one of them: together at most 1")


def too_few_to_simulate(devices: int, rollouts: int) -> KeyProblemView:
    """The problem of rollouts and simulators that have fewer devices than processes."""
    one = rollouts == 1
    reason = (
        f"a device is leased to one process at a time, and {devices} {'is' if devices == 1 else 'are'} named for "
        f"{'a rollout' if one else f'{rollouts} rollouts'} and a simulator, which act at the same time"
    )
    fewer = "" if devices < 2 else f", set rollout.instances: {devices - 1}"
    fix = f"name at least {rollouts + 1} devices{fewer}, let them hold one together ({JOINT}), or remove {SIMULATOR}: "
    fix += "simulators then hold no lease"
    return problem(SIMULATOR, reason, fix)


def overlaps_trainer(key: str, devices: Collection[str], mode: str) -> KeyProblemView:
    """The problem of devices that the trainer would have at the same time."""
    reason = f"{', '.join(devices)} learns too; {mode} placement needs disjoint devices"
    return problem(key, reason, "name other devices, or set placement.mode: collocated")


def missing_devices(placement: PlacementSection, key: str) -> Iterator[KeyProblemView]:
    """Yields the first other side that names no devices, although `key` names some."""
    for side in ("rollout", "trainer"):
        if not getattr(placement, side):
            reason = f"{key} is given: what is left for the others is not guessed"
            yield problem(f"placement.{side}", reason, f"name devices, or remove {key}")
            return


def refuse_sharing(placement: PlacementSection, key: str, lost: str) -> Iterator[KeyProblemView]:
    """Refuses to share devices, which other runs would take while `lost` is under way."""
    if placement.share:
        reason = f"runs that share give their devices away while they generate, and {lost} would be lost"
        yield problem("placement.share", reason, f"remove it, or {key}")


def refuse_trainer_elsewhere(
    placement: PlacementSection, key: str, devices: Sequence[str], does: str
) -> Iterator[KeyProblemView]:
    """Refuses a collocated trainer that has no device in common with the rollouts or the side of `key`."""
    if placement.mode == "collocated" and not overlap(placement.trainer, [*placement.rollout, *devices]):
        yield problem(
            "placement.trainer",
            f"collocated placement takes turns on the same devices, and these neither generate nor {does}",
            f"name devices of placement.rollout or {key}, or set placement.mode: disaggregated",
        )


def apart(generates: Sequence[str], simulates: Sequence[str], rollouts: int) -> tuple[list[str], list[str]]:
    """(devices of the rollouts, devices of the simulators): half of what both name goes to each.

    The rollouts have one each where there are as many, and the simulators at least one.

    >>> apart(["0", "1", "2", "3"], ["0", "1", "2", "3"], rollouts=1)
    (['0', '1'], ['2', '3'])
    """
    both = [device for device in generates if device in simulates]
    if not both:
        return list(generates), list(simulates)
    alone = len(generates) - len(both)
    most = len(both) - (len(both) == len(simulates))
    kept = both[: max(0, min(most, max(len(both) // 2, rollouts - alone)))]
    mine = [device for device in generates if device in kept or device not in both]
    return mine, [device for device in simulates if device not in kept]
