"""Pictures as policies resize them: scaled to fit, with black around; stretched; their middle. Knows no policy."""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor


def fit(image: Tensor, size: tuple[int, int], at: Literal["centre", "end"] = "centre") -> Tensor:
    """(B, 3, *size) of a (B, 3, H, W) in 0 to 1; height, then width.

    openpi's `resize_with_pad` has black on all sides; SmolVLA's on the left and above, so that the picture stands at
    the end.
    """
    height, width = image.shape[-2:]
    if (height, width) == size:
        return image
    ratio = max(height / size[0], width / size[1])
    rows, columns = max(1, int(height / ratio)), max(1, int(width / ratio))
    scaled = F.interpolate(image, (rows, columns), mode="bilinear", align_corners=False).clamp(0, 1)
    above, left = size[0] - rows, size[1] - columns
    if at == "centre":
        above, left = above // 2, left // 2
    return F.pad(scaled, (left, size[1] - columns - left, above, size[0] - rows - above))


def middle(image_B3HW: Tensor, share: float) -> Tensor:
    """The middle of the pictures with this share of their area, at their own size.

    As TensorFlow's `crop_and_resize` does in OpenVLA: bilinear, the outermost pixels on the crop's edges.
    """
    count, _, height, width = image_B3HW.shape
    side = math.sqrt(share)
    rows_H, columns_W = (torch.linspace(-side, side, size).to(image_B3HW) for size in (height, width))
    places_HW2 = torch.stack([columns_W.expand(height, width), rows_H[:, None].expand(height, width)], -1)
    return F.grid_sample(image_B3HW, places_HW2.expand(count, -1, -1, -1), align_corners=True)


def stretched(image: Tensor, side: int) -> Tensor:
    """(B, 3, side, side) of (B, 3, H, W) in 0 to 1, bicubic."""
    if image.shape[-2:] == (side, side):
        return image
    return F.interpolate(image, (side, side), mode="bicubic", antialias=True, align_corners=False).clamp(0, 1)
