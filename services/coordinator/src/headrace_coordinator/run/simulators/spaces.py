"""What an environment's spaces say of a robot policy, and how environments are divided. Pure.

What the spec leaves out of a new policy (sizes, bounds, cameras) is the environment's; what it gives must agree.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.common.v1 import common_pb2 as common
from headrace.simulator.v1 import simulator_pb2 as simulator
from headrace_schema.problems import Impossible, problem
from headrace_schema.resources.views import KeyProblemView
from headrace_schema.sections.embodied import EnvironmentSection
from headrace_servicekit.rpc.tensors import decode_tensor

from headrace_coordinator.run.simulators.written import Written, misfits

SPACE_BYTES = 1 << 26
CAMERA = "camera"
"""What an image without a name is called."""
Place = tuple[str, str, str]
"""Incarnation of a simulator, incarnation of a rollout, task."""


@dataclass(frozen=True)
class Fitted:
    """A whole policy, and the observations that it reads; see `PolicyFitted`."""

    policy: dict[str, Any] | None
    state: list[str] | None
    cameras: dict[str, str] | None


def fit(
    policy: Mapping[str, Any] | None,
    environment: EnvironmentSection,
    pools: Mapping[str, simulator.OpenPoolResponse],
    written: Written | None = None,
) -> Fitted:
    """The policy of a run whose tasks have these spaces; `written` is what a directory's policy says of itself.

    Raises `Impossible`, whose problems name the keys.
    """
    found = {task: _fit(policy, environment, task, pool, written) for task, pool in sorted(pools.items())}
    (first, fitted), *others = found.items()
    for task, other in others:
        if other != fitted:
            reason = f"{task} has other observations or actions than {first}, and one policy acts in both"
            raise Impossible([problem("environment.tasks", reason, "give each its own run")])
    return fitted


def _fit(
    policy: Mapping[str, Any] | None,
    environment: EnvironmentSection,
    task: str,
    pool: simulator.OpenPoolResponse,
    written: Written | None,
) -> Fitted:
    if pool.action_space.discrete_count:
        reason = (
            f"{task} takes one of {pool.action_space.discrete_count} actions, and robot policies draw numbers"
        )
        raise Impossible(
            [problem("environment.tasks", reason, "choose an environment with continuous actions")]
        )
    spaces = {space.name: space for space in pool.observation_spaces}
    images = {name for name, space in spaces.items() if _is_image(space)}
    _known("environment.state", environment.state or (), spaces.keys() - images, "a state")
    _known("environment.cameras", (environment.cameras or {}).values(), images, "an image")
    if policy is None:
        if problems := misfits(written or {}, environment, pool.action_space, spaces, images):
            raise Impossible(problems)
        return Fitted(None, environment.state, environment.cameras)
    state = environment.state if environment.state is not None else sorted(spaces.keys() - images)
    cameras = environment.cameras
    if cameras is None:
        cameras = {} if policy.get("kind") == "mlp" else {name or CAMERA: name for name in sorted(images)}
    numbers = sum(math.prod(spaces[name].shape) for name in state)
    return Fitted(_complete(policy, pool.action_space, numbers, spaces, cameras), state, cameras)


def _complete(
    policy: Mapping[str, Any],
    action: simulator.Space,
    numbers: int,
    spaces: Mapping[str, simulator.Space],
    cameras: Mapping[str, str],
) -> dict[str, Any]:
    kind, given = policy.get("kind"), dict(policy)
    known: dict[str, Any] = {"bounds": bounds_of(action)}
    if kind in ("mlp", "cnn"):
        known["state_size"] = numbers
    if kind == "cnn":
        known |= _pixels(spaces, cameras)
    elif kind != "mlp":
        known["cameras"] = list(cameras)
    size = math.prod(action.shape)
    problems = [
        problem(
            f"model.policy.{key}", f"is {given[key]!r}, and the environment's is {value!r}", "leave it out"
        )
        for key, value in known.items()
        if key in given
        and key != "bounds"
        and given[key] != value
        and list(value if isinstance(value, list) else [value]) != given[key]
    ]
    own = given.get("bounds")
    if isinstance(own, Mapping) and len(own.get("low", ())) != size:
        reason = f"has {len(own.get('low', ()))} numbers, and an action of the environment {size}"
        problems.append(problem("model.policy.bounds", reason, "leave it out"))
    if problems:
        raise Impossible(problems)
    return {**known, **given}


def _pixels(spaces: Mapping[str, simulator.Space], cameras: Mapping[str, str]) -> dict[str, Any]:
    sizes = {tuple(spaces[name].shape[:2]) for name in cameras.values()}
    if len(sizes) != 1:
        what = "no images" if not sizes else f"images of {len(sizes)} sizes"
        fix = "ask for images of one size in environment.options, or choose environment.cameras"
        raise Impossible([problem("environment.cameras", f"a cnn reads images, and there are {what}", fix)])
    ((height, width),) = sizes
    return {"cameras": list(cameras), "height": height, "width": width}


def bounds_of(action: simulator.Space) -> dict[str, list[float | None]]:
    """Bounds of each number of an action; None in both where one of them is infinite."""
    size = math.prod(action.shape)
    low, high = (_numbers(action, which, size) for which in ("low", "high"))
    whole = [math.isfinite(a) and math.isfinite(b) for a, b in zip(low, high, strict=True)]
    return {
        "low": [value if both else None for value, both in zip(low, whole, strict=True)],
        "high": [value if both else None for value, both in zip(high, whole, strict=True)],
    }


def _numbers(action: simulator.Space, which: str, size: int) -> list[float]:
    if not action.HasField(which):  # type: ignore[arg-type]
        return [math.inf] * size
    values: list[float] = decode_tensor(getattr(action, which), max_bytes=SPACE_BYTES).ravel().tolist()
    return [float(value) for value in values]


def _is_image(space: simulator.Space) -> bool:
    return space.data_type == common.DATA_TYPE_UINT8 and len(space.shape) == 3


def _known(key: str, named: Iterable[str], allowed: Iterable[str], what: str) -> None:
    missing = sorted(set(named) - set(allowed))
    if missing:
        problems: list[KeyProblemView] = [
            problem(
                key, f"{', '.join(map(repr, missing))} is not {what} of the environment", _choice(allowed)
            )
        ]
        raise Impossible(problems)


def _choice(allowed: Iterable[str]) -> str:
    names = sorted(allowed)
    return f"use of: {', '.join(map(repr, names))}" if names else "leave it out"


def divide(
    count: int, rollouts: Sequence[str], tasks: Sequence[str], simulators: Sequence[str]
) -> dict[Place, int]:
    """Environments of each pool: evenly over rollouts, tasks and simulators; each rollout has one of each task."""
    pools: dict[Place, int] = {}
    turn = 0
    for rollout, share in zip(rollouts, _shares(count, len(rollouts)), strict=True):
        for task, part in zip(tasks, _shares(max(share, len(tasks)), len(tasks)), strict=True):
            for _ in range(part):
                place = (simulators[turn % len(simulators)], rollout, task)
                pools[place] = pools.get(place, 0) + 1
                turn += 1
    return pools


def _shares(count: int, parts: int) -> list[int]:
    share, extra = divmod(count, parts) if parts else (0, 0)
    return [share + (index < extra) for index in range(parts)]
