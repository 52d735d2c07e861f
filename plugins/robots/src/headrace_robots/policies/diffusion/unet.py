"""The networks of a diffusion policy: key points of pictures, and a one-dimensional U-Net. Names are LeRobot's.

Shapes: B environments, T places of a horizon, D numbers of what conditions, K key points.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headrace_robots.policies.resnet import BLOCKS, FEATURES, REDUCTION, FrozenNorm, group_norm, resnet

if TYPE_CHECKING:
    from headrace_robots.policies.diffusion.model import DiffusionConfig

LAST_GROUPS = 8
"""Of the last convolution's norm, whatever `n_groups` says."""


class Steps(nn.Module):
    """Training steps as sines and cosines."""

    frequencies_F: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        half = size // 2
        exponents = -math.log(10000) / (half - 1) * torch.arange(half, dtype=torch.float64)
        self.register_buffer("frequencies_F", exponents.exp().float(), persistent=False)

    def forward(self, time_B: Tensor) -> Tensor:
        """(B, size) fp32."""
        angles = time_B[:, None] * self.frequencies_F
        return torch.cat([angles.sin(), angles.cos()], -1)


class ConvBlock(nn.Module):
    """A convolution, a norm of groups, Mish."""

    def __init__(self, channels: int, width: int, config: DiffusionConfig, groups: int = 0) -> None:
        super().__init__()
        size = config.kernel_size
        self.block = nn.Sequential(
            nn.Conv1d(channels, width, size, padding=size // 2),
            nn.GroupNorm(groups or config.n_groups, width),
            nn.Mish(),
        )

    def forward(self, places_BWT: Tensor) -> Tensor:
        """(B, width, T)."""
        found: Tensor = self.block(places_BWT)
        return found


class ResidualBlock(nn.Module):
    """Two convolutions beside a shortcut, the first one's channels moved (and scaled) by what conditions."""

    def __init__(self, channels: int, width: int, condition: int, config: DiffusionConfig) -> None:
        super().__init__()
        self.scales = config.use_film_scale_modulation
        self.conv1 = ConvBlock(channels, width, config)
        self.cond_encoder = nn.Sequential(nn.Mish(), nn.Linear(condition, width * (1 + self.scales)))
        self.conv2 = ConvBlock(width, width, config)
        self.residual_conv = nn.Conv1d(channels, width, 1) if channels != width else nn.Identity()

    def forward(self, places_BWT: Tensor, condition_BD: Tensor) -> Tensor:
        """(B, width, T)."""
        found: Tensor = self.conv1(places_BWT)
        moved = self.cond_encoder(condition_BD)[..., None]
        if self.scales:
            scale, moved = moved.chunk(2, 1)
            found = scale * found
        shortcut: Tensor = self.residual_conv(places_BWT)
        found = shortcut + self.conv2(found + moved)
        return found


class Unet(nn.Module):
    """What the model predicts of a point of a path."""

    def __init__(self, condition: int, config: DiffusionConfig) -> None:
        super().__init__()
        size, widths, numbers = config.diffusion_step_embed_dim, config.down_dims, config.bounds.size
        self.diffusion_step_encoder = nn.Sequential(
            Steps(size), nn.Linear(size, size * 4), nn.Mish(), nn.Linear(size * 4, size)
        )

        def pair(channels: int, width: int, between: nn.Module) -> nn.ModuleList:
            blocks = [ResidualBlock(own, width, size + condition, config) for own in (channels, width)]
            return nn.ModuleList([*blocks, between])

        sides = list(zip((numbers, *widths[:-1]), widths, strict=True))
        self.down_modules = nn.ModuleList(
            pair(channels, width, nn.Conv1d(width, width, 3, 2, 1) if width_ahead else nn.Identity())
            for (channels, width), width_ahead in zip(sides, [*widths[1:], 0], strict=True)
        )
        self.mid_modules = nn.ModuleList(
            ResidualBlock(widths[-1], widths[-1], size + condition, config) for _ in range(2)
        )
        self.up_modules = nn.ModuleList(
            pair(width * 2, channels, nn.ConvTranspose1d(channels, channels, 4, 2, 1))
            for channels, width in reversed(sides[1:])
        )
        self.final_conv = nn.Sequential(
            ConvBlock(widths[0], widths[0], config, LAST_GROUPS), nn.Conv1d(widths[0], numbers, 1)
        )

    def forward(self, point_BTA: Tensor, time_B: Tensor, condition_BD: Tensor) -> Tensor:
        """(B, T, A) in the type of the weights."""
        steps: Any = self.diffusion_step_encoder
        times = steps[1:](steps[0](time_B).to(condition_BD.dtype))
        given = torch.cat([times, condition_BD], -1)
        hidden, skipped = point_BTA.to(given.dtype).transpose(1, 2), []
        down: Any
        for down in self.down_modules:
            hidden = down[1](down[0](hidden, given), given)
            skipped.append(hidden)
            hidden = down[2](hidden)
        for block in self.mid_modules:
            hidden = block(hidden, given)
        up: Any
        for up in self.up_modules:
            hidden = up[2](up[1](up[0](torch.cat([hidden, skipped.pop()], 1), given), given))
        found: Tensor = self.final_conv(hidden).transpose(1, 2)
        return found


class RgbEncoder(nn.Module):
    """A ResNet, of whose last feature map the centres of mass count."""

    def __init__(self, config: DiffusionConfig) -> None:
        super().__init__()
        self.backbone = resnet(
            BLOCKS[config.vision_backbone],
            norm=group_norm if config.use_group_norm else FrozenNorm,
            named=False,
        )
        points = config.spatial_softmax_num_keypoints
        self.pool = SpatialSoftmax(points, tuple(-(-side // REDUCTION) for side in config.seen))
        self.out = nn.Linear(2 * points, 2 * points)

    def forward(self, image: Tensor) -> Tensor:
        """(B, 2 K)."""
        return F.relu(self.out(self.pool(self.backbone(image))))


class SpatialSoftmax(nn.Module):
    """Key points: where a map is high, on average, from -1 to 1 in each direction."""

    places_P2: Tensor

    def __init__(self, points: int, sides: tuple[int, ...]) -> None:
        super().__init__()
        self.nets = nn.Conv2d(FEATURES, points, 1)
        rows, columns = (torch.linspace(-1, 1, side, dtype=torch.float64) for side in sides)
        grid = torch.stack(torch.meshgrid(columns, rows, indexing="xy"), -1)
        self.register_buffer("places_P2", grid.flatten(0, 1).float(), persistent=False)

    def forward(self, features: Tensor) -> Tensor:
        """(B, 2 K): across and down of each key point."""
        shares_BKP = self.nets(features).flatten(2).softmax(-1)
        found: Tensor = (shares_BKP @ self.places_P2.to(shares_BKP)).flatten(1)
        return found
