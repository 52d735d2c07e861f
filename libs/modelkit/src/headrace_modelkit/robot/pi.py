"""`pi0` on transformers' `PI0ForConditionalGeneration`, and `pi05`: flow-matching policies with log-probs.

`pi05` differs in two ways (arXiv 2504.16054; openpi `models_pytorch/pi0_pytorch.py` at 27b8a01): the time enters by
adaptive norms of the action expert, and the state by the prompt, as numbers of 256 bins (`pi05_prompt`).
Shapes as in `policy`; N prefix positions, D hidden of the language model, H actions of the model's horizon (the first C
are executed), W numbers that it draws for each (the first A are executed), F hidden of the expert.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from headrace_schema.sections.base import Count, Section
from pydantic import Field, model_validator
from torch import Tensor, nn
from transformers import PI0Config, PI0ForConditionalGeneration
from transformers.models.pi0.modeling_pi0 import PI0TimestepEmbeddings
from typing_extensions import override

from headrace_modelkit.critic import ValueHead
from headrace_modelkit.robot import flow
from headrace_modelkit.robot.flow import FlowConfig, NoiseHead, VelocityField
from headrace_modelkit.robot.gaussian import row_noise, row_uniform
from headrace_modelkit.robot.normalizer import Normalizer
from headrace_modelkit.robot.pi_expert import AdaptiveGemma, Behind, Prefix, with_gradient_to
from headrace_modelkit.robot.policy import (
    ACTIONS,
    ActionChunk,
    Evaluation,
    Observation,
    PolicyShape,
    RobotPolicy,
    check_seeds,
    image_of,
    state_of,
)
from headrace_modelkit.robot.scaling import ActionBounds, ActionScaling


def _shape(vlm: str, expert: tuple[str, ...]) -> PolicyShape:
    vision = (f"{vlm}vision_tower.", f"{vlm}multi_modal_projector.")
    return PolicyShape(
        layers=("SiglipEncoderLayer", "GemmaDecoderLayer", "_AdaptiveLayer"),
        parts={"vision": vision, "language": (f"{vlm}language_model.",), "expert": expert},
        added=("value_head.", "noise_head."),
    )


# transformers' modules are not annotated.
_Times: Any = PI0TimestepEmbeddings


class PiConfig(Section):
    """Sizes of the model, what actions are, and how they are drawn."""

    kind: Literal["pi0", "pi05"]
    model: dict[str, Any] = Field(description="fields of transformers' PI0Config")
    bounds: ActionBounds = Field(description="statistics that un-normalise actions")
    state: ActionBounds | None = Field(default=None, description="statistics that normalise the state (pi0)")
    cameras: tuple[str, ...] = Field(min_length=1, description="names of the cameras, in their order")
    chunk_length: Count = Field(description="actions executed of the model's horizon")
    flow: FlowConfig = FlowConfig()

    @model_validator(mode="after")
    def _fits(self) -> PiConfig:
        horizon, width = self.model.get("chunk_size", 50), self.model.get("max_action_dim", 32)
        if self.chunk_length > horizon or self.bounds.size > width:
            raise ValueError(
                f"chunk_length {self.chunk_length} and {self.bounds.size} numbers an action; the model draws "
                f"{horizon} actions of {width}"
            )
        if (self.kind == "pi0") != (self.state is not None):
            raise ValueError(
                "pi0 reads the state: give its statistics; pi05 reads it in the prompt: give none"
            )
        return self

    def build(self, seed: int) -> PiPolicy:
        """The policy with random weights, drawn from a seed."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return (Pi0Policy(self) if self.kind == "pi0" else Pi05Policy(self)).eval()


class PiPolicy(nn.Module, RobotPolicy, ABC):
    """What both share: reading the prefix once, and a path of denoising steps."""

    shape: PolicyShape
    vlm: Any

    def __init__(self, config: PiConfig, sizes: PI0Config) -> None:
        super().__init__()
        self.config, self.sizes = config, sizes
        self.chunk_length, self.action_size = config.chunk_length, config.bounds.size
        self.normalizer: Normalizer | None = None
        self.scaling = ActionScaling(config.bounds)
        untyped: Any = sizes
        self.horizon = int(untyped.chunk_size)
        self.value_head = ValueHead(untyped.vlm_config.text_config.hidden_size)
        eye = untyped.vlm_config.vision_config
        patches = (eye.image_size // eye.patch_size) ** 2 * len(config.cameras)
        self.chunk_tokens = patches + self.horizon + 1
        if config.flow.noise == "learned":
            self.noise_head = NoiseHead(untyped.dit_config.hidden_size, untyped.max_action_dim, config.flow)

    @abstractmethod
    def field(self, observation: Observation, cache: Any, mask_BN: Tensor) -> VelocityField:
        """The velocity field of what is seen; the cache is left as it was given."""

    @torch.no_grad()
    @override
    def act(
        self, observation: Observation, seeds: Sequence[int], *, deterministic: bool = False
    ) -> ActionChunk:
        """Deterministic: the ODE's path, from noise by the seeds."""
        check_seeds(observation, seeds)
        cache, mask_BN, values_B = self.prefix(observation)
        sizes: Any = self.sizes
        sampled, log_probs = flow.draw(
            self.field(observation, cache, mask_BN),
            self.config.flow,
            None if deterministic else seeds,
            (sizes.chunk_size, sizes.max_action_dim),
            self.value_head.weight.device,
            seeds,
        )
        drawn_BCA = self._executed(sampled[flow.PATH][:, -1])
        return ActionChunk(
            sampled={ACTIONS: drawn_BCA, **sampled},
            executed_BCA=self.scaling(drawn_BCA),
            valid_BC=torch.ones(drawn_BCA.shape[:2], dtype=torch.bool, device=drawn_BCA.device),
            log_probs_BCA=self._executed(log_probs),
            values_B=values_B,
        )

    @override
    def evaluate(self, observation: Observation, sampled: Mapping[str, Tensor]) -> Evaluation:
        cache, mask_BN, values_B = self.prefix(observation)
        found = flow.score(self.field(observation, cache, mask_BN), self.config.flow, sampled)
        log_probs_BCA, entropy_BCA = (self._executed(values) for values in found)
        return Evaluation(with_gradient_to(values_B, log_probs_BCA), entropy_BCA, values_B)

    def imitate(self, observation: Observation, actions_BHA: Tensor, seeds: Sequence[int]) -> Tensor:
        """Squared errors of the velocity at a drawn time; see `RobotPolicy.imitate`. Unused numbers are to be 0."""
        sizes: Any = self.sizes
        cache, mask_BN, values_B = self.prefix(observation)
        drawn = self.scaling.drawn(actions_BHA.to(mask_BN.device))
        actions = F.pad(drawn, (0, sizes.max_action_dim - self.action_size))
        noise = row_noise(seeds, tuple(actions.shape[1:]), actions.device)
        time_B = imitation_times(sizes, seeds).to(actions.device)
        time = time_B[:, None, None]
        velocity, _ = self.field(observation, cache, mask_BN)(time * noise + (1 - time) * actions, time_B)
        return with_gradient_to(values_B, (velocity - (noise - actions)).square().mean(-1))

    def prefix(self, observation: Observation) -> tuple[Any, Tensor, Tensor]:
        """(keys and values of images and prompt, their (B, N) mask, (B,) values). Raises ValueError without prompts."""
        if len(observation.prompts) != len(observation):
            raise ValueError("a vision-language-action model needs the ids of a prompt for each environment")
        device = self.value_head.weight.device
        embeds_BND, mask_BN = self._embeds(observation, device)
        found = self.vlm(
            inputs_embeds=embeds_BND,
            attention_mask=mask_BN.long(),
            position_ids=(mask_BN.cumsum(-1) - 1).clamp(min=0),
            token_type_ids=torch.zeros_like(mask_BN, dtype=torch.long),
            past_key_values=(prefix := Prefix()),
            use_cache=True,
        )
        shares_BN1 = (mask_BN / mask_BN.sum(-1, keepdim=True))[..., None]
        values_B = self.value_head((found.last_hidden_state * shares_BN1).sum(1))
        return Behind(prefix), mask_BN, values_B

    def _embeds(self, observation: Observation, device: torch.device) -> tuple[Tensor, Tensor]:
        """All cameras' tokens, then the prompt, filled on the right."""
        parts, words = [], self.vlm.get_input_embeddings().weight
        for camera in self.config.cameras:
            image = fit(image_of(observation, camera, device), self.vlm.config.vision_config.image_size)
            parts.append(self.vlm.get_image_features((image * 2 - 1).to(words.dtype)).pooler_output)
        longest = max(len(prompt) for prompt in observation.prompts)
        filled = [[*prompt, *[0] * (longest - len(prompt))] for prompt in observation.prompts]
        ids_BT = torch.tensor(filled, dtype=torch.long).to(device)
        lengths_B = torch.tensor([len(prompt) for prompt in observation.prompts]).to(device)
        kept_BT = torch.arange(longest, device=device) < lengths_B[:, None]
        parts.append(self.vlm.get_input_embeddings()(ids_BT))
        embeds_BND = torch.cat(parts, 1)
        return embeds_BND, F.pad(kept_BT, (embeds_BND.shape[1] - longest, 0), value=True)

    def _executed(self, values: Tensor) -> Tensor:
        return values[:, : self.chunk_length, : self.action_size]

    def _log_width(self, features: Tensor) -> Tensor | None:
        return self.noise_head(features).float() if self.config.flow.noise == "learned" else None


class Pi0Policy(PiPolicy):
    """`pi0`."""

    shape = _shape(
        "model.model.vlm.", ("model.model.dit.", "model.embed_action_time.", "model.action_out_proj.")
    )

    def __init__(self, config: PiConfig) -> None:
        sizes = PI0Config(**config.model)
        super().__init__(config, sizes)
        self.model: Any = PI0ForConditionalGeneration(sizes)
        self.model.model.dit.embed_tokens.requires_grad_(False)  # no word is read with it
        assert config.state is not None
        self.state_scaling = ActionScaling(config.state)

    @property
    def vlm(self) -> Any:
        """The language model and its image encoder, a part of `model`."""
        return self.model.model.vlm

    @override
    def field(self, observation: Observation, cache: Any, mask_BN: Tensor) -> VelocityField:
        assert self.config.state is not None
        sizes: Any = self.sizes
        state_BS = state_of(observation, self.config.state.size).to(mask_BN.device)
        state_BS = self.state_scaling.drawn(state_BS)
        dtype = self.vlm.get_input_embeddings().weight.dtype
        state_BS = F.pad(state_BS, (0, sizes.max_state_dim - state_BS.shape[1])).to(dtype)

        def velocity(point: Tensor, time_B: Tensor) -> tuple[Tensor, Tensor | None]:
            found = self.model.model(
                action_embeds=self.model.embed_action_time(state_BS, point.to(dtype), time_B),
                attention_mask=mask_BN.long(),
                past_key_values=cache,
            )
            features = found.last_hidden_state[:, -sizes.chunk_size :]
            return self.model.action_out_proj(features).float(), self._log_width(features)

        return velocity


class Pi05Policy(PiPolicy):
    """`pi05`: a Gemma expert whose norms are set by the time, and no state token."""

    shape = _shape("vlm.", ("expert.", "time_mlp_", "action_in_proj.", "action_out_proj."))

    def __init__(self, config: PiConfig) -> None:
        sizes = PI0Config(**config.model)
        super().__init__(config, sizes)
        whole: Any = PI0ForConditionalGeneration(sizes)
        self.vlm = whole.model.vlm
        untyped: Any = sizes
        hidden, numbers = untyped.dit_config.hidden_size, untyped.max_action_dim
        self.times = _Times(sizes)
        self.action_in_proj = nn.Linear(numbers, hidden)
        self.time_mlp_in = nn.Linear(hidden, hidden)
        self.time_mlp_out = nn.Linear(hidden, hidden)
        self.expert = AdaptiveGemma(untyped.dit_config)
        self.action_out_proj = nn.Linear(hidden, numbers)

    @override
    def field(self, observation: Observation, cache: Any, mask_BN: Tensor) -> VelocityField:
        dtype = self.vlm.get_input_embeddings().weight.dtype

        def velocity(point: Tensor, time_B: Tensor) -> tuple[Tensor, Tensor | None]:
            time_BF = F.silu(self.time_mlp_out(F.silu(self.time_mlp_in(self.times(time_B).to(dtype)))))
            features = self.expert(self.action_in_proj(point.to(dtype)), time_BF, cache, mask_BN)
            return self.action_out_proj(features).float(), self._log_width(features)

        return velocity


def pi05_prompt(instruction: str, state_S: Tensor) -> str:
    """The text that pi05 reads for an instruction and a normalised state, as openpi writes it.

    A number of the state is its bin of 256 between -1 and 1; -1 below.
    """
    edges = torch.linspace(-1, 1, 257, dtype=torch.float64)[:-1]
    bins = torch.bucketize(state_S.double().contiguous(), edges, right=True) - 1
    task = instruction.strip().replace("_", " ").replace("\n", " ")
    return f"Task: {task}, State: {' '.join(str(int(place)) for place in bins)};\nAction: "


def imitation_times(sizes: Any, seeds: Sequence[int]) -> Tensor:
    """(B,) times that imitation looks at, by each environment's seed: of the Beta distribution of the configuration.

    Its second parameter is 1, as in every published configuration, so that u^(1 / alpha) of a uniform u is Beta.
    Raises ValueError for another one.
    """
    if sizes.time_sampling_beta_beta != 1.0:
        raise ValueError(f"time_sampling_beta_beta is {sizes.time_sampling_beta_beta}; only 1.0 is supported")
    uniform_B = row_uniform([seed + 1 for seed in seeds], (1,), torch.device("cpu"))[:, 0]
    beta_B = uniform_B ** (1 / sizes.time_sampling_beta_alpha)
    times_B: Tensor = beta_B * sizes.time_sampling_scale + sizes.time_sampling_offset
    return times_B.float()


def fit(image: Tensor, size: int) -> Tensor:
    """(B, 3, size, size): scaled to fit, with black around it, as openpi's `resize_with_pad`."""
    height, width = image.shape[-2:]
    if (height, width) == (size, size):
        return image
    share = size / max(height, width)
    rows, columns = max(1, round(height * share)), max(1, round(width * share))
    scaled = F.interpolate(image, (rows, columns), mode="bilinear", align_corners=False).clamp(0, 1)
    top, left = (size - rows) // 2, (size - columns) // 2
    return F.pad(scaled, (left, size - columns - left, top, size - rows - top))
