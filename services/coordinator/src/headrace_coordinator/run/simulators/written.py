"""Whether the policy of a directory fits an environment's spaces, by what its `policy.json` says.

Knows the sizes that a robot policy writes down, and nothing else of it: whoever builds it checks the rest. Reads that
file alone, where this host has it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from headrace.simulator.v1 import simulator_pb2 as simulator
from headrace_schema.problems import choose, problem
from headrace_schema.resources.views import KeyProblemView
from headrace_schema.sections.embodied import EnvironmentSection

FILE, MOST_BYTES = "policy.json", 1 << 24
Spaces = Mapping[str, simulator.Space]
Written = Mapping[str, Any]


def read_written(path: str) -> Written | None:
    """What the directory's file says; None where this host has none that can be read."""
    file = Path(path) / FILE
    try:
        if not path or not file.is_file() or file.stat().st_size > MOST_BYTES:
            return None
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def misfits(
    written: Written,
    environment: EnvironmentSection,
    action: simulator.Space,
    spaces: Spaces,
    images: set[str],
) -> list[KeyProblemView]:
    """What of the policy is not the environment's, by key."""
    state = environment.state if environment.state is not None else sorted(spaces.keys() - images)
    numbers = sum(math.prod(spaces[name].shape) for name in state)
    return [
        *_action(written, math.prod(action.shape)),
        *_state(written, state, numbers),
        *_cameras(written, environment.cameras, spaces, images),
    ]


def _action(written: Written, size: int) -> Iterator[KeyProblemView]:
    own = _numbers(written.get("bounds"))
    if own is not None and own != size:
        reason = f"its policy draws {own} numbers an action, and the environment takes {size}"
        yield problem("model.path", reason, "name a policy for these actions, or another environment")


def _state(written: Written, state: Iterable[str], numbers: int) -> Iterator[KeyProblemView]:
    own = _state_size(written)
    if own and own != numbers:
        named = ", ".join(state) or "none"
        reason = (
            f"these observations have {numbers} numbers ({named}), and the policy of model.path reads {own}"
        )
        yield problem("environment.state", reason, f"name observations of {own} numbers")


def _cameras(
    written: Written, cameras: Mapping[str, str] | None, spaces: Spaces, images: set[str]
) -> Iterator[KeyProblemView]:
    wanted = written.get("cameras")
    for camera in wanted if isinstance(wanted, list) else ():
        source = camera if cameras is None else cameras.get(camera)
        if source not in images:
            reason = f"the policy of model.path sees a camera {camera!r}, and there is none"
            fix = f"say which image it is, {camera}: IMAGE; {choose(camera, images)}"
            yield problem("environment.cameras", reason, fix)
            continue
        pixels, own = list(spaces[source].shape[:2]), [written.get("height"), written.get("width")]
        if None not in own and own != pixels:
            reason = f"{source} has {_by(pixels)} pixels, and the policy of model.path reads {_by(own)}"
            yield problem("environment.options", reason, "ask for images of that size")


def _state_size(written: Written) -> int | None:
    """Numbers of the state that it reads; None or 0 where it reads none, or does not say."""
    size = written.get("state_size")
    if isinstance(size, int):
        return size
    read = written.get("proprio", written.get("state"))
    return _numbers(read)


def _numbers(bounds: object) -> int | None:
    low = bounds.get("low") if isinstance(bounds, Mapping) else None
    return len(low) if isinstance(low, list) else None


def _by(pixels: Iterable[object]) -> str:
    return " x ".join(map(str, pixels))
