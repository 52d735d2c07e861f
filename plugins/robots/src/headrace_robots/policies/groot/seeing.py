"""What GR00T sees: cameras' pictures resized as its processors do it, and Qwen3-VL's vision tower over them.

Shapes as in `qwen`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from headrace_schema.sections.base import Count
from pydantic import Field
from torch import Tensor, nn
from transformers.models.qwen3_vl.modeling_qwen3_vl import (
    Qwen3VLVisionBlock,
    Qwen3VLVisionPatchEmbed,
    Qwen3VLVisionPatchMerger,
    Qwen3VLVisionRotaryEmbedding,
)

from headrace_robots.policies.qwen import Processor, Tower, TowerAttention, bicubic, levels

# transformers' modules are not annotated.
_Block: Any = Qwen3VLVisionBlock
_Embed: Any = Qwen3VLVisionPatchEmbed
_Merger: Any = Qwen3VLVisionPatchMerger
_Rotary: Any = Qwen3VLVisionRotaryEmbedding


class Pictures(Processor):
    """How a picture is resized before the tower sees it."""

    height: Count = 256
    width: Count = 256
    edge: Count | None = Field(default=None, description="side before the middle is cut out; null: height")
    crop: float = Field(default=1.0, gt=0, le=1, description="share of each side that is read, in the middle")
    square: bool = Field(default=False, description="black around it makes a picture square first")
    by_area: bool = Field(
        default=False, description="scaled as cv2's INTER_AREA, by the shorter edge; else stretched, bicubic"
    )

    def ready(self, image_BHWC: Tensor, multiple: int) -> Tensor:
        """(B, 3, H, W) normalised, of (B, H, W, 3) uint8; sides are multiples. Every step rounds to whole levels."""
        image = image_BHWC.permute(0, 3, 1, 2)
        if self.square:
            image = _squared(image)
        image = self._scaled(self._middle(self._scaled(image, self.edge or self.height)), None)
        return self.processed(image, multiple)

    def _scaled(self, image: Tensor, edge: int | None) -> Tensor:
        """To a square of `edge`, or the final size."""
        if not self.by_area:
            return bicubic(image, (edge, edge) if edge else (self.height, self.width))
        side = edge or self.edge or self.height
        height, width = image.shape[-2:]
        ratio = side / min(height, width)
        return area_scaled(image, (max(1, round(height * ratio)), max(1, round(width * ratio))))

    def _middle(self, image: Tensor) -> Tensor:
        sides = [side * self.crop for side in image.shape[-2:]]
        height, width = (max(1, int(side) if self.by_area else round(side)) for side in sides)
        top, left = (image.shape[-2] - height) // 2, (image.shape[-1] - width) // 2
        return image[..., top : top + height, left : left + width]


def _squared(image: Tensor) -> Tensor:
    height, width = image.shape[-2:]
    rows, columns = max(width - height, 0), max(height - width, 0)
    return F.pad(image, (columns // 2, columns - columns // 2, rows // 2, rows - rows // 2))


def area_scaled(image: Tensor, size: tuple[int, int]) -> Tensor:
    """uint8 pictures as cv2's INTER_AREA scales them, to a level: means of areas, and between pixels if they grow."""
    if image.shape[-2:] == size:
        return image
    shrinks = image.shape[-2] >= size[0] and image.shape[-1] >= size[1]
    rows, columns = (
        _shares(given, side, shrinks=shrinks).to(image.device)
        for given, side in zip(image.shape[-2:], size, strict=True)
    )
    return levels(rows @ image.float() @ columns.T)


def _shares(given: int, side: int, *, shrinks: bool) -> Tensor:
    """(side, given) shares of the given pixels in each new one."""
    scale = given / side
    new = torch.arange(side, dtype=torch.float64)[:, None]
    old = torch.arange(given, dtype=torch.float64)[None]
    if shrinks:
        covered = torch.minimum((new + 1) * scale, old + 1) - torch.maximum(new * scale, old)
        covered = covered.clamp(min=0)
        return (covered / covered.sum(1, keepdim=True)).float()
    first = torch.floor(new * scale)
    share = (new + 1) - (first + 1) / scale
    share = torch.where(share <= 0, torch.zeros_like(share), share - torch.floor(share))
    share = torch.where(first >= given - 1, torch.zeros_like(share), share)
    found: Tensor = (old == first) * (1 - share) + (old == first + 1) * share
    return found.float()


class Eye(Tower):
    """The tower of a Qwen3-VL."""

    def __init__(self, sizes: Any) -> None:
        super().__init__(sizes)
        self.patch_embed = _Embed(sizes)
        self.pos_embed = nn.Embedding(sizes.num_position_embeddings, sizes.hidden_size)
        self.rotary_pos_emb = _Rotary(sizes)
        self.blocks = nn.ModuleList(_Block(sizes) for _ in range(sizes.depth))
        for block in self.blocks:
            block.attn = TowerAttention(sizes)
        self.merger = _Merger(sizes)
        self.deepstack_merger_list = nn.ModuleList(
            _Merger(sizes, use_postshuffle_norm=True) for _ in sizes.deepstack_visual_indexes
        )

    def forward(self, pixels: Tensor) -> tuple[Tensor, list[Tensor]]:
        """(B, M, D) tokens of (B, 3, H, W) pixels, and those of lower blocks, which the reader's first layers add."""
        hidden, turns, _ = self.embedded(pixels)
        hidden = hidden + self._learned(pixels).to(hidden.dtype)
        below = []
        for index, block in enumerate(self.blocks):
            hidden = block(hidden, cu_seqlens=None, position_embeddings=turns)
            if index in self.sizes.deepstack_visual_indexes:
                merger = self.deepstack_merger_list[list(self.sizes.deepstack_visual_indexes).index(index)]
                below.append(merger(hidden).view(len(pixels), -1, self.sizes.out_hidden_size))
        return self.merger(hidden).view(len(pixels), -1, self.sizes.out_hidden_size), below

    def _learned(self, pixels: Tensor) -> Tensor:
        """(P, W): the square of learned places, scaled to the picture's."""
        side = round(self.sizes.num_position_embeddings**0.5)
        square = self.pos_embed.weight.float().T.view(1, -1, side, side)
        grid = [length // self.sizes.patch_size for length in pixels.shape[-2:]]
        scaled = F.interpolate(square, grid, mode="bilinear", align_corners=True)
        return self.ordered(scaled[0].permute(1, 2, 0))
