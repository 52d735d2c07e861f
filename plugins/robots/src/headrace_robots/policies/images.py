"""Pictures as policies resize them: scaled to fit, with black around. Knows no policy."""

from __future__ import annotations

from typing import Literal

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
