"""Supervised batches from reference answers, in a seeded order that is the same on every rank."""

from __future__ import annotations

import base64
import random

from headrace_modelkit.tokenizer import load_tokenizer
from headrace_schema.openings import TrainerConfig
from headrace_servicekit.rpc.digests import digest_bytes

from headrace_trainer.errors import invalid
from headrace_trainer.learning.given import positions_of, read_given
from headrace_trainer.learning.planning import plan_batches, plan_rows
from headrace_trainer.learning.samples import Image, Rows, Sample


class SupervisedBatches:
    """The share of one rank in each warm-up step. Only answer tokens, their end included, are trained."""

    def __init__(self, config: TrainerConfig, rank: int, world_size: int) -> None:
        self._config = config
        self._rank = rank
        self._world_size = world_size
        if config.trainer.warmup.steps:
            codec = load_tokenizer(config.model)
            try:
                self._sequences = [
                    read_given(codec, example, [*map(_image, example.images)])
                    for example in config.warmup_examples
                ]
            except ValueError as error:  # of the model's chat template, which no second try mends
                raise invalid(str(error), key="model.path") from error
            self._check_lengths()

    def _check_lengths(self) -> None:
        """Raises Refusal INVALID for an example that is longer than what the model was made to read."""
        positions = positions_of(self._config.model)
        for number, sequence in enumerate(self._sequences, 1):
            if positions is not None and len(sequence.tokens) > positions:
                raise invalid(
                    f"trainer.warmup: example {number} of {len(self._sequences)} has {len(sequence.tokens)} tokens "
                    f"with its answer, and the model has {positions} positions; shorten it or leave it out",
                    key="trainer.warmup",
                )

    def step(self, step: int, *, shared: bool) -> tuple[list[Rows], int]:
        """Micro-batches and trained tokens of this rank's share of step `step`."""
        own = self._batch(step)[self._rank :: self._world_size]
        budget = self._config.trainer.micro_batch_tokens
        rows = [
            (length, [own[index] for index in members])
            for length, members in plan_rows(own, budget, shared=shared)
        ]
        batches = plan_batches([length for length, _ in rows], budget)
        work = [[rows[row][1] for row in batch] for batch in batches]
        return work, sum(len(sequence.trained) for sequence in own)

    def _batch(self, step: int) -> list[Sample]:
        size = min(self._config.trainer.warmup.batch, len(self._sequences))
        first = step * size
        return [self._sequences[self._pick(first + offset)] for offset in range(size)]

    def _pick(self, position: int) -> int:
        """Index of the example at a position of the endless order: one permutation after another."""
        epoch, index = divmod(position, len(self._sequences))
        order = list(range(len(self._sequences)))
        random.Random(f"{self._config.seed}/warmup/{epoch}").shuffle(order)
        return order[index]


def _image(file: str) -> Image:
    data = base64.b64decode(file)
    return Image(digest_bytes(data), data)
