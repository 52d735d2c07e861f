"""A tiny OpenVLA put together from transformers' own DINOv2, SigLIP and Llama, under the published names."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from headrace_robots.policies.openvla.model import pixels
from headrace_robots.policies.openvla.vit import VitShape
from transformers import (
    Dinov2WithRegistersConfig,
    Dinov2WithRegistersModel,
    LlamaConfig,
    LlamaForCausalLM,
    SiglipVisionConfig,
    SiglipVisionModel,
)

SHAPES = {
    "tiny_dinov2": VitShape(
        width=16,
        depth=3,
        heads=2,
        mlp_width=64,
        image_size=28,
        patch_size=14,
        registers=4,
        class_token=True,
        layer_scale=True,
    ),
    "tiny_siglip": VitShape(
        width=24, depth=3, heads=2, mlp_width=40, image_size=28, patch_size=14, attention_pool=True
    ),
}
TEXT = {
    "vocab_size": 364,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "pad_token_id": 0,
}


class Parts:
    """The same model made of transformers' parts."""

    def __init__(self) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.dino = Dinov2WithRegistersModel(
                Dinov2WithRegistersConfig(
                    hidden_size=16,
                    num_hidden_layers=3,
                    num_attention_heads=2,
                    mlp_ratio=4,
                    image_size=28,
                    patch_size=14,
                    num_register_tokens=4,
                )
            ).eval()
            self.siglip = SiglipVisionModel(
                SiglipVisionConfig(
                    hidden_size=24,
                    num_hidden_layers=3,
                    num_attention_heads=2,
                    intermediate_size=40,
                    image_size=28,
                    patch_size=14,
                    hidden_act="gelu",
                    vision_use_head=False,
                )
            ).eval()
            self.llama = LlamaForCausalLM(LlamaConfig(**TEXT)).eval()
            for module in (self.dino, self.siglip, self.llama):
                for parameter in module.parameters():
                    torch.nn.init.normal_(parameter, std=0.3)
            with torch.no_grad():
                self.dino.embeddings.position_embeddings[:, 0] = 0  # timm has none for the class token
            self.fc = [
                torch.randn(size) * 0.2 for size in ((160, 40), (160,), (32, 160), (32,), (32, 32), (32,))
            ]

    def published(self) -> dict[str, torch.Tensor]:
        """Weights under the published names."""
        found = {f"language_model.{name}": value for name, value in self.llama.state_dict().items()}
        for index, name in enumerate(("fc1", "fc2", "fc3")):
            found[f"projector.{name}.weight"], found[f"projector.{name}.bias"] = self.fc[
                2 * index : 2 * index + 2
            ]
        found |= {f"vision_backbone.featurizer.{name}": value for name, value in self._dino_names().items()}
        found |= {f"vision_backbone.fused_featurizer.{n}": value for n, value in self._siglip_names().items()}
        return {name: value.detach().clone().contiguous() for name, value in found.items()}

    def _dino_names(self) -> dict[str, torch.Tensor]:
        own = self.dino.state_dict()
        found = {
            "cls_token": own["embeddings.cls_token"],
            "reg_token": own["embeddings.register_tokens"],
            "pos_embed": own["embeddings.position_embeddings"][:, 1:],
            "norm.weight": own["layernorm.weight"],
            "norm.bias": own["layernorm.bias"],
        }
        for kind in ("weight", "bias"):
            found[f"patch_embed.proj.{kind}"] = own[f"embeddings.patch_embeddings.projection.{kind}"]
            for layer in range(3):
                block = f"encoder.layer.{layer}."
                parts = [own[f"{block}attention.{name}_proj.{kind}"] for name in "qkv"]
                found[f"blocks.{layer}.attn.qkv.{kind}"] = torch.cat(parts)
                found[f"blocks.{layer}.attn.proj.{kind}"] = own[f"{block}attention.o_proj.{kind}"]
                for name in ("norm1", "norm2", "mlp.fc1", "mlp.fc2"):
                    found[f"blocks.{layer}.{name}.{kind}"] = own[f"{block}{name}.{kind}"]
        for layer in range(3):
            for place in (1, 2):
                scale = own[f"encoder.layer.{layer}.layer_scale{place}.lambda1"]
                found[f"blocks.{layer}.ls{place}.scale_factor"] = scale
        return found

    def _siglip_names(self) -> dict[str, torch.Tensor]:
        own = self.siglip.state_dict()
        found = {
            "pos_embed": own["embeddings.position_embedding.weight"][None],
            "attn_pool.latent": torch.zeros(1, 1, 24),
        }
        shapes = {"q": (24, 24), "kv": (48, 24), "proj": (24, 24), "mlp.fc1": (40, 24), "mlp.fc2": (24, 40)}
        for name, shape in shapes.items():
            found[f"attn_pool.{name}.weight"], found[f"attn_pool.{name}.bias"] = (
                torch.ones(shape),
                torch.ones(shape[0]),
            )
        for kind in ("weight", "bias"):
            found[f"attn_pool.norm.{kind}"] = torch.ones(24)
            found[f"norm.{kind}"] = own[f"post_layernorm.{kind}"]
            found[f"patch_embed.proj.{kind}"] = own[f"embeddings.patch_embedding.{kind}"]
            for layer in range(3):
                block = f"encoder.layers.{layer}."
                parts = [own[f"{block}self_attn.{name}_proj.{kind}"] for name in "qkv"]
                found[f"blocks.{layer}.attn.qkv.{kind}"] = torch.cat(parts)
                found[f"blocks.{layer}.attn.proj.{kind}"] = own[f"{block}self_attn.out_proj.{kind}"]
                for ours, theirs in (("norm1", "layer_norm1"), ("norm2", "layer_norm2")):
                    found[f"blocks.{layer}.{ours}.{kind}"] = own[f"{block}{theirs}.{kind}"]
                for name in ("mlp.fc1", "mlp.fc2"):
                    found[f"blocks.{layer}.{name}.{kind}"] = own[f"{block}{name}.{kind}"]
        return found

    def embeds(self, image: torch.Tensor, prompt: tuple[int, ...]) -> torch.Tensor:
        """(1, N, D) of one uint8 image and one prompt, without any padding."""
        shown = image.permute(2, 0, 1)[None].float() / 255
        dino, siglip = (pixels(shown, shape) for shape in SHAPES.values())
        seen = self.dino(dino, output_hidden_states=True).hidden_states[-2][:, 5:]
        other = self.siglip(siglip, output_hidden_states=True).hidden_states[-2]
        features = torch.cat([seen, other], -1)
        w1, b1, w2, b2, w3, b3 = self.fc
        patches = F.linear(F.gelu(F.linear(F.gelu(F.linear(features, w1, b1)), w2, b2)), w3, b3)
        words = self.llama.model.embed_tokens(torch.tensor([prompt]))
        return torch.cat([words[:, :1], patches, words[:, 1:]], 1)
