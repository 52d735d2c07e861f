"""What a data set says of the new policy that imitates it, as an environment says it of one that acts there."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from typing import Any

from headrace_schema.problems import Impossible, problem
from headrace_schema.sections.generating import DataSection
from headrace_schema.spec import RunSpec

from headrace_coordinator.data.builtin.lerobot import LeRobot
from headrace_coordinator.data.fetching import with_local_data
from headrace_coordinator.data.sources import open_source
from headrace_coordinator.run.simulators.policy_fit import completed

STATE, ACTION = "observation.state", "action"
WHOSE = "the data set"


async def imitating(spec: RunSpec) -> RunSpec:
    """The spec with what its new policy leaves out: sizes, bounds and cameras, of the data set that it imitates.

    Raises `Impossible` where the policy contradicts the data set, or that does not say enough.
    """
    policy = spec.model.policy
    if policy is None or spec.acts_in_environments or not spec.trains_robots:
        return spec
    whole = await asyncio.to_thread(_whole, policy, (await with_local_data(spec)).data)
    return spec.model_copy(update={"model": spec.model.model_copy(update={"policy": whole})})


def _whole(policy: Mapping[str, Any], data: DataSection) -> dict[str, Any]:
    source = open_source(data.source, data.options)
    assert isinstance(source, LeRobot)
    known = _known(policy, source)
    return completed(policy, known, math.prod(source.shape(ACTION)), WHOSE)


def _known(policy: Mapping[str, Any], source: LeRobot) -> dict[str, Any]:
    kind, known = policy.get("kind"), dict[str, Any]()
    if not source.shape(ACTION):
        raise _lacks("data.options.path", "has no feature named action", "name another one")
    if "bounds" not in policy:
        if (bounds := source.action_bounds()) is None:
            reason = "states no least and greatest action in meta/stats.json"
            raise _lacks("model.policy.bounds", reason, "give the bounds of the robot's actions")
        known["bounds"] = bounds
    state = source.shape(STATE)
    numbers = math.prod(state) if state else 0
    if kind == "mlp" and not numbers:
        raise _lacks("model.policy.kind", f"has no {STATE}, which an mlp reads", "use cnn")
    if kind == "mlp" or (kind == "cnn" and policy.get("state_size") != 0):
        known["state_size"] = numbers
    return known if kind == "mlp" else known | _cameras(policy, source)


def _cameras(policy: Mapping[str, Any], source: LeRobot) -> dict[str, Any]:
    named = policy.get("cameras")
    cameras = source.features_of_cameras(named if isinstance(named, list) else None)
    if policy.get("kind") != "cnn":
        return {"cameras": [*cameras]}
    sizes = sorted({source.shape(feature)[:2] for feature in cameras.values()})
    if len(sizes) != 1:
        shown = ", ".join(" x ".join(map(str, size)) for size in sizes) or "none"
        raise _lacks(
            "model.policy.cameras", f"has pictures of {shown}, and a cnn reads those of one size", "name one"
        )
    return {"cameras": [*cameras], "height": sizes[0][0], "width": sizes[0][1]}


def _lacks(key: str, reason: str, fix: str) -> Impossible:
    return Impossible([problem(key, f"{WHOSE} {reason}", fix)])
