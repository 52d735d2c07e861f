"""`diffusion`: LeRobot's diffusion policy, whose denoising steps are drawn and scored (DPPO, 2409.00588).

Pictures become key points, which with the state of each observed moment condition a U-Net. A policy that reads several
moments reads them from an environment that stacks frames: channels of an image and numbers of a state one moment after
the other, the newest last. Facts: huggingface/lerobot at 005002b, `policies/diffusion`; arXiv 2303.04137.
Shapes as in `policy` and `paths`; T observed moments, D numbers of what conditions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from headrace_modelkit.critic import ValueHead
from headrace_schema.sections.base import Count
from pydantic import Field, model_validator
from torch import Tensor, nn
from typing_extensions import override

from headrace_robots.policies import paths
from headrace_robots.policies.diffusion.denoising import DenoisingConfig, Schedule, ScheduleConfig, drawn_by
from headrace_robots.policies.diffusion.unet import LAST_GROUPS, RgbEncoder, Unet
from headrace_robots.policies.gaussian import row_noise, row_uniform
from headrace_robots.policies.paths import PATH, STEPS, Transition
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
from headrace_robots.policies.resnet import IMAGENET, REDUCTION
from headrace_robots.policies.scaling import ActionBounds, ActionScaling

Pixels = tuple[Count, Count]


class DiffusionConfig(PolicyConfig):
    """Sizes of the model, and what actions are; names as in LeRobot's config.json."""

    reads: ClassVar[bool] = False
    kind: Literal["diffusion"] = "diffusion"
    n_obs_steps: Count = Field(default=1, description="moments that it reads, stacked by the environment")
    channels: Count = Field(default=3, description="of each camera's image: 3 for each moment")
    height: Count | None = Field(default=None, description="pixels of each camera")
    width: Count | None = Field(default=None, description="pixels of each camera")
    resize_shape: Pixels | None = Field(
        default=None, description="height and width that images are resized to"
    )
    crop_shape: Pixels | None = Field(default=None, description="height and width of their middle")
    crop_is_random: bool = Field(default=True, description="cloning crops anywhere")
    image_mean: tuple[float, float, float] = Field(
        default=IMAGENET["mean"], description="of pixels in 0 to 1"
    )
    image_std: tuple[float, float, float] = Field(default=IMAGENET["std"], description="of pixels in 0 to 1")
    state: ActionBounds = Field(description="statistics that normalise the states of all moments")
    horizon: Count = Field(default=16, description="actions that are drawn at once, from the first moment on")
    vision_backbone: Literal["resnet18", "resnet34"] = "resnet18"
    use_group_norm: bool = True
    spatial_softmax_num_keypoints: Count = 32
    use_separate_rgb_encoder_per_camera: bool = False
    down_dims: tuple[Count, ...] = Field(default=(512, 1024, 2048), min_length=1)
    kernel_size: Count = 5
    n_groups: Count = 8
    diffusion_step_embed_dim: Count = Field(default=128, multiple_of=2, ge=4)
    use_film_scale_modulation: bool = True
    schedule: ScheduleConfig = ScheduleConfig()
    denoising: DenoisingConfig = DenoisingConfig()

    @property
    @override
    def state_numbers(self) -> int:
        return self.state.size

    @property
    @override
    def moments(self) -> int:
        return self.n_obs_steps

    @property
    def pixels(self) -> tuple[int, int]:
        """Height and width of an image; 0 without cameras."""
        return self.height or 0, self.width or 0

    @property
    def seen(self) -> tuple[int, int]:
        """Height and width of what the encoder sees of an image."""
        return self.crop_shape or self.resize_shape or self.pixels

    @model_validator(mode="after")
    def _fits(self) -> DiffusionConfig:
        moments, halves = self.n_obs_steps, 2 ** (len(self.down_dims) - 1)
        whole, known = self.resize_shape or self.pixels, self.schedule.num_train_timesteps
        if self.chunk_length + moments - 1 > self.horizon:
            raise ValueError(
                f"chunk_length {self.chunk_length} from moment {moments} on; the model draws {self.horizon} actions"
            )
        if self.horizon % halves:
            raise ValueError(
                f"horizon {self.horizon} is no multiple of {halves}, by which down_dims shortens it"
            )
        if self.channels != 3 * moments:
            raise ValueError(f"channels {self.channels}; images of {moments} moments have {3 * moments}")
        if self.state.size % moments:
            raise ValueError(f"state has {self.state.size} numbers, no multiple of {moments} moments")
        if self.cameras and not all(self.pixels):
            raise ValueError("give height and width, the pixels of the cameras")
        if not self.kernel_size % 2 or any(width % self.n_groups for width in self.down_dims):
            raise ValueError(
                f"kernel_size {self.kernel_size} and down_dims {self.down_dims}: give an odd one, and multiples of "
                f"n_groups {self.n_groups}"
            )
        if self.down_dims[0] % LAST_GROUPS:
            raise ValueError(f"down_dims {self.down_dims}: the first one is a multiple of {LAST_GROUPS}")
        if self.denoising.steps > known:
            raise ValueError(f"denoising.steps is {self.denoising.steps}; num_train_timesteps is {known}")
        if (
            self.cameras
            and self.crop_shape
            and (self.crop_shape[0] > whole[0] or self.crop_shape[1] > whole[1])
        ):
            raise ValueError(f"crop_shape {self.crop_shape} does not fit into {whole} pixels")
        return self

    @override
    def policy(self) -> type[DiffusionPolicy]:
        return DiffusionPolicy


class DiffusionPolicy(RobotPolicy):
    """`diffusion`. Weights are named as LeRobot names them, below `diffusion`."""

    shape = PolicyShape(
        layers=("ResidualBlock",),
        parts={"vision": ("diffusion.rgb_encoder.",), "unet": ("diffusion.unet.",)},
        added=("value_head.",),
    )
    config: DiffusionConfig

    def __init__(self, config: DiffusionConfig) -> None:
        super().__init__()
        self.config = config
        self.chunk_length, self.action_size = config.chunk_length, config.bounds.size
        self.past = config.n_obs_steps - 1
        self.horizon = config.horizon - self.past
        self.normalizer = None
        self.scaling = ActionScaling(config.bounds)
        self.state_scaling = ActionScaling(config.state)
        self.schedule = Schedule(config.schedule, config.denoising)
        self.diffusion = _Diffusion(config)
        self.value_head = ValueHead(self.diffusion.condition)
        patches = -(-config.seen[0] // REDUCTION) * -(-config.seen[1] // REDUCTION)
        self.chunk_tokens = config.n_obs_steps * (1 + patches * len(config.cameras)) + config.horizon

    @torch.no_grad()
    @override
    def act(
        self, observation: Observation, seeds: Sequence[int], *, deterministic: bool = False
    ) -> ActionChunk:
        """Deterministic: ddim's path without noise, from noise by the seeds."""
        check_seeds(observation, seeds)
        condition_BD = self._condition(observation)
        denoising, drawing = self.config.denoising, None if deterministic else seeds
        drawn_BM = drawn_by(denoising, seeds, deterministic=deterministic).to(condition_BD.device)
        shape = (self.config.horizon, self.action_size)
        sampled, log_probs = paths.draw(
            self._transition(condition_BD), denoising.steps, drawn_BM, drawing, seeds, shape
        )
        values_B = self.value_head(condition_BD)
        return paths.chunk_of(sampled, log_probs, values_B, self._executed, self.scaling)

    @override
    def evaluate(self, observation: Observation, sampled: Mapping[str, Tensor]) -> Evaluation:
        condition_BD = self._condition(observation)
        values_B = self.value_head(condition_BD)
        found = paths.score(self._transition(condition_BD), sampled)
        log_probs_BCA, entropy_BCA = (self._executed(values) for values in found)
        return Evaluation(log_probs_BCA, entropy_BCA, values_B)

    @override
    def imitate(self, observation: Observation, actions_BHA: Tensor, seeds: Sequence[int]) -> Tensor:
        """Squared errors of what is predicted at a drawn training step.

        Of several moments, places before the present one are filled with the next action, and do not count.
        """
        crops = seeds if self.config.crop_is_random else None
        condition_BD = self._condition(observation, crops)
        wanted = self.scaling.drawn(actions_BHA.to(condition_BD.device))
        actions = torch.cat([wanted[:, :1].expand(-1, self.past, -1), wanted], 1)
        noise = row_noise(seeds, tuple(actions.shape[1:]), actions.device)
        time_B = self.schedule.times(seeds).to(actions.device)
        found = self._predict(condition_BD)(self.schedule.noised(actions, noise, time_B), time_B)
        target = noise if self.config.schedule.prediction_type == "epsilon" else actions
        errors_BH: Tensor = (found - target).square().mean(-1)[:, self.past :]
        return errors_BH

    @override
    def example(self, count: int, words: int) -> tuple[Observation, dict[str, Tensor]]:
        denoising, numbers = self.config.denoising, self.action_size
        steps = len(denoising.candidates) if denoising.drawn == "all" else 1
        path = torch.zeros(count, denoising.steps + 1, self.config.horizon, numbers)
        drawn = torch.zeros(count, steps, dtype=torch.long)
        seen = seen_example(self.config, count, words, self.config.pixels, self.config.channels)
        return seen, {ACTIONS: torch.zeros(count, self.chunk_length, numbers), PATH: path, STEPS: drawn}

    def _predict(self, condition_BD: Tensor) -> Any:
        unet = self.diffusion.unet
        return lambda point, time_B: unet(point, time_B, condition_BD).float()

    def _transition(self, condition_BD: Tensor) -> Transition:
        return self.schedule.transition(self._predict(condition_BD))

    def _executed(self, values: Tensor) -> Tensor:
        return values[:, self.past : self.past + self.chunk_length]

    def _condition(self, observation: Observation, crops: Sequence[int] | None = None) -> Tensor:
        """(B, D): of each moment its state and its cameras' key points. Raises ValueError for other images."""
        config, weight = self.config, self.value_head.weight
        state_BS = state_of(observation, config.state.size).to(weight.device)
        state_BTS = self.state_scaling.drawn(state_BS).reshape(len(state_BS), config.n_obs_steps, -1)
        images = [self._images(observation, camera, crops) for camera in config.cameras]
        return self.diffusion.conditions(state_BTS.to(self.diffusion.dtype), images)

    def _images(self, observation: Observation, camera: str, crops: Sequence[int] | None) -> Tensor:
        """(B, T, 3, height, width) of a camera as the encoder sees them; `crops` seeds where they are cut."""
        config, moments = self.config, self.config.n_obs_steps
        image = image_of(observation, camera, self.value_head.weight.device, config.channels)
        if tuple(image.shape[-2:]) != config.pixels:
            raise ValueError(f"camera {camera!r} gives {tuple(image.shape[-2:])} pixels, not {config.pixels}")
        image = image.reshape(-1, 3, *config.pixels)
        mean, std = (
            torch.tensor(each).to(image.device)[:, None, None]
            for each in (config.image_mean, config.image_std)
        )
        image = (image - mean) / std
        if config.resize_shape is not None and config.resize_shape != config.pixels:
            image = F.interpolate(image, config.resize_shape, mode="bilinear", antialias=True)
        image = image.reshape(-1, moments, *image.shape[1:])
        if config.crop_shape is not None:
            image = _cropped(image, config.crop_shape, crops)
        return image.to(self.diffusion.dtype)


def _cropped(image: Tensor, size: tuple[int, int], seeds: Sequence[int] | None) -> Tensor:
    """The middle of (B, T, 3, H, W) images, or for each environment a part by its seed."""
    rows, columns = size
    room = [whole - own for whole, own in zip(image.shape[-2:], size, strict=True)]
    if seeds is None:
        top, left = (round(free / 2.0) for free in room)
        return image[..., top : top + rows, left : left + columns]
    uniform_B2 = row_uniform([seed + 2 for seed in seeds], (2,), torch.device("cpu"))
    places = (uniform_B2 * (torch.tensor(room) + 1)).long().tolist()
    return torch.stack(
        [
            own[..., top : top + rows, left : left + columns]
            for own, (top, left) in zip(image, places, strict=True)
        ]
    )


class _Diffusion(nn.Module):
    """Names are LeRobot's."""

    def __init__(self, config: DiffusionConfig) -> None:
        super().__init__()
        cameras = len(config.cameras)
        own = config.state.size // config.n_obs_steps + 2 * config.spatial_softmax_num_keypoints * cameras
        self.condition = own * config.n_obs_steps
        self.separate = config.use_separate_rgb_encoder_per_camera
        if self.separate and cameras:
            self.rgb_encoder: nn.Module = nn.ModuleList(RgbEncoder(config) for _ in config.cameras)
        elif cameras:
            self.rgb_encoder = RgbEncoder(config)
        self.unet = Unet(self.condition, config)

    @property
    def dtype(self) -> torch.dtype:
        """Of what is computed."""
        return next(self.unet.parameters()).dtype

    def conditions(self, state_BTS: Tensor, images: Sequence[Tensor]) -> Tensor:
        """(B, D) of (B, T, 3, height, width) images of each camera."""
        parts, encoders = [state_BTS], self.rgb_encoder if images else None
        for place, image in enumerate(images):
            encoder: Any = encoders[place] if self.separate else encoders  # type: ignore[index]
            parts.append(encoder(image.flatten(0, 1)).reshape(*image.shape[:2], -1))
        return torch.cat(parts, -1).flatten(1)
