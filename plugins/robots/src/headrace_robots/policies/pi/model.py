"""`pi0` on transformers' `PI0ForConditionalGeneration`, and `pi05`: flow-matching policies with log-probs.

`pi05` differs in two ways (arXiv 2504.16054; openpi `models_pytorch/pi0_pytorch.py` at 27b8a01): the time enters by
adaptive norms of the action expert, and the state by the prompt, as numbers of 256 bins (`pi.words`).
Shapes as in `flow_policy`.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn
from transformers import PI0Config, PI0ForConditionalGeneration
from typing_extensions import override

from headrace_robots.policies.flows.flow import VelocityField
from headrace_robots.policies.flows.policy import (
    ADDED,
    FlowPolicy,
    FlowPolicyConfig,
    FlowSizes,
    TimeWaves,
    imitation_times,
    mean_of,
    padded,
)
from headrace_robots.policies.flows.prefixes import Behind, Prefix
from headrace_robots.policies.images import fit
from headrace_robots.policies.pi.expert import AdaptiveGemma
from headrace_robots.policies.pi.words import StateWords, WordsOfStates, cleaned, framed
from headrace_robots.policies.policy import Observation, PolicyShape, image_of, seen_example


def _shape(vlm: str, expert: tuple[str, ...]) -> PolicyShape:
    vision = (f"{vlm}vision_tower.", f"{vlm}multi_modal_projector.")
    return PolicyShape(
        layers=("SiglipEncoderLayer", "GemmaDecoderLayer", "_AdaptiveLayer"),
        parts={"vision": vision, "language": (f"{vlm}language_model.",), "expert": expert},
        added=ADDED,
    )


class PiConfig(FlowPolicyConfig):
    """Sizes of the model, what actions are, and how they are drawn."""

    kind: Literal["pi0", "pi05"]
    model: dict[str, Any] = Field(description="fields of transformers' PI0Config")
    words: StateWords | None = Field(
        default=None, description="of pi05: the ids of a state's numbers, by the tokenizer beside it"
    )

    @property
    @override
    def sizes(self) -> FlowSizes:
        model: Any = self.filled
        return FlowSizes(
            horizon=model.chunk_size,
            numbers=model.max_action_dim,
            state=model.max_state_dim if self.kind == "pi0" else 0,
            hidden=model.vlm_config.text_config.hidden_size,
            expert=model.dit_config.hidden_size,
        )

    @cached_property
    def filled(self) -> PI0Config:
        """`model` with what it leaves out."""
        return PI0Config(**self.model)

    @model_validator(mode="after")
    def _reads_the_state(self) -> PiConfig:
        if (self.kind == "pi05") != (self.words is not None):
            raise ValueError(
                "pi05 reads the state in its prompt: give words, the ids of its numbers; pi0: give none"
            )
        if (beta := getattr(self.filled, "time_sampling_beta_beta", 1.0)) != 1.0:
            raise ValueError(f"model.time_sampling_beta_beta is {beta}; only 1.0 is supported")
        return self

    @override
    def policy(self) -> type[PiPolicy]:
        return Pi0Policy if self.kind == "pi0" else Pi05Policy

    @override
    def prompt_ids(self, tokenizer: Any, instruction: str) -> tuple[int, ...]:
        """Of pi0 a line; of pi05 what stands before the state."""
        text = f"{cleaned(instruction)}\n" if self.kind == "pi0" else framed(instruction)
        return super().prompt_ids(tokenizer, text)

    @override
    def check_tokenizer(self, tokenizer: Any) -> None:
        if self.words is not None and self.words != StateWords.of(tokenizer):
            raise ValueError(
                "its ids of numbers are others than the policy's words, which another tokenizer made"
            )


class PiPolicy(FlowPolicy):
    """What both share: reading the prefix."""

    imitates_unused = True
    config: PiConfig
    vlm: Any

    def __init__(self, config: PiConfig) -> None:
        super().__init__(config)
        sizes: Any = PI0Config(**config.model)
        self.sizes: Any = sizes
        eye = sizes.vlm_config.vision_config
        self.chunk_tokens = (eye.image_size // eye.patch_size) ** 2 * len(config.cameras) + self.horizon + 1

    @override
    def prefix(self, observation: Observation) -> tuple[Any, Tensor, Tensor]:
        embeds_BND, mask_BN = self._embeds(observation, self.value_head.weight.device)
        found = self.vlm(
            inputs_embeds=embeds_BND,
            attention_mask=mask_BN.long(),
            position_ids=(mask_BN.cumsum(-1) - 1).clamp(min=0),
            token_type_ids=torch.zeros_like(mask_BN, dtype=torch.long),
            past_key_values=(prefix := Prefix()),
            use_cache=True,
        )
        return Behind(prefix), mask_BN, self.value_head(mean_of(found.last_hidden_state, mask_BN))

    def _embeds(self, observation: Observation, device: torch.device) -> tuple[Tensor, Tensor]:
        """All cameras' tokens, then the prompt, filled on the right."""
        parts, words = [], self.vlm.get_input_embeddings().weight
        side = int(self.vlm.config.vision_config.image_size)
        for camera in self.config.cameras:
            image = fit(image_of(observation, camera, device), (side, side))
            parts.append(self.vlm.get_image_features((image * 2 - 1).to(words.dtype)).pooler_output)
        ids_BT, kept_BT = self._prompt(observation, device)
        parts.append(self.vlm.get_input_embeddings()(ids_BT))
        embeds_BND = torch.cat(parts, 1)
        return embeds_BND, F.pad(kept_BT, (embeds_BND.shape[1] - ids_BT.shape[1], 0), value=True)

    def _prompt(self, observation: Observation, device: torch.device) -> tuple[Tensor, Tensor]:
        """(B, T) ids, and which of them there are."""
        return padded(observation, device)

    @override
    def _imitation_times(self, seeds: Any) -> Tensor:
        sizes = self.sizes
        return imitation_times(
            seeds, sizes.time_sampling_beta_alpha, sizes.time_sampling_scale, sizes.time_sampling_offset
        )

    @override
    def _seen(self, count: int, words: int) -> Observation:
        side = int(self.sizes.vlm_config.vision_config.image_size)
        return seen_example(self.config, count, words, (side, side))


class Pi0Policy(PiPolicy):
    """`pi0`."""

    shape = _shape(
        "model.model.vlm.", ("model.model.dit.", "model.embed_action_time.", "model.action_out_proj.")
    )

    def __init__(self, config: PiConfig) -> None:
        super().__init__(config)
        self.model: Any = PI0ForConditionalGeneration(self.sizes)
        self.model.model.dit.embed_tokens.requires_grad_(False)  # no word is read with it

    @property
    def vlm(self) -> Any:
        """The language model and its image encoder, a part of `model`."""
        return self.model.model.vlm

    @override
    def field(self, observation: Observation, cache: Any, mask_BN: Tensor) -> VelocityField:
        dtype = self.vlm.get_input_embeddings().weight.dtype
        state_BS = self._state(observation, mask_BN.device, self.sizes.max_state_dim).to(dtype)

        def velocity(point: Tensor, time_B: Tensor) -> tuple[Tensor, Tensor | None]:
            found = self.model.model(
                action_embeds=self.model.embed_action_time(state_BS, point.to(dtype), time_B),
                attention_mask=mask_BN.long(),
                past_key_values=cache,
            )
            features = found.last_hidden_state[:, -self.horizon :]
            return self.model.action_out_proj(features).float(), self._log_width(features)

        return velocity


class Pi05Policy(PiPolicy):
    """`pi05`: a Gemma expert whose norms are set by the time, and a state that is words."""

    shape = _shape("vlm.", ("expert.", "time_mlp_", "action_in_proj.", "action_out_proj."))

    def __init__(self, config: PiConfig) -> None:
        super().__init__(config)
        sizes = self.sizes
        whole: Any = PI0ForConditionalGeneration(sizes)
        self.vlm = whole.model.vlm
        hidden, numbers = sizes.dit_config.hidden_size, sizes.max_action_dim
        self.times = TimeWaves(hidden, sizes.min_period, sizes.max_period)
        self.action_in_proj = nn.Linear(numbers, hidden)
        self.time_mlp_in = nn.Linear(hidden, hidden)
        self.time_mlp_out = nn.Linear(hidden, hidden)
        self.expert = AdaptiveGemma(sizes.dit_config)
        self.action_out_proj = nn.Linear(hidden, numbers)
        assert config.words is not None
        self.words = WordsOfStates(config.words)
        self.chunk_tokens += self.words.count(config.state.size)

    @override
    def _prompt(self, observation: Observation, device: torch.device) -> tuple[Tensor, Tensor]:
        found = [padded(observation, device)]
        found.append(self.words(self._state(observation, device, self.config.state.size)))
        ids, kept = zip(*found, strict=True)
        return torch.cat(ids, 1), torch.cat(kept, 1)

    @override
    def field(self, observation: Observation, cache: Any, mask_BN: Tensor) -> VelocityField:
        dtype = self.vlm.get_input_embeddings().weight.dtype

        def velocity(point: Tensor, time_B: Tensor) -> tuple[Tensor, Tensor | None]:
            time_BF = F.silu(self.time_mlp_out(F.silu(self.time_mlp_in(self.times(time_B).to(dtype)))))
            features = self.expert(self.action_in_proj(point.to(dtype)), time_BF, cache, mask_BN)
            return self.action_out_proj(features).float(), self._log_width(features)

        return velocity
