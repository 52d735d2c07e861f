"""Gymnasium environments (https://gymnasium.farama.org), registered ones and a user's own."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Mapping
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from headrace_servicekit.registry import Options

from headrace_simulator.backends import mujoco
from headrace_simulator.backends.base import BackendError, Knob, Observation, Transition
from headrace_simulator.backends.batched import MASKS, Batched, success_of
from headrace_simulator.backends.gymnasium_spaces import Actions, Observations
from headrace_simulator.backends.user_file import is_user_environment, load_factory
from headrace_simulator.spaces import flag, picture

_NO_LIMIT = 1 << 30
_SYNC, _OWN = "sync", "vector_entry_point"


class GymnasiumBackend:
    """Environments by registered id, as `module:Id-v0`, or as `path/to/file.py:make_env`."""

    def environments(self) -> list[str]:
        """The registered ids."""
        return sorted(str(name) for name in gymnasium.registry)

    def make(
        self, name: str, options: Mapping[str, Any], *, own_time_limit: bool, dense: bool
    ) -> GymnasiumEnvironment:
        """Makes an environment; a user's own function gets the options as keyword arguments.

        What its reward is stands in the options, where it has a choice: `dense` changes nothing.
        """
        if is_user_environment(name):
            own = load_factory(name)(**options)
            return GymnasiumEnvironment(own, knobs=_knobs(own))
        name = self._registered(name)
        limit = None if own_time_limit else -1
        arguments = {"render_mode": _render_mode(name), "max_episode_steps": limit, **options}
        made: gymnasium.Env[Any, Any] = gymnasium.make(name, disable_env_checker=True, **arguments)
        return GymnasiumEnvironment(made, knobs=_knobs(made))

    def make_vector(
        self, name: str, count: int, options: Mapping[str, Any], *, own_time_limit: bool, dense: bool
    ) -> Batched:
        """Makes environments that are stepped in one call, as `gymnasium.make_vec` does.

        The option `vectorization_mode` says how, where there is a choice. A user's own function gets `num_envs` beside
        the options, and returns a gymnasium.vector.VectorEnv.
        """
        if is_user_environment(name):
            own = load_factory(name)(num_envs=count, **options)
            if not isinstance(own, gymnasium.vector.VectorEnv):
                reason = f"{name} made a {type(own).__name__} for environment.vectorized, and not a VectorEnv"
                raise BackendError("environment.name", f"{reason}: return one of num_envs environments")
            return Batched(own, count, MASKS, name)
        name = self._registered(name)
        chosen = dict(options)
        own_class = gymnasium.spec(name).vector_entry_point is not None
        mode = chosen.pop("vectorization_mode", _OWN if own_class else _SYNC)
        if mode not in (_SYNC, _OWN) or (mode == _OWN and not own_class):
            has = f"{_SYNC!r} or {_OWN!r}" if own_class else f"{_SYNC!r}: {name} has no vector_entry_point"
            raise BackendError(
                "options_json.vectorization_mode",
                f"{mode!r} is not served; it may be {has}. For environments in processes of their own, leave out "
                "environment.vectorized",
            )
        arguments: dict[str, Any] = {"render_mode": _render_mode(name), **chosen}
        if not own_time_limit:
            arguments.setdefault("max_episode_steps", -1 if mode == _SYNC else _NO_LIMIT)
        made = gymnasium.make_vec(name, num_envs=count, vectorization_mode=mode, **arguments)
        return Batched(made, count, MASKS, name)

    def _registered(self, name: str) -> str:
        """A name without the module that registers it. Raises BackendError for one that is not registered."""
        module, _, name = name.rpartition(":")
        if module:
            importlib.import_module(module)
        if name not in gymnasium.registry:
            raise BackendError("environment.name", self._unknown(name))
        return name

    def _unknown(self, name: str) -> str:
        near = difflib.get_close_matches(name, self.environments(), n=3)
        hint = f"; the nearest are {', '.join(near)}" if near else ""
        return f"gymnasium has no environment {name!r}{hint}; your own is written path/to/file.py:make_env"


class GymnasiumEnvironment:
    """A Gymnasium environment seen as named arrays."""

    init_state_count = 0

    def __init__(
        self,
        environment: gymnasium.Env[Any, Any],
        instruction: str = "",
        knobs: Mapping[str, Knob] | None = None,
    ) -> None:
        self.instruction, self.knobs = instruction, knobs or {}
        self._environment = environment
        self._observe, self._act = (
            Observations(environment.observation_space),
            Actions(environment.action_space),
        )
        self.observation_spaces, self.action_space = self._observe.spaces, self._act.space

    def reset(
        self, seed: int | None, options: Mapping[str, Any], init_state: int | None
    ) -> tuple[Observation, Mapping[str, Any]]:
        """Starts an episode."""
        observation, info = self._environment.reset(seed=seed, options=dict(options) or None)
        return self._observe(observation), info

    def step(self, action: np.ndarray) -> Transition:
        """Acts once."""
        observation, reward, terminated, truncated, info = self._environment.step(self._act(action))
        arrays = self._observe(observation)
        ends = flag("terminated", terminated), flag("truncated", truncated)
        return Transition(arrays, float(reward), *ends, success_of(info), info)

    def render(self) -> np.ndarray:
        """A picture; ValueError where the environment makes none."""
        return picture(self._environment.render())

    def close(self) -> None:
        """Frees what it holds."""
        self._environment.close()


def _knobs(environment: gymnasium.Env[Any, Any]) -> dict[str, Knob]:
    """Those of a MuJoCo model; else the numbers that the environment's physics are written with, by attribute."""
    inner: Any = environment.unwrapped
    model = getattr(inner, "model", None)
    if hasattr(model, "geom_friction"):
        return mujoco.knobs(model, mujoco.uploader(inner))
    numbers = {
        name: value for name, value in vars(inner).items() if isinstance(value, float) and name[0] != "_"
    }

    def turn(name: str, nominal: float, factor: float) -> None:
        setattr(inner, name, nominal * factor)

    return {f"execution.{name}": partial(turn, name, nominal) for name, nominal in numbers.items()}


def _render_mode(name: str) -> str | None:
    """rgb_array where the environment says that it can: asking others for it only warns."""
    creator: Any = gymnasium.spec(name).entry_point
    if isinstance(creator, str):
        creator = gymnasium.envs.registration.load_env_creator(creator)
    modes = getattr(creator, "metadata", {}).get("render_modes") or []
    return "rgb_array" if "rgb_array" in modes else None


def build(options: Options) -> GymnasiumBackend:
    """The backend."""
    return GymnasiumBackend()
