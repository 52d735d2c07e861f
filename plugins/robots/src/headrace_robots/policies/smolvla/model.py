"""`smolvla`: the first layers of a SmolVLM read images, an instruction and a state; an action expert follows a flow.

Facts: huggingface/lerobot at 7427f318, `policies/smolvla`. Rotary angles are of wavelength 10,000 whatever the language
model's own configuration says. Shapes as in `flow_policy`.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, Literal

import torch
import torch.nn.functional as F
from headrace_schema.sections.base import Count
from pydantic import Field, model_validator
from torch import Tensor, nn
from transformers import SmolVLMConfig, SmolVLMModel
from typing_extensions import override

from headrace_robots.policies.flows.flow import VelocityField
from headrace_robots.policies.flows.policy import (
    ADDED,
    FlowPolicy,
    FlowPolicyConfig,
    FlowSizes,
    TimeWaves,
    mean_of,
    padded,
)
from headrace_robots.policies.flows.prefixes import Behind, Prefix
from headrace_robots.policies.images import fit
from headrace_robots.policies.policy import Observation, PolicyShape, image_of, seen_example
from headrace_robots.policies.smolvla.expert import SmolVlaExpert, expert_sizes

WAVELENGTH = 10_000.0


class SmolVlaConfig(FlowPolicyConfig):
    """Sizes of the model, what actions are, and how they are drawn."""

    kind: Literal["smolvla"] = "smolvla"
    vlm: dict[str, Any] = Field(
        description="fields of transformers' SmolVLMConfig; text_config.num_hidden_layers: those that are kept"
    )
    horizon: Count = Field(default=50, description="actions that are drawn at once")
    action_width: Count = Field(default=32, description="numbers that are drawn for each")
    state_width: Count = Field(default=32, description="numbers that a state is filled up to")
    expert_width: float = Field(
        default=0.75, gt=0, description="of the expert's hidden states, in the language model's"
    )
    self_attention_every: Count = Field(
        default=2,
        description="layers of the expert of which the first attends to actions too, the others to the prefix",
    )
    min_period: float = Field(default=4e-3, gt=0, description="shortest period of a time's sine")
    max_period: float = Field(default=4.0, gt=0, description="longest period of a time's sine")

    @cached_property
    def filled(self) -> SmolVLMConfig:
        """`vlm` with what it leaves out."""
        return self.whole()

    def whole(self) -> SmolVLMConfig:
        """As `filled`, one of its own."""
        text = {
            **self.vlm.get("text_config", {}),
            "rope_parameters": {"rope_type": "default", "rope_theta": WAVELENGTH},
        }
        return SmolVLMConfig(**{**self.vlm, "text_config": text})

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
            expert=int(hidden * self.expert_width),
        )

    @model_validator(mode="after")
    def _even(self) -> SmolVlaConfig:
        if self.sizes.expert % 2:
            raise ValueError(
                f"expert_width makes hidden states of {self.sizes.expert} numbers; their count is even"
            )
        return self

    @override
    def prompt_ids(self, tokenizer: Any, instruction: str) -> tuple[int, ...]:
        """A line."""
        text = instruction if instruction.endswith("\n") else f"{instruction}\n"
        return super().prompt_ids(tokenizer, text)

    @override
    def policy(self) -> type[SmolVlaPolicy]:
        return SmolVlaPolicy


class SmolVlaPolicy(FlowPolicy):
    """`smolvla`."""

    shape = PolicyShape(
        layers=("SmolVLMEncoderLayer", "LlamaDecoderLayer", "_ExpertLayer"),
        parts={
            "vision": ("vlm.vision_model.", "vlm.connector."),
            "language": ("vlm.text_model.",),
            "expert": ("expert.", "state_proj.", "action_"),
        },
        added=ADDED,
    )
    config: SmolVlaConfig

    def __init__(self, config: SmolVlaConfig) -> None:
        super().__init__(config)
        self.vlm: Any = SmolVLMModel(config.whole())
        sizes: Any = config.filled
        text, eye, expert = sizes.text_config, sizes.vision_config, config.sizes.expert
        self.expert = SmolVlaExpert(expert_sizes(text, expert), text, config.self_attention_every)
        self.times = TimeWaves(expert, config.min_period, config.max_period)
        self.state_proj = nn.Linear(config.state_width, text.hidden_size)
        self.action_in_proj = nn.Linear(config.action_width, expert)
        self.action_out_proj = nn.Linear(expert, config.action_width)
        self.action_time_mlp_in = nn.Linear(2 * expert, expert)
        self.action_time_mlp_out = nn.Linear(expert, expert)
        self.side = int(eye.image_size)
        patches = (self.side // eye.patch_size // self.vlm.config.scale_factor) ** 2
        self.chunk_tokens = patches * len(config.cameras) + 1 + self.horizon

    @override
    def prefix(self, observation: Observation) -> tuple[Any, Tensor, Tensor]:
        """Images and words see each other; the state sees them, and nothing but what follows sees the state."""
        embeds_BND, mask_BN = self._embeds(observation, self.value_head.weight.device)
        seen_BNN = mask_BN[:, None, :].repeat(1, mask_BN.shape[1], 1)
        seen_BNN[:, :-1, -1] = False
        blocked = torch.zeros_like(seen_BNN, dtype=embeds_BND.dtype)
        blocked = blocked.masked_fill(~seen_BNN, torch.finfo(embeds_BND.dtype).min)[:, None]
        found = self.vlm.text_model(
            inputs_embeds=embeds_BND,
            attention_mask=blocked,
            position_ids=(mask_BN.cumsum(-1) - 1).clamp(min=0),
            past_key_values=(prefix := Prefix()),
            use_cache=True,
        )
        return Behind(prefix), mask_BN, self.value_head(mean_of(found.last_hidden_state, mask_BN))

    def _embeds(self, observation: Observation, device: torch.device) -> tuple[Tensor, Tensor]:
        """All cameras' tokens, then the prompt, filled on the right, then the state."""
        words = self.vlm.get_input_embeddings()
        dtype, scale = words.weight.dtype, words.weight.shape[1] ** 0.5
        parts = []
        for camera in self.config.cameras:
            image = fit(image_of(observation, camera, device), (self.side, self.side), at="end")
            patches = self.vlm.vision_model((image * 2 - 1).to(dtype)).last_hidden_state
            parts.append(self.vlm.connector(patches) * scale)
        ids_BT, kept_BT = padded(observation, device)
        state_BS = self._state(observation, device, self.config.state_width)
        parts += [words(ids_BT) * scale, self.state_proj(state_BS.to(dtype))[:, None]]
        embeds_BND = torch.cat(parts, 1)
        seen = embeds_BND.shape[1] - ids_BT.shape[1] - 1
        return embeds_BND, F.pad(kept_BT, (seen, 1), value=True)

    @override
    def field(self, observation: Observation, cache: Any, mask_BN: Tensor) -> VelocityField:
        dtype = self.state_proj.weight.dtype

        def velocity(point: Tensor, time_B: Tensor) -> tuple[Tensor, Tensor | None]:
            actions = self.action_in_proj(point.to(dtype))
            times = self.times(time_B).to(dtype)[:, None].expand_as(actions)
            hidden = self.action_time_mlp_out(
                F.silu(self.action_time_mlp_in(torch.cat([actions, times], -1)))
            )
            features = self.expert(hidden, cache, mask_BN)
            return self.action_out_proj(features).float(), self._log_width(features)

        return velocity

    @override
    def _seen(self, count: int, words: int) -> Observation:
        return seen_example(self.config, count, words, (self.side, self.side))
