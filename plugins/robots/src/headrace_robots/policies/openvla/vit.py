"""Vision transformers under timm's names: the DINOv2 and SigLIP encoders of OpenVLA's checkpoints, without timm.

timm needs torchvision, which does not import beside a CPU build of torch. Names and order of operations are those of
timm 0.9's `VisionTransformer`, but for OpenVLA's `scale_factor` in place of a layer scale's `gamma`.
Shapes: B images, P patches, W width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from headrace_schema.sections.base import Count, CountOrZero, Section
from pydantic import Field
from torch import Tensor, nn

EPSILON = 1e-6


class VitShape(Section):
    """The size of an encoder, and what it has beside its blocks."""

    width: Count
    depth: Count = Field(ge=2)
    heads: Count
    mlp_width: Count
    image_size: Count = Field(description="pixels of a side")
    patch_size: Count
    registers: CountOrZero = Field(default=0, description="register tokens of DINOv2")
    class_token: bool = False
    layer_scale: bool = False
    attention_pool: bool = Field(
        default=False, description="SigLIP's pooling head, whose weights are unused here"
    )
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)

    @property
    def patches(self) -> int:
        """P."""
        return (self.image_size // self.patch_size) ** 2


PUBLISHED: dict[str, VitShape] = {
    "vit_large_patch14_reg4_dinov2.lvd142m": VitShape(
        width=1024,
        depth=24,
        heads=16,
        mlp_width=4096,
        image_size=224,
        patch_size=14,
        registers=4,
        class_token=True,
        layer_scale=True,
        mean=(0.485, 0.456, 0.406),
        std=(0.229, 0.224, 0.225),
    ),
    "vit_so400m_patch14_siglip_224": VitShape(
        width=1152,
        depth=27,
        heads=16,
        mlp_width=4304,
        image_size=224,
        patch_size=14,
        attention_pool=True,
    ),
}
"""The encoders of `dinosiglip-vit-so-224px`, by timm's names."""


class VisionTransformer(nn.Module):
    """Patches as the second-to-last block leaves them, without a norm: what Prismatic models read."""

    def __init__(self, shape: VitShape, said: int = 0) -> None:
        """`said`: width of an instruction that scales and shifts what blocks see (FiLM, as OFT has it); 0: none."""
        super().__init__()
        self.shape = shape
        width = shape.width
        if shape.class_token:
            self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        if shape.registers:
            self.reg_token = nn.Parameter(torch.zeros(1, shape.registers, width))
        self.pos_embed = nn.Parameter(torch.zeros(1, shape.patches, width))
        self.patch_embed = _PatchEmbedding(shape)
        self.blocks = nn.ModuleList(_Block(shape, said) for _ in range(shape.depth))
        self.norm = nn.LayerNorm(width, eps=EPSILON)
        if shape.attention_pool:
            self.attn_pool = _UnusedPool(shape)
        self.blocks[-1].unused = True  # type: ignore[assignment]
        unused = (self.blocks[-1], self.norm, getattr(self, "attn_pool", None))
        for module in unused:
            if module is not None:
                module.requires_grad_(False)

    def forward(self, pixels: Tensor, said_BD: Tensor | None = None) -> Tensor:
        """(B, P, W) of normalised (B, 3, H, W) pixels."""
        hidden: Tensor = self.patch_embed(pixels.to(self.pos_embed.dtype)) + self.pos_embed
        prefix = [
            token.expand(len(hidden), -1, -1)
            for token in (getattr(self, "cls_token", None), getattr(self, "reg_token", None))
            if token is not None
        ]
        hidden = torch.cat([*prefix, hidden], 1)
        for block in self.blocks[:-1]:
            hidden = block(hidden, said_BD)
        return hidden[:, hidden.shape[1] - self.shape.patches :]


class _PatchEmbedding(nn.Module):
    def __init__(self, shape: VitShape) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, shape.width, shape.patch_size, shape.patch_size)

    def forward(self, pixels: Tensor) -> Tensor:
        patches: Tensor = self.proj(pixels)
        return patches.flatten(2).transpose(1, 2)


class _Block(nn.Module):
    unused = False

    def __init__(self, shape: VitShape, said: int) -> None:
        super().__init__()
        if said:
            self.scale, self.shift = nn.Linear(said, shape.width), nn.Linear(said, shape.width)
        self.norm1 = nn.LayerNorm(shape.width, eps=EPSILON)
        self.attn = _Attention(shape)
        self.ls1 = _LayerScale(shape.width) if shape.layer_scale else nn.Identity()
        self.norm2 = nn.LayerNorm(shape.width, eps=EPSILON)
        self.mlp = _Mlp(shape)
        self.ls2 = _LayerScale(shape.width) if shape.layer_scale else nn.Identity()

    def forward(self, hidden: Tensor, said_BD: Tensor | None) -> Tensor:
        hidden = hidden + self.ls1(self.attn(self.norm1(hidden)))
        if said_BD is not None:
            hidden = hidden * (1 + self.scale(said_BD)[:, None]) + self.shift(said_BD)[:, None]
        found: Tensor = hidden + self.ls2(self.mlp(self.norm2(hidden)))
        return found


class _Attention(nn.Module):
    def __init__(self, shape: VitShape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.proj = nn.Linear(shape.width, shape.width)

    def forward(self, hidden: Tensor) -> Tensor:
        count, length, width = hidden.shape
        parts = (
            self.qkv(hidden).view(count, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        )
        mixed = F.scaled_dot_product_attention(parts[0], parts[1], parts[2])
        found: Tensor = self.proj(mixed.transpose(1, 2).reshape(count, length, width))
        return found


class _Mlp(nn.Module):
    def __init__(self, shape: VitShape) -> None:
        super().__init__()
        self.fc1 = nn.Linear(shape.width, shape.mlp_width)
        self.fc2 = nn.Linear(shape.mlp_width, shape.width)

    def forward(self, hidden: Tensor) -> Tensor:
        found: Tensor = self.fc2(F.gelu(self.fc1(hidden)))
        return found


class _LayerScale(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale_factor = nn.Parameter(torch.full((width,), 1e-5))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden * self.scale_factor


class _UnusedPool(nn.Module):
    """SigLIP's attention pooling: its weights are in the checkpoints, and patches are read before it."""

    def __init__(self, shape: VitShape) -> None:
        super().__init__()
        width = shape.width
        self.latent = nn.Parameter(torch.zeros(1, 1, width))
        self.q = nn.Linear(width, width)
        self.kv = nn.Linear(width, 2 * width)
        self.proj = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width, eps=EPSILON)
        self.mlp = _Mlp(shape)
