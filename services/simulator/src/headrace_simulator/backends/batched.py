"""Simulators that step many environments in one call, in Gymnasium's form of it: everything has a row an environment.

Arrays may be tensors of torch, on a GPU too: they are copied to this process's memory once a step. N: environments.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import concatenate, create_empty_array

from headrace_simulator.backends.base import BackendError, Observation, Start, Transition, Transitions
from headrace_simulator.backends.gymnasium_spaces import Actions, Observations
from headrace_simulator.pipes import MEMORY_PART
from headrace_simulator.spaces import flag, picture

_SUCCESS_KEYS = ("success", "is_success")
Rows = Any
"""Arrays or tensors (N, …), nested in dicts and tuples as a space is."""
Began = tuple[Rows, Mapping[str, Any]]


class Restart(Protocol):
    """How a simulator begins episodes in some of its environments and leaves the others alone."""

    def __call__(
        self, environment: Any, count: int, places: Sequence[int], seeds: Sequence[int | None], options: Any
    ) -> Began:
        """What `environment.reset` returns, with a row for each of `count` environments."""
        ...


@dataclass(frozen=True)
class Form:
    """How a simulator differs from others. `apart`: one call begins one episode, which its seed decides."""

    restart: Restart
    apart: bool = False
    tensors: bool = False
    """Whether actions are tensors on `environment.device`."""


def _by_mask(
    environment: Any, count: int, places: Sequence[int], seeds: Sequence[int | None], options: Any
) -> Began:
    mask = np.zeros(count, np.bool_)
    mask[list(places)] = True
    every: list[int | None] = [None] * count
    for place, seed in zip(places, seeds, strict=True):
        every[place] = seed
    began: Began = environment.reset(seed=every, options={**options, "reset_mask": mask})
    return began


MASKS = Form(_by_mask)
"""Gymnasium's vectors: `reset(seed=[…], options={"reset_mask": …})`."""


class Batched:
    """A vectorised simulator seen as rows. Raises BackendError for one that cannot begin an episode by itself."""

    init_state_count = 0

    def __init__(self, environment: Any, count: int, form: Form, name: str, instruction: str = "") -> None:
        self.instruction = instruction
        if form.tensors:
            bound_memory()
        self._environment, self._count, self._form = environment, count, form
        # A wrapper of Gymnasium's vectors has spaces of its own, one of single environments passes none on.
        described = environment if hasattr(environment, "single_action_space") else environment.unwrapped
        self._single = described.single_action_space
        self._observe, self._act = Observations(described.single_observation_space), Actions(self._single)
        self.observation_spaces, self.action_space = self._observe.spaces, self._act.space
        space = self.action_space
        still = np.clip(np.zeros(space.shape), space.low, space.high).astype(space.dtype)
        self._filler = self._act(still)
        self._mode = getattr(environment, "metadata", {}).get("autoreset_mode")
        self._over: set[int] = set()
        """Environments whose episode has ended, of a simulator that begins none by itself."""
        observation, _ = environment.reset(seed=0)
        if not form.apart:
            self._check_partial_reset(_numpy(observation), name)

    def reset(self, starts: Mapping[int, Start]) -> dict[int, tuple[Observation, Mapping[str, Any]]]:
        """Begins episodes, those with equal options in one call."""
        found: dict[int, tuple[Observation, Mapping[str, Any]]] = {}
        for places in self._calls(starts):
            seeds, options = [starts[place].seed for place in places], dict(starts[places[0]].options)
            rows, info = self._restart(places, seeds, options)
            found |= {place: (self._observe(_row(rows, place)), _info(info, place)) for place in places}
        return found

    def step(self, actions: Mapping[int, np.ndarray]) -> dict[int, Transition]:
        """Acts once; environments without an action do nothing, where the simulator lets them go on."""
        rows, rewards, terminated, truncated, info = self._stepped(self._batch(actions), actions)
        found = {}
        for place in actions:
            by_itself, cut = flag("terminated", terminated[place]), flag("truncated", truncated[place])
            shown, said = _ended(rows, info, place) if by_itself or cut else (rows, info)
            row, figures = _row(shown, place), _info(said, place)
            found[place] = Transition(
                self._observe(row), float(rewards[place]), by_itself, cut, success_of(figures), figures
            )
        return found

    def step_rows(self, places: Sequence[int], actions: np.ndarray) -> Transitions:
        """As `step`, without what the environments say beside success."""
        chosen = list(places)
        batch = self._batch_of_rows(chosen, actions)
        rows, rewards, terminated, truncated, info = self._stepped(batch, chosen)
        by_itself, cut = _flags("terminated", terminated, chosen), _flags("truncated", truncated, chosen)
        observation = self._observe.rows(rows, chosen)
        successes: list[bool | None] = [None] * len(chosen)
        says = any(key in info for key in (*_SUCCESS_KEYS, "final_info"))
        for row, place in enumerate(chosen):
            ended = by_itself[row] or cut[row]
            shown, said = _ended(rows, info, place) if ended else (rows, info)
            if shown is not rows:
                for name, array in self._observe(_row(shown, place)).items():
                    observation[name][row] = array
            if says:
                successes[row] = success_of(_info(said, place))
        return Transitions(
            observation, np.asarray(rewards, np.float64)[chosen].tolist(), by_itself, cut, successes
        )

    def render(self, environment: int) -> np.ndarray:
        """A picture; ValueError where the environments make none."""
        frames = self._environment.render()
        return picture(None if frames is None else _numpy(frames)[environment])

    def close(self) -> None:
        """Frees what it holds."""
        self._environment.close()

    def _calls(self, starts: Mapping[int, Start]) -> Iterable[list[int]]:
        if self._form.apart:
            return [[place] for place in starts]
        groups: dict[str, list[int]] = {}
        for place, start in starts.items():
            groups.setdefault(repr(start.options), []).append(place)
        return groups.values()

    def _restart(self, places: Sequence[int], seeds: Sequence[int | None], options: Any) -> Began:
        rows, info = self._form.restart(self._environment, self._count, places, seeds, options)
        self._over -= {*places}
        return _numpy(rows), _numpy(info)

    def _stepped(self, batch: Any, acting: Collection[int]) -> tuple[Any, ...]:
        """What the simulator returns, as arrays."""
        if self._mode is AutoresetMode.DISABLED and (over := sorted(self._over.difference(acting))):
            self._restart(over, [None] * len(over), {})
        made: tuple[Any, ...] = tuple(_numpy(part) for part in self._environment.step(batch))
        # Also those that did nothing: a filler may end what nobody plays.
        self._over |= {*np.flatnonzero(np.asarray(made[2]) | np.asarray(made[3])).tolist()}
        return made

    def _batch_of_rows(self, places: Sequence[int], rows: np.ndarray) -> Any:
        if isinstance(self._single, spaces.Dict | spaces.Tuple):
            return self._batch(dict(zip(places, rows, strict=True)))
        batch: Any = create_empty_array(self._single, self._count)
        if len(places) < self._count:
            batch[...] = self._filler
        batch[places] = rows.reshape(len(places), *batch.shape[1:])
        return tensor(batch, self._environment) if self._form.tensors else batch

    def _batch(self, actions: Mapping[int, np.ndarray]) -> Any:
        """Actions of all environments in the simulator's own form."""
        each = [self._act(actions[i]) if i in actions else self._filler for i in range(self._count)]
        empty: Any = create_empty_array(self._single, self._count)
        batch = concatenate(self._single, each, empty)
        return tensor(batch, self._environment) if self._form.tensors else batch

    def _check_partial_reset(self, before: Rows, name: str) -> None:
        """Whether the others stay as they are where one begins: a class that knows no mask begins all of them."""
        why = "begins an episode in all of them where one is asked for"
        try:
            after, _ = self._restart([0], [1], {})
            if all(
                _same(self._observe(_row(before, i)), self._observe(_row(after, i)))
                for i in range(1, self._count)
            ):
                return
        except (TypeError, ValueError, AssertionError) as error:
            why = f"takes no list of seeds with a mask ({error})"
        except Exception as error:
            if type(error).__module__.partition(".")[0] != "gymnasium":
                raise
            why = f"takes no list of seeds with a mask ({error})"
        raise BackendError(
            "environment.name",
            f"{name} steps its environments together, but {why}: its reset has to take a list of seeds and "
            "options={'reset_mask': …}, as Gymnasium's own vectors do. Set options.vectorization_mode: sync, or leave "
            "out environment.vectorized",
        )


def tensor(values: Any, environment: Any) -> Any:
    """A tensor on the device of a simulator whose rows are tensors."""
    import torch

    return torch.as_tensor(values, device=environment.unwrapped.device)


def require_gpu(key: str, wanted: str) -> None:
    """Raises BackendError where torch sees no GPU in this process."""
    import torch

    if not torch.cuda.is_available():
        raise BackendError(
            key,
            f"{wanted!r} needs a GPU, and this simulator's process sees none: name GPUs in placement.simulator, start "
            "the simulator with one, or use 'physx_cpu' without environment.vectorized",
        )


def bound_memory() -> None:
    """torch takes no more of this process's GPU than the lease's part, where another process holds the rest."""
    import torch

    if (part := os.environ.get(MEMORY_PART)) and torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(float(part))


def success_of(info: Mapping[str, Any]) -> bool | None:
    """What an environment's info says about success; None where it says nothing."""
    flags = [flag(f"info[{key!r}]", info[key]) for key in _SUCCESS_KEYS if info.get(key) is not None]
    return any(flags) if flags else None


def _numpy(rows: Any) -> Any:
    """Tensors as arrays; what has no rows stays."""
    if isinstance(rows, Mapping):
        return {key: _numpy(value) for key, value in rows.items()}
    if isinstance(rows, tuple):
        return tuple(_numpy(value) for value in rows)
    return rows.detach().cpu().numpy() if hasattr(rows, "detach") else rows


def _row(rows: Rows, place: int) -> Any:
    if isinstance(rows, Mapping):
        return {key: _row(value, place) for key, value in rows.items()}
    if isinstance(rows, tuple):
        return tuple(_row(value, place) for value in rows)
    return rows[place]


def _info(info: Mapping[str, Any], place: int) -> dict[str, Any]:
    """The figures of one environment: each has an array of all, and beside it, as "_NAME", who has one."""
    return {
        key: value[place]
        for key, value in info.items()
        if not key.startswith("_") and np.ndim(value) == 1 and _has(info, key, place)
    }


def _ended(rows: Rows, info: Mapping[str, Any], place: int) -> tuple[Rows, Mapping[str, Any]]:
    """Where the last observation of an ended episode is, and what was said with it.

    A simulator that has begun the next episode already shows that, and has these beside it.
    """
    return (
        info["final_obs"] if _has(info, "final_obs", place) else rows,
        info["final_info"] if _has(info, "final_info", place) else info,
    )


def _flags(what: str, values: Any, places: Sequence[int]) -> list[bool]:
    chosen = np.asarray(values)[places]
    return chosen.tolist() if chosen.dtype == np.bool_ else [flag(what, each) for each in chosen]


def _has(info: Mapping[str, Any], key: str, place: int) -> bool:
    if key not in info:
        return False
    owners = info.get(f"_{key}")
    return True if owners is None else bool(owners[place])


def _same(one: Observation, other: Observation) -> bool:
    return all(np.array_equal(one[name], other[name]) for name in one)
