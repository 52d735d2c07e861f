"""`groot`: GR00T N1.7, a Qwen3-VL whose last kept layer a diffusion transformer attends to, which follows a flow.

Facts: huggingface/lerobot v0.6.1, `policies/groot` (NVIDIA's Isaac-GR00T in LeRobot). A policy has the encoders of one
embodiment. Where prompts differ in length, LeRobot mixes what stands before the shorter into what is seen; here no
position attends to it, so that a draw does not depend on who else is in the batch. Shapes as in `flow_policy`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, Literal

import torch
import torch.nn.functional as F
from headrace_schema.sections.base import Count, CountOrZero
from pydantic import Field, model_validator
from torch import Tensor, nn
from transformers import Qwen3VLConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextModel
from typing_extensions import override

from headrace_robots.policies.flows.flow import FlowConfig, VelocityField
from headrace_robots.policies.flows.policy import (
    ADDED,
    FlowPolicy,
    FlowPolicyConfig,
    FlowSizes,
    imitation_times,
    mean_of,
)
from headrace_robots.policies.groot.dit import Dit, GrootBlock, sinusoids
from headrace_robots.policies.groot.seeing import Eye, Pictures
from headrace_robots.policies.policy import Observation, PolicyShape, seen_example, uint8_image_of
from headrace_robots.policies.qwen import put, rows_of

WHATEVER = "Perform the task."
"""What it reads where there is no instruction."""


class GrootConfig(FlowPolicyConfig):
    """Sizes of the model, what actions are, and how they are drawn."""

    kind: Literal["groot"] = "groot"
    embodiment: str = Field(default="new_embodiment", description="whose encoders and statistics these are")
    vlm: dict[str, Any] = Field(
        description="fields of transformers' Qwen3VLConfig; text_config.num_hidden_layers: those that are kept"
    )
    pictures: Pictures = Pictures()
    plain: bool = Field(default=True, description="instructions in small letters, without punctuation")
    clip_state: bool = Field(default=True, description="the normalised state lies between -1 and 1")
    horizon: Count = Field(default=40, description="actions that are drawn at once")
    taught: Count | None = Field(
        default=None, description="first of them that demonstrations teach and robots execute; null: all"
    )
    action_width: Count = Field(default=132, description="numbers that are drawn for each")
    state_width: Count = Field(default=132, description="numbers that a state is filled up to")
    hidden: Count = Field(default=1024, description="width of encoders and decoder")
    layers: Count = Field(default=32, description="of the diffusion transformer")
    heads: Count = 32
    head_size: Count = 48
    turn: Count = Field(
        default=2, description="blocks that read the prefix: one of so many its text, others images"
    )
    mixers: CountOrZero = Field(default=4, description="layers over what the language model has read")
    mixer_heads: Count = 32
    places: Count = Field(default=1024, description="learned places of actions")
    buckets: Count = Field(default=1000, description="whole numbers that stand for times")
    beta: float = Field(default=1.5, gt=0, description="of the times that imitation looks at")
    last_time: float = Field(default=0.999, gt=0, lt=1, description="the greatest of them")
    flow: FlowConfig = FlowConfig(steps=4)

    @cached_property
    def filled(self) -> Qwen3VLConfig:
        """`vlm` with what it leaves out."""
        return Qwen3VLConfig(**{**self.vlm, "attn_implementation": "sdpa"})

    @property
    @override
    def sizes(self) -> FlowSizes:
        vlm: Any = self.filled
        return FlowSizes(
            horizon=self.horizon,
            numbers=self.action_width,
            state=self.state_width,
            hidden=int(vlm.text_config.hidden_size),
            expert=self.hidden,
        )

    @model_validator(mode="after")
    def _possible(self) -> GrootConfig:
        taught = self.taught or self.horizon
        if not self.chunk_length <= taught <= self.horizon <= self.places:
            raise ValueError(
                f"chunk_length {self.chunk_length}, taught {taught}, horizon {self.horizon} and places {self.places}: "
                "each is at most the next"
            )
        return self

    @override
    def prompt_ids(self, tokenizer: Any, instruction: str) -> tuple[int, ...]:
        """A user's message of a picture for each camera and the instruction, by the tokenizer's chat template."""
        text = instruction or WHATEVER
        if self.plain:
            text = "".join(each for each in text.lower() if each.isalnum() or each.isspace() or each == "_")
        content = [{"type": "image"} for _ in self.cameras] + [{"type": "text", "text": text}]
        message = tokenizer.apply_chat_template([{"role": "user", "content": content}], tokenize=False)
        return super().prompt_ids(tokenizer, message)

    @override
    def check_tokenizer(self, tokenizer: Any) -> None:
        found = self.prompt_ids(tokenizer, "").count(int(self.filled.image_token_id))
        if found != len(self.cameras):
            raise ValueError(
                f"its chat template writes {found} image tokens (id {self.filled.image_token_id}) for "
                f"{len(self.cameras)} cameras"
            )

    @override
    def policy(self) -> type[GrootPolicy]:
        return GrootPolicy


class GrootPolicy(FlowPolicy):
    """`groot`."""

    shape = PolicyShape(
        layers=("Qwen3VLVisionBlock", "Qwen3VLTextDecoderLayer", "GrootBlock"),
        parts={
            "vision": ("eye.",),
            "language": ("reader.",),
            "expert": ("normed.", "mixers.", "dit.", "state_encoder.", "action_", "position_embedding."),
        },
        added=ADDED,
    )
    config: GrootConfig

    def __init__(self, config: GrootConfig) -> None:
        super().__init__(config)
        vlm: Any = config.filled
        self.horizon = config.taught or config.horizon
        width, read = config.heads * config.head_size, int(vlm.text_config.hidden_size)
        self.eye = Eye(vlm.vision_config)
        self.reader: Any = _Reader(vlm.text_config)
        self.normed = nn.LayerNorm(read)
        self.mixers = nn.ModuleList(
            GrootBlock(read, config.mixer_heads, read=None, timed=False) for _ in range(config.mixers)
        )
        self.dit = Dit(config.layers, config.heads, width, read, config.hidden, config.turn)
        self.state_encoder = _twice(config.state_width, config.hidden, width)
        self.action_encoder = nn.ModuleDict(
            {
                "W1": nn.Linear(config.action_width, width),
                "W2": nn.Linear(2 * width, width),
                "W3": nn.Linear(width, width),
            }
        )
        self.action_decoder = _twice(config.hidden, config.hidden, config.action_width)
        self.position_embedding = nn.Embedding(config.places, width)
        sides = config.pictures.height // self.eye.multiple, config.pictures.width // self.eye.multiple
        self.chunk_tokens = sides[0] * sides[1] * len(config.cameras) + 1 + config.horizon

    @override
    def prefix(self, observation: Observation) -> tuple[Any, Tensor, Tensor]:
        device = self.value_head.weight.device
        seen, below, grids = self._seen_tokens(observation, device)
        image = int(self.config.filled.image_token_id)
        ids_BN, places_3BN, images_BM, mask_BN = rows_of(observation, image, grids, device)
        words = self.reader.embed_tokens(ids_BN)
        features = self.reader(
            inputs_embeds=put(words, images_BM, seen),
            attention_mask=mask_BN.long(),
            position_ids=places_3BN,
            deepstack_visual_embeds=[put(torch.zeros_like(words), images_BM, each) for each in below],
            use_cache=False,
        ).last_hidden_state
        features = self.normed(features)
        for mixer in self.mixers:
            features = mixer(features, None, None, mask_BN)
        images_BN = torch.zeros_like(mask_BN).scatter(1, images_BM, True)
        return (features, images_BN), mask_BN, self.value_head(mean_of(features, mask_BN))

    def _seen_tokens(
        self, observation: Observation, device: torch.device
    ) -> tuple[Tensor, list[Tensor], list[tuple[int, int]]]:
        """(B, M, D) tokens of all cameras, those that the reader's first layers add, and each camera's rows and
        columns of tokens."""
        seen, below, grids = [], [], []
        for camera in self.config.cameras:
            image = uint8_image_of(observation, camera, device)
            pixels = self.config.pictures.ready(image, self.eye.multiple)
            tokens, deep = self.eye(pixels)
            seen.append(tokens)
            below.append(deep)
            grids.append((pixels.shape[-2] // self.eye.multiple, pixels.shape[-1] // self.eye.multiple))
        return torch.cat(seen, 1), [torch.cat(each, 1) for each in zip(*below, strict=True)], grids

    @override
    def field(self, observation: Observation, cache: Any, mask_BN: Tensor) -> VelocityField:
        features, images_BN = cache
        text_BN = mask_BN & ~images_BN
        dtype = self.position_embedding.weight.dtype
        state_BS = self._state(observation, mask_BN.device, self.config.state_width)
        if self.config.clip_state:
            state_BS = state_BS.clamp(-1, 1)
        state = _through(self.state_encoder, state_BS.to(dtype))[:, None]

        def velocity(point: Tensor, time_B: Tensor) -> tuple[Tensor, Tensor | None]:
            # Its time goes from 0 (noise) to 1 (action), in whole buckets; a step's own begins one of them.
            bucket_B = ((1 - time_B) * self.config.buckets + 1e-3).floor()
            hidden = torch.cat([state, self._actions(point.to(dtype), bucket_B)], 1)
            found = self.dit(hidden, bucket_B, features, text_BN, images_BN)[:, 1:]
            return -_through(self.action_decoder, found).float(), self._log_width(found)

        return velocity

    def _actions(self, point: Tensor, bucket_B: Tensor) -> Tensor:
        """(B, H, W) embeddings of noisy actions, a time and their places."""
        actions = self.action_encoder["W1"](point)
        times = sinusoids(bucket_B, actions.shape[-1]).to(actions.dtype)[:, None].expand_as(actions)
        both = F.silu(self.action_encoder["W2"](torch.cat([actions, times], -1)))
        found: Tensor = self.action_encoder["W3"](both) + self.position_embedding.weight[: point.shape[1]]
        return found

    @override
    def _imitation_times(self, seeds: Sequence[int]) -> Tensor:
        last = self.config.last_time
        return imitation_times(seeds, self.config.beta, last, 1 - last)

    @override
    def _seen(self, count: int, words: int) -> Observation:
        found = seen_example(
            self.config, count, words, (self.config.pictures.height, self.config.pictures.width)
        )
        image = (int(self.config.filled.image_token_id),)
        prompts = tuple(image * len(self.config.cameras) + prompt for prompt in found.prompts)
        return Observation(found.state_BS, found.images, prompts)


# transformers' modules are not annotated.
_TextModel: Any = Qwen3VLTextModel


class _Reader(_TextModel):  # type: ignore[misc]
    """Qwen3-VL's language model up to a layer, without the norm behind the last; what its first layers add has a row
    for every position."""

    def __init__(self, sizes: Any) -> None:
        super().__init__(sizes)
        self.norm = nn.Identity()

    def _deepstack_process(
        self, hidden_states: Tensor, visual_pos_masks: Any, visual_embeds: Tensor
    ) -> Tensor:
        return hidden_states + visual_embeds


def _twice(given: int, hidden: int, found: int) -> nn.ModuleDict:
    return nn.ModuleDict({"layer1": nn.Linear(given, hidden), "layer2": nn.Linear(hidden, found)})


def _through(encoder: nn.ModuleDict, values: Tensor) -> Tensor:
    found: Tensor = encoder["layer2"](F.relu(encoder["layer1"](values)))
    return found
