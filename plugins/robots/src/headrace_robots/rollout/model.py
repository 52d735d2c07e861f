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


@dataclass(frozen=True)
class Row:
    """What one environment shows: arrays by their names in an episode, and the instruction's ids.

    `seed` is that of the draw; `greedy` takes the likeliest action.
    """

    observation: Arrays
    prompt_ids: tuple[int, ...]
    seed: int
    greedy: bool


@dataclass(frozen=True)
class Decision:
    """What the policy drew for a row: `sampled` by name, (C, …); `executed_CA` in the environment's units."""

    sampled: Arrays
    executed_CA: np.ndarray
    log_probs_CA: np.ndarray
    value: np.ndarray


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

    def act(self, rows: Sequence[Row]) -> list[Decision]:
        """Decisions in the rows' order. ValueError: an observation is not what the policy reads."""
        if self.policy is None:
            raise Refused("POLICY_MISMATCH", "no policy is installed; call InstallPolicy first")
        decisions: dict[int, Decision] = {}
        for greedy in (False, True):
            chosen = [index for index, row in enumerate(rows) if row.greedy is greedy]
            if chosen:
                found = self._act([rows[index] for index in chosen], greedy)
                decisions.update(zip(chosen, found, strict=True))
        return [decisions[index] for index in range(len(rows))]

    def _act(self, rows: Sequence[Row], greedy: bool) -> list[Decision]:
        seeds = [row.seed for row in rows]
        chunk = self._module.act(observation_of(rows), seeds, deterministic=greedy)
        sampled = {name: _numbers(tensor) for name, tensor in chunk.sampled.items()}
        executed = _numbers(chunk.executed_BCA)
        log_probs = _numbers(chunk.log_probs_BCA).astype(np.float32, copy=False)
        values = _numbers(chunk.values_B).astype(np.float32, copy=False)
        return [
            Decision(
                {name: array[row] for name, array in sampled.items()},
                executed[row],
                log_probs[row],
                values[row],
            )
            for row in range(len(rows))
        ]

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


def observation_of(rows: Sequence[Row]) -> Observation:
    """The rows as the policy reads them. ValueError where they differ in names or shapes."""
    names = set().union(*(row.observation for row in rows))
    stacked = {name: _stacked(name, [row.observation for row in rows]) for name in sorted(names)}
    prompts = tuple(row.prompt_ids for row in rows)
    return Observation(
        stacked.get(STATE),
        {name.removeprefix(IMAGE): image for name, image in stacked.items() if name.startswith(IMAGE)},
        prompts if any(prompts) else (),
    )


def _stacked(name: str, observations: Sequence[Mapping[str, np.ndarray]]) -> Tensor:
    shapes = {found.shape if (found := each.get(name)) is not None else None for each in observations}
    if len(shapes) > 1:
        raise ValueError(f"environments differ in {name!r}: its shapes are {', '.join(map(str, shapes))}")
    return torch.from_numpy(np.stack([each[name] for each in observations]))


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
        """STATE, (S,) float32, and IMAGE + camera, (H, W, channels) uint8: those that the policy reads.

        ValueError, which names the key of the spec, where the environment has no such observation. NotFinite.
        """
        found: dict[str, np.ndarray] = {}
        if self._reads_state:
            parts = [_named(observation, name, "environment.state") for name in self._state_of(observation)]
            if not parts:
                raise ValueError(
                    "environment.state: the environment has images alone, and the policy reads a state"
                )
            with np.errstate(over="ignore"):  # too large for float32: it becomes infinite, and is refused
                found[STATE] = np.concatenate([part.astype(np.float32).reshape(-1) for part in parts])
            if not np.isfinite(found[STATE]).all():
                names = self._state_of(observation)
                raise NotFinite(_first_not_finite(dict(zip(names, parts, strict=True))))
        for camera in self._wanted:
            source = camera if self._cameras is None else self._cameras.get(camera, "")
            where = f"environment.cameras: {camera!r}"
            image = _named(observation, source, where)
            if not is_image(image.dtype, image.shape):
                raise ValueError(
                    f"{where}: {source!r} is {image.dtype} {image.shape}, no (height, width, channels) of uint8"
                )
            found[IMAGE + camera] = image
        return found

    def _state_of(self, observation: Arrays) -> Sequence[str]:
        if self._state is not None:
            return self._state
        return sorted(name for name, array in observation.items() if not is_image(array.dtype, array.shape))


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
