"""What GR00T sees: cameras' pictures resized as its processors do it, and Qwen3-VL's vision tower over them.

The tower's blocks are transformers'; all pictures of a camera have one size, so they go through it as a batch.
Shapes: B environments, P patches and M = P / merge² tokens of a picture, W width, D hidden of the language model.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from headrace_schema.sections.base import Count, Section
from pydantic import Field
from torch import Tensor, nn
from transformers.models.qwen3_vl.modeling_qwen3_vl import (
    Qwen3VLVisionBlock,
    Qwen3VLVisionPatchEmbed,
    Qwen3VLVisionPatchMerger,
    Qwen3VLVisionRotaryEmbedding,
)

# transformers' modules are not annotated.
_Block: Any = Qwen3VLVisionBlock
_Embed: Any = Qwen3VLVisionPatchEmbed
_Merger: Any = Qwen3VLVisionPatchMerger
_Rotary: Any = Qwen3VLVisionRotaryEmbedding


class Pictures(Section):
    """How a picture is resized before the tower sees it."""

    height: Count = 256
    width: Count = 256
    edge: Count | None = Field(default=None, description="side before the middle is cut out; null: height")
    crop: float = Field(default=1.0, gt=0, le=1, description="share of each side that is read, in the middle")
    square: bool = Field(default=False, description="black around it makes a picture square first")
    by_area: bool = Field(
        default=False, description="scaled as cv2's INTER_AREA, by the shorter edge; else stretched, bicubic"
    )
    least: Count = Field(default=65536, description="fewest pixels that the tower is given")
    most: Count = Field(default=16777216, description="most pixels that the tower is given")
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)

    def ready(self, image_BHWC: Tensor, multiple: int) -> Tensor:
        """(B, 3, H, W) normalised, of (B, H, W, 3) uint8; sides are multiples. Every step rounds to whole levels."""
        image = image_BHWC.permute(0, 3, 1, 2)
        if self.square:
            image = _squared(image)
        image = self._scaled(self._middle(self._scaled(image, self.edge or self.height)), None)
        height, width = image.shape[-2:]
        image = _bicubic(image, self._whole(height, width, multiple)).float()
        mean, std = (
            torch.tensor(own, device=image.device)[:, None, None] * 255 for own in (self.mean, self.std)
        )
        return (image - mean) / std

    def _scaled(self, image: Tensor, edge: int | None) -> Tensor:
        """To a square of `edge`, or the final size."""
        if not self.by_area:
            return _bicubic(image, (edge, edge) if edge else (self.height, self.width))
        side = edge or self.edge or self.height
        height, width = image.shape[-2:]
        ratio = side / min(height, width)
        return area_scaled(image, (max(1, round(height * ratio)), max(1, round(width * ratio))))

    def _middle(self, image: Tensor) -> Tensor:
        sides = [side * self.crop for side in image.shape[-2:]]
        height, width = (max(1, int(side) if self.by_area else round(side)) for side in sides)
        top, left = (image.shape[-2] - height) // 2, (image.shape[-1] - width) // 2
        return image[..., top : top + height, left : left + width]

    def _whole(self, height: int, width: int, multiple: int) -> tuple[int, int]:
        """The nearest size of whole tokens, with as many pixels as the tower may be given."""
        found = [round(side / multiple) * multiple for side in (height, width)]
        pixels = found[0] * found[1]
        if pixels > self.most:
            share = (height * width / self.most) ** 0.5
            found = [max(multiple, int(side / share / multiple) * multiple) for side in (height, width)]
        elif pixels < self.least:
            share = (self.least / (height * width)) ** 0.5
            found = [-int(-side * share // multiple) * multiple for side in (height, width)]
        return found[0], found[1]


def _squared(image: Tensor) -> Tensor:
    height, width = image.shape[-2:]
    rows, columns = max(width - height, 0), max(height - width, 0)
    return F.pad(image, (columns // 2, columns - columns // 2, rows // 2, rows - rows // 2))


def _bicubic(image: Tensor, size: tuple[int, int]) -> Tensor:
    if image.shape[-2:] == size:
        return image
    if image.device.type == "cpu":  # the kernel that LeRobot's processors use there
        return F.interpolate(image, size, mode="bicubic", antialias=True)
    return _levels(F.interpolate(image.float(), size, mode="bicubic", antialias=True))


def _levels(image: Tensor) -> Tensor:
    return image.round().clamp(0, 255).to(torch.uint8)


def area_scaled(image: Tensor, size: tuple[int, int]) -> Tensor:
    """uint8 pictures as cv2's INTER_AREA scales them, to a level: means of areas, and between pixels if they grow."""
    if image.shape[-2:] == size:
        return image
    shrinks = image.shape[-2] >= size[0] and image.shape[-1] >= size[1]
    rows, columns = (
        _shares(given, side, shrinks=shrinks).to(image.device)
        for given, side in zip(image.shape[-2:], size, strict=True)
    )
    return _levels(rows @ image.float() @ columns.T)


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


class Eye(nn.Module):
    """The tower of a Qwen3-VL, by transformers' names. `sizes` are its vision_config."""

    def __init__(self, sizes: Any) -> None:
        super().__init__()
        self.sizes = sizes
        self.patch_embed = _Embed(sizes)
        self.pos_embed = nn.Embedding(sizes.num_position_embeddings, sizes.hidden_size)
        self.rotary_pos_emb = _Rotary(sizes)
        self.blocks = nn.ModuleList(_Block(sizes) for _ in range(sizes.depth))
        for block in self.blocks:
            block.attn = _EyeAttention(sizes)
        self.merger = _Merger(sizes)
        self.deepstack_merger_list = nn.ModuleList(
            _Merger(sizes, use_postshuffle_norm=True) for _ in sizes.deepstack_visual_indexes
        )

    @property
    def multiple(self) -> int:
        """Pixels of a token's side."""
        return int(self.sizes.patch_size * self.sizes.spatial_merge_size)

    def forward(self, pixels: Tensor) -> tuple[Tensor, list[Tensor]]:
        """(B, M, D) tokens of (B, 3, H, W) pixels, and those of lower blocks, which the reader's first layers add."""
        count, grid = len(pixels), tuple(side // self.sizes.patch_size for side in pixels.shape[-2:])
        patches = _patches(pixels, grid, self.sizes)
        hidden = self.patch_embed(patches.flatten(0, 1)).view(count, grid[0] * grid[1], -1)
        hidden = hidden + self._places(grid).to(hidden.dtype)
        turns = self.rotary_pos_emb(hidden, self._order(_axes(grid, hidden.device)))
        below = []
        for index, block in enumerate(self.blocks):
            hidden = block(hidden, cu_seqlens=None, position_embeddings=turns)
            if index in self.sizes.deepstack_visual_indexes:
                merger = self.deepstack_merger_list[list(self.sizes.deepstack_visual_indexes).index(index)]
                below.append(merger(hidden).view(count, -1, self.sizes.out_hidden_size))
        return self.merger(hidden).view(count, -1, self.sizes.out_hidden_size), below

    def _places(self, grid: tuple[int, ...]) -> Tensor:
        """(P, W): the square of learned places, scaled to the picture's."""
        side = round(self.sizes.num_position_embeddings**0.5)
        square = self.pos_embed.weight.float().T.view(1, -1, side, side)
        scaled = F.interpolate(square, grid, mode="bilinear", align_corners=True)
        return self._order(scaled[0].permute(1, 2, 0))

    def _order(self, values: Tensor) -> Tensor:
        """(P, …) of (rows, columns, …): token by token, and within each patch by patch."""
        merge, (rows, columns) = self.sizes.spatial_merge_size, values.shape[:2]
        blocks = values.reshape(rows // merge, merge, columns // merge, merge, *values.shape[2:])
        return blocks.transpose(1, 2).flatten(0, 3)


def _axes(grid: tuple[int, ...], device: torch.device) -> Tensor:
    rows, columns = (torch.arange(side, device=device) for side in grid)
    return torch.stack(torch.meshgrid(rows, columns, indexing="ij"), -1)


def _patches(pixels: Tensor, grid: tuple[int, ...], sizes: Any) -> Tensor:
    """(B, P, 3 × times × patch²), each picture as a film that stands still."""
    merge, patch = sizes.spatial_merge_size, sizes.patch_size
    cut = pixels.view(len(pixels), 3, grid[0] // merge, merge, patch, grid[1] // merge, merge, patch)
    cut = cut.permute(0, 2, 5, 3, 6, 1, 4, 7).unsqueeze(6)
    still = cut.expand(*[-1] * 6, sizes.temporal_patch_size, -1, -1)
    return still.reshape(len(pixels), grid[0] * grid[1], -1)


class _EyeAttention(nn.Module):
    """Qwen3-VL's, over a batch of pictures."""

    def __init__(self, sizes: Any) -> None:
        super().__init__()
        self.heads = int(sizes.num_heads)
        self.qkv = nn.Linear(sizes.hidden_size, 3 * sizes.hidden_size)
        self.proj = nn.Linear(sizes.hidden_size, sizes.hidden_size)

    def forward(self, hidden: Tensor, position_embeddings: tuple[Tensor, Tensor], **_: Any) -> Tensor:
        heads = self.qkv(hidden).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        queries, keys = (_turned(part, *position_embeddings) for part in heads[:2])
        mixed = F.scaled_dot_product_attention(queries, keys, heads[2])
        found: Tensor = self.proj(mixed.transpose(1, 2).flatten(2))
        return found


def _turned(heads: Tensor, cosines_PK: Tensor, sines_PK: Tensor) -> Tensor:
    one, other = heads.float().chunk(2, -1)
    return (heads.float() * cosines_PK + torch.cat([-other, one], -1) * sines_PK).to(heads.dtype)
