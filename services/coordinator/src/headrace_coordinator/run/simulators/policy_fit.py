"""Whether a robot policy and an environment's spaces fit, and what the environment adds to the policy.

What the spec leaves out of a new policy (sizes, bounds, cameras) is the environment's; what it gives must agree. Of a
policy that a directory holds, `policy.json` is compared, where this host has it; the instances that build the policy
check the rest.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.common.v1 import common_pb2 as common
from headrace.simulator.v1 import simulator_pb2 as simulator
from headrace_schema.problems import Impossible, choose, problem
from headrace_schema.resources.views import KeyProblemView
from headrace_schema.sections.embodied import EnvironmentSection
from headrace_servicekit.rpc.tensors import decode_tensor

SPACE_BYTES = 1 << 26
CAMERA = "camera"
"""What an image without a name is called."""
FILE, MOST_BYTES = "policy.json", 1 << 24
COLOURS = 3
Spaces = Mapping[str, simulator.Space]
PolicyFile = Mapping[str, Any]
"""What a policy's directory says of the policy."""


@dataclass(frozen=True)
class Fitted:
    """A whole policy, and the observations that it reads; the fields of `PolicyFitted`."""

    policy: dict[str, Any] | None
    state: list[str] | None
    cameras: dict[str, str] | None


def fit(
    policy: Mapping[str, Any] | None,
    environment: EnvironmentSection,
    pools: Mapping[str, simulator.OpenPoolResponse],
    file: PolicyFile | None = None,
) -> Fitted:
    """The policy of a run whose tasks have these spaces; `file` is what a directory's policy says of itself.

    Raises `Impossible`, whose problems name the keys.
    """
    found = {task: _fit(policy, environment, task, pool, file) for task, pool in sorted(pools.items())}
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
    file: PolicyFile | None,
) -> Fitted:
    if pool.action_space.discrete_count:
        reason = (
            f"{task} takes one of {pool.action_space.discrete_count} actions, and robot policies draw numbers"
        )
        raise Impossible(
            [problem("environment.tasks", reason, "choose an environment with continuous actions")]
        )
    spaces = {space.name: space for space in pool.observation_spaces}
    _check_images(task, environment, spaces)
    images = {name for name, space in spaces.items() if _is_image(space)}
    _known("environment.state", environment.state or (), spaces.keys() - images, "a state")
    _known("environment.cameras", (environment.cameras or {}).values(), images, "an image")
    if policy is None:
        if problems := _misfits(file or {}, environment, pool.action_space, spaces, images):
            raise Impossible(problems)
        return Fitted(None, environment.state, environment.cameras)
    state = environment.state if environment.state is not None else sorted(spaces.keys() - images)
    cameras = environment.cameras
    if cameras is None:
        cameras = {} if policy.get("kind") == "mlp" else {name or CAMERA: name for name in sorted(images)}
    numbers = sum(math.prod(spaces[name].shape) for name in state)
    if policy.get("kind") == "mlp" and not numbers:
        reason = f"an mlp reads numbers, and {task} shows {'images' if images else 'none'} alone"
        raise Impossible(
            [problem("model.policy.kind", reason, "use cnn, or show it a state in environment.state")]
        )
    return Fitted(_complete(policy, pool.action_space, numbers, spaces, cameras), state, cameras)


def _complete(
    policy: Mapping[str, Any],
    action: simulator.Space,
    numbers: int,
    spaces: Spaces,
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


def _pixels(spaces: Spaces, cameras: Mapping[str, str]) -> dict[str, Any]:
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


def _check_images(task: str, environment: EnvironmentSection, spaces: Spaces) -> None:
    """Raises `Impossible` for an image that policies cannot see, unless the spec reads it as a state or not at all."""
    read = None if environment.cameras is None else set(environment.cameras.values())
    for name, space in spaces.items():
        pixels = space.data_type == common.DATA_TYPE_UINT8 and len(space.shape) == 3
        if pixels and space.shape[2] != COLOURS and (read is None or name in read):
            if name in (environment.state or ()):
                continue
            reason = (
                f"{task} shows {name or CAMERA!r} with shape {_by(space.shape)}, and images are height x width x 3 "
                "(red, green, blue)"
            )
            moved = "move its colours to the end (numpy.moveaxis(image, 0, -1))"
            one = "give one RGB frame in place of frames or channels that are stacked"
            fix = f"{moved if space.shape[0] == COLOURS else one} in the environment"
            raise Impossible([problem("environment.tasks", reason, fix)])


def _is_image(space: simulator.Space) -> bool:
    return space.data_type == common.DATA_TYPE_UINT8 and len(space.shape) == 3 and space.shape[2] == COLOURS


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


# --- the policy of a directory


def read_policy_file(path: str) -> PolicyFile | None:
    """What the directory's file says; None where this host has none that can be read."""
    file = Path(path) / FILE
    try:
        if not path or not file.is_file() or file.stat().st_size > MOST_BYTES:
            return None
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _misfits(
    file: PolicyFile,
    environment: EnvironmentSection,
    action: simulator.Space,
    spaces: Spaces,
    images: set[str],
) -> list[KeyProblemView]:
    """What of a directory's policy does not fit the environment, by key."""
    state = environment.state if environment.state is not None else sorted(spaces.keys() - images)
    numbers = sum(math.prod(spaces[name].shape) for name in state)
    return [
        *_file_action(file, math.prod(action.shape)),
        *_file_state(file, state, numbers),
        *_file_cameras(file, environment.cameras, spaces, images),
    ]


def _file_action(file: PolicyFile, size: int) -> Iterator[KeyProblemView]:
    own = _length(file.get("bounds"))
    if own is not None and own != size:
        reason = f"its policy draws {own} numbers an action, and the environment takes {size}"
        yield problem("model.path", reason, "name a policy for these actions, or another environment")


def _file_state(file: PolicyFile, state: Iterable[str], numbers: int) -> Iterator[KeyProblemView]:
    own = _file_state_size(file)
    if own and own != numbers:
        named = ", ".join(state) or "none"
        reason = (
            f"these observations have {numbers} numbers ({named}), and the policy of model.path reads {own}"
        )
        yield problem("environment.state", reason, f"name observations of {own} numbers")


def _file_cameras(
    file: PolicyFile, cameras: Mapping[str, str] | None, spaces: Spaces, images: set[str]
) -> Iterator[KeyProblemView]:
    wanted = file.get("cameras")
    for camera in wanted if isinstance(wanted, list) else ():
        source = camera if cameras is None else cameras.get(camera)
        if source not in images:
            reason = f"the policy of model.path sees a camera {camera!r}, and there is none"
            fix = f"say which image it is, {camera}: IMAGE; {choose(camera, images)}"
            yield problem("environment.cameras", reason, fix)
            continue
        pixels, own = list(spaces[source].shape[:2]), [file.get("height"), file.get("width")]
        if None not in own and own != pixels:
            reason = f"{source} has {_by(pixels)} pixels, and the policy of model.path reads {_by(own)}"
            yield problem("environment.options", reason, "ask for images of that size")


def _file_state_size(file: PolicyFile) -> int | None:
    """Numbers of the state that the policy reads; None or 0 where it reads none, or does not say."""
    size = file.get("state_size")
    if isinstance(size, int):
        return size
    read = file.get("proprio", file.get("state"))
    return _length(read)


def _length(bounds: object) -> int | None:
    low = bounds.get("low") if isinstance(bounds, Mapping) else None
    return len(low) if isinstance(low, list) else None


def _by(pixels: Iterable[object]) -> str:
    return " x ".join(map(str, pixels))
