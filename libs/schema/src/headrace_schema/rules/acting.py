"""What cannot work where a spec names devices for simulators or for scorers.

Both act beside the rollouts on devices of their own, while answers are made.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from headrace_schema.problems import problem
from headrace_schema.resources.views import KeyProblemView
from headrace_schema.sections.run import RunSections
from headrace_schema.sections.running import JointSection, PlacementSection, is_every, overlap

SIMULATOR = "placement.simulator"
REWARD = "placement.reward"
JOINT = "placement.joint"
PART_ERROR = 1e-6
"""By how much the sum of parts of a device's memory may be off as numbers are rounded."""


def beside_problems(spec: RunSections) -> Iterator[KeyProblemView]:
    """Problems of the devices of simulators and of scorers, where the spec names some."""
    placement = spec.placement
    simulates = placement.simulator if spec.environment is not None else []
    if placement.joint is not None and spec.acts_in_environments:
        yield from _joint_problems(placement, placement.joint)
    for key, does, names, others in (
        (SIMULATOR, "simulate", simulates, simulates),
        (REWARD, "score", placement.reward, [*placement.simulator, *placement.reward]),
    ):
        lacking = next((side for side in ("rollout", "trainer") if not getattr(placement, side)), "")
        if names and lacking:
            reason = f"{key} is given: what is left for the others is not guessed"
            yield problem(f"placement.{lacking}", reason, f"name devices, or remove {key}")
        elif names:
            if len({*names}) < len(names):
                yield problem(key, "a device is named twice", "name each device once")
            if placement.mode == "disaggregated" and (both := sorted({*placement.trainer} & {*names})):
                yield overlaps_trainer(key, both, placement.mode)
            if placement.mode == "collocated" and not overlap(
                placement.trainer, [*placement.rollout, *others]
            ):
                reason = f"collocated placement takes turns on the same devices, and these neither generate nor {does}"
                fix = f"name devices of placement.rollout or {key}, or set placement.mode: disaggregated"
                yield problem("placement.trainer", reason, fix)
    every = {*placement.rollout, *simulates}
    wanted, counted = spec.rollout.instances * spec.engines, not any(map(is_every, every))
    if simulates and placement.rollout and placement.joint is None and counted and len(every) <= wanted:
        yield too_few_to_simulate(len(every), wanted)
    for side in ("rollout", "simulator") if placement.rollout and placement.trainer else ():
        names = getattr(placement, side)
        if placement.reward and overlap(names, placement.reward):
            yield scores_beside(sorted({*names} & {*placement.reward}) or placement.reward, side)


def scores_beside(devices: Collection[str], side: str) -> KeyProblemView:
    """The problem of devices that scorers and another side would have at the same time."""
    does = {"rollout": "generates", "simulator": "simulates"}[side]
    reason = (
        f"{', '.join(devices)} {does} too, and a device is leased to one process at a time: answers are scored while "
        "others are made"
    )
    return problem(REWARD, reason, "name other devices, such as the trainer's in collocated placement")


def _joint_problems(placement: PlacementSection, parts: JointSection) -> Iterator[KeyProblemView]:
    if {*placement.simulator} != {*placement.rollout} or not placement.simulator:
        reason = (
            "a rollout and a simulator hold each of these devices together, and the two sides name others"
        )
        yield problem(JOINT, reason, 'name the same ones, as in placement: {"rollout,simulator": 0}')
    if parts.rollout + parts.simulator > 1 + PART_ERROR:
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
