"""A robot policy's passes over rows, and its weights' life (none, installed, released).

Shapes: B rows, C actions of a chunk, A numbers of an action. Knows no environment and no episode.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from headrace_modelkit.products import use_fp32_products
from headrace_rollout.engines.base import Adapter, Policy, Refused, WeightView
from headrace_rollout.engines.holding import HeldModel
from headrace_rollout.engines.weight_memory import HOST, ParameterMemory
from headrace_schema.sections.embodied import EnvironmentSection
from headrace_servicekit.rpc.episodes import IMAGE, STATE, Arrays, is_image
from torch import Tensor, nn
from typing_extensions import override

from headrace_robots.policies.directory import in_type
from headrace_robots.policies.policy import Observation

if TYPE_CHECKING:
    from headrace_robots.policies.policy import PolicyConfig, RobotPolicy


Seen = tuple[Arrays, int]
"""What an environment shows, by the names of an episode: arrays of several environments, and its row."""


@dataclass(frozen=True)
class Rows:
    """What several environments show, and the instructions' ids.

    `seeds` are those of the draws; `greedy` takes the likeliest action.
    """

    seen: Sequence[Seen]
    prompts: Sequence[tuple[int, ...]]
    seeds: Sequence[int]
    greedy: Sequence[bool]

    def chosen(self, greedy: bool) -> Rows:
        """Those that are, or are not."""
        kept = [row for row, each in enumerate(self.greedy) if each is greedy]
        seen, prompts, seeds = ([part[row] for row in kept] for part in (self.seen, self.prompts, self.seeds))
        return Rows(seen, prompts, seeds, [greedy] * len(kept))  # type: ignore[arg-type]  # one type each


@dataclass(frozen=True)
class Decisions:
    """What the policy drew for rows: `sampled` by name, (B, C, …); `executed_BCA` in the environment's units."""

    sampled: Arrays
    executed_BCA: np.ndarray
    log_probs_BCA: np.ndarray
    values_B: np.ndarray


class RobotModel(HeldModel):
    """A robot policy in the run's type; used from its holder's thread alone."""

    def __init__(self, config: PolicyConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.device = HOST
        self.policy: Policy | None = None
        self._module: RobotPolicy = in_type(config.build(seed=0).requires_grad_(False), dtype)
        use_fp32_products(self._module, device)
        self._memory = ParameterMemory(self._module)
        self._memory.free()
        self.place(device)

    def act(self, rows: Rows) -> Decisions:
        """Decisions in the rows' order. ValueError: an observation is not what the policy reads."""
        if self.policy is None:
            raise Refused("POLICY_MISMATCH", "no policy is installed; call InstallPolicy first")
        if len({*rows.greedy}) == 1:
            return self._act(rows, rows.greedy[0])
        drawn, greedy = self._act(rows.chosen(False), False), self._act(rows.chosen(True), True)
        order = np.argsort(np.argsort(rows.greedy, kind="stable"), kind="stable")

        def merged(one: np.ndarray, other: np.ndarray) -> np.ndarray:
            return np.concatenate([one, other])[order]

        return Decisions(
            {name: merged(drawn.sampled[name], greedy.sampled[name]) for name in drawn.sampled},
            merged(drawn.executed_BCA, greedy.executed_BCA),
            merged(drawn.log_probs_BCA, greedy.log_probs_BCA),
            merged(drawn.values_B, greedy.values_B),
        )

    def _act(self, rows: Rows, greedy: bool) -> Decisions:
        chunk = self._module.act(observation_of(rows), rows.seeds, deterministic=greedy)
        return Decisions(
            {name: _numbers(tensor) for name, tensor in chunk.sampled.items()},
            _numbers(chunk.executed_BCA),
            _numbers(chunk.log_probs_BCA).astype(np.float32, copy=False),
            _numbers(chunk.values_B).astype(np.float32, copy=False),
        )

    @override
    def install(self, policy: Policy, tensors: Sequence[WeightView], beside: Mapping[str, Adapter]) -> float:
        """On the CPU the views become the weights; a GPU gets a copy."""
        start = time.perf_counter()
        self._memory.load(tensors, self.device)
        self.policy = policy
        return time.perf_counter() - start

    @override
    def place(self, device: torch.device) -> None:
        if device == self.device:
            return
        self.free_memory()
        self.device = device
        for module in self._module.modules():
            _move_buffers(module, device)

    @override
    def take_memory(self) -> None:
        self._memory.take(self.device)

    @override
    def free_memory(self) -> None:
        self.policy = None
        self._memory.free()


def observation_of(rows: Rows) -> Observation:
    """The rows as the policy reads them. ValueError where they differ in names or shapes."""
    stacked = {name: torch.from_numpy(array) for name, array in _together(rows.seen).items()}
    prompts = tuple(rows.prompts)
    return Observation(
        stacked.get(STATE),
        {name.removeprefix(IMAGE): image for name, image in stacked.items() if name.startswith(IMAGE)},
        prompts if any(prompts) else (),
    )


def _together(seen: Sequence[Seen]) -> Arrays:
    first, places = seen[0][0], [row for _, row in seen]
    if all(arrays is first for arrays, _ in seen):
        # One message's, as it is where all of its environments go on.
        whole = places == list(range(len(next(iter(first.values()), ()))))
        return first if whole else {name: array[places] for name, array in first.items()}
    names = sorted(set().union(*(arrays for arrays, _ in seen)))
    return {name: _stacked(name, seen) for name in names}


def _stacked(name: str, seen: Sequence[Seen]) -> np.ndarray:
    shapes = {found.shape[1:] if (found := each.get(name)) is not None else None for each, _ in seen}
    if len(shapes) > 1:
        raise ValueError(f"environments differ in {name!r}: its shapes are {', '.join(map(str, shapes))}")
    return np.stack([each[name][row] for each, row in seen])


def _numbers(tensor: Tensor) -> np.ndarray:
    found: np.ndarray = tensor.detach().cpu().numpy()
    return found


def _move_buffers(module: nn.Module, device: torch.device) -> None:
    for name, buffer in module.named_buffers(recurse=False):
        setattr(module, name, buffer.to(device))


class NotFinite(Exception):
    """An observation holds a value that is no finite number: its episode is of no use. The message names it."""


class Views:
    """Maps observations by their names in the environment to the names of an episode."""

    def __init__(self, policy: PolicyConfig, environment: EnvironmentSection) -> None:
        self._state = environment.state
        self._cameras = environment.cameras
        self._wanted = policy.cameras
        self._reads_state = policy.state_numbers > 0

    def __call__(self, observation: Arrays) -> dict[str, np.ndarray]:
        """STATE, (N, S) float32, and IMAGE + camera, (N, H, W, channels) uint8, of N environments.

        ValueError, which names the key of the spec, where the environment has no such observation. NotFinite.
        """
        found: dict[str, np.ndarray] = {}
        if self._reads_state:
            names = self._state_of(observation)
            parts = [_named(observation, name, "environment.state") for name in names]
            if not parts:
                raise ValueError(
                    "environment.state: the environment has images alone, and the policy reads a state"
                )
            found[STATE] = _state(parts)
            if not np.isfinite(found[STATE]).all():
                raise NotFinite(_first_not_finite(dict(zip(names, parts, strict=True))))
        for camera in self._wanted:
            source = camera if self._cameras is None else self._cameras.get(camera, "")
            where = f"environment.cameras: {camera!r}"
            image = _named(observation, source, where)
            if not is_image(image.dtype, image.shape[1:]):
                raise ValueError(
                    f"{where}: {source!r} is {image.dtype} {image.shape[1:]}, no (height, width, channels) of uint8"
                )
            found[IMAGE + camera] = image
        return found

    def seen(self, observation: Arrays, row: int) -> Seen:
        """One environment of them, where another one's values may not be finite. Raises as a call."""
        return self({name: array[row : row + 1] for name, array in observation.items()}), 0

    def _state_of(self, observation: Arrays) -> Sequence[str]:
        if self._state is not None:
            return self._state
        return sorted(
            name for name, array in observation.items() if not is_image(array.dtype, array.shape[1:])
        )


def _state(parts: Sequence[np.ndarray]) -> np.ndarray:
    if len(parts) == 1 and parts[0].dtype == np.float32:
        return parts[0].reshape(len(parts[0]), -1)
    with np.errstate(over="ignore"):  # too large for float32: it becomes infinite, and is refused
        return np.concatenate([part.astype(np.float32).reshape(len(part), -1) for part in parts], 1)


def _first_not_finite(parts: Mapping[str, np.ndarray]) -> str:
    for name, part in parts.items():
        values = part.astype(np.float32).reshape(-1)
        if (wrong := ~np.isfinite(values)).any():
            return f"observation {name!r} holds {values[wrong.argmax()]} at element {int(wrong.argmax())}"
    raise AssertionError("all parts are finite")


def _named(observation: Arrays, name: str, where: str) -> np.ndarray:
    if name not in observation:
        have = ", ".join(sorted(observation)) or "none"
        raise ValueError(f"{where}: the environment has no observation {name!r}, it has: {have}")
    return observation[name]
