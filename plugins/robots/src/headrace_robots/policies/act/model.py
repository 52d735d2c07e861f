"""`act`: the Action Chunking Transformer of LeRobot, with a Gaussian around its chunk.

Cloning trains its variational encoder too; drawing and scoring take a latent of zeros, as its authors do. Around the
chunk, reinforcement learning draws from a Gaussian of learned width. There is no dropout: a version is one function.
Facts: huggingface/lerobot at 7427f318, `policies/act`; arXiv 2304.13705.
Shapes as in `policy`; M tokens of the encoder, H actions of the horizon, D of the transformer, L of the latent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Literal

import torch
from headrace_modelkit.critic import ValueHead
from headrace_schema.sections.base import Count
from pydantic import Field, model_validator
from torch import Tensor, nn
from typing_extensions import override

from headrace_robots.policies import gaussian
from headrace_robots.policies.act.transformer import Decoder, Encoder, VaeLayer, plane_waves, waves
from headrace_robots.policies.policy import (
    ACTIONS,
    ActionChunk,
    Evaluation,
    Observation,
    PolicyConfig,
    PolicyShape,
    RobotPolicy,
    check_seeds,
    chunk_around,
    image_of,
    seen_example,
    state_of,
)
from headrace_robots.policies.resnet import BLOCKS, FEATURES, IMAGENET, REDUCTION, resnet
from headrace_robots.policies.scaling import ActionBounds, ActionScaling


class ActConfig(PolicyConfig):
    """Sizes of the model, and what actions are; names as in LeRobot's config.json."""

    reads: ClassVar[bool] = False
    kind: Literal["act"] = "act"
    cameras: tuple[str, ...] = Field(min_length=1, description="names of the cameras, in their order")
    height: Count = Field(description="pixels of each camera")
    width: Count = Field(description="pixels of each camera")
    image_mean: tuple[float, float, float] = Field(
        default=IMAGENET["mean"], description="of pixels in 0 to 1"
    )
    image_std: tuple[float, float, float] = Field(default=IMAGENET["std"], description="of pixels in 0 to 1")
    state: ActionBounds | None = Field(
        default=None, description="statistics that normalise the state; null: none"
    )
    horizon: Count = Field(default=100, description="actions that are drawn at once")
    vision_backbone: Literal["resnet18", "resnet34"] = "resnet18"
    pre_norm: bool = False
    feedforward_activation: Literal["relu", "gelu"] = "relu"
    dim_model: Count = Field(default=512, multiple_of=4)
    n_heads: Count = 8
    dim_feedforward: Count = 3200
    n_encoder_layers: Count = 4
    n_decoder_layers: Count = 1
    use_vae: bool = True
    latent_dim: Count = 32
    n_vae_encoder_layers: Count = 4
    kl_weight: float = Field(default=10.0, ge=0, description="of cloning: weight of the latent's divergence")
    log_std: float = Field(default=-2.0, description="log-width of the Gaussian around the chunk")

    @property
    @override
    def state_numbers(self) -> int:
        return 0 if self.state is None else self.state.size

    @model_validator(mode="after")
    def _fits(self) -> ActConfig:
        if self.chunk_length > self.horizon:
            raise ValueError(f"chunk_length {self.chunk_length}; the model draws {self.horizon} actions")
        return self

    @override
    def policy(self) -> type[ActPolicy]:
        return ActPolicy


class ActPolicy(RobotPolicy):
    """`act`. Weights are named as LeRobot names them, below `model`."""

    shape = PolicyShape(
        layers=("EncoderLayer", "DecoderLayer"),
        parts={
            "vision": ("model.backbone.",),
            "vae": ("model.vae_encoder",),
            "transformer": ("model.encoder", "model.decoder", "model.action_head."),
        },
        added=("value_head.", "log_std"),
    )
    config: ActConfig

    def __init__(self, config: ActConfig) -> None:
        super().__init__()
        self.config = config
        self.chunk_length, self.action_size, self.horizon = (
            config.chunk_length,
            config.bounds.size,
            config.horizon,
        )
        self.normalizer = None
        self.scaling = ActionScaling(config.bounds)
        if config.state is not None:
            self.state_scaling = ActionScaling(config.state)
        self.model = _Act(config)
        self.value_head = ValueHead(config.dim_model)
        self.log_std = nn.Parameter(torch.full((self.chunk_length, self.action_size), config.log_std))
        patches = -(-config.height // REDUCTION) * -(-config.width // REDUCTION)
        self.chunk_tokens = 1 + bool(config.state) + patches * len(config.cameras) + self.horizon

    @torch.no_grad()
    @override
    def act(
        self, observation: Observation, seeds: Sequence[int], *, deterministic: bool = False
    ) -> ActionChunk:
        check_seeds(observation, seeds)
        mean_BCA, values_B = self._means(observation)
        drawing = None if deterministic else seeds
        return chunk_around(mean_BCA, self.log_std.float(), drawing, self.scaling, values_B)

    @override
    def evaluate(self, observation: Observation, sampled: Mapping[str, Tensor]) -> Evaluation:
        mean_BCA, values_B = self._means(observation)
        log_std = self.log_std.float()
        return Evaluation(
            gaussian.log_density(sampled[ACTIONS], mean_BCA, log_std),
            gaussian.entropy(log_std).expand_as(mean_BCA),
            values_B,
        )

    @override
    def imitate(self, observation: Observation, actions_BHA: Tensor, seeds: Sequence[int]) -> Tensor:
        """Absolute errors under a drawn latent, and the latent's weighted divergence, the same at every action."""
        state_BS, images = self._inputs(observation)
        wanted_BHA = self.scaling.drawn(actions_BHA.to(self.log_std.device))
        latent_BL, divergence_B = self._latent(state_BS, wanted_BHA, seeds)
        found_BHA = self.model(state_BS, images, latent_BL)[0].float()
        errors_BH: Tensor = (found_BHA - wanted_BHA).abs().mean(-1)
        if divergence_B is not None:
            errors_BH = errors_BH + self.config.kl_weight * divergence_B[:, None]
        return errors_BH

    @override
    def example(self, count: int, words: int) -> tuple[Observation, dict[str, Tensor]]:
        seen = seen_example(self.config, count, words, (self.config.height, self.config.width))
        return seen, {ACTIONS: torch.zeros(count, self.chunk_length, self.action_size)}

    def _means(self, observation: Observation) -> tuple[Tensor, Tensor]:
        """((B, C, A) most likely actions as they are drawn, (B,) values)."""
        state_BS, images = self._inputs(observation)
        chunk_BHA, seen_BMD = self.model(state_BS, images, None)
        return chunk_BHA[:, : self.chunk_length].float(), self.value_head(seen_BMD.mean(1))

    def _inputs(self, observation: Observation) -> tuple[Tensor | None, list[Tensor]]:
        """The normalised state and the normalised images. Raises ValueError for images of another size."""
        config, weight = self.config, self.model.action_head.weight
        wanted, images = (config.height, config.width), []
        mean, std = (
            torch.tensor(each).to(weight.device)[:, None, None]
            for each in (config.image_mean, config.image_std)
        )
        for camera in config.cameras:
            image = image_of(observation, camera, weight.device)
            if image.shape[-2:] != wanted:
                raise ValueError(f"camera {camera!r} gives {tuple(image.shape[-2:])} pixels, not {wanted}")
            images.append(((image - mean) / std).to(weight.dtype))
        if config.state is None:
            return None, images
        state_BS = state_of(observation, config.state.size).to(weight.device)
        return self.state_scaling.drawn(state_BS).to(weight.dtype), images

    def _latent(
        self, state_BS: Tensor | None, actions_BHA: Tensor, seeds: Sequence[int]
    ) -> tuple[Tensor | None, Tensor | None]:
        """(latents drawn from what the actions tell, (B,) their divergences from a standard normal); none of no VAE."""
        if not self.config.use_vae:
            return None, None
        dtype = self.model.action_head.weight.dtype
        mean_BL, log_variance_BL = self.model.told(state_BS, actions_BHA.to(dtype)).float().chunk(2, -1)
        noise_BL = gaussian.row_noise(seeds, tuple(mean_BL.shape[1:]), mean_BL.device)
        apart_BL = -0.5 * (1 + log_variance_BL - mean_BL.square() - log_variance_BL.exp())
        return (mean_BL + (log_variance_BL / 2).exp() * noise_BL).to(dtype), apart_BL.sum(-1)


class _Act(nn.Module):
    """Names are LeRobot's."""

    vae_encoder_pos_enc: Tensor

    def __init__(self, config: ActConfig) -> None:
        super().__init__()
        self.config = config
        size, state, numbers = config.dim_model, config.state_numbers, config.bounds.size
        if config.use_vae:
            self.vae_encoder = Encoder(config, config.n_vae_encoder_layers, VaeLayer)
            self.vae_encoder_cls_embed = nn.Embedding(1, size)
            if state:
                self.vae_encoder_robot_state_input_proj = nn.Linear(state, size)
            self.vae_encoder_action_input_proj = nn.Linear(numbers, size)
            self.vae_encoder_latent_output_proj = nn.Linear(size, 2 * config.latent_dim)
            places = waves(1 + bool(state) + config.horizon, size)[None]
            self.register_buffer("vae_encoder_pos_enc", places, persistent=False)
        self.backbone = resnet(BLOCKS[config.vision_backbone])
        self.encoder = Encoder(config, config.n_encoder_layers)
        self.decoder = Decoder(config, config.n_decoder_layers)
        if state:
            self.encoder_robot_state_input_proj = nn.Linear(state, size)
        self.encoder_latent_input_proj = nn.Linear(config.latent_dim, size)
        self.encoder_img_feat_input_proj = nn.Conv2d(FEATURES, size, 1)
        self.encoder_1d_feature_pos_embed = nn.Embedding(1 + bool(state), size)
        self.decoder_pos_embed = nn.Embedding(config.horizon, size)
        self.action_head = nn.Linear(size, numbers)
        for parameter in (*self.encoder.parameters(), *self.decoder.parameters()):
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)

    def forward(
        self, state_BS: Tensor | None, images: Sequence[Tensor], latent_BL: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """((B, H, A) chunk, (B, M, D) what the encoder gives); a latent of zeros for None."""
        weight = self.encoder_latent_input_proj.weight
        if latent_BL is None:
            latent_BL = weight.new_zeros(len(images[0]), self.config.latent_dim)
        tokens = [self.encoder_latent_input_proj(latent_BL)[:, None]]
        if state_BS is not None:
            tokens.append(self.encoder_robot_state_input_proj(state_BS)[:, None])
        places = [self.encoder_1d_feature_pos_embed.weight]
        for image in images:
            found = self.backbone(image)
            tokens.append(self.encoder_img_feat_input_proj(found).flatten(2).transpose(1, 2))
            places.append(plane_waves(found.shape[-2], found.shape[-1], self.config.dim_model).to(weight))
        places_MD = torch.cat(places)
        seen_BMD = self.encoder(torch.cat(tokens, 1), places_MD)
        features_BHD = self.decoder(seen_BMD, places_MD, self.decoder_pos_embed.weight)
        return self.action_head(features_BHD), seen_BMD

    def told(self, state_BS: Tensor | None, actions_BHA: Tensor) -> Tensor:
        """(B, 2 L) means and log-variances of the latent, by the variational encoder."""
        tokens = [self.vae_encoder_cls_embed.weight[None].expand(len(actions_BHA), -1, -1)]
        if state_BS is not None:
            tokens.append(self.vae_encoder_robot_state_input_proj(state_BS)[:, None])
        tokens.append(self.vae_encoder_action_input_proj(actions_BHA))
        given = torch.cat(tokens, 1)
        found = self.vae_encoder(given, self.vae_encoder_pos_enc[0].to(given))
        parameters: Tensor = self.vae_encoder_latent_output_proj(found[:, 0])
        return parameters
