"""World models as simulators: environments whose step is what an ensemble of networks has learned of real ones.

An episode begins at a state of a real episode and stays in one member of the ensemble, by its seed. It is cut where
the members disagree more than they did on nearly all held-out steps: there the model does not know the way. The action
that would lead there leaves the state as it is and earns UNKNOWN: a new state there would have a value that nothing
teaches, and policies would go where that is too high. N environments.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import numpy as np
from headrace_servicekit.registry import Options
from headrace_simulator.backends.base import BackendError, Observation, Start, Transition
from headrace_simulator.backends.options import parse, require, unknown
from headrace_simulator.spaces import ArraySpace
from pydantic import Field, NonNegativeFloat, PositiveFloat

UNKNOWN = -3.0
"""Reward of an action whose outcome is not known, in standard deviations from the mean of the data's."""


class WorldOptions(Options):
    """Options of a world model."""

    starts: Literal["any", "first"] = Field(
        default="any",
        description="where an episode begins: at any state of the real episodes, or where one of them began",
    )
    threshold: PositiveFloat | None = Field(
        default=None,
        description="disagreement of the members at which an episode is cut; default: the model's own, from held-out "
        "steps",
    )
    penalty: NonNegativeFloat = Field(
        default=0.0,
        description="what an action loses of its reward for each unit of disagreement, in standard deviations of the "
        "rewards in the data",
    )
    version: str = Field(
        default="",
        description="the beginning of the model's digest: another model in its directory is refused; empty: any",
    )


class WorldBackend:
    """World models by their directories, which `headrace world train` writes."""

    def __init__(self) -> None:
        require("world", "safetensors")

    def environments(self) -> list[str]:
        """None: they are directories."""
        return []

    def make(
        self, name: str, options: Mapping[str, Any], *, own_time_limit: bool, dense: bool
    ) -> WorldEnvironment:
        """One environment of a model; its own limit is the length of the longest real episode."""
        return WorldEnvironment(
            self.make_vector(name, 1, options, own_time_limit=own_time_limit, dense=dense)
        )

    def make_vector(
        self, name: str, count: int, options: Mapping[str, Any], *, own_time_limit: bool, dense: bool
    ) -> WorldVector:
        """Environments of a model that one call steps."""
        from headrace_robots.world.model import WorldNotReadable, load_world

        chosen, directory = parse(WorldOptions, options), Path(name)
        if not os.path.isdir(directory):  # nor where this process may not look
            near: list[str] = []
            with suppress(OSError):  # this process may look into no other folder
                near = [str(each) for each in directory.parent.iterdir() if each.is_dir()]
            raise unknown("world model", name, near)
        try:
            model = load_world(directory)
        except WorldNotReadable as error:
            raise BackendError("environment.name", str(error)) from error
        if not model.digest.startswith(chosen.version):
            reason = f"{name} is version {model.version} now; train that one again, or leave the option out"
            raise BackendError("options_json.version", reason)
        return WorldVector(model, directory.name, count, chosen, own_time_limit=own_time_limit)


class WorldVector:
    """Environments of one model."""

    init_state_count = 0
    instruction = ""

    def __init__(
        self, model: Any, name: str, count: int, options: WorldOptions, *, own_time_limit: bool
    ) -> None:
        config = model.config
        self.versions = {f"world {name}": model.version}
        self.observation_spaces = [_space(each) for each in config.observations]
        self.action_space = _space(config.action)
        self._model = model
        self._limit = config.longest if own_time_limit else 0
        self._penalty = options.penalty * model.reward_std
        self._unknown = model.reward_mean + UNKNOWN * model.reward_std
        self._threshold = options.threshold or config.threshold
        self._rows = model.first_N if options.starts == "first" else np.arange(len(model.starts_NS))
        self._states_NS = np.zeros((count, config.state_size))
        self._members_N, self._steps_N = np.zeros(count, np.int64), np.zeros(count, np.int64)
        self._random = [np.random.default_rng(place) for place in range(count)]

    def reset(self, starts: Mapping[int, Start]) -> dict[int, tuple[Observation, Mapping[str, Any]]]:
        """Begins episodes at states that their seeds, or the streams that these began, draw."""
        found: dict[int, tuple[Observation, Mapping[str, Any]]] = {}
        for place, start in starts.items():
            if start.seed is not None:
                self._random[place] = np.random.default_rng(start.seed & (1 << 64) - 1)
            random = self._random[place]
            row = int(self._rows[random.integers(len(self._rows))])
            self._states_NS[place], self._steps_N[place] = self._model.starts_NS[row], 0
            self._members_N[place] = random.integers(self._model.config.members)
            found[place] = self._seen(place), {"member": int(self._members_N[place])}
        return found

    def step(self, actions: Mapping[int, np.ndarray]) -> dict[int, Transition]:
        """Acts once in some environments."""
        places = [*actions]
        given_NA = np.stack([np.ravel(actions[place]) for place in places])
        made = self._model.predict(self._states_NS[places], given_NA, self._members_N[places])
        known_N = made.disagreement_N <= self._threshold
        self._states_NS[places] = np.where(known_N[:, None], made.states_NS, self._states_NS[places])
        self._steps_N[places] += 1
        return {place: self._transition(place, row, made) for row, place in enumerate(places)}

    def _transition(self, place: int, row: int, made: Any) -> Transition:
        disagreement, ended = float(made.disagreement_N[row]), bool(made.ended_N[row])
        lost = disagreement > self._threshold
        reward = self._unknown if lost else float(made.rewards_N[row]) - self._penalty * disagreement
        return Transition(
            self._seen(place),
            reward,
            ended and not lost,
            lost or bool(self._limit and self._steps_N[place] >= self._limit and not ended),
            None,
            {"disagreement": disagreement, "beyond_model": lost},
        )

    def render(self, environment: int) -> np.ndarray:
        """Raises ValueError: a model of states has no pictures."""
        raise ValueError("a world model renders no picture; record episodes of the real environment")

    def close(self) -> None:
        """Holds nothing but memory."""

    def _seen(self, place: int) -> Observation:
        found, first = {}, 0
        for space in self.observation_spaces:
            size = int(np.prod(space.shape, dtype=np.int64))
            part = self._states_NS[place, first : first + size].reshape(space.shape).astype(space.dtype)
            # Rounding to the space's type may leave its bounds.
            found[space.name] = np.clip(part, space.low, space.high) if space.low is not None else part
            first += size
        return found


class WorldEnvironment:
    """One environment of a model, by itself."""

    init_state_count = 0
    instruction = ""

    def __init__(self, vector: WorldVector) -> None:
        self._vector, self.versions = vector, vector.versions
        self.observation_spaces, self.action_space = vector.observation_spaces, vector.action_space

    def reset(
        self, seed: int | None, options: Mapping[str, Any], init_state: int | None
    ) -> tuple[Observation, Mapping[str, Any]]:
        """Starts an episode."""
        return self._vector.reset({0: Start(seed, options, init_state)})[0]

    def step(self, action: np.ndarray) -> Transition:
        """Acts once."""
        return self._vector.step({0: action})[0]

    def render(self) -> np.ndarray:
        """Raises ValueError."""
        return self._vector.render(0)

    def close(self) -> None:
        """Holds nothing but memory."""


def _space(space: Any) -> ArraySpace:
    dtype = np.dtype(space.dtype)

    def bound(ends: Sequence[float | None] | None, free: float) -> np.ndarray | None:
        if ends is None:
            return None
        return np.array([free if end is None else end for end in ends]).reshape(space.shape).astype(dtype)

    return ArraySpace(
        space.name, dtype, space.shape, bound(space.low, -np.inf), bound(space.high, np.inf), space.categories
    )


def build(options: Options) -> WorldBackend:
    """The backend."""
    return WorldBackend()
