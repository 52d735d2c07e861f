"""Meta-World's 50 tasks (https://meta-world.github.io) with the goal in the observation and a new one each episode."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from headrace_servicekit.registry import Options
from headrace_simulator.backends import mujoco
from headrace_simulator.backends.base import EXPERT_ACTION, Observation, Transition
from headrace_simulator.backends.options import parse, require, unknown
from headrace_simulator.spaces import ArraySpace
from pydantic import Field

_SUFFIX = "-goal-observable"
_NO_LIMIT = 1 << 40
_PICTURE = 480
Expert = Callable[[np.ndarray], np.ndarray]
Camera = Literal["topview", "corner", "corner2", "corner3", "corner4", "behindGripper", "gripperPOV"]


class MetaWorldOptions(Options):
    """Options of a task."""

    image_size: int = Field(
        default=0, ge=0, le=1024, description="height and width of the observation `rgb`; 0 leaves it out"
    )
    camera: Camera = Field(default="corner2", description="camera of `rgb` and of pictures")
    expert: bool = Field(
        default=False,
        description="add the observation `expert_action`: what Meta-World's scripted policy would do",
    )


class MetaWorldBackend:
    """Tasks by name, such as `reach-v3`."""

    def __init__(self) -> None:
        require("metaworld", "metaworld")
        os.environ.setdefault("MUJOCO_GL", "osmesa")
        from metaworld.env_dict import ALL_V3_ENVIRONMENTS_GOAL_OBSERVABLE as tasks

        from headrace_robots.simulator.metaworld.speed import hasten

        self._hasten = hasten
        self._tasks = {name.removesuffix(_SUFFIX): task for name, task in tasks.items()}

    def environments(self) -> list[str]:
        """The tasks' names."""
        return sorted(self._tasks)

    def make(
        self, name: str, options: Mapping[str, Any], *, own_time_limit: bool, dense: bool
    ) -> MetaWorldEnvironment:
        """Makes a task; its own reward is the dense one, its own limit 500 steps."""
        short = name.removesuffix(_SUFFIX)
        task = self._tasks.get(short)
        if task is None:
            raise unknown("Meta-World task", name, self._tasks)
        chosen = parse(MetaWorldOptions, options)
        made = task(render_mode="rgb_array")
        self._hasten(made)
        return MetaWorldEnvironment(made, chosen, own_time_limit, _expert(short) if chosen.expert else None)


class MetaWorldEnvironment:
    """A task whose goal follows from the seed of the reset, or from the stream that the last seed began."""

    init_state_count = 0
    instruction = ""

    def __init__(
        self, environment: Any, options: MetaWorldOptions, own_time_limit: bool, expert: Expert | None
    ) -> None:
        self._expert, self._environment = expert, environment
        self.knobs = mujoco.knobs(environment.model, mujoco.uploader(environment))
        self._size = options.image_size
        # By default every instance has one goal for ever; so its own random stream draws one at each reset.
        environment.seeded_rand_vec, environment._freeze_rand_vec = True, False
        if not own_time_limit:
            environment.max_path_length = _NO_LIMIT
        renderer = environment.mujoco_renderer
        renderer.width = renderer.height = options.image_size or _PICTURE
        renderer.camera_id = environment.model.camera(options.camera).id
        space, action = environment.sawyer_observation_space, environment.action_space
        self.action_space = ArraySpace("", np.dtype(np.float32), action.shape, action.low, action.high)
        self._state_name = "state" if self._size else ""
        self.observation_spaces = [
            ArraySpace(self._state_name, np.dtype(np.float64), space.shape, space.low, space.high)
        ]
        if self._size:
            self.observation_spaces.append(ArraySpace("rgb", np.dtype(np.uint8), (self._size, self._size, 3)))
        if expert is not None:
            self.observation_spaces.append(replace(self.action_space, name=EXPERT_ACTION))

    def reset(
        self, seed: int | None, options: Mapping[str, Any], init_state: int | None
    ) -> tuple[Observation, Mapping[str, Any]]:
        """Starts an episode with a new goal."""
        if seed is not None:
            self._environment.seed(seed)
        observation, info = self._environment.reset()
        return self._named(observation), info

    def step(self, action: np.ndarray) -> Transition:
        """Acts once; an episode ends by its time limit alone."""
        observation, reward, terminated, truncated, info = self._environment.step(action.astype(np.float32))
        success = bool(info["success"])
        return Transition(
            self._named(observation), float(reward), bool(terminated), bool(truncated), success, info
        )

    def render(self) -> np.ndarray:
        """A picture, upright."""
        # The corner cameras hang upside down.
        return np.ascontiguousarray(self._environment.render()[::-1])

    def close(self) -> None:
        """Frees what it holds."""
        self._environment.close()

    def _named(self, observation: np.ndarray) -> Observation:
        state = np.asarray(observation, np.float64)
        named = {self._state_name: state}
        if self._size:
            named["rgb"] = self.render()
        if self._expert is not None:
            space = self.action_space
            named[EXPERT_ACTION] = np.clip(self._expert(state), space.low, space.high).astype(space.dtype)
        return named


def _expert(task: str) -> Expert:
    """Meta-World's scripted policy of a task."""
    from metaworld.policies import ENV_POLICY_MAP

    act: Expert = ENV_POLICY_MAP[task]().get_action
    # It says at every step that its answers are clipped, as they are here.
    warnings.filterwarnings("ignore", message="Constant\\(s\\) may be too high")
    return act


def build(options: Options) -> MetaWorldBackend:
    """The backend."""
    return MetaWorldBackend()
