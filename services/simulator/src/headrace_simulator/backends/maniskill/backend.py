"""ManiSkill 3 tasks (https://maniskill.readthedocs.io) on its CPU simulation, one in each process.

Needs Vulkan for state observations too: see `deploy/vulkan.sh`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from headrace_servicekit.registry import Options
from typing_extensions import override

from headrace_simulator.backends.base import BackendError
from headrace_simulator.backends.gymnasium import GymnasiumEnvironment
from headrace_simulator.backends.maniskill.experts import ShownExpert, expert_of
from headrace_simulator.backends.options import require

_NO_LIMIT = 1 << 30
_CPU = ("physx_cpu", "cpu")
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

            from headrace_simulator.backends.maniskill import plates, sapien  # the first one registers ours

        self._tasks: dict[str, Any] = REGISTERED_ENVS
        self._plates, self._scenes = plates, sapien

    def environments(self) -> list[str]:
        """The tasks' names; some of them need assets that no package brings."""
        return sorted(self._tasks)

    @override
    def perturbations(self, name: str) -> Mapping[str, Mapping[str, Any]]:
        found: Mapping[str, Mapping[str, Any]] = self._plates.perturbations(name)
        return found

    def make(
        self, name: str, options: Mapping[str, Any], *, own_time_limit: bool, dense: bool
    ) -> GymnasiumEnvironment:
        """Makes a task; the options are those of its `gymnasium.make`, `ignore_terminations` and `expert`.

        Tasks of putting a thing on a plate may be named with the thing, NAME/INDEX; then they have an instruction.

        The dense reward is the normalised one, unless the option `reward_mode` is "dense".
        """
        import gymnasium
        from mani_skill.utils.wrappers.gymnasium import CPUGymWrapper

        task = name.partition("/")[0]
        if task in self._plates.TASKS:
            options, name = self._plates.options_of(name, dict(options)), task
        if name not in self._tasks:
            near = difflib.get_close_matches(name, self.environments(), n=3)
            hint = f"; the nearest are {', '.join(near)}" if near else ""
            raise BackendError("environment.name", f"ManiSkill has no task {name!r}{hint}")
        arguments = {**_DEFAULTS, **options}
        ignore_terminations = bool(arguments.pop("ignore_terminations", False))
        expert = expert_of(name, options) if arguments.pop("expert", False) else None
        if arguments["sim_backend"] not in _CPU:
            raise BackendError(
                "options_json.sim_backend",
                f"{arguments['sim_backend']!r} simulates many environments in one process on a GPU, which is not "
                "served; use 'physx_cpu'",
            )
        if dense:
            arguments.setdefault("reward_mode", "normalized_dense")
        if not own_time_limit:
            arguments["max_episode_steps"] = _NO_LIMIT
        with _explained(name):
            made: Any = gymnasium.make(name, num_envs=1, **arguments)
        one = CPUGymWrapper(made, ignore_terminations=ignore_terminations)
        rest = _instruction(made), self._scenes.knobs(made)
        return GymnasiumEnvironment(one, *rest) if expert is None else ShownExpert(one, expert, *rest)


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
