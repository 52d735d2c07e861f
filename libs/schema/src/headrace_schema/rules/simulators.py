"""What cannot work where a spec names devices for simulators. Each rule yields problems with their fixes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from headrace_schema.problems import problem
from headrace_schema.resources.views import KeyProblemView
from headrace_schema.rules.acting import also_learns, given_away, learns_elsewhere, unnamed
from headrace_schema.sections.running import APART, EVERY

if TYPE_CHECKING:
    from headrace_schema.spec import RunSpec

KEY = "placement.simulator"


def simulator_problems(spec: RunSpec) -> Iterator[KeyProblemView]:
    """Problems of `placement.simulator`; none where it is left out."""
    placement = spec.placement
    if not placement.simulator:
        return
    if spec.environment is None:
        yield problem(KEY, "the run has no environment, and so no simulator", "remove it")
        return
    if missing := list(unnamed(placement, KEY)):
        yield from missing
        return
    yield from given_away(placement, KEY, "an episode")
    yield from _turns(spec)
    yield from _room(spec)


def _turns(spec: RunSpec) -> Iterator[KeyProblemView]:
    placement = spec.placement
    if placement.mode in APART and (both := sorted({*placement.trainer} & {*placement.simulator})):
        yield also_learns(KEY, both, placement.mode)
    yield from learns_elsewhere(placement, KEY, placement.simulator, "simulate")


def _room(spec: RunSpec) -> Iterator[KeyProblemView]:
    placement, rollouts = spec.placement, spec.rollout.instances
    names = [*placement.rollout, *placement.simulator]
    if len({*placement.simulator}) < len(placement.simulator):
        yield problem(KEY, "a device is named twice", "name each device once")
    elif not any(name.rpartition("/")[2] == EVERY for name in names) and len({*names}) <= rollouts:
        yield too_few(len({*names}), rollouts)


def too_few(devices: int, rollouts: int) -> KeyProblemView:
    """What is said where rollouts and simulators have fewer devices than processes."""
    one = rollouts == 1
    reason = (
        f"a device is leased to one process at a time, and {devices} {'is' if devices == 1 else 'are'} named for "
        f"{'a rollout' if one else f'{rollouts} rollouts'} and a simulator, which act at the same time"
    )
    fewer = "" if devices < 2 else f", set rollout.instances: {devices - 1}"
    fix = f"name at least {rollouts + 1} devices{fewer}, or remove {KEY}: simulators then hold no lease"
    return problem(KEY, reason, fix)


def apart(generates: Sequence[str], simulates: Sequence[str], rollouts: int) -> tuple[list[str], list[str]]:
    """The two sides without a device in common: half of what both name goes to each.

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
