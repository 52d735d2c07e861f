"""ResNet-18 and -34 up to their last feature map, with batch norms that stay as they are or norms of groups.

Names are torchvision's, or the places that its parts have one after the other.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BLOCKS = {"resnet18": (2, 2, 2, 2), "resnet34": (3, 4, 6, 3)}
IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
"""Of pixels in 0 to 1."""
WIDTHS = (64, 128, 256, 512)
FEATURES = WIDTHS[-1]
REDUCTION = 32
"""Pixels of an image for one of the feature map, in each direction."""


class FrozenNorm(nn.Module):
    """A batch norm by fixed statistics, which does not learn."""

    weight: nn.Parameter
    bias: nn.Parameter
    running_mean: nn.Parameter
    running_var: nn.Parameter

    def __init__(self, channels: int) -> None:
        super().__init__()
        for name, value in {"weight": 1.0, "bias": 0.0, "running_mean": 0.0, "running_var": 1.0}.items():
            own = nn.Parameter(torch.full((channels,), value), requires_grad=False)
            self.register_parameter(name, own)

    def forward(self, image: Tensor) -> Tensor:
        """(B, channels, H, W)."""
        weight, bias, mean, variance = (
            each.float()[:, None, None]
            for each in (self.weight, self.bias, self.running_mean, self.running_var)
        )
        scale = weight * torch.rsqrt(variance + 1e-5)
        return (image * scale + (bias - mean * scale)).to(image.dtype)


Norm = Callable[[int], nn.Module]


def group_norm(channels: int) -> nn.Module:
    """Groups of 16 channels."""
    return nn.GroupNorm(channels // 16, channels)


class Block(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, channels: int, width: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, stride, 1, bias=False)
        self.bn1 = norm(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = norm(width)
        self.downsample: nn.Module = nn.Identity()
        if stride > 1 or channels != width:
            self.downsample = nn.Sequential(nn.Conv2d(channels, width, 1, stride, bias=False), norm(width))

    def forward(self, image: Tensor) -> Tensor:
        """(B, width, H / stride, W / stride)."""
        found = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(image)))))
        return F.relu(found + self.downsample(image))


def resnet(blocks: tuple[int, ...], *, norm: Norm = FrozenNorm, named: bool = True) -> nn.Sequential:
    """(B, FEATURES, H / 32, W / 32) features of (B, 3, H, W)."""
    parts: OrderedDict[str, nn.Module] = OrderedDict(
        conv1=nn.Conv2d(3, WIDTHS[0], 7, 2, 3, bias=False),
        bn1=norm(WIDTHS[0]),
        relu=nn.ReLU(),
        maxpool=nn.MaxPool2d(3, 2, 1),
    )
    channels = WIDTHS[0]
    for number, (width, count) in enumerate(zip(WIDTHS, blocks, strict=True), 1):
        stages = []
        for place in range(count):
            stages.append(Block(channels, width, 2 if number > 1 and not place else 1, norm))
            channels = width
        parts[f"layer{number}"] = nn.Sequential(*stages)
    found = nn.Sequential(parts) if named else nn.Sequential(*parts.values())
    for name, module in found.named_modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, nonlinearity="linear" if "downsample" in name else "relu")
            if name.endswith("conv2") and norm is FrozenNorm:  # holds no features: what blocks add is small
                module.weight.data.mul_(0.25)
    return found
