"""Rows of a run that imitates alone, from messages to samples: each is a moment of a demonstration. Knows no data set.

A sample's first two tokens are the episode and the step, and each trained one is an action of the policy's horizon; so
it takes as many tokens as the moment takes positions in a pass.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from headrace_schema.openings import GivenAnswer
from headrace_trainer.algorithms._base import TokenBatch
from headrace_trainer.errors import invalid
from headrace_trainer.learning.samples import Image, Rows, Sample
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor


class Moment(BaseModel):
    """What a row's answer says as JSON: a step of an episode that has so many."""

    model_config = ConfigDict(extra="forbid", strict=True)

    episode: int = Field(ge=0)
    step: int = Field(ge=0)
    steps: int = Field(ge=1)


class MomentReader:
    """Reads the rows of a run whose policy has a horizon of so many actions and takes so many positions in a pass."""

    def __init__(self, horizon: int, places: int) -> None:
        self._horizon, self._size = horizon, max(places, 2 + horizon)

    def read(self, given_json: str, files: Mapping[str, Image], where: str) -> tuple[Sample, ...]:
        """The sample of a row. Raises Refusal INVALID."""
        try:
            moment = Moment.model_validate_json(GivenAnswer.model_validate_json(given_json).answer)
        except ValidationError as error:
            raise invalid(
                f"data.source: {where} names no moment of a demonstration, which a robot policy imitates; set lerobot",
                key="data.source",
            ) from error
        actions = min(self._horizon, moment.steps - moment.step)
        first = self._size - self._horizon
        tokens = [moment.episode, moment.step, *[0] * (self._size - 2)]
        return (Sample(tokens, [*range(first, first + actions)], [math.nan] * actions, weight=1.0),)


def moment_of(sample: Sample) -> tuple[int, int]:
    """(episode, step) of a sample."""
    return sample.tokens[0], sample.tokens[1]


def moments_batch(rows: Rows, log_probs_K: Tensor) -> TokenBatch:
    """The actions of these samples as an algorithm's loss takes them."""
    samples = [sample for row in rows for sample in row]
    device, counts = log_probs_K.device, torch.tensor([len(sample.trained) for sample in samples])

    def each(values: list[float]) -> Tensor:
        return torch.tensor(values, device=device)

    own_K = log_probs_K.detach()
    return TokenBatch(
        log_probs_K=log_probs_K,
        old_log_probs_K=own_K,
        engine_log_probs_K=torch.full_like(own_K, math.nan),
        advantages_K=each([value for sample in samples for value in sample.advantages]),
        weights_K=each([sample.weight for sample in samples for _ in sample.trained]),
        sequences_K=torch.repeat_interleave(torch.arange(len(samples)), counts).to(device),
        columns_K={},
    )
