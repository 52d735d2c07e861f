"""What every robot policy is: it draws actions, and computes their log-probs again later.

Shapes: B environments, C actions of a chunk, A numbers of an action, S numbers of a state, H × W pixels. A number of an
action is a token where the policy draws tokens. Knows no environment, no wire and no loss.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import torch
from headrace_schema.sections.base import Count, Section
from pydantic import Field
from torch import Tensor, nn

from headrace_robots.policies import gaussian
from headrace_robots.policies.normalizer import Normalizer
from headrace_robots.policies.scaling import ActionBounds

ACTIONS = "actions"
"""The entry of `ActionChunk.sampled` that every policy has: what it drew, (B, C, A), numbers or token ids."""

Level = Literal["token", "action", "chunk"]
"""What has one log-prob, and so one ratio: a number of an action, an action, or a chunk of actions."""


@dataclass(frozen=True)
class Observation:
    """What B environments show. `state_BS` is as the environment gave it: the policy normalises it.

    `images` are (B, H, W, channels) uint8 by camera. `prompts` holds the token ids of each environment's instruction,
    which are never tokenised again.
    """

    state_BS: Tensor | None = None
    images: Mapping[str, Tensor] = field(default_factory=dict)
    prompts: tuple[tuple[int, ...], ...] = ()

    def __len__(self) -> int:
        """B."""
        if self.state_BS is not None:
            return len(self.state_BS)
        return len(next(iter(self.images.values()))) if self.images else len(self.prompts)

    def take(self, rows: Sequence[int] | Tensor) -> Observation:
        """The same of these environments, in this order."""
        index = torch.as_tensor(rows, dtype=torch.long)
        return Observation(
            None if self.state_BS is None else self.state_BS[index],
            {name: image[index] for name, image in self.images.items()},
            tuple(self.prompts[int(row)] for row in index) if self.prompts else (),
        )


@dataclass(frozen=True)
class ActionChunk:
    """C actions for each of B environments, drawn once.

    `sampled` is what was drawn, (B, …) tensors by name: ACTIONS, and whatever else `evaluate` needs to score them (a
    flow policy's path of noise). `executed_BCA` is what the environment is given: clipped, in its own units.
    `valid_BC` is true at actions that were (or are to be) executed. `log_probs_BCA` are those of the numbers drawn, at
    temperature 1 unless the policy says otherwise; `values_B` the critic's, of the observation.
    """

    sampled: Mapping[str, Tensor]
    executed_BCA: Tensor
    valid_BC: Tensor
    log_probs_BCA: Tensor
    values_B: Tensor

    def cut(self, lengths_B: Sequence[int] | Tensor) -> ActionChunk:
        """The same chunk, of which each environment executed only the first `lengths_B` actions."""
        lengths = torch.as_tensor(lengths_B, device=self.valid_BC.device)
        places_C = torch.arange(self.valid_BC.shape[1], device=self.valid_BC.device)
        return replace(self, valid_BC=self.valid_BC & (places_C < lengths[:, None]))


@dataclass(frozen=True)
class Evaluation:
    """Log-probs, entropies and values of actions drawn earlier; all differentiable.

    `entropy_BCA` is that of the distribution that each number is drawn from, in nats.
    """

    log_probs_BCA: Tensor
    entropy_BCA: Tensor
    values_B: Tensor


@dataclass(frozen=True)
class PolicyShape:
    """What a large policy is made of, for those who divide it, freeze parts of it or give it adapters; a small one: of
    nothing.

    `layers` are class names of its layers; ranks gather one at a time. `parts` are what can be frozen by name, and
    beginnings of their weights' names. `added`: beginnings of the names of what reinforcement learning adds to a
    published model, which always learns whole.
    """

    layers: tuple[str, ...]
    parts: Mapping[str, tuple[str, ...]]
    added: tuple[str, ...]


class PolicyConfig(Section, ABC):
    """What `policy.json` says of a policy: what every kind says, to which each adds its own."""

    large: ClassVar[bool] = True
    """Whether it has layers that ranks divide, parts that can be frozen, and a type of its own. Others are whole on
    every rank, in fp32."""
    reads: ClassVar[bool] = True
    """Whether it reads an instruction."""

    kind: str
    bounds: ActionBounds = Field(description="statistics that un-normalise actions")
    cameras: tuple[str, ...] = Field(default=(), description="names of the cameras, in their order")
    chunk_length: Count = Field(default=1, description="actions drawn at once")

    @property
    def state_numbers(self) -> int:
        """S, numbers of a state that it reads; 0: none."""
        return 0

    @property
    def moments(self) -> int:
        """Observed moments that it reads at once, which an environment stacks: channels and numbers of one after those
        of the other, the newest last."""
        return 1

    def build(self, seed: int) -> RobotPolicy:
        """The policy in eval mode, its random weights drawn from a seed; changes no random state of the process."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.policy()(self).eval()

    @abstractmethod
    def policy(self) -> Callable[[Any], RobotPolicy]:
        """The class of the policy, which is made of this configuration."""

    def prompt_ids(self, tokenizer: Any, instruction: str) -> tuple[int, ...]:
        """The ids that it reads for an instruction, by a tokenizer of transformers."""
        return tuple(tokenizer.encode(instruction, add_special_tokens=True))

    def check_tokenizer(self, tokenizer: Any) -> None:
        """Raises ValueError for a tokenizer whose ids are not those that the policy was made for."""


class RobotPolicy(nn.Module, ABC):
    """A module whose parameters and persistent buffers are one version of the policy."""

    config: Any
    """Its kind's PolicyConfig."""
    shape: PolicyShape
    chunk_length: int
    action_size: int
    horizon: int
    """H, actions that it predicts; the first `chunk_length` of them are executed."""
    chunk_tokens: int
    """Positions that a chunk takes in a pass, without its instruction's: actions and patches of images."""
    normalizer: Normalizer | None
    """Changed by `Normalizer.update` alone, when a version is committed."""

    @abstractmethod
    def act(
        self, observation: Observation, seeds: Sequence[int], *, deterministic: bool = False
    ) -> ActionChunk:
        """Draws a chunk for each environment, without a gradient.

        `seeds` has one number an environment: the same seed draws the same noise whatever else is in the batch.
        `deterministic` takes the most likely action. Raises ValueError when the observation does not fit.
        """

    @abstractmethod
    def evaluate(self, observation: Observation, sampled: Mapping[str, Tensor]) -> Evaluation:
        """Scores `ActionChunk.sampled` again under the present weights."""

    @abstractmethod
    def imitate(self, observation: Observation, actions_BHA: Tensor, seeds: Sequence[int]) -> Tensor:
        """(B, H) losses of imitating a demonstration's next H = `horizon` actions, in the environment's units.

        `seeds` are for policies whose loss is drawn (flows).
        """

    @abstractmethod
    def example(self, count: int, words: int) -> tuple[Observation, dict[str, Tensor]]:
        """What `evaluate` takes of so many environments, of the shapes that a run's has; instructions have `words` ids.

        For plans of memory: zeros.
        """


def chunk_around(
    mean_BCA: Tensor,
    log_std: Tensor,
    seeds: Sequence[int] | None,
    scaling: Callable[[Tensor], Tensor],
    values_B: Tensor,
) -> ActionChunk:
    """A chunk drawn from a Gaussian by the environments' seeds; None: its means."""
    drawn_BCA = mean_BCA
    if seeds is not None:
        noise_BCA = gaussian.row_noise(seeds, tuple(log_std.shape), mean_BCA.device)
        drawn_BCA = mean_BCA + log_std.exp() * noise_BCA
    return ActionChunk(
        sampled={ACTIONS: drawn_BCA},
        executed_BCA=scaling(drawn_BCA),
        valid_BC=torch.ones(drawn_BCA.shape[:2], dtype=torch.bool, device=drawn_BCA.device),
        log_probs_BCA=gaussian.log_density(drawn_BCA, mean_BCA, log_std),
        values_B=values_B,
    )


def at_level(values_BCA: Tensor, valid_BC: Tensor, level: Level) -> tuple[Tensor, Tensor]:
    """Log-probs or entropies summed to a level, and their mask: (B, C, A), (B, C) or (B, 1).

    Actions that were not executed count nothing. Raises ValueError for an unknown level.
    """
    masked_BCA = torch.where(valid_BC[..., None], values_BCA, torch.zeros_like(values_BCA))
    if level == "token":
        return masked_BCA, valid_BC[..., None].expand_as(masked_BCA)
    if level == "action":
        return masked_BCA.sum(-1), valid_BC
    if level == "chunk":
        return masked_BCA.sum((-2, -1))[..., None], valid_BC.any(-1, keepdim=True)
    raise ValueError(f"unknown level {level!r}: choose token, action or chunk")


def imitation_loss(losses_BH: Tensor, valid_BH: Tensor) -> Tensor:
    """The mean of `RobotPolicy.imitate` over the actions that the demonstration has; 0 where it has none."""
    kept_BH = torch.where(valid_BH, losses_BH, torch.zeros_like(losses_BH))
    return kept_BH.sum() / valid_BH.sum().clamp(min=1)


def state_of(observation: Observation, size: int) -> Tensor:
    """The (B, S) fp32 state. Raises ValueError when there is none of this size."""
    state_BS = observation.state_BS
    if state_BS is None or state_BS.dim() != 2 or state_BS.shape[1] != size:
        shape = None if state_BS is None else tuple(state_BS.shape)
        raise ValueError(f"the observation's state has shape {shape}, the policy reads (B, {size})")
    return state_BS.float()


def image_of(observation: Observation, camera: str, device: torch.device, channels: int = 3) -> Tensor:
    """(B, channels, H, W) fp32 in 0 to 1 on `device`; see `uint8_image_of`."""
    return uint8_image_of(observation, camera, device, channels).permute(0, 3, 1, 2).float() / 255


def uint8_image_of(observation: Observation, camera: str, device: torch.device, channels: int = 3) -> Tensor:
    """(B, H, W, channels) on `device`, to which they go in uint8.

    Raises ValueError when there is no such camera, or it has other pixels.
    """
    image = observation.images.get(camera)
    if image is None:
        raise ValueError(f"the observation has no camera {camera!r}, only {sorted(observation.images)}")
    if image.dim() != 4 or image.shape[-1] != channels or image.dtype != torch.uint8:
        raise ValueError(
            f"camera {camera!r} gives {tuple(image.shape)} {image.dtype}; the policy reads (B, H, W, {channels}) uint8"
        )
    return image.to(device)


def check_seeds(observation: Observation, seeds: Sequence[int]) -> None:
    """Raises ValueError unless there is one seed an environment."""
    if len(seeds) != len(observation):
        raise ValueError(f"{len(seeds)} seeds for {len(observation)} environments: give one each")


def seen_example(
    config: PolicyConfig, count: int, words: int, pixels: tuple[int, int], channels: int = 3
) -> Observation:
    """An observation of zeros, as `RobotPolicy.example` gives it; `pixels` are height and width."""
    state = torch.zeros(count, config.state_numbers) if config.state_numbers else None
    image = torch.zeros(count, *pixels, channels, dtype=torch.uint8)
    return Observation(
        state, dict.fromkeys(config.cameras, image), ((1,) * words,) * count if config.reads else ()
    )
