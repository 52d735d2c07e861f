"""`mlp` and `cnn`: small actor-critics with a Gaussian of state-independent width.

Shapes as in `policy`; F features. The recipe that learns on a CPU: separate actor and critic of two layers of 64 tanh
units, orthogonal weights (gain √2, the actor's last layer 0.01), log-std -0.5, a running normaliser of the state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Literal

import torch
from headrace_schema.sections.base import Count, CountOrZero, Section
from pydantic import Field
from torch import Tensor, nn
from typing_extensions import override

from headrace_modelkit.robot import gaussian
from headrace_modelkit.robot.normalizer import Normalizer, NormalizerConfig
from headrace_modelkit.robot.policy import (
    ACTIONS,
    ActionChunk,
    Evaluation,
    Observation,
    PolicyShape,
    RobotPolicy,
    check_seeds,
    image_of,
    state_of,
)
from headrace_modelkit.robot.scaling import ActionBounds, ActionScaling

GAIN = 2**0.5
PATCH_PIXELS = 14 * 14
"""Pixels of an image that count as a position of a pass."""


class _GaussianConfig(Section):
    """What `mlp` and `cnn` share."""

    bounds: ActionBounds = Field(description="the action space")
    chunk_length: Count = Field(default=1, description="actions drawn at once")
    hidden: tuple[Count, ...] = Field(
        default=(64, 64), description="units of each layer, actor and critic alike"
    )
    log_std: float = Field(default=-0.5, ge=-10, le=2, description="log of the Gaussian's width at the start")
    normalizer: NormalizerConfig | None = Field(
        default=NormalizerConfig(), description="running normaliser of the state; null: none"
    )


class MlpConfig(_GaussianConfig):
    """An actor-critic that reads a state."""

    kind: Literal["mlp"] = "mlp"
    state_size: Count = Field(description="numbers of a state")

    def build(self, seed: int) -> MlpPolicy:
        """The policy with weights drawn from a seed; changes no random state of the process."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return MlpPolicy(self)


class CnnConfig(_GaussianConfig):
    """An actor-critic that reads camera images, and a state beside them."""

    kind: Literal["cnn"] = "cnn"
    cameras: tuple[str, ...] = Field(
        min_length=1, description="names of the cameras, in the order of channels"
    )
    height: Count = Field(ge=36, description="pixels")
    width: Count = Field(ge=36, description="pixels")
    state_size: CountOrZero = Field(default=0, description="numbers of a state; 0: pixels alone")
    features: Count = Field(default=128, description="features that the convolutions give")

    def build(self, seed: int) -> CnnPolicy:
        """As `MlpConfig.build`."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return CnnPolicy(self)


class _GaussianPolicy(nn.Module, RobotPolicy, ABC):
    """Actor and critic on features of an observation."""

    shape = PolicyShape((), {}, ())

    def __init__(self, config: _GaussianConfig, features: int, state_size: int) -> None:
        super().__init__()
        self.chunk_length, self.action_size = config.chunk_length, config.bounds.size
        self.horizon = self.chunk_tokens = self.chunk_length
        self.state_size = state_size
        self.normalizer = (
            Normalizer((state_size,), config.normalizer) if config.normalizer and state_size else None
        )
        self.scaling = ActionScaling(config.bounds)
        numbers = self.chunk_length * self.action_size
        self.actor = _layers(features, config.hidden, numbers, last_gain=0.01)
        self.critic = _layers(features, config.hidden, 1, last_gain=1.0)
        self.log_std = nn.Parameter(torch.full((self.chunk_length, self.action_size), config.log_std))

    @abstractmethod
    def features(self, observation: Observation) -> Tensor:
        """(B, F) of what is seen."""

    def state(self, observation: Observation) -> Tensor:
        """The normalised (B, S) state."""
        state_BS = state_of(observation, self.state_size).to(self.log_std.device)
        return state_BS if self.normalizer is None else self.normalizer(state_BS)

    def forward(self, observation: Observation) -> tuple[Tensor, Tensor]:
        """(B, C, A) means and (B,) values."""
        features_BF = self.features(observation)
        mean_BCA = self.actor(features_BF).view(-1, self.chunk_length, self.action_size)
        return mean_BCA, self.critic(features_BF)[:, 0]

    @torch.no_grad()
    @override
    def act(
        self, observation: Observation, seeds: Sequence[int], *, deterministic: bool = False
    ) -> ActionChunk:
        check_seeds(observation, seeds)
        mean_BCA, values_B = self(observation)
        drawn_BCA = mean_BCA
        if not deterministic:
            noise_BCA = gaussian.row_noise(seeds, tuple(self.log_std.shape), mean_BCA.device)
            drawn_BCA = mean_BCA + self.log_std.exp() * noise_BCA
        return ActionChunk(
            sampled={ACTIONS: drawn_BCA},
            executed_BCA=self.scaling(drawn_BCA),
            valid_BC=torch.ones(drawn_BCA.shape[:2], dtype=torch.bool, device=drawn_BCA.device),
            log_probs_BCA=gaussian.log_density(drawn_BCA, mean_BCA, self.log_std),
            values_B=values_B,
        )

    @override
    def evaluate(self, observation: Observation, sampled: Mapping[str, Tensor]) -> Evaluation:
        mean_BCA, values_B = self(observation)
        log_probs_BCA = gaussian.log_density(sampled[ACTIONS], mean_BCA, self.log_std)
        return Evaluation(log_probs_BCA, gaussian.entropy(self.log_std).expand_as(mean_BCA), values_B)

    def imitate(self, observation: Observation, actions_BHA: Tensor, seeds: Sequence[int]) -> Tensor:
        """Squared errors of the means; see `RobotPolicy.imitate`."""
        mean_BCA, _ = self(observation)
        losses_BH: Tensor = (mean_BCA - self.scaling.drawn(actions_BHA)).square().mean(-1)
        return losses_BH


class MlpPolicy(_GaussianPolicy):
    """`mlp`."""

    def __init__(self, config: MlpConfig) -> None:
        super().__init__(config, config.state_size, config.state_size)
        self.config = config

    def features(self, observation: Observation) -> Tensor:
        """The normalised state."""
        return self.state(observation)


class CnnPolicy(_GaussianPolicy):
    """`cnn`: one stack of convolutions for actor and critic (Mnih et al. 2015)."""

    def __init__(self, config: CnnConfig) -> None:
        super().__init__(config, config.features + config.state_size, config.state_size)
        self.config = config
        self.chunk_tokens += len(config.cameras) * (config.height * config.width // PATCH_PIXELS)
        self.encoder = _convolutions(3 * len(config.cameras), (config.height, config.width), config.features)

    def features(self, observation: Observation) -> Tensor:
        """Features of all cameras, and the normalised state.

        Raises ValueError for images of another size.
        """
        images = [image_of(observation, camera) for camera in self.config.cameras]
        wanted = (self.config.height, self.config.width)
        for camera, image in zip(self.config.cameras, images, strict=True):
            if image.shape[-2:] != wanted:
                raise ValueError(f"camera {camera!r} gives {tuple(image.shape[-2:])} pixels, not {wanted}")
        features_BF: Tensor = self.encoder(torch.cat(images, 1).to(self.log_std.device))
        return torch.cat([features_BF, self.state(observation)], -1) if self.state_size else features_BF


def _layers(inputs: int, hidden: Sequence[int], outputs: int, *, last_gain: float) -> nn.Sequential:
    sizes = [inputs, *hidden]
    layers: list[nn.Module] = []
    for width, following in pairwise(sizes):
        layers += [_orthogonal(nn.Linear(width, following), GAIN), nn.Tanh()]
    return nn.Sequential(*layers, _orthogonal(nn.Linear(sizes[-1], outputs), last_gain))


def _convolutions(channels: int, pixels: tuple[int, int], features: int) -> nn.Sequential:
    layers = nn.Sequential(
        *(_orthogonal(nn.Conv2d(channels, 32, 8, 4), GAIN), nn.ReLU()),
        *(_orthogonal(nn.Conv2d(32, 64, 4, 2), GAIN), nn.ReLU()),
        *(_orthogonal(nn.Conv2d(64, 64, 3, 1), GAIN), nn.ReLU()),
        nn.Flatten(),
    )
    with torch.no_grad():
        flat = layers(torch.zeros(1, channels, *pixels)).shape[1]
    return layers.extend([_orthogonal(nn.Linear(flat, features), GAIN), nn.Tanh()])


def _orthogonal(layer: nn.Linear | nn.Conv2d, gain: float) -> nn.Module:
    nn.init.orthogonal_(layer.weight, gain)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer
