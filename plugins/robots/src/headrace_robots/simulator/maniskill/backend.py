"""ManiSkill 3 tasks (https://maniskill.readthedocs.io): one in each process on its CPU simulation, many on a GPU.

Needs Vulkan for state observations too: see `deploy/vulkan.sh`.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
from headrace_servicekit.registry import Options
from headrace_simulator.backends.base import EXPERT_ACTION, BackendError, Observation, Transition
from headrace_simulator.backends.batched import Batched, Began, Form, require_gpu, tensor
from headrace_simulator.backends.gymnasium import GymnasiumEnvironment
from headrace_simulator.backends.options import require

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
        self.observation_spaces = [*self.observation_spaces, replace(self.action_space, name=EXPERT_ACTION)]

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


def _by_index(
    environment: Any, count: int, places: Sequence[int], seeds: Sequence[int | None], options: Any
) -> Began:
    # Of several seeds it would draw the starts of all from the first one.
    seed = None if seeds[0] is None else [seeds[0]]
    chosen = tensor(list(places), environment)
    began: Began = environment.reset(seed=seed, options={**options, "env_idx": chosen})
    return began


FORM = Form(_by_index, apart=True, tensors=True)
"""`reset(seed=[…], options={"env_idx": …})`."""
_NO_LIMIT = 1 << 30
_CPU = ("physx_cpu", "cpu")
_GPU = {"sim_backend": "physx_cuda", "render_backend": "gpu"}
_VULKAN_SIGNS = ("vulkan", "vk::", "rendering device", "render device")
_DEFAULTS = {
    "obs_mode": "state",
    "render_mode": "rgb_array",
    "sim_backend": "physx_cpu",
    "render_backend": "cpu",
}


class ManiSkillBackend:
    """Tasks by their registered name, such as `PushCube-v1`."""

    def __init__(self) -> None:
        require("maniskill", "mani_skill", "torch")
        with _explained("importing it"):
            import mani_skill.envs  # noqa: F401 - registers the tasks
            from mani_skill.utils.registration import REGISTERED_ENVS

            from headrace_robots.simulator.maniskill import plates, sapien  # the first one registers ours

        self._tasks: dict[str, Any] = REGISTERED_ENVS
        self._plates, self._scenes = plates, sapien

    def environments(self) -> list[str]:
        """The tasks' names; some of them need assets that no package brings."""
        return sorted(self._tasks)

    def perturbations(self, name: str) -> Mapping[str, Mapping[str, Any]]:
        """By name, the options with which a task's things are others."""
        found: Mapping[str, Mapping[str, Any]] = self._plates.perturbations(name)
        return found

    def make(
        self, name: str, options: Mapping[str, Any], *, own_time_limit: bool, dense: bool
    ) -> GymnasiumEnvironment:
        """Makes a task; the options are those of its `gymnasium.make`, `ignore_terminations` and `expert`.

        Tasks of putting a thing on a plate may be named with the thing, NAME/INDEX; then they have an instruction.

        The dense reward is the normalised one, unless the option `reward_mode` is "dense".
        """
        from mani_skill.utils.wrappers.gymnasium import CPUGymWrapper

        name, arguments = self._arguments(name, {**_DEFAULTS, **options}, own_time_limit, dense)
        ignore_terminations = bool(arguments.pop("ignore_terminations", False))
        expert = expert_of(name, options) if arguments.pop("expert", False) else None
        if arguments["sim_backend"] not in _CPU:
            raise BackendError(
                "options_json.sim_backend",
                f"{arguments['sim_backend']!r} simulates many environments in one process on a GPU: set "
                "environment.vectorized: true, or use 'physx_cpu'",
            )
        made = _made(name, 1, arguments)
        one = CPUGymWrapper(made, ignore_terminations=ignore_terminations)
        rest = _instruction(made), self._scenes.knobs(made)
        return GymnasiumEnvironment(one, *rest) if expert is None else ShownExpert(one, expert, *rest)

    def make_vector(
        self, name: str, count: int, options: Mapping[str, Any], *, own_time_limit: bool, dense: bool
    ) -> Batched:
        """Makes a task many times in this process, on a GPU unless the options say otherwise and `count` is 1."""
        name, arguments = self._arguments(name, {**_DEFAULTS, **_GPU, **options}, own_time_limit, dense)
        for key in ("expert", "ignore_terminations"):
            if arguments.pop(key, False):
                raise BackendError(f"options_json.{key}", "is for environments of their own: leave it out")
        on_cpu = arguments["sim_backend"] in _CPU
        if on_cpu and count > 1:
            raise BackendError(
                "options_json.sim_backend",
                f"{arguments['sim_backend']!r} simulates one environment in a process, and {count} are asked for: "
                "leave out environment.vectorized, or use 'gpu'",
            )
        if not on_cpu:
            require_gpu("options_json.sim_backend", arguments["sim_backend"])
        made = _made(name, count, arguments)
        return Batched(made, count, FORM, name, _instruction(made))

    def _arguments(
        self, name: str, options: dict[str, Any], own_time_limit: bool, dense: bool
    ) -> tuple[str, dict[str, Any]]:
        """A task's registered name, and the arguments of its `gymnasium.make` with the service's own options."""
        task = name.partition("/")[0]
        if task in self._plates.TASKS:
            options, name = dict(self._plates.options_of(name, options)), task
        if name not in self._tasks:
            near = difflib.get_close_matches(name, self.environments(), n=3)
            hint = f"; the nearest are {', '.join(near)}" if near else ""
            raise BackendError("environment.name", f"ManiSkill has no task {name!r}{hint}")
        if dense:
            options.setdefault("reward_mode", "normalized_dense")
        if not own_time_limit:
            options["max_episode_steps"] = _NO_LIMIT
        return name, options


def _made(name: str, count: int, arguments: Mapping[str, Any]) -> Any:
    import gymnasium

    with _explained(name):
        return gymnasium.make(name, num_envs=count, **arguments)


@contextmanager
def _explained(name: str) -> Iterator[None]:
    """Turns what ManiSkill raises where assets or Vulkan are missing into sentences."""
    try:
        yield
    except (EOFError, FileNotFoundError) as error:
        # It asks on standard input whether to download; there is nobody to answer.
        raise BackendError(
            "environment.name",
            f"{name} needs assets that no package brings: run `python -m mani_skill.utils.download_asset {name}` where "
            f"there is a network, and set MS_ASSET_DIR to its folder ({error})",
        ) from error
    except (RuntimeError, ImportError) as error:
        if not any(sign in str(error).lower() for sign in _VULKAN_SIGNS):
            raise
        raise BackendError(
            "environment.backend",
            f"ManiSkill finds no Vulkan device, which it needs for state observations too: run `sh deploy/vulkan.sh` "
            f"(Debian 12: Mesa 25 from bookworm-backports), and set VK_ICD_FILENAMES to its driver ({error})",
        ) from error


def _instruction(environment: Any) -> str:
    """What a task asks for, where it has words for it."""
    tell = getattr(environment.unwrapped, "get_language_instruction", None)
    found = tell() if callable(tell) else ""
    return str(found[0]) if isinstance(found, list) and found else str(found or "")


def build(options: Options) -> ManiSkillBackend:
    """The backend."""
    return ManiSkillBackend()
