"""`wall`: WALL-OSS, a Qwen2.5-VL that follows a flow of actions behind its prompt.

Its layers have a second feed-forward part, which the positions of actions go through; attention and norms are shared.
What the prompt says sees no action, so it is read once; actions see it, and each other. Facts: huggingface/lerobot
v0.6.1, `policies/wall_x` (X-Square's wall-x in LeRobot). Shapes as in `flow_policy`.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any, Literal

import torch
import torch.nn.functional as F
from headrace_schema.sections.base import Count, CountOrZero
from pydantic import Field
from torch import Tensor, nn
from transformers import Qwen2_5_VLConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
    Qwen2_5_VLAttention,
    Qwen2_5_VLRMSNorm,
    Qwen2_5_VLRotaryEmbedding,
)
from typing_extensions import override

from headrace_robots.policies.flows.flow import VelocityField
from headrace_robots.policies.flows.policy import (
    ADDED,
    FlowPolicy,
    FlowPolicyConfig,
    FlowSizes,
    TimeWaves,
    mean_of,
)
from headrace_robots.policies.flows.prefixes import Behind, Prefix
from headrace_robots.policies.policy import Observation, PolicyShape, seen_example, uint8_image_of
from headrace_robots.policies.qwen import put, rows_of
from headrace_robots.policies.wall.seeing import WallEye, WallPictures

# transformers' modules are not annotated.
_Attention: Any = Qwen2_5_VLAttention
_Norm: Any = Qwen2_5_VLRMSNorm
_Rotary: Any = Qwen2_5_VLRotaryEmbedding

STATE_TOKEN = "<|propri|>"
WHATEVER = "Execute the robot action"
"""What it reads where there is no instruction."""
VIEWS = {"face_view": "front view", "move1_view": "move view", "move2_view": "move view"}
"""Cameras that its prompt calls by other names."""


class WallConfig(FlowPolicyConfig):
    """Sizes of the model, what actions are, and how they are drawn."""

    kind: Literal["wall"] = "wall"
    vlm: dict[str, Any] = Field(
        description="fields of transformers' Qwen2_5_VLConfig; text_config.intermediate_size: of what words go through"
    )
    pictures: WallPictures = WallPictures()
    state_token: CountOrZero = Field(description="the id in a prompt where the state goes")
    expert_width: Count = Field(default=2048, description="intermediate size of what actions go through")
    horizon: Count = Field(default=32, description="actions that are drawn at once")
    action_width: Count = Field(default=20, description="numbers that are drawn for each")
    state_width: Count = Field(default=20, description="numbers that a state is filled up to")

    @cached_property
    def filled(self) -> Qwen2_5_VLConfig:
        """`vlm` with what it leaves out."""
        return Qwen2_5_VLConfig(**{**self.vlm, "attn_implementation": "sdpa"})

    @property
    @override
    def sizes(self) -> FlowSizes:
        vlm: Any = self.filled
        hidden = int(vlm.text_config.hidden_size)
        return FlowSizes(
            horizon=self.horizon,
            numbers=self.action_width,
            state=self.state_width,
            hidden=hidden,
            expert=hidden,
        )

    @override
    def prompt_ids(self, tokenizer: Any, instruction: str) -> tuple[int, ...]:
        """A system's and a user's message: a picture for each camera, by its name, the instruction and the state."""
        task = instruction or WHATEVER
        seen = "".join(
            f" {_view(camera)}: <|vision_start|><|image_pad|><|vision_end|>" for camera in self.cameras
        )
        text = (
            "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
            f"<|im_start|>user\nObservation:{seen}\nInstruction: {task}{'' if task.endswith('.') else '.'}\n"
            f"Predict the next action in robot action.\nProprioception: {STATE_TOKEN}\n<|im_end|>\n"
            "<|im_start|>assistant\n"
        )
        return super().prompt_ids(tokenizer, text)

    @override
    def check_tokenizer(self, tokenizer: Any) -> None:
        ids = self.prompt_ids(tokenizer, "")
        image, state = (ids.count(each) for each in (int(self.filled.image_token_id), self.state_token))
        if (image, state) != (len(self.cameras), 1):
            raise ValueError(
                f"its ids of a prompt have {image} image tokens (id {self.filled.image_token_id}) for "
                f"{len(self.cameras)} cameras, and {state} {STATE_TOKEN} (id {self.state_token}) for the state"
            )

    @override
    def policy(self) -> type[WallPolicy]:
        return WallPolicy


def _view(camera: str) -> str:
    """What a prompt calls a camera."""
    return VIEWS.get(camera) or (camera.replace("_", " ") if "view" in camera else f"{camera} view")


class WallPolicy(FlowPolicy):
    """`wall`."""

    shape = PolicyShape(
        layers=("Qwen2_5_VLVisionBlock", "WallAttention", "WallMlp"),
        parts={"vision": ("eye.",), "language": ("reader.",), "expert": ("expert.", "action_head.")},
        added=ADDED,
    )
    config: WallConfig

    def __init__(self, config: WallConfig) -> None:
        super().__init__(config)
        vlm: Any = config.filled
        text = vlm.text_config
        hidden = int(text.hidden_size)
        self.eye = WallEye(vlm.vision_config)
        self.reader = WallReader(text)
        self.expert = nn.ModuleList(
            WallMlp(hidden, config.expert_width) for _ in range(text.num_hidden_layers)
        )
        self.times = TimeWaves(hidden, 2 * math.pi, 2 * math.pi * 10_000)
        sides = {
            "w1": (2 * config.action_width, hidden),
            "w2": (2 * hidden, hidden),
            "w3": (hidden, hidden),
            "action_proj_back": (hidden, config.action_width),
            "propri_proj": (2 * config.state_width, hidden),
        }
        self.action_head = nn.ModuleDict({name: nn.Linear(*each, bias=False) for name, each in sides.items()})
        side = round(config.pictures.side / self.eye.multiple)
        self.chunk_tokens = side**2 * len(config.cameras) + 1 + config.horizon

    @override
    def prefix(self, observation: Observation) -> tuple[Any, Tensor, Tensor]:
        device = self.value_head.weight.device
        seen, grids = self._seen_tokens(observation, device)
        image = int(self.config.filled.image_token_id)
        ids_BN, places_3BN, images_BM, mask_BN = rows_of(observation, image, grids, device)
        if any(prompt.count(self.config.state_token) != 1 for prompt in observation.prompts):
            raise ValueError(f"a prompt needs one id {self.config.state_token}, where the state goes")
        state_BN1 = (ids_BN == self.config.state_token)[..., None]
        words = put(self.reader.embed_tokens(ids_BN), images_BM, seen)
        state_BS = self._state(observation, device, self.config.state_width)
        told = self.action_head["propri_proj"](_with_mask(state_BS, self.config.state.size).to(words.dtype))
        length = mask_BN.shape[1]
        causal_NN = torch.ones(length, length, dtype=torch.bool, device=device).tril()
        found = self.reader(
            torch.where(state_BN1, told[:, None], words),
            places_3BN,
            causal_NN & mask_BN[:, None, None],
            prefix := Prefix(),
        )
        following_B = places_3BN.amax((0, 2)) + 1
        return (Behind(prefix), following_B), mask_BN, self.value_head(mean_of(found, mask_BN))

    def _seen_tokens(
        self, observation: Observation, device: torch.device
    ) -> tuple[Tensor, list[tuple[int, int]]]:
        """(B, M, D) tokens of all cameras, and each camera's rows and columns of tokens."""
        seen, grids = [], []
        for camera in self.config.cameras:
            pixels = self.config.pictures.ready(
                uint8_image_of(observation, camera, device), self.eye.multiple
            )
            seen.append(self.eye(pixels))
            grids.append((pixels.shape[-2] // self.eye.multiple, pixels.shape[-1] // self.eye.multiple))
        return torch.cat(seen, 1), grids

    @override
    def field(self, observation: Observation, cache: Any, mask_BN: Tensor) -> VelocityField:
        behind, following_B = cache
        dtype, head = self.reader.embed_tokens.weight.dtype, self.action_head
        places_BH = following_B[:, None] + torch.arange(self.config.horizon, device=mask_BN.device)
        places_3BH = places_BH.expand(3, -1, -1)
        seen_BN = F.pad(mask_BN, (0, self.config.horizon), value=True)
        seen = seen_BN[:, None, None].expand(-1, 1, self.config.horizon, -1)

        def velocity(point: Tensor, time_B: Tensor) -> tuple[Tensor, Tensor | None]:
            # Its own time goes from 0 (noise) to 1 (action), and so does its velocity.
            actions = head["w1"](_with_mask(point, self.action_size).to(dtype))
            times = self.times(1 - time_B).to(dtype)[:, None].expand_as(actions)
            hidden = head["w3"](F.silu(head["w2"](torch.cat([actions, times], -1))))
            features = self.reader(hidden, places_3BH, seen, behind, self.expert)
            return -head["action_proj_back"](features).float(), self._log_width(features)

        return velocity

    @override
    def _seen(self, count: int, words: int) -> Observation:
        side = self.config.pictures.side
        found = seen_example(self.config, count, words, (side, side))
        more = (*[int(self.config.filled.image_token_id)] * len(self.config.cameras), self.config.state_token)
        prompts = tuple(more + prompt for prompt in found.prompts)
        return Observation(found.state_BS, found.images, prompts)


def _with_mask(values: Tensor, size: int) -> Tensor:
    """(…, 2 W) of (…, W): the values, and which of them a robot has."""
    own = (torch.arange(values.shape[-1], device=values.device) < size).to(values.dtype)
    return torch.cat([values, own.expand_as(values)], -1)


class WallReader(nn.Module):
    """Qwen2.5-VL's language model. `sizes` are its text_config."""

    def __init__(self, sizes: Any) -> None:
        super().__init__()
        layers = range(sizes.num_hidden_layers)
        self.embed_tokens = nn.Embedding(sizes.vocab_size, sizes.hidden_size)
        self.layers = nn.ModuleList(WallAttention(sizes, index) for index in layers)
        self.mlps = nn.ModuleList(WallMlp(sizes.hidden_size, sizes.intermediate_size) for _ in layers)
        self.norm = _Norm(sizes.hidden_size, eps=sizes.rms_norm_eps)
        self.rotary_emb = _Rotary(sizes)

    def forward(
        self, hidden: Tensor, places_3BT: Tensor, seen: Tensor, cache: Any, expert: Any = None
    ) -> Tensor:
        """(B, T, D) of (B, T, D) behind the cache; `seen` is what each position attends to, (B, 1, T, all that there
        are). They go through the feed-forward parts of `expert`, layer by layer; None: through those of words."""
        angles = self.rotary_emb(hidden, places_3BT)
        for layer, mlp in zip(self.layers, expert or self.mlps, strict=True):
            hidden, normed = layer(hidden, seen, angles, cache)
            hidden = hidden + mlp(normed)
        found: Tensor = self.norm(hidden)
        return found


class WallAttention(nn.Module):
    """A layer of Qwen2.5-VL up to its feed-forward part, which ranks gather apart: a pass needs one of two."""

    def __init__(self, sizes: Any, index: int) -> None:
        super().__init__()
        self.self_attn = _Attention(sizes, index)
        self.input_layernorm = _Norm(sizes.hidden_size, eps=sizes.rms_norm_eps)
        self.post_attention_layernorm = _Norm(sizes.hidden_size, eps=sizes.rms_norm_eps)

    def forward(self, hidden: Tensor, seen: Tensor, angles: Any, cache: Any) -> tuple[Tensor, Tensor]:
        """(B, T, D) with what it attends to, and the same normed."""
        mixed, _ = self.self_attn(
            self.input_layernorm(hidden),
            attention_mask=seen,
            position_embeddings=angles,
            past_key_values=cache,
        )
        hidden = hidden + mixed
        return hidden, self.post_attention_layernorm(hidden)


class WallMlp(nn.Module):
    """The gated feed-forward part of a layer."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, width, bias=False)
        self.up_proj = nn.Linear(hidden, width, bias=False)
        self.down_proj = nn.Linear(width, hidden, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        found: Tensor = self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))
        return found
