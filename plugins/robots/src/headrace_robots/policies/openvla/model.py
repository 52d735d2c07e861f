"""`openvla`: DINOv2 + SigLIP → projector → Llama, with actions as tokens. What OFT changes is in `openvla.oft`.

Parameters have the published checkpoints' names. Facts of the architecture (no code) are from
openvla/openvla `prismatic/extern/hf/modeling_prismatic.py` at 97b39e5.
Shapes as in `policy`; D hidden, N positions, P patches of all cameras. Knows no tokenizer: prompts are ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, Literal

import torch
import torch.nn.functional as F
from headrace_modelkit.critic import ValueHead
from headrace_schema.sections.base import Count, CountOrZero
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, LlamaForCausalLM
from typing_extensions import override

from headrace_robots.policies.diffusion.denoising import DenoisingConfig, ScheduleConfig
from headrace_robots.policies.images import middle, stretched
from headrace_robots.policies.normalizer import Normalizer
from headrace_robots.policies.openvla.tokens import ActionTokens, entropy_of
from headrace_robots.policies.openvla.vit import VisionTransformer, VitShape
from headrace_robots.policies.policy import (
    ACTIONS,
    ActionChunk,
    Evaluation,
    Observation,
    PolicyConfig,
    PolicyShape,
    RobotPolicy,
    check_seeds,
    image_of,
    seen_example,
)
from headrace_robots.policies.scaling import ActionBounds, ActionScaling

SPACE = "▁"
"""Llama's empty token, which OpenVLA reads behind its prompt (predict_action of modeling_prismatic.py)."""


class OpenVlaConfig(PolicyConfig):
    """Sizes of the parts, and what actions are."""

    kind: Literal["openvla", "openvla_oft"]
    featurizers: tuple[VitShape, ...] = Field(min_length=1, max_length=2, description="DINOv2, then SigLIP")
    text: dict[str, Any] = Field(description="fields of Llama's configuration")
    action_vocabulary: Count = Field(
        description="ids of the vocabulary without its padding; actions are the last"
    )
    bins: Count = Field(default=256, ge=3, description="ids that are actions")
    cameras: tuple[str, ...] = Field(
        min_length=1, description="names of the cameras, in the order of their patches"
    )
    head: Literal["tokens", "l1", "diffusion"] = "tokens"
    film: bool = Field(default=False, description="the instruction scales and shifts what vision blocks see")
    denoising: DenoisingConfig = Field(
        default=DenoisingConfig(steps=50), description="how the diffusion head's actions are drawn"
    )
    schedule: ScheduleConfig = Field(
        default=ScheduleConfig(num_train_timesteps=50), description="how noise was added in its training"
    )
    temperature: float = Field(default=1.0, gt=0, description="of drawing and of scoring")
    log_std: float = Field(default=-2.0, description="log-width of the Gaussian around the L1 head's actions")
    proprio: ActionBounds | None = Field(
        default=None, description="statistics of the state; null: it is not read"
    )
    crop: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="share of each picture's area that is read, around its middle: 0.9 for checkpoints that were "
        "fine-tuned with random crops, as all published ones for LIBERO were",
    )
    stop_token: CountOrZero = Field(default=2, description="id behind OFT's actions")

    @model_validator(mode="after")
    def _plain_openvla(self) -> OpenVlaConfig:
        more = (
            self.chunk_length > 1
            or self.head != "tokens"
            or self.proprio is not None
            or len(self.cameras) > 1
        )
        if self.kind == "openvla" and (more or self.film):
            raise ValueError(
                "openvla draws one action of tokens from one camera, without a state; "
                "for chunks, heads, FiLM, states and several cameras set kind: openvla_oft"
            )
        if self.denoising.steps > self.schedule.num_train_timesteps:
            raise ValueError(
                f"denoising.steps is {self.denoising.steps}: the model was trained on "
                f"{self.schedule.num_train_timesteps}"
            )
        return self

    @property
    @override
    def state_numbers(self) -> int:
        return 0 if self.proprio is None else self.proprio.size

    @override
    def prompt_ids(self, tokenizer: Any, instruction: str) -> tuple[int, ...]:
        ids, space = super().prompt_ids(tokenizer, instruction), tokenizer.convert_tokens_to_ids(SPACE)
        return ids if space in (None, tokenizer.unk_token_id) or ids[-1:] == (space,) else (*ids, space)

    @override
    def policy(self) -> type[OpenVlaPolicy]:
        if self.kind == "openvla":
            return OpenVlaPolicy
        oft = import_module("headrace_robots.policies.openvla.oft")
        found: type[OpenVlaPolicy] = (
            oft.DiffusionOftPolicy if self.head == "diffusion" else oft.OpenVlaOftPolicy
        )
        return found


class OpenVlaPolicy(RobotPolicy):
    """`openvla`: the numbers of one action, one token after the other."""

    shape = PolicyShape(
        layers=("_Block", "LlamaDecoderLayer"),
        parts={
            "vision": ("vision_backbone.",),
            "projector": ("projector.",),
            "language": ("language_model.",),
        },
        added=("value_head.", "log_std"),
    )

    def __init__(self, config: OpenVlaConfig) -> None:
        super().__init__()
        self.config = config
        self.chunk_length, self.action_size = config.chunk_length, config.bounds.size
        self.horizon = self.chunk_length
        self.normalizer: Normalizer | None = None
        text = LlamaConfig(**{**config.text, "attn_implementation": "sdpa"})
        self.vision_backbone = _VisionBackbone(config.featurizers, text.hidden_size if config.film else 0)
        self.language_model: Any = LlamaForCausalLM(text)
        self.projector = _Projector(config.featurizers, text.hidden_size)
        self.value_head = ValueHead(text.hidden_size)
        self.scaling = ActionScaling(config.bounds)
        self.tokens = ActionTokens(config.action_vocabulary, config.bins)
        patches = config.featurizers[0].patches * len(config.cameras)
        self.chunk_tokens = patches + self.chunk_length * self.action_size

    def get_output_embeddings(self) -> nn.Module:
        """The head, which gets no adapter."""
        found: nn.Module = self.language_model.lm_head
        return found

    @torch.no_grad()
    @override
    def act(
        self, observation: Observation, seeds: Sequence[int], *, deterministic: bool = False
    ) -> ActionChunk:
        check_seeds(observation, seeds)
        embeds_BND, mask_BN = self.prefix(observation)
        hidden_BND, cache = self._read(embeds_BND, mask_BN, None, use_cache=True)
        values_B = self.value_head(hidden_BND[:, -1])
        ids: list[Tensor] = []
        scores: list[Tensor] = []
        for number in range(self.action_size):
            if number:
                mask_BN = F.pad(mask_BN, (0, 1), value=True)
                hidden_BND, cache = self._read(self._embed(ids[-1]), mask_BN, cache, use_cache=True)
            log_probs_B1K = self._log_probs(hidden_BND[:, -1:])
            drawn = self.tokens.draw(
                log_probs_B1K, None if deterministic else seeds, slice(number, number + 1)
            )
            ids.append(drawn)
            scores.append(log_probs_B1K.gather(-1, (drawn - self.tokens.first)[..., None])[..., 0])
        return self._chunk(torch.cat(ids, 1)[:, None], torch.cat(scores, 1)[:, None], values_B)

    @override
    def evaluate(self, observation: Observation, sampled: Mapping[str, Tensor]) -> Evaluation:
        ids_BA = sampled[ACTIONS][:, 0]
        embeds_BND, mask_BN = self.prefix(observation)
        embeds_BND = torch.cat([embeds_BND, self._embed(ids_BA[:, :-1])], 1)
        mask_BN = F.pad(mask_BN, (0, self.action_size - 1), value=True)
        hidden_BND, _ = self._read(embeds_BND, mask_BN, None, use_cache=False)
        return self._score(hidden_BND[:, -self.action_size :], ids_BA[:, None])

    @override
    def imitate(self, observation: Observation, actions_BHA: Tensor, seeds: Sequence[int]) -> Tensor:
        """Negative log-probs of the actions' tokens; see `RobotPolicy.imitate`.

        Over the ids of actions alone, where OpenVLA's own fine-tuning normalises over the whole vocabulary.
        """
        ids_BCA = self.tokens.encode(self.scaling.drawn(actions_BHA))
        return -self.evaluate(observation, {ACTIONS: ids_BCA}).log_probs_BCA.mean(-1)

    @override
    def example(self, count: int, words: int) -> tuple[Observation, dict[str, Tensor]]:
        side = self.config.featurizers[0].image_size
        drawn = torch.zeros(count, self.chunk_length, self.action_size)
        seen = seen_example(self.config, count, words, (side, side))
        return seen, {ACTIONS: drawn.long() if self.config.head == "tokens" else drawn}

    def prefix(self, observation: Observation) -> tuple[Tensor, Tensor]:
        """As `joined`, of what an observation has. Raises ValueError without prompts."""
        if len(observation.prompts) != len(observation) or not all(observation.prompts):
            raise ValueError("a vision-language-action model needs the ids of a prompt for each environment")
        return self.joined(observation, self._seen(observation))

    def joined(self, observation: Observation, seen_BPD: Tensor) -> tuple[Tensor, Tensor]:
        """Embeddings (B, N, D) of what is read before the actions, rows filled on the left, and their (B, N) mask.

        An image's patches stand behind the first token of the prompt.
        """
        rows = []
        for prompt, seen_PD in zip(observation.prompts, seen_BPD, strict=True):
            words_ND = self._embed(torch.tensor(prompt).to(seen_BPD.device))
            rows.append(torch.cat([words_ND[:1], seen_PD, words_ND[1:]]))
        embeds_BND = pad_sequence(rows, batch_first=True, padding_side="left")
        lengths_B = torch.tensor([len(row) for row in rows]).to(embeds_BND.device)
        places_N = torch.arange(embeds_BND.shape[1], device=embeds_BND.device)
        return embeds_BND, places_N >= embeds_BND.shape[1] - lengths_B[:, None]

    def _seen(self, observation: Observation) -> Tensor:
        """(B, P, D) of all cameras."""
        device = self.value_head.weight.device
        side, share = self.config.featurizers[0].image_size, self.config.crop
        images = [image_of(observation, camera, device) for camera in self.config.cameras]
        if share < 1:
            images = [middle(stretched(image, side), share) for image in images]
        said_BD = self._said(observation, device)
        patches = [self.projector(self.vision_backbone(image, said_BD)) for image in images]
        return torch.cat(patches, 1)

    def _said(self, observation: Observation, device: torch.device) -> Tensor | None:
        """(B, D): the mean of what stands around the actions, prompt and stop token, where FiLM reads it."""
        if not self.config.film:
            return None
        rows = [torch.tensor([*prompt, self.config.stop_token]) for prompt in observation.prompts]
        return torch.stack([self._embed(row.to(device)).mean(0) for row in rows])

    def _embed(self, ids: Tensor) -> Tensor:
        found: Tensor = self.language_model.get_input_embeddings()(ids)
        return found

    def _read(
        self, embeds_BND: Tensor, mask_BN: Tensor, cache: Any, *, use_cache: bool
    ) -> tuple[Tensor, Any]:
        """Hidden states of the given embeddings, which end where the mask ends; causal."""
        positions_BN = (mask_BN.cumsum(-1) - 1).clamp(min=0)[:, -embeds_BND.shape[1] :]
        found = self.language_model.model(
            inputs_embeds=embeds_BND,
            attention_mask=mask_BN.long(),
            position_ids=positions_BN,
            past_key_values=cache,
            use_cache=use_cache,
        )
        return found.last_hidden_state, found.past_key_values

    def _log_probs(self, hidden_BND: Tensor) -> Tensor:
        """(B, N, K) over the ids of actions, whose rows of the head alone are multiplied, in fp32."""
        rows_KD = self.language_model.lm_head.weight[self.tokens.first : self.tokens.action_vocabulary]
        logits_BNK = F.linear(hidden_BND.float(), rows_KD.float())
        found_BNK: Tensor = (logits_BNK / self.config.temperature).log_softmax(-1)
        return found_BNK

    def _score(self, hidden_BND: Tensor, ids_BCA: Tensor) -> Evaluation:
        log_probs_BNK = self._log_probs(hidden_BND)
        chosen_BN1 = (ids_BCA.flatten(1) - self.tokens.first)[..., None]
        return Evaluation(
            log_probs_BNK.gather(-1, chosen_BN1)[..., 0].view(ids_BCA.shape),
            entropy_of(log_probs_BNK).view(ids_BCA.shape),
            self.value_head(hidden_BND[:, 0]),
        )

    def _chunk(self, ids_BCA: Tensor, log_probs_BCA: Tensor, values_B: Tensor) -> ActionChunk:
        return ActionChunk(
            sampled={ACTIONS: ids_BCA},
            executed_BCA=self.scaling(self.tokens.decode(ids_BCA)),
            valid_BC=torch.ones(ids_BCA.shape[:2], dtype=torch.bool, device=ids_BCA.device),
            log_probs_BCA=log_probs_BCA,
            values_B=values_B,
        )


class _VisionBackbone(nn.Module):
    def __init__(self, shapes: Sequence[VitShape], said: int) -> None:
        super().__init__()
        self.featurizer = VisionTransformer(shapes[0], said)
        if len(shapes) > 1:
            self.fused_featurizer = VisionTransformer(shapes[1], said)

    def forward(self, image: Tensor, said_BD: Tensor | None) -> Tensor:
        """(B, P, W) features, both encoders' side by side, of (B, 3, H, W) in 0 to 1."""
        encoders = [self.featurizer, *([self.fused_featurizer] if hasattr(self, "fused_featurizer") else [])]
        return torch.cat([encoder(pixels(image, encoder.shape), said_BD) for encoder in encoders], -1)


class _Projector(nn.Module):
    def __init__(self, shapes: Sequence[VitShape], hidden: int) -> None:
        super().__init__()
        width = sum(shape.width for shape in shapes)
        self.fused = len(shapes) > 1
        between = 4 * width if self.fused else hidden
        self.fc1 = nn.Linear(width, between)
        self.fc2 = nn.Linear(between, hidden)
        if self.fused:
            self.fc3 = nn.Linear(hidden, hidden)

    def forward(self, features: Tensor) -> Tensor:
        found: Tensor = self.fc2(F.gelu(self.fc1(features)))
        return self.fc3(F.gelu(found)) if self.fused else found


def pixels(image: Tensor, shape: VitShape) -> Tensor:
    """(B, 3, H, W) in 0 to 1, stretched to the encoder's square ("resize-naive", bicubic) and normalised."""
    image = stretched(image, shape.image_size)
    mean, std = (torch.tensor(values).to(image)[:, None, None] for values in (shape.mean, shape.std))
    return (image - mean) / std
