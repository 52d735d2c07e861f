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
from typing import Any

import numpy as np
from headrace.simulator.v1 import simulator_pb2 as simulator
from headrace_schema.problems import Impossible, choose, problem
from headrace_schema.resources.views import KeyProblemView
from headrace_schema.sections.embodied import EnvironmentSection
from headrace_schema.stores import described
from headrace_servicekit.rpc.episodes import is_image
from headrace_servicekit.rpc.tensors import NUMPY_TYPES, decode_tensor

SPACE_BYTES = 1 << 26
CAMERA = "camera"
"""What an image without a name is called."""
FILE, MOST_BYTES = "policy.json", 1 << 24
COLOURS = 3
"""Channels of an image as every policy reads it; a cnn reads any number."""
FEWEST_PIXELS = 4
"""On a side of an image that a cnn reads."""
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
    spaces = {space.name: space for space in pool.observation_spaces}
    _check_images(task, environment, spaces)
    images = {name for name, space in spaces.items() if is_image(_dtype(space), space.shape)}
    _known("environment.state", environment.state or (), spaces, "an observation")
    _known("environment.cameras", (environment.cameras or {}).values(), images, "an image")
    if policy is None:
        if problems := _misfits(file or {}, environment, pool.action_space, spaces, images):
            raise Impossible(problems)
        return Fitted(None, environment.state, environment.cameras)
    state = environment.state if environment.state is not None else sorted(spaces.keys() - images)
    cameras = environment.cameras
    if cameras is None:
        seen = [] if policy.get("kind") == "mlp" else sorted(images - {*state})
        cameras = {name or CAMERA: name for name in seen}
    numbers = sum(math.prod(spaces[name].shape) for name in state)
    if policy.get("kind") == "mlp" and not numbers:
        reason = f"an mlp reads numbers, and {task} shows {'images' if images else 'none'} alone"
        fix = f"use cnn, or let it read pixels as numbers, {_naming('environment.state', images)}"
        raise Impossible([problem("model.policy.kind", reason, fix)])
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
        if action.categories:
            known["categories"] = list(action.categories)
    elif action.categories:
        raise Impossible([_draws_no_categories(f"a {kind}", "model.policy.kind", "use mlp or cnn")])
    if kind == "cnn":
        known |= _pixels(spaces, cameras)
    elif kind != "mlp":
        known["cameras"] = list(cameras)
        if problems := [*_of_other_channels(cameras, spaces, COLOURS, f"a {kind}")]:
            raise Impossible(problems)
    return completed(given, known, math.prod(action.shape), "the environment")


def completed(given: Mapping[str, Any], known: Mapping[str, Any], size: int, whose: str) -> dict[str, Any]:
    """A new policy as it is given, with what is known of whatever it reads, and of its actions of `size` numbers.

    Raises `Impossible` for what is given otherwise.
    """
    problems = [
        problem(f"model.policy.{key}", f"is {given[key]!r}, and {whose}'s is {value!r}", "leave it out")
        for key, value in known.items()
        if key in given
        and key != "bounds"
        and given[key] != value
        and list(value if isinstance(value, list) else [value]) != given[key]
    ]
    own = given.get("bounds")
    if isinstance(own, Mapping) and len(own.get("low", ())) != size:
        reason = f"has {len(own.get('low', ()))} numbers, and an action of {whose} {size}"
        problems.append(problem("model.policy.bounds", reason, "leave it out"))
    if problems:
        raise Impossible(problems)
    return {**known, **given}


def _draws_no_categories(what: str, key: str, fix: str) -> KeyProblemView:
    reason = f"{what} draws numbers, and some of the environment's actions are categories"
    return problem(key, reason, f"{fix}, or choose an environment with continuous actions")


def _pixels(spaces: Spaces, cameras: Mapping[str, str]) -> dict[str, Any]:
    sizes = sorted({tuple(spaces[name].shape) for name in cameras.values()})
    if len(sizes) != 1:
        what = "no images" if not sizes else f"images of {len(sizes)} shapes, {', '.join(map(_by, sizes))}"
        fix = "ask for images of one shape in environment.options, or choose environment.cameras"
        raise Impossible([problem("environment.cameras", f"a cnn reads images, and there are {what}", fix)])
    ((height, width, channels),) = sizes
    if min(height, width) < FEWEST_PIXELS:
        reason = (
            f"a cnn reads images from {FEWEST_PIXELS} x {FEWEST_PIXELS} on, and these are {_by(sizes[0])}"
        )
        fix = f"use mlp, which reads pixels as numbers, {_naming('environment.state', cameras.values())}"
        raise Impossible([problem("model.policy.kind", reason, fix)])
    found: dict[str, Any] = {"cameras": list(cameras), "height": height, "width": width}
    return found if channels == COLOURS else {**found, "channels": channels}


def _of_other_channels(
    cameras: Mapping[str, str], spaces: Spaces, channels: int, what: str
) -> Iterator[KeyProblemView]:
    for name in cameras.values():
        if (shape := spaces[name].shape)[2] != channels:
            reason = f"{name or CAMERA!r} is {_by(shape)}, and {what} reads height x width x {channels}"
            fix = "show it so in the environment, choose other images in environment.cameras, or train a cnn"
            yield problem("environment.cameras", reason, fix)


def _naming(key: str, names: Iterable[str]) -> str:
    return f"{key}: [{', '.join(sorted(name or repr(name) for name in names))}]"


def bounds_of(action: simulator.Space) -> dict[str, list[float | None]]:
    """Bounds of each number of an action; None in both where one of them is infinite. Of a category: first and last."""
    size = math.prod(action.shape)
    low, high = (_numbers(action, which, size) for which in ("low", "high"))
    for place, count in enumerate(action.categories):
        if count:
            low[place] = low[place] if math.isfinite(low[place]) else 0.0
            high[place] = low[place] + count - 1
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
        bytes_3d = _dtype(space) == np.uint8 and len(space.shape) == 3
        if not bytes_3d or is_image(_dtype(space), space.shape) or name in (environment.state or ()):
            continue
        if read is None or name in read:
            shape = f"{task} shows {name or CAMERA!r} with shape {_by(space.shape)}"
            reason = f"{shape}, and images are height x width x channels"
            fix = "move its channels to the end in the environment (numpy.moveaxis(image, 0, -1))"
            raise Impossible([problem("environment.tasks", reason, fix)])


def _dtype(space: simulator.Space) -> np.dtype:
    return NUMPY_TYPES.get(space.data_type, np.dtype(np.float32))


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
    file = described(path) / FILE
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
        *_file_action(file, action),
        *_file_state(file, state, numbers),
        *_file_cameras(file, environment.cameras, spaces, images),
    ]


def _file_action(file: PolicyFile, action: simulator.Space) -> Iterator[KeyProblemView]:
    own, size = _length(file.get("bounds")), math.prod(action.shape)
    if file and list(file.get("categories", ())) != list(action.categories):
        if "categories" not in file:
            yield _draws_no_categories("its policy", "model.path", "name a policy for these actions")
            return
        own_counts, counts = list(file["categories"]), list(action.categories)
        reason = f"its policy draws categories {own_counts}, and the environment's are {counts or 'none'}"
        yield problem("model.path", reason, "name a policy for these actions, or another environment")
        return
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
        channels = file.get("channels", COLOURS)
        yield from _of_other_channels({camera: source}, spaces, channels, "the policy of model.path")


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
