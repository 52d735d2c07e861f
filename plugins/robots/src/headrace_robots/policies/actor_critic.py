"""`mlp` and `cnn`: small actor-critics, for actions of numbers, of categories, or of both.

Shapes as in `policy`; F features, O outputs of the actor for an action. The recipe that learns on a CPU: separate actor
and critic of two layers of 64 tanh units, orthogonal weights (gain √2, the actor's last layer 0.01), log-std -0.5, a
running normaliser of the state.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import ClassVar, Literal, Self

import torch
from headrace_schema.sections.base import Count, CountOrZero
from pydantic import Field, model_validator
from torch import Tensor, nn
from typing_extensions import override

from headrace_robots.policies.action_head import ActionHead
from headrace_robots.policies.normalizer import Normalizer, NormalizerConfig
from headrace_robots.policies.policy import (
    ACTIONS,
    ActionChunk,
    Evaluation,
    Observation,
    PolicyConfig,
    PolicyShape,
    RobotPolicy,
    check_seeds,
    image_of,
    seen_example,
    state_of,
)
from headrace_robots.policies.scaling import ActionBounds
from headrace_robots.policies.squashed import DeterministicHead, SquashedHead

GAIN = 2**0.5
PATCH_PIXELS = 14 * 14
"""Pixels of an image that count as a position of a pass."""


CONVOLUTIONS = {
    36: ((32, 8, 4), (64, 4, 2), (64, 3, 1)),
    16: ((32, 4, 2), (64, 3, 2), (64, 3, 1)),
    4: ((16, 2, 1), (32, 2, 1), (64, 2, 1)),
}
"""Channels, kernel and stride of each layer, by the fewest pixels on a side: those of Mnih et al. 2015, and smaller
ones, at last for pictures whose pixels are a grid's cells."""


class _ActorCriticConfig(PolicyConfig):
    """What `mlp` and `cnn` share."""

    large: ClassVar[bool] = False
    reads: ClassVar[bool] = False
    bounds: ActionBounds = Field(
        description="the action space; of a category: its first and its last whole number"
    )
    categories: tuple[CountOrZero, ...] = Field(
        default=(),
        description="of each number of an action, how many categories it is one of; 0: it is drawn from a Gaussian. "
        "Empty: all are",
    )
    hidden: tuple[Count, ...] = Field(
        default=(64, 64), description="units of each layer, actor and critic alike"
    )
    log_std: float = Field(default=-0.5, ge=-10, le=2, description="log of the Gaussian's width at the start")
    normalizer: NormalizerConfig | None = Field(
        default=NormalizerConfig(), description="running normaliser of the state; null: none"
    )
    head: Literal["gaussian", "squashed", "deterministic"] = Field(
        default="gaussian",
        description="how numbers are drawn: gaussian, of a width of its own, cut at the bounds; squashed, a Gaussian "
        "through tanh whose width the actor gives (SAC); deterministic, tanh with noise to explore (TD3). The last two "
        "have no critic here: algorithms that learn off policy have critics of their own",
    )
    exploration: float = Field(
        default=0.1,
        ge=0,
        le=2,
        description="width of the noise of a deterministic head, in units of the bounds",
    )
    activation: Literal["tanh", "relu"] = Field(
        default="tanh", description="of the layers; relu: begun as torch begins them, tanh: orthogonally"
    )
    conditioned: bool = Field(
        default=False,
        description="the actor reads one number more, by which recap tells it whether an action was better than most; "
        "it acts as one that is told so",
    )
    guidance: float = Field(
        default=1.0,
        ge=0,
        le=10,
        description="of a conditioned policy: how far its outputs go from those untold to those told; above 1: beyond "
        "them (classifier-free guidance)",
    )

    @model_validator(mode="after")
    def _bounded(self) -> Self:
        if self.head != "gaussian" and (any(self.categories) or None in self.bounds.low):
            raise ValueError(
                f"head: {self.head} needs bounds of each number and no categories; set head: gaussian"
            )
        return self

    @model_validator(mode="after")
    def _category_bounds(self) -> Self:
        if not self.categories:
            return self
        if len(self.categories) != self.bounds.size:
            raise ValueError(
                f"categories has {len(self.categories)} numbers and bounds {self.bounds.size}: give one each"
            )
        pairs = zip(self.categories, self.bounds.low, self.bounds.high, strict=True)
        for place, (count, low, high) in enumerate(pairs):
            if count and (low is None or high is None or low % 1 or high - low + 1 != count):
                raise ValueError(f"bounds {place} are {low} and {high}, which are no {count} whole numbers")
        return self


class MlpConfig(_ActorCriticConfig):
    """An actor-critic that reads a state."""

    kind: Literal["mlp"] = "mlp"
    cameras: tuple[()] = Field(default=(), description="none: it reads no images")
    state_size: Count = Field(description="numbers of a state")

    @property
    @override
    def state_numbers(self) -> int:
        return self.state_size

    @override
    def policy(self) -> type[MlpPolicy]:
        return MlpPolicy


class CnnConfig(_ActorCriticConfig):
    """An actor-critic that reads camera images, and a state beside them."""

    kind: Literal["cnn"] = "cnn"
    cameras: tuple[str, ...] = Field(
        min_length=1, description="names of the cameras, in the order of channels"
    )
    height: Count = Field(ge=4, description="pixels")
    width: Count = Field(ge=4, description="pixels")
    channels: Count = Field(default=3, description="of each camera's image; those of stacked frames together")
    state_size: CountOrZero = Field(default=0, description="numbers of a state; 0: pixels alone")
    features: Count = Field(default=128, description="features that the convolutions give")

    @property
    @override
    def state_numbers(self) -> int:
        return self.state_size

    @override
    def policy(self) -> type[CnnPolicy]:
        return CnnPolicy


class _ActorCritic(RobotPolicy):
    """Actor and critic on features of an observation."""

    shape = PolicyShape((), {}, ())

    def __init__(self, config: _ActorCriticConfig, features: int, state_size: int) -> None:
        super().__init__()
        self.chunk_length, self.action_size = config.chunk_length, config.bounds.size
        self.horizon = self.chunk_tokens = self.chunk_length
        self.state_size = state_size
        self.normalizer = (
            Normalizer((state_size,), config.normalizer) if config.normalizer and state_size else None
        )
        self.head = _head(config)
        outputs = self.chunk_length * self.head.outputs
        self.actor = _layers(features + config.conditioned, config, outputs, last_gain=0.01)
        self.critic = _layers(features, config, 1, last_gain=1.0) if config.head == "gaussian" else None

    @abstractmethod
    def features(self, observation: Observation) -> Tensor:
        """(B, F) of what is seen."""

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.actor.parameters()).device

    def state(self, observation: Observation) -> Tensor:
        """The normalised (B, S) state."""
        state_BS = state_of(observation, self.state_size).to(self.device)
        return state_BS if self.normalizer is None else self.normalizer(state_BS)

    def forward(self, observation: Observation) -> tuple[Tensor, Tensor]:
        """(B, C, O) outputs of the actor, the means where all are Gaussian, and (B,) values, 0 without a critic."""
        features_BF = self.features(observation)
        outputs_BCO = self._outputs(features_BF, None)
        if self.critic is None:
            return outputs_BCO, outputs_BCO.new_zeros(len(outputs_BCO))
        return outputs_BCO, self.critic(features_BF)[:, 0]

    def outputs(self, observation: Observation, told_B: Tensor | None = None) -> Tensor:
        """(B, C, O) outputs of the actor alone.

        `told_B` is what a conditioned one is told of its action: 1 that it is better than most, -1 that it is not, 0
        nothing. None: as it acts.
        """
        return self._outputs(self.features(observation), told_B)

    def _outputs(self, features_BF: Tensor, told_B: Tensor | None) -> Tensor:
        config = self.config
        if config.conditioned:
            if told_B is None and config.guidance != 1:
                none_B = features_BF.new_zeros(len(features_BF))
                untold_BCO = self._outputs(features_BF, none_B)
                return untold_BCO.lerp(self._outputs(features_BF, none_B + 1), config.guidance)
            told_B = features_BF.new_ones(len(features_BF)) if told_B is None else told_B
            features_BF = torch.cat([features_BF, told_B[:, None]], -1)
        outputs_BO: Tensor = self.actor(features_BF)
        return outputs_BO.view(-1, self.chunk_length, self.head.outputs)

    @torch.no_grad()
    @override
    def act(
        self, observation: Observation, seeds: Sequence[int], *, deterministic: bool = False
    ) -> ActionChunk:
        check_seeds(observation, seeds)
        outputs_BCO, values_B = self(observation)
        drawn_BCA = self.head.draw(outputs_BCO, None if deterministic else seeds)
        return ActionChunk(
            sampled={ACTIONS: drawn_BCA},
            executed_BCA=self.head.executed(drawn_BCA),
            valid_BC=torch.ones(drawn_BCA.shape[:2], dtype=torch.bool, device=drawn_BCA.device),
            log_probs_BCA=self.head.score(outputs_BCO, drawn_BCA)[0],
            values_B=values_B,
        )

    @override
    def evaluate(self, observation: Observation, sampled: Mapping[str, Tensor]) -> Evaluation:
        outputs_BCO, values_B = self(observation)
        return Evaluation(*self.head.score(outputs_BCO, sampled[ACTIONS]), values_B)

    @override
    def imitate(self, observation: Observation, actions_BHA: Tensor, seeds: Sequence[int]) -> Tensor:
        """Squared errors of means, cross-entropies of categories; see `RobotPolicy.imitate`."""
        outputs_BCO, _ = self(observation)
        return self.head.imitate(outputs_BCO, actions_BHA)

    @override
    def example(self, count: int, words: int) -> tuple[Observation, dict[str, Tensor]]:
        config = self.config
        pixels = (getattr(config, "height", 0), getattr(config, "width", 0))
        seen = seen_example(config, count, words, pixels, getattr(config, "channels", 0))
        return seen, {ACTIONS: torch.zeros(count, self.chunk_length, self.action_size)}


class MlpPolicy(_ActorCritic):
    """`mlp`."""

    def __init__(self, config: MlpConfig) -> None:
        super().__init__(config, config.state_size, config.state_size)
        self.config = config

    def features(self, observation: Observation) -> Tensor:
        """The normalised state."""
        return self.state(observation)


class CnnPolicy(_ActorCritic):
    """`cnn`: one stack of convolutions for actor and critic.

    Pictures are centred, and features normalised before their tanh (Yarats et al. 2021): else all of a bright picture
    goes one way, the tanh saturates, and what is left to learn from is the state.
    """

    def __init__(self, config: CnnConfig) -> None:
        super().__init__(config, config.features + config.state_size, config.state_size)
        self.config = config
        self.chunk_tokens += len(config.cameras) * (config.height * config.width // PATCH_PIXELS)
        channels = config.channels * len(config.cameras)
        self.encoder = _convolutions(channels, (config.height, config.width), config.features)

    def features(self, observation: Observation) -> Tensor:
        """Features of all cameras, and the normalised state.

        Raises ValueError for images of another size.
        """
        channels = self.config.channels
        images = [image_of(observation, camera, self.device, channels) for camera in self.config.cameras]
        wanted = (self.config.height, self.config.width)
        for camera, image in zip(self.config.cameras, images, strict=True):
            if image.shape[-2:] != wanted:
                raise ValueError(f"camera {camera!r} gives {tuple(image.shape[-2:])} pixels, not {wanted}")
        features_BF: Tensor = self.encoder(torch.cat(images, 1) - 0.5)
        return torch.cat([features_BF, self.state(observation)], -1) if self.state_size else features_BF


def _head(config: _ActorCriticConfig) -> ActionHead | SquashedHead:
    if config.head == "squashed":
        return SquashedHead(config.bounds, config.chunk_length)
    if config.head == "deterministic":
        return DeterministicHead(config.bounds, config.chunk_length, config.exploration)
    return ActionHead(config.bounds, config.categories, config.chunk_length, config.log_std)


def _layers(inputs: int, config: _ActorCriticConfig, outputs: int, *, last_gain: float) -> nn.Sequential:
    sizes = [inputs, *config.hidden]
    layers: list[nn.Module] = []
    if config.activation == "relu":
        for width, following in pairwise(sizes):
            layers += [nn.Linear(width, following), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(sizes[-1], outputs))
    for width, following in pairwise(sizes):
        layers += [_orthogonal(nn.Linear(width, following), GAIN), nn.Tanh()]
    return nn.Sequential(*layers, _orthogonal(nn.Linear(sizes[-1], outputs), last_gain))


def _convolutions(channels: int, pixels: tuple[int, int], features: int) -> nn.Sequential:
    parts: list[nn.Module] = []
    width = channels
    for following, kernel, stride in next(
        each for least, each in CONVOLUTIONS.items() if least <= min(pixels)
    ):
        parts += [_orthogonal(nn.Conv2d(width, following, kernel, stride), GAIN), nn.ReLU()]
        width = following
    layers = nn.Sequential(*parts, nn.Flatten())
    with torch.no_grad():
        flat = layers(torch.zeros(1, channels, *pixels)).shape[1]
    return layers.extend([_orthogonal(nn.Linear(flat, features), GAIN), nn.LayerNorm(features), nn.Tanh()])


def _orthogonal(layer: nn.Linear | nn.Conv2d, gain: float) -> nn.Module:
    nn.init.orthogonal_(layer.weight, gain)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer
