"""The episodes of a step as one rank holds them: read, scored, and taken chunk by chunk. Knows no optimizer.

Shapes: T chunks of an episode, C actions of a chunk, A numbers of an action; N chunks of all episodes of a step, M of
a micro-batch, K units of it that are learned from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from headrace_servicekit.rpc.episodes import IMAGE, STATE
from headrace_trainer.algorithms._base import OLD_LOG_PROBS, RETURNS, VALUES, TokenBatch
from headrace_trainer.learning.samples import CreditData, EpisodeData, LentPictures, Packed
from torch import Tensor
from typing_extensions import override

from headrace_robots.policies.policy import Evaluation, Level, Observation, at_level


@dataclass(frozen=True)
class Chunks:
    """N chunks of actions with what was seen before each, on the CPU."""

    observation: Observation
    sampled: Mapping[str, Tensor]
    valid_NC: Tensor

    def take(self, index: Tensor, device: torch.device) -> Chunks:
        """These chunks, on a device."""
        return self._taken(index, self.observation.take(index), device)

    def _taken(self, index: Tensor, seen: Observation, device: torch.device) -> Chunks:
        return Chunks(
            Observation(
                None if seen.state_BS is None else seen.state_BS.to(device),
                {name: image.to(device) for name, image in seen.images.items()},
                seen.prompts,
            ),
            {name: drawn[index].to(device) for name, drawn in self.sampled.items()},
            self.valid_NC[index].to(device),
        )


@dataclass(frozen=True)
class StepChunks(Chunks):
    """The chunks of all episodes of a step, one after the other; their pictures lie where they were read."""

    pictures: Mapping[str, list[Tensor]]
    """By camera, one for each chunk: blank ones stand for those that other ranks own."""

    @classmethod
    def of(cls, parts: list[Chunks]) -> StepChunks:
        """Copies no picture."""
        seen = [part.observation for part in parts]
        states = [each.state_BS for each in seen if each.state_BS is not None]
        return cls(
            Observation(
                torch.cat(states) if states else None,
                prompts=tuple(prompt for each in seen for prompt in each.prompts),
            ),
            {name: torch.cat([part.sampled[name] for part in parts]) for name in parts[0].sampled},
            torch.cat([part.valid_NC for part in parts]),
            {name: [picture for each in seen for picture in each.images[name]] for name in seen[0].images},
        )

    def lend(self, lent: LentPictures) -> StepChunks:
        """With pictures of some chunks in place of blank ones."""
        if not lent.chunks:
            return self
        pictures = {name: [*own] for name, own in self.pictures.items()}
        for name, array in lent.pictures.items():
            for chunk, picture in zip(lent.chunks, _tensor(array), strict=True):
                pictures[name.removeprefix(IMAGE)][chunk] = picture
        return replace(self, pictures=pictures)

    @override
    def take(self, index: Tensor, device: torch.device) -> Chunks:
        found = self.observation.take(index)
        images = {
            name: torch.stack([own[row] for row in index.tolist()]) for name, own in self.pictures.items()
        }
        return self._taken(index, replace(found, images=images), device)


@dataclass(frozen=True)
class Credits:
    """`CreditData` as tensors, on the CPU."""

    old_log_probs_NCA: Tensor
    engine_log_probs_NCA: Tensor
    values_N: Tensor
    advantages: Tensor
    mask_NC: Tensor
    weights_N: Tensor
    returns_N: Tensor | None


def read_chunks(data: EpisodeData) -> Chunks:
    """An episode's chunks."""
    seen, valid_TC = _tensors(data.observation), _tensor(data.valid_TC)
    blank = {name: torch.zeros((1, *shape), dtype=torch.uint8) for name, shape in data.unseen.items()}
    seen |= {name: one.expand(len(valid_TC), *one.shape[1:]) for name, one in blank.items()}
    return Chunks(_observation(seen, data.prompt, len(valid_TC)), _tensors(data.sampled), valid_TC)


def read_final(data: EpisodeData) -> Observation | None:
    """What an episode that was cut ended with."""
    seen = {name: value[None] for name, value in _tensors(data.final).items()}
    return _observation(seen, data.prompt, 1) if seen else None


def read_credits(data: CreditData) -> Credits:
    """What the chunks are worth."""
    return Credits(
        _tensor(data.old_log_probs_NCA),
        _tensor(data.engine_log_probs_NCA),
        _tensor(data.values_N),
        _tensor(data.advantages),
        _tensor(data.mask_NC),
        _tensor(data.weights_N),
        None if data.returns_N is None else _tensor(data.returns_N),
    )


def units(found: Evaluation, credits: Credits, index: Tensor, level: Level) -> TokenBatch:
    """The units of a micro-batch that are learned from, flat, as a loss reads them."""
    device = found.log_probs_BCA.device
    mask_MC = credits.mask_NC[index].to(device)

    def summed(values_MCA: Tensor) -> Tensor:
        return at_level(values_MCA, mask_MC, level)[0][kept]

    def each(values_M: Tensor) -> Tensor:
        spread = values_M.view(-1, *[1] * (kept.dim() - 1))
        return spread.expand(kept.shape)[kept]

    kept = at_level(found.log_probs_BCA, mask_MC, level)[1]
    advantages = credits.advantages[index].to(device)
    if level == "token":
        advantages = advantages[..., None].expand(kept.shape)
    old_K = summed(credits.old_log_probs_NCA[index].to(device))
    columns = {OLD_LOG_PROBS: old_K, VALUES: each(credits.values_N[index].to(device))}
    if credits.returns_N is not None:
        columns[RETURNS] = each(credits.returns_N[index].to(device))
    return TokenBatch(
        log_probs_K=summed(found.log_probs_BCA),
        old_log_probs_K=old_K,
        engine_log_probs_K=summed(credits.engine_log_probs_NCA[index].to(device)),
        advantages_K=advantages[kept],
        weights_K=each(credits.weights_N[index].to(device)),
        sequences_K=each(torch.arange(len(index), device=device)),
        columns_K=columns,
        entropy_K=summed(found.entropy_BCA),
        values_K=each(found.values_B),
    )


def _observation(seen: Mapping[str, Tensor], prompt: list[int], count: int) -> Observation:
    return Observation(
        seen[STATE].float() if STATE in seen else None,
        {name.removeprefix(IMAGE): value for name, value in seen.items() if name.startswith(IMAGE)},
        (tuple(prompt),) * count if prompt else (),
    )


def _tensors(arrays: Mapping[str, Packed]) -> dict[str, Tensor]:
    return {name: _tensor(array) for name, array in arrays.items()}


def _tensor(packed: Packed) -> Tensor:
    array = packed.array()
    return torch.from_numpy(array.astype(np.float32) if array.dtype == np.float64 else array)
