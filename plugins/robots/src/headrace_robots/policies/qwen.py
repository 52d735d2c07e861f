"""What policies on a Qwen-VL share: pictures of whole tokens, its vision tower, and prompts with pictures in them.

The towers' blocks are transformers'; all pictures of a camera have one size, so they go through a tower as a batch.
Shapes: B environments, P patches and M = P / merge² tokens of a picture, W width, D hidden of the language model, N
positions of a prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from headrace_schema.sections.base import Count, Section
from pydantic import Field
from torch import Tensor, nn

from headrace_robots.policies.policy import Observation
from headrace_robots.policies.published import read_json


class Processor(Section):
    """What Qwen's processor of images does to a picture before the tower sees it."""

    least: Count = Field(default=65536, description="fewest pixels that the tower is given")
    most: Count = Field(default=16777216, description="most pixels that the tower is given")
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)

    def processed(self, image: Tensor, multiple: int) -> Tensor:
        """(B, 3, H, W) normalised, of (B, 3, H, W) uint8, with sides that are multiples."""
        image = bicubic(image, whole_size(image, multiple, self.least, self.most)).float()
        mean, std = (torch.tensor(own).to(image.device)[:, None, None] * 255 for own in (self.mean, self.std))
        return (image - mean) / std


def processor_fields(base: Path) -> dict[str, Any]:
    """What a directory's preprocessor_config.json says of a `Processor`; nothing where there is none."""
    file = base / "preprocessor_config.json"
    stated = read_json(file) if file.is_file() else {}
    size = stated.get("size") or {}
    found = {
        "least": stated.get("min_pixels") or size.get("shortest_edge"),
        "most": stated.get("max_pixels") or size.get("longest_edge"),
        "mean": stated.get("image_mean"),
        "std": stated.get("image_std"),
    }
    return {name: value for name, value in found.items() if value is not None}


def whole_size(image: Tensor, multiple: int, least: int, most: int) -> tuple[int, int]:
    """The nearest size of whole tokens, with as many pixels as the tower may be given."""
    height, width = image.shape[-2:]
    found = [round(side / multiple) * multiple for side in (height, width)]
    pixels = found[0] * found[1]
    if pixels > most:
        share = (height * width / most) ** 0.5
        found = [max(multiple, int(side / share / multiple) * multiple) for side in (height, width)]
    elif pixels < least:
        share = (least / (height * width)) ** 0.5
        found = [-int(-side * share // multiple) * multiple for side in (height, width)]
    return found[0], found[1]


def bicubic(image: Tensor, size: tuple[int, int]) -> Tensor:
    """uint8 pictures scaled, in whole levels."""
    if image.shape[-2:] == size:
        return image
    if image.device.type == "cpu":  # the kernel that LeRobot's processors use there
        return F.interpolate(image, size, mode="bicubic", antialias=True)
    return levels(F.interpolate(image.float(), size, mode="bicubic", antialias=True))


def levels(image: Tensor) -> Tensor:
    """uint8 of fp32."""
    return image.round().clamp(0, 255).to(torch.uint8)


# The tower


class Tower(nn.Module):
    """What towers share, by transformers' names. `sizes` are a vision_config."""

    patch_embed: nn.Module
    rotary_pos_emb: nn.Module

    def __init__(self, sizes: Any) -> None:
        super().__init__()
        self.sizes = sizes

    @property
    def multiple(self) -> int:
        """Pixels of a token's side."""
        return int(self.sizes.patch_size * self.sizes.spatial_merge_size)

    def embedded(self, pixels: Tensor) -> tuple[Tensor, Any, Tensor]:
        """((B, P, W) of (B, 3, H, W) pixels, how each patch's place turns queries and keys, (P, 2) rows and columns of
        the patches)."""
        rows, columns = (side // self.sizes.patch_size for side in pixels.shape[-2:])
        patches = _patches(pixels, (rows, columns), self.sizes)
        hidden = self.patch_embed(patches.flatten(0, 1)).view(len(pixels), rows * columns, -1)
        axes = [torch.arange(side, device=pixels.device) for side in (rows, columns)]
        places = self.ordered(torch.stack(torch.meshgrid(*axes, indexing="ij"), -1))
        return hidden, self.rotary_pos_emb(hidden, places), places

    def ordered(self, values: Tensor) -> Tensor:
        """(P, …) of (rows, columns, …): token by token, and within each patch by patch."""
        merge, (rows, columns) = self.sizes.spatial_merge_size, values.shape[:2]
        blocks = values.reshape(rows // merge, merge, columns // merge, merge, *values.shape[2:])
        return blocks.transpose(1, 2).flatten(0, 3)


def _patches(pixels: Tensor, grid: tuple[int, int], sizes: Any) -> Tensor:
    """(B, P, 3 × times × patch²), each picture as a film that stands still."""
    merge, patch = sizes.spatial_merge_size, sizes.patch_size
    cut = pixels.view(len(pixels), 3, grid[0] // merge, merge, patch, grid[1] // merge, merge, patch)
    cut = cut.permute(0, 2, 5, 3, 6, 1, 4, 7).unsqueeze(6)
    still = cut.expand(*[-1] * 6, sizes.temporal_patch_size, -1, -1)
    return still.reshape(len(pixels), grid[0] * grid[1], -1)


class TowerAttention(nn.Module):
    """That of the towers' blocks, over a batch of pictures; of patches to all, or to those that they may see."""

    def __init__(self, sizes: Any) -> None:
        super().__init__()
        self.heads = int(sizes.num_heads)
        self.qkv = nn.Linear(sizes.hidden_size, 3 * sizes.hidden_size)
        self.proj = nn.Linear(sizes.hidden_size, sizes.hidden_size)

    def forward(
        self,
        hidden: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        seen_PP: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        heads = self.qkv(hidden).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        queries, keys = (_turned(part, *position_embeddings) for part in heads[:2])
        mixed = F.scaled_dot_product_attention(queries, keys, heads[2], attn_mask=seen_PP)
        found: Tensor = self.proj(mixed.transpose(1, 2).flatten(2))
        return found


def _turned(heads: Tensor, cosines_PK: Tensor, sines_PK: Tensor) -> Tensor:
    one, other = heads.float().chunk(2, -1)
    return (heads.float() * cosines_PK + torch.cat([-other, one], -1) * sines_PK).to(heads.dtype)


# Prompts


def put(words: Tensor, images_BM: Tensor, seen: Tensor) -> Tensor:
    """(B, N, D) with what is seen at its places."""
    return words.scatter(1, images_BM[..., None].expand_as(seen), seen.to(words.dtype))


def rows_of(
    observation: Observation, image: int, grids: Sequence[tuple[int, int]], device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """((B, N) ids with as many image tokens as are seen, (3, B, N) places, (B, M) where image tokens stand, (B, N)
    which ids there are), filled on the right. Raises ValueError for a prompt without a place for each camera.
    """
    prompts = observation.prompts
    if len(prompts) != len(observation) or any(prompt.count(image) != len(grids) for prompt in prompts):
        raise ValueError(
            f"it needs the ids of a prompt for each environment, with {len(grids)} of {image} in it, one a camera"
        )
    known = {prompt: _row(prompt, image, grids) for prompt in set(prompts)}
    longest = max(len(ids) for ids, _, _ in known.values())
    ids = [[*known[prompt][0], *[0] * (longest - len(known[prompt][0]))] for prompt in prompts]
    places = [[*known[prompt][1], *[(0, 0, 0)] * (longest - len(known[prompt][1]))] for prompt in prompts]
    kept = [[place < len(known[prompt][0]) for place in range(longest)] for prompt in prompts]
    images = [known[prompt][2] for prompt in prompts]
    found = torch.tensor(ids), torch.tensor(places).permute(2, 0, 1), torch.tensor(images), torch.tensor(kept)
    ids_BN, places_3BN, images_BM, kept_BN = (each.to(device) for each in found)
    return ids_BN, places_3BN, images_BM, kept_BN


def _row(
    prompt: Sequence[int], image: int, grids: Sequence[tuple[int, int]]
) -> tuple[list[int], list[tuple[int, int, int]], list[int]]:
    """Ids, their places in time, height and width, and where the image tokens are (arXiv 2409.12191, section 2.1)."""
    ids: list[int] = []
    places: list[tuple[int, int, int]] = []
    images: list[int] = []
    at, left = 0, iter(grids)
    for word in prompt:
        if word != image:
            ids.append(word)
            places.append((at, at, at))
            at += 1
            continue
        rows, columns = next(left)
        images += range(len(ids), len(ids) + rows * columns)
        ids += [image] * (rows * columns)
        places += [(at, at + row, at + column) for row in range(rows) for column in range(columns)]
        at += max(rows, columns)
    return ids, places, images
