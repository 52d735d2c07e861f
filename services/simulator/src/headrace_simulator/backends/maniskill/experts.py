"""Scripted policies of ManiSkill tasks, whose episodes become demonstrations. ManiSkill itself has planners alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from headrace_simulator.backends.base import EXPERT_ACTION, BackendError, Observation, Transition
from headrace_simulator.backends.gymnasium import GymnasiumEnvironment

CONTROL = "pd_ee_delta_pos"
"""The actions of all of them: where the gripper moves, in tenths of a metre, and whether it is closed (-1)."""
_REACH_M = 0.1
Expert = Callable[[Any], np.ndarray]


def expert_of(task: str, options: Mapping[str, Any]) -> Expert:
    """The scripted policy of a task. Raises BackendError where there is none, or not for these actions."""
    if task not in EXPERTS:
        raise BackendError(
            "options_json.expert", f"{task} has no scripted policy; {', '.join(EXPERTS)} has one"
        )
    if options.get("control_mode") != CONTROL:
        raise BackendError("options_json.control_mode", f"the scripted policy of {task} needs {CONTROL}")
    return EXPERTS[task]


class ShownExpert(GymnasiumEnvironment):
    """An environment that shows what its scripted policy would do."""

    def __init__(self, environment: Any, expert: Expert, *arguments: Any) -> None:
        super().__init__(environment, *arguments)
        self._expert = expert
        self._shown = self.observation_spaces
        self.observation_spaces = [*self._shown, replace(self.action_space, name=EXPERT_ACTION)]

    def reset(
        self, seed: int | None, options: Mapping[str, Any], init_state: int | None
    ) -> tuple[Observation, Mapping[str, Any]]:
        """Starts an episode."""
        observation, info = super().reset(seed, options, init_state)
        return self._with_expert(observation), info

    def step(self, action: np.ndarray) -> Transition:
        """Acts once."""
        transition = super().step(action)
        return replace(transition, observation=self._with_expert(transition.observation))

    def _with_expert(self, observation: Observation) -> Observation:
        space = self.action_space
        action = np.clip(self._expert(self._environment.unwrapped), space.low, space.high)
        return {**observation, EXPERT_ACTION: action.astype(space.dtype)}

    def _arrays(self, observation: Any) -> dict[str, np.ndarray]:
        return {space.name: self._array(observation, space) for space in self._shown}


def push_cube(base: Any) -> np.ndarray:
    """Goes behind the cube, above it until it is there, then pushes it to the middle of its goal."""
    gripper, cube, goal = (
        each.pose.p[0].cpu().numpy() for each in (base.agent.tcp, base.obj, base.goal_region)
    )
    low = base.cube_half_size
    behind = cube[:2] - [0.06, 0.0]
    away = float(np.hypot(*(gripper[:2] - behind)))
    if np.linalg.norm(cube[:2] - goal[:2]) < base.goal_radius / 2:
        wanted = gripper
    elif abs(gripper[1] - cube[1]) < 0.015 and gripper[0] < cube[0] - 0.03 and gripper[2] < 3 * low:
        wanted = np.array([goal[0] - low, cube[1], low])
    else:
        wanted = np.array([*behind, low + min(0.1, 2 * max(0.0, away - 0.02))])
    return np.array([*(wanted - gripper) / _REACH_M, -1.0])


EXPERTS: dict[str, Expert] = {"PushCube-v1": push_cube}
