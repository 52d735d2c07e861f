"""What cannot work where a spec names devices for replies. Each rule yields problems with their fixes."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

from headrace_schema.problems import problem
from headrace_schema.resources.views import KeyProblemView
from headrace_schema.rules.acting import also_learns, given_away, learns_elsewhere, unnamed
from headrace_schema.sections.running import APART, EVERY, overlap

if TYPE_CHECKING:
    from headrace_schema.spec import RunSpec

KEY = "placement.reply"


def replier_problems(spec: RunSpec) -> Iterator[KeyProblemView]:
    """Problems of `placement.reply`, and of `reply.instances` where it is left out."""
    placement = spec.placement
    if not placement.reply:
        if spec.reply is not None and spec.reply.instances > 1:
            reason = f"without {KEY} each rollout replies itself, on its own devices"
            yield problem("reply.instances", reason, f"remove it, or name devices in {KEY}")
        return
    if spec.reply is None:
        reason = "the run has no second policy that replies"
        yield problem(KEY, reason, "remove it, or add the section reply and its stage of the workflow")
        return
    if missing := list(unnamed(placement, KEY)):
        yield from missing
        return
    yield from given_away(placement, KEY, "an exchange")
    yield from _sides(spec)
    yield from _room(spec)


def _sides(spec: RunSpec) -> Iterator[KeyProblemView]:
    placement = spec.placement
    if overlap(placement.rollout, placement.reply):
        both = sorted({*placement.rollout} & {*placement.reply})
        yield also_generates(both or placement.reply)
    if placement.mode in APART and (both := sorted({*placement.trainer} & {*placement.reply})):
        yield also_learns(KEY, both, placement.mode)
    yield from learns_elsewhere(placement, KEY, placement.reply, "reply")


def _room(spec: RunSpec) -> Iterator[KeyProblemView]:
    names, instances = spec.placement.reply, spec.reply.instances if spec.reply else 1
    if len({*names}) < len(names):
        yield problem(KEY, "a device is named twice", "name each device once")
    elif len(names) < instances and not any(name.rpartition("/")[2] == EVERY for name in names):
        yield too_few(len(names), instances)


def too_few(devices: int, instances: int) -> KeyProblemView:
    """What is said where fewer devices are named than there are instances that reply."""
    reason = f"{devices} devices are too few for reply.instances: {instances}"
    return problem(KEY, reason, f"name at least {instances} devices, or set reply.instances: {devices}")


def also_generates(devices: Collection[str]) -> KeyProblemView:
    """What is said of devices that both policies are to have at the same time."""
    reason = (
        f"{', '.join(devices)} generates too, and a device is leased to one process at a time: the policies take turns "
        "within a trajectory, while other trajectories are at the other one"
    )
    return problem(KEY, reason, f"name other devices, or remove {KEY}: rollouts then reply on their own")
