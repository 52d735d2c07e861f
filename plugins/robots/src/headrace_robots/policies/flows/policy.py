"""Policies whose actions are the end of a flow: a prefix that is read once, and a path of denoising steps behind it.

Shapes as in `policy` and `flow`; N prefix positions, H actions of the horizon (the first C are executed), W numbers
that are drawn for each (the first A are executed), D hidden of what reads the prefix, F hidden of the expert.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from headrace_modelkit.critic import ValueHead
from pydantic import Field, model_validator
from torch import Tensor, nn
from typing_extensions import override

from headrace_robots.policies.flows import flow
from headrace_robots.policies.flows.flow import FlowConfig, NoiseHead, VelocityField
from headrace_robots.policies.flows.prefixes import with_gradient_to
from headrace_robots.policies.gaussian import row_noise, row_uniform
from headrace_robots.policies.paths import PATH, STEPS, chunk_of
from headrace_robots.policies.policy import (
    ACTIONS,
    ActionChunk,
    Evaluation,
    Observation,
    PolicyConfig,
    RobotPolicy,
    check_seeds,
    state_of,
)
from headrace_robots.policies.scaling import ActionBounds, ActionScaling

ADDED = ("value_head.", "noise_head.")
"""Beginnings of the names of what reinforcement learning adds."""


class FlowPolicyConfig(PolicyConfig):
    """What every flow policy's configuration says."""

    cameras: tuple[str, ...] = Field(min_length=1, description="names of the cameras, in their order")
    state: ActionBounds = Field(description="statistics that normalise the state")
    flow: FlowConfig = FlowConfig()

    @property
    @override
    def state_numbers(self) -> int:
        return self.state.size

    @property
    @abstractmethod
    def sizes(self) -> FlowSizes:
        """Of what is drawn, and of the hidden states."""

    @model_validator(mode="after")
    def _fits(self) -> FlowPolicyConfig:
        sizes = self.sizes
        if self.chunk_length > sizes.horizon or self.bounds.size > sizes.numbers:
            raise ValueError(
                f"chunk_length {self.chunk_length} and {self.bounds.size} numbers an action; the model draws "
                f"{sizes.horizon} actions of {sizes.numbers}"
            )
        if sizes.state and self.state.size > sizes.state:
            raise ValueError(f"state has {self.state.size} numbers; the model reads at most {sizes.state}")
        return self


class FlowSizes:
    """H, W, the most numbers of a state (0: any), D and F."""

    def __init__(self, *, horizon: int, numbers: int, state: int, hidden: int, expert: int) -> None:
        self.horizon, self.numbers, self.state = horizon, numbers, state
        self.hidden, self.expert = hidden, expert


class FlowPolicy(RobotPolicy):
    """Draws and scores paths. A family gives the prefix and the velocity field."""

    imitates_unused: ClassVar[bool] = False
    """Whether the loss of imitation counts the numbers that are not executed, which are to be 0."""

    config: FlowPolicyConfig

    def __init__(self, config: FlowPolicyConfig) -> None:
        super().__init__()
        self.config = config
        self.chunk_length, self.action_size = config.chunk_length, config.bounds.size
        self.normalizer = None
        self.scaling = ActionScaling(config.bounds)
        self.state_scaling = ActionScaling(config.state)
        sizes = config.sizes
        self.horizon, self.numbers = sizes.horizon, sizes.numbers
        self.drawn = (sizes.horizon, sizes.numbers)
        self.value_head = ValueHead(sizes.hidden)
        if config.flow.noise == "learned":
            self.noise_head = NoiseHead(sizes.expert, sizes.numbers, config.flow)

    @abstractmethod
    def prefix(self, observation: Observation) -> tuple[Any, Tensor, Tensor]:
        """(keys and values of what is seen, their (B, N) mask, (B,) values). Raises ValueError without prompts."""

    @abstractmethod
    def field(self, observation: Observation, cache: Any, mask_BN: Tensor) -> VelocityField:
        """The velocity field of what is seen; the cache is left as it was given."""

    @torch.no_grad()
    @override
    def act(
        self, observation: Observation, seeds: Sequence[int], *, deterministic: bool = False
    ) -> ActionChunk:
        """Deterministic: the ODE's path, from noise by the seeds."""
        check_seeds(observation, seeds)
        cache, mask_BN, values_B = self.prefix(observation)
        sampled, log_probs = flow.draw(
            self.field(observation, cache, mask_BN),
            self.config.flow,
            None if deterministic else seeds,
            self.drawn,
            self.value_head.weight.device,
            seeds,
        )
        return chunk_of(sampled, log_probs, values_B, self._executed, self.scaling)

    @override
    def evaluate(self, observation: Observation, sampled: Mapping[str, Tensor]) -> Evaluation:
        cache, mask_BN, values_B = self.prefix(observation)
        found = flow.score(self.field(observation, cache, mask_BN), self.config.flow, sampled)
        log_probs_BCA, entropy_BCA = (self._executed(values) for values in found)
        return Evaluation(with_gradient_to(values_B, log_probs_BCA), entropy_BCA, values_B)

    @override
    def imitate(self, observation: Observation, actions_BHA: Tensor, seeds: Sequence[int]) -> Tensor:
        """Squared errors of the velocity at a drawn time; see `RobotPolicy.imitate`."""
        cache, mask_BN, values_B = self.prefix(observation)
        drawn = self.scaling.drawn(actions_BHA.to(mask_BN.device))
        rows = self.drawn[0] - drawn.shape[1]  # of a horizon that robots execute the first actions of
        actions = F.pad(drawn, (0, self.numbers - self.action_size, 0, rows))
        noise = row_noise(seeds, tuple(actions.shape[1:]), actions.device)
        time_B = self._imitation_times(seeds).to(actions.device)
        time = time_B[:, None, None]
        velocity, _ = self.field(observation, cache, mask_BN)(time * noise + (1 - time) * actions, time_B)
        errors = (velocity - (noise - actions)).square()
        counted = errors if self.imitates_unused else errors[..., : self.action_size]
        return with_gradient_to(values_B, counted[:, : self.horizon].mean(-1))

    @override
    def example(self, count: int, words: int) -> tuple[Observation, dict[str, Tensor]]:
        way = self.config.flow
        drawn = way.candidates if way.drawn == "all" else 1
        path = torch.zeros(count, way.steps + 1, *self.drawn)
        chunk = torch.zeros(count, self.chunk_length, self.action_size)
        steps = torch.zeros(count, drawn, dtype=torch.long)
        return self._seen(count, words), {ACTIONS: chunk, PATH: path, STEPS: steps}

    @abstractmethod
    def _seen(self, count: int, words: int) -> Observation:
        """The observation of an `example`."""

    def _imitation_times(self, seeds: Sequence[int]) -> Tensor:
        return imitation_times(seeds)

    def _state(self, observation: Observation, device: torch.device, width: int) -> Tensor:
        """(B, width) of the normalised state, and 0 behind it."""
        state_BS = self.state_scaling.drawn(state_of(observation, self.config.state.size).to(device))
        return F.pad(state_BS, (0, width - state_BS.shape[1]))

    def _executed(self, values: Tensor) -> Tensor:
        return values[:, : self.chunk_length, : self.action_size]

    def _log_width(self, features: Tensor) -> Tensor | None:
        return self.noise_head(features).float() if self.config.flow.noise == "learned" else None


class TimeWaves(nn.Module):
    """Times as sines and cosines, of periods from the shortest to the longest. Has no weights."""

    frequencies_F: Tensor

    def __init__(self, size: int, shortest: float, longest: float) -> None:
        super().__init__()
        shares = torch.linspace(0, 1, size // 2, dtype=torch.float64)
        periods = shortest * (longest / shortest) ** shares
        self.register_buffer("frequencies_F", (2 * math.pi / periods).float(), persistent=False)

    def forward(self, time_B: Tensor) -> Tensor:
        """(B, size) fp32."""
        angles = self.frequencies_F * time_B[:, None]
        return torch.cat([angles.sin(), angles.cos()], -1)


def imitation_times(
    seeds: Sequence[int], alpha: float = 1.5, scale: float = 0.999, offset: float = 0.001
) -> Tensor:
    """(B,) times that imitation looks at, by each environment's seed: of the Beta distribution of alpha and 1.

    With a second parameter of 1, as in every published configuration, u^(1 / alpha) of a uniform u is Beta.
    """
    uniform_B = row_uniform([seed + 1 for seed in seeds], (1,), torch.device("cpu"))[:, 0]
    times_B: Tensor = uniform_B ** (1 / alpha) * scale + offset
    return times_B.float()


def padded(observation: Observation, device: torch.device) -> tuple[Tensor, Tensor]:
    """(ids of prompts filled on the right, which of them there are), both (B, T). Raises ValueError without prompts."""
    prompts = observation.prompts
    if len(prompts) != len(observation) or not all(prompts):
        raise ValueError("a vision-language-action model needs the ids of a prompt for each environment")
    longest = max(map(len, prompts))
    ids_BT = torch.tensor([[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts], dtype=torch.long)
    lengths_B1 = torch.tensor([[len(prompt)] for prompt in prompts])
    return ids_BT.to(device), (torch.arange(longest) < lengths_B1).to(device)


def mean_of(hidden_BND: Tensor, mask_BN: Tensor) -> Tensor:
    """(B, D) means of the positions that there are."""
    shares_BN1 = (mask_BN / mask_BN.sum(-1, keepdim=True))[..., None]
    return (hidden_BND * shares_BN1).sum(1)
