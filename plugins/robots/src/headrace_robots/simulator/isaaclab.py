"""Isaac Lab's tasks (https://isaac-sim.github.io/IsaacLab), many in one process on a GPU.

Those of managers (`ManagerBasedRLEnv`): their `reset` begins the episodes of some environments. Not run by this
project's own tests, for want of a GPU with Isaac Sim: they run the form of such an environment on the CPU.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from headrace_servicekit.registry import Options
from headrace_simulator.backends.base import BackendError, SimulatedEnvironment
from headrace_simulator.backends.batched import Batched, Began, Form, tensor
from headrace_simulator.backends.options import require

_NO_LIMIT_S = 1e9
WAY = (
    "install Isaac Lab by its own instructions (https://isaac-sim.github.io/IsaacLab), then pip install "
    "headrace-simulator into its Python, and start the simulator there; no extra and no make simulators brings it"
)


def _by_ids(
    environment: Any, count: int, places: Sequence[int], seeds: Sequence[int | None], options: Any
) -> Began:
    ids = tensor(list(places), environment)
    began: Began = environment.unwrapped.reset(seed=seeds[0], env_ids=ids, options=options or None)
    return began


FORM = Form(_by_ids, apart=True, tensors=True)


class IsaacLabBackend:
    """Tasks by their registered name, such as `Isaac-Lift-Cube-Franka-v0`."""

    def __init__(self) -> None:
        require("isaaclab", "isaaclab", "isaaclab_tasks", "torch", way=WAY)
        from isaaclab.app import AppLauncher

        # Before anything else of it is imported; the process that holds it dies with the pool.
        self._app = AppLauncher(headless=True, enable_cameras=True).app
        import gymnasium
        import isaaclab_tasks  # noqa: F401 - registers the tasks

        self._registry = gymnasium.registry

    def environments(self) -> list[str]:
        """The tasks' names."""
        return sorted(str(name) for name in self._registry if str(name).startswith("Isaac-"))

    def make(
        self, name: str, options: Mapping[str, Any], *, own_time_limit: bool, dense: bool
    ) -> SimulatedEnvironment:
        """Refused: a process simulates all of its environments together."""
        raise BackendError("environment.vectorized", "Isaac Lab steps many in one process: set it to true")

    def make_vector(
        self, name: str, count: int, options: Mapping[str, Any], *, own_time_limit: bool, dense: bool
    ) -> Batched:
        """Makes a task; the options are fields of its configuration, one inside the other by dots."""
        import gymnasium
        from isaaclab_tasks.utils import parse_env_cfg

        if name not in self._registry:
            near = difflib.get_close_matches(name, self.environments(), n=3)
            hint = f"; the nearest are {', '.join(near)}" if near else ""
            raise BackendError("environment.name", f"Isaac Lab has no task {name!r}{hint}")
        config = parse_env_cfg(name, num_envs=count)
        for key, value in options.items():
            _set(config, key, value)
        if not own_time_limit:
            # An environment that cuts its episodes shows the next one's first observation, and the last one nowhere.
            config.episode_length_s = _NO_LIMIT_S
        return batched(gymnasium.make(name, cfg=config, render_mode="rgb_array"), count, name)


def batched(environment: Any, count: int, name: str) -> Batched:
    """An environment as rows. Raises BackendError for one that begins no single episode."""
    if "env_ids" not in inspect.signature(environment.unwrapped.reset).parameters:
        raise BackendError(
            "environment.name",
            f"{name} resets all of its environments at once (a DirectRLEnv); name a task of managers",
        )
    return Batched(environment, count, FORM, name)


def _set(config: Any, key: str, value: Any) -> None:
    *path, last = key.split(".")
    for part in path:
        config = getattr(config, part, None)
    if not hasattr(config, last):
        raise BackendError(f"options_json.{key}", "the task's configuration has no such field")
    setattr(config, last, value)


def build(options: Options) -> IsaacLabBackend:
    """The backend."""
    return IsaacLabBackend()
