"""Pictures as policies resize them."""

from __future__ import annotations

import numpy as np
import torch
from headrace_robots.policies.images import middle


def cropped_as_tensorflow_does(image_HWC, share):
    """tf.image.crop_and_resize, by its documentation: bilinear at y1 (H - 1) + i (y2 - y1) (H - 1) / (h - 1)."""
    height, width, _ = image_HWC.shape
    first, last = (1 - share**0.5) / 2, (1 + share**0.5) / 2
    found = np.zeros_like(image_HWC, np.float64)
    for row in range(height):
        for column in range(width):
            y = first * (height - 1) + row * (last - first) * (height - 1) / (height - 1)
            x = first * (width - 1) + column * (last - first) * (width - 1) / (width - 1)
            top, left = int(y), int(x)
            low, right = min(top + 1, height - 1), min(left + 1, width - 1)
            upper = image_HWC[top, left] * (1 - (x - left)) + image_HWC[top, right] * (x - left)
            lower = image_HWC[low, left] * (1 - (x - left)) + image_HWC[low, right] * (x - left)
            found[row, column] = upper * (1 - (y - top)) + lower * (y - top)
    return found


def test_the_middle_of_a_picture_is_what_openvla_reads_of_it():
    picture = np.random.default_rng(0).random((28, 20, 3))
    found = middle(torch.tensor(picture).permute(2, 0, 1)[None].float(), 0.9)
    wanted = cropped_as_tensorflow_does(picture, 0.9)
    torch.testing.assert_close(found[0].permute(1, 2, 0).double(), torch.tensor(wanted), atol=1e-5, rtol=0)
