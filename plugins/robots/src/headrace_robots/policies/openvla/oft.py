"""`openvla_oft`: a chunk in one pass, all positions attending to all; token, L1 or diffusion head, a state, FiLM.

Parameters have the published names. Facts of the architecture (no code) are from moojink/openvla-oft at 213c5ff:
`modeling_prismatic.py`, `models/action_heads.py`, `projectors.py`, `film_vit_wrapper.py`; attention over all positions
from its issues 27 and 83. Shapes as in `openvla.model`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from headrace_robots.policies import gaussian, paths
from headrace_robots.policies.diffusion.denoising import Schedule, drawn_by
from headrace_robots.policies.diffusion.unet import Steps
from headrace_robots.policies.openvla.heads import DiffusionHead, L1Head, Projector
from headrace_robots.policies.openvla.model import OpenVlaConfig, OpenVlaPolicy
from headrace_robots.policies.paths import PATH, STEPS, Transition
from headrace_robots.policies.policy import (
    ACTIONS,
    ActionChunk,
    Evaluation,
    Observation,
    check_seeds,
    chunk_around,
    state_of,
)
from headrace_robots.policies.scaling import ActionScaling


class OpenVlaOftPolicy(OpenVlaPolicy):
    """`openvla_oft`: all numbers of a chunk in one pass, every position attending to every other."""

    action_head: nn.Module

    def __init__(self, config: OpenVlaConfig) -> None:
        super().__init__(config)
        hidden = int(self.language_model.config.hidden_size)
        if config.proprio is not None:
            self.proprio_scaling = ActionScaling(config.proprio)
            self.proprio_projector = Projector(config.proprio.size, hidden)
        if config.head == "l1":
            self.action_head = L1Head(hidden, self.action_size)
            self.log_std = nn.Parameter(torch.full((self.chunk_length, self.action_size), config.log_std))
        self.chunk_tokens += 1 + (config.proprio is not None)

    @torch.no_grad()
    @override
    def act(
        self, observation: Observation, seeds: Sequence[int], *, deterministic: bool = False
    ) -> ActionChunk:
        check_seeds(observation, seeds)
        hidden_BND = self.slots(observation)
        values_B = self.value_head(hidden_BND[:, 0])
        if self.config.head == "l1":
            drawing = None if deterministic else seeds
            return chunk_around(self.means(hidden_BND), self.log_std.float(), drawing, self.scaling, values_B)
        log_probs_BNK = self._log_probs(hidden_BND)
        ids_BN = self.tokens.draw(
            log_probs_BNK, None if deterministic else seeds, slice(0, hidden_BND.shape[1])
        )
        ids_BCA = ids_BN.view(-1, self.chunk_length, self.action_size)
        scores_BN = log_probs_BNK.gather(-1, (ids_BN - self.tokens.first)[..., None])[..., 0]
        return self._chunk(ids_BCA, scores_BN.view(ids_BCA.shape), values_B)

    @override
    def evaluate(self, observation: Observation, sampled: Mapping[str, Tensor]) -> Evaluation:
        hidden_BND = self.slots(observation)
        if self.config.head == "tokens":
            return self._score(hidden_BND, sampled[ACTIONS])
        mean_BCA = self.means(hidden_BND)
        log_std = self.log_std.float()
        log_probs_BCA = gaussian.log_density(sampled[ACTIONS], mean_BCA, log_std)
        entropy_BCA = gaussian.entropy(log_std).expand_as(mean_BCA)
        return Evaluation(log_probs_BCA, entropy_BCA, self.value_head(hidden_BND[:, 0]))

    @override
    def imitate(self, observation: Observation, actions_BHA: Tensor, seeds: Sequence[int]) -> Tensor:
        """Absolute errors of the L1 head, or token losses; see `RobotPolicy.imitate`."""
        if self.config.head == "tokens":
            return super().imitate(observation, actions_BHA, seeds)
        return (self.means(self.slots(observation)) - self.scaling.drawn(actions_BHA)).abs().mean(-1)

    def slots(self, observation: Observation) -> Tensor:
        """(B, C A, D) hidden states that give the chunk's numbers: each one position before its empty slot."""
        embeds_BND, mask_BN = self.prefix(observation)
        numbers = self.chunk_length * self.action_size
        return self.filled(
            embeds_BND, mask_BN, embeds_BND.new_zeros(len(embeds_BND), numbers, embeds_BND.shape[-1])
        )

    def filled(self, embeds_BND: Tensor, mask_BN: Tensor, slots_BND: Tensor) -> Tensor:
        """As `slots`, of C A embeddings that stand behind the prompt, before the stop token."""
        count, numbers = slots_BND.shape[:2]
        stop_1D = self._embed(torch.tensor([self.config.stop_token]).to(embeds_BND.device))
        embeds_BND = torch.cat([embeds_BND, slots_BND, stop_1D.expand(count, 1, -1)], 1)
        mask_BN = F.pad(mask_BN, (0, numbers + 1), value=True)
        blocked = embeds_BND.new_zeros(mask_BN.shape).masked_fill(~mask_BN, torch.finfo(embeds_BND.dtype).min)
        found = self.language_model.model(
            inputs_embeds=embeds_BND,
            attention_mask=blocked[:, None, None].expand(-1, 1, embeds_BND.shape[1], -1),
            position_ids=(mask_BN.cumsum(-1) - 1).clamp(min=0),
            use_cache=False,
        )
        hidden_BND: Tensor = found.last_hidden_state
        return hidden_BND[:, -(numbers + 2) : -2]

    def means(self, hidden_BND: Tensor) -> Tensor:
        """(B, C, A) of the L1 head, fp32."""
        found: Tensor = self.action_head(hidden_BND.reshape(len(hidden_BND), self.chunk_length, -1))
        return found.float()

    def _seen(self, observation: Observation) -> Tensor:
        seen_BPD = super()._seen(observation)
        if self.config.proprio is None:
            return seen_BPD
        state_BS = state_of(observation, self.config.proprio.size).to(seen_BPD.device)
        state_BS = self.proprio_scaling.drawn(state_BS).clamp(-1, 1).to(seen_BPD.dtype)
        state_B1D = self.proprio_projector(state_BS)[:, None]
        return torch.cat([seen_BPD, state_B1D], 1)


class DiffusionOftPolicy(OpenVlaOftPolicy):
    """`openvla_oft` with the diffusion head: the slots hold noisy numbers, and a training step stands behind what is
    seen. Each denoising step is a pass of the language model; the critic's reads slots of no action at step 0.
    """

    def __init__(self, config: OpenVlaConfig) -> None:
        super().__init__(config)
        hidden = int(self.language_model.config.hidden_size)
        self.schedule = Schedule(config.schedule, config.denoising)
        self.times = Steps(hidden)
        self.noisy_action_projector = Projector(1, hidden)
        self.action_head = DiffusionHead(hidden, self.action_size)
        self.chunk_tokens += 1

    @torch.no_grad()
    @override
    def act(
        self, observation: Observation, seeds: Sequence[int], *, deterministic: bool = False
    ) -> ActionChunk:
        """Deterministic: ddim's path without noise, from noise by the seeds."""
        check_seeds(observation, seeds)
        seen_BPD, denoising = self._checked(observation), self.config.denoising
        drawn_BM = drawn_by(denoising, seeds, deterministic=deterministic).to(seen_BPD.device)
        drawing, shape = None if deterministic else seeds, (self.chunk_length, self.action_size)
        transition = self._transition(observation, seen_BPD)
        sampled, log_probs = paths.draw(transition, denoising.steps, drawn_BM, drawing, seeds, shape)
        values_B = self._values(observation, seen_BPD)
        return paths.chunk_of(sampled, log_probs, values_B, lambda values: values, self.scaling)

    @override
    def evaluate(self, observation: Observation, sampled: Mapping[str, Tensor]) -> Evaluation:
        seen_BPD = self._checked(observation)
        found = paths.score(self._transition(observation, seen_BPD), sampled)
        return Evaluation(*found, self._values(observation, seen_BPD))

    @override
    def imitate(self, observation: Observation, actions_BHA: Tensor, seeds: Sequence[int]) -> Tensor:
        """Squared errors of the noise that is predicted at a drawn training step."""
        seen_BPD = self._checked(observation)
        actions = self.scaling.drawn(actions_BHA.to(seen_BPD.device))
        noise = gaussian.row_noise(seeds, tuple(actions.shape[1:]), actions.device)
        time_B = self.schedule.times(seeds).to(actions.device)
        found = self._noise(observation, seen_BPD, self.schedule.noised(actions, noise, time_B), time_B)
        return (found - noise).square().mean(-1)

    @override
    def example(self, count: int, words: int) -> tuple[Observation, dict[str, Tensor]]:
        seen, drawn = super().example(count, words)
        denoising = self.config.denoising
        steps = len(denoising.candidates) if denoising.drawn == "all" else 1
        path = torch.zeros(count, denoising.steps + 1, self.chunk_length, self.action_size)
        return seen, {**drawn, PATH: path, STEPS: torch.zeros(count, steps, dtype=torch.long)}

    def _checked(self, observation: Observation) -> Tensor:
        """What is seen. Raises ValueError without prompts."""
        if len(observation.prompts) != len(observation) or not all(observation.prompts):
            raise ValueError("a vision-language-action model needs the ids of a prompt for each environment")
        return self._seen(observation)

    def _transition(self, observation: Observation, seen_BPD: Tensor) -> Transition:
        return self.schedule.transition(
            lambda point, time_B: self._noise(observation, seen_BPD, point, time_B)
        )

    def _noise(self, observation: Observation, seen_BPD: Tensor, point: Tensor, time_B: Tensor) -> Tensor:
        """(B, C, A) fp32, predicted of a noisy chunk at training steps."""
        hidden_BND = self._at(observation, seen_BPD, point, time_B)
        found: Tensor = self.action_head(hidden_BND.reshape(len(hidden_BND), self.chunk_length, -1))
        return found.float()

    def _values(self, observation: Observation, seen_BPD: Tensor) -> Tensor:
        nothing = seen_BPD.new_zeros(len(seen_BPD), self.chunk_length, self.action_size)
        time_B = torch.zeros(len(seen_BPD), device=seen_BPD.device)
        found: Tensor = self.value_head(self._at(observation, seen_BPD, nothing, time_B)[:, 0])
        return found

    def _at(self, observation: Observation, seen_BPD: Tensor, point: Tensor, time_B: Tensor) -> Tensor:
        """Hidden states of the slots."""
        time_B1D = self.times(time_B).to(seen_BPD.dtype)[:, None]
        joined = self.joined(observation, torch.cat([seen_BPD, time_B1D], 1))
        slots_BND = self.noisy_action_projector(point.to(seen_BPD.dtype).flatten(1)[..., None])
        return self.filled(*joined, slots_BND)
