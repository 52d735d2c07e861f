"""What WALL-OSS sees: cameras' pictures resized as LeRobot does it, and Qwen2.5-VL's vision tower over them.

Shapes as in `qwen`.
"""

from __future__ import annotations

from typing import Any

from headrace_schema.sections.base import Count
from pydantic import Field
from torch import Tensor, nn
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
    Qwen2_5_VisionPatchEmbed,
    Qwen2_5_VLPatchMerger,
    Qwen2_5_VLVisionBlock,
    Qwen2_5_VLVisionRotaryEmbedding,
)

from headrace_robots.policies.qwen import Processor, Tower, TowerAttention, bicubic, whole_size

# transformers' modules are not annotated.
_Block: Any = Qwen2_5_VLVisionBlock
_Embed: Any = Qwen2_5_VisionPatchEmbed
_Merger: Any = Qwen2_5_VLPatchMerger
_Rotary: Any = Qwen2_5_VLVisionRotaryEmbedding

LEAST, MOST = 4 * 28 * 28, 16384 * 28 * 28
"""Pixels of a picture, as LeRobot bounds them before Qwen's processor does."""


class WallPictures(Processor):
    """How a picture is resized before the tower sees it."""

    side: Count = Field(default=256, description="the longer side, before both become whole tokens")
    least: Count = Field(default=56 * 56, description="fewest pixels that the tower is given")
    most: Count = Field(default=28 * 28 * 16384, description="most pixels that the tower is given")
    mean: tuple[float, float, float] = (0.48145466, 0.4578275, 0.40821073)
    std: tuple[float, float, float] = (0.26862954, 0.26130258, 0.27577711)

    def ready(self, image_BHWC: Tensor, multiple: int) -> Tensor:
        """(B, 3, H, W) normalised, of (B, H, W, 3) uint8; sides are multiples. Every step rounds to whole levels."""
        image = image_BHWC.permute(0, 3, 1, 2)
        height, width = image.shape[-2:]
        size = (
            (int(self.side * height / width), self.side)
            if width > height
            else (self.side, int(self.side * width / height))
        )
        image = bicubic(image, size)
        return self.processed(bicubic(image, whole_size(image, multiple, LEAST, MOST)), multiple)


class WallEye(Tower):
    """The tower of a Qwen2.5-VL, most of whose blocks attend within windows of a picture."""

    def __init__(self, sizes: Any) -> None:
        super().__init__(sizes)
        self.patch_embed = _Embed(
            sizes.patch_size, sizes.temporal_patch_size, sizes.in_channels, sizes.hidden_size
        )
        self.rotary_pos_emb = _Rotary(sizes)
        self.blocks = nn.ModuleList(_Block(sizes) for _ in range(sizes.depth))
        for block in self.blocks:
            block.attn = TowerAttention(sizes)
        self.merger = _Merger(sizes.out_hidden_size, sizes.hidden_size, sizes.spatial_merge_size)

    def forward(self, pixels: Tensor) -> Tensor:
        """(B, M, D) tokens of (B, 3, H, W) pixels."""
        hidden, turns, places_P2 = self.embedded(pixels)
        window_P2 = places_P2 // self.sizes.spatial_merge_size // self._window
        near_PP = (window_P2[:, None] == window_P2[None]).all(-1)
        for index, block in enumerate(self.blocks):
            seen_PP = None if index in self.sizes.fullatt_block_indexes else near_PP
            hidden = block(hidden, cu_seqlens=None, position_embeddings=turns, seen_PP=seen_PP)
        found: Tensor = self.merger(hidden).view(len(pixels), -1, self.sizes.out_hidden_size)
        return found

    @property
    def _window(self) -> int:
        """Tokens of a window's side."""
        return int(self.sizes.window_size // self.multiple)
