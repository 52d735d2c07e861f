"""Whether a model computes what its own class does, in each form that its rows will have: tried as it is loaded.

Its weights and a few tokens say so. Log-probs of a lone answer must be the class's own, or the run ends. A form that
puts answers together is right where one of them stays as it is when the others are replaced, and is the lone one's;
else every answer gets a row of its own. All ranks take part with the same tokens. Knows no files and no loss.

Shapes: K trained tokens of an answer, D hidden; others as in `packing`.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Any

import torch
from headrace_modelkit.attending import longest_window
from headrace_modelkit.experts import plain_experts
from headrace_modelkit.families.mixtures import expert_shape
from headrace_modelkit.invariant import plain_attention
from headrace_modelkit.loading import DTYPES, context_limit
from headrace_modelkit.probing import BROKEN, OFF, apart, breaks, distance, in_words, probe_tokens, wrong
from headrace_modelkit.processors import load_images
from headrace_schema.openings import TrainerConfig
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from headrace_trainer.backends.fsdp.attending.context import CONTEXT
from headrace_trainer.backends.fsdp.attending.gradients import check_gradient
from headrace_trainer.backends.fsdp.attending.prefixes import Attending, attend_to_trees, obstacle_to_trees
from headrace_trainer.backends.fsdp.sharding import ShardedModel
from headrace_trainer.errors import invalid
from headrace_trainer.group.group import TrainerGroup
from headrace_trainer.learning.packing import Attends, MicroBatch, pack
from headrace_trainer.learning.samples import Rows, Sample

MOVED = 1e-3
"""How far an answer's log-probs may move as others are replaced: 1e-6 in models that keep answers apart, 0.3 in others.
Hidden states of a critic are measured in their own root mean square."""
PROBED_WINDOW = 1024
"""Longer ones are not probed beyond: the class computes the logits of all tokens."""
PROMPT, ANSWER = 4, 5
"""Tokens."""


@dataclass(frozen=True)
class Attention:
    """What a model that was tried takes."""

    shares: bool
    """Rows may be prefix trees."""
    along: bool
    """It takes paths and segments."""
    note: str = ""
    """For the run's user: why every answer gets a row of its own."""
    windowed: bool = False
    """Layers of it see the last tokens alone: of its forms segments know windows."""
    idle: str = ""
    """For the run's user: which adapters do not learn."""


class FormCheck:
    """One model of a run, the critic's own body included, whose weights are loaded."""

    def __init__(self, config: TrainerConfig, model: ShardedModel, ranks: TrainerGroup) -> None:
        policy: Any = model.policy
        own_critic = policy.critic is not None and policy.critic.body is not None
        self.bodies: list[PreTrainedModel] = [policy.model, *([policy.critic.body] if own_critic else [])]
        self._policy, self._context = policy, policy.context
        self._config, self._model, self._ranks = config, model, ranks
        architecture = policy.model.config
        self._experts = expert_shape(architecture)
        self._images = load_images(config.model) if config.sees else None
        limit = context_limit(config.model, architecture)
        self._window = longest_window(architecture, limit)
        self._first, self._second = _answers(architecture, limit, self._window)
        """Answers, one to another prompt and three to the same; then with all but the middle one replaced."""

    def settle(self) -> Attention:
        """Sets the model's attention to what it takes. Raises Refusal INVALID where no form is right, or where one is
        wrong that the spec demands.
        """
        alone = self._alone()
        obstacle = next(
            (why for each in self.bodies if (why := obstacle_to_trees(self._config, each.config))), ""
        )
        wanted, along = self._config.trainer.shared_prefix, False
        if not obstacle:
            own = Attending.of(self.bodies)
            along = attend_to_trees(self.bodies)
            obstacle = self._problem(alone, along=along, shared=wanted is not False)
            if obstacle:
                own.put_back()
                along = False
                self._probe(
                    [[self._first[2]]], Attends.MASK, shared=False
                )  # fully_shard forgets a forward that broke
        self._model.release()
        if obstacle and wanted:
            raise invalid(
                f"trainer.shared_prefix: true, but {obstacle}; leave it out, or set it to false, and every sample "
                "gets a row of its own"
            )
        if self._context is not None and not along:
            why = obstacle or "the model has attention of its own"
            raise invalid(f"{CONTEXT}: ranks cannot divide rows: {why}; leave it out", key=CONTEXT)
        note = f"every answer gets a row of its own: {obstacle}" if obstacle else ""
        path = self._config.model.path
        idle = check_gradient(path, self._model, self.bodies, self._ranks, self._lone())
        return Attention(wanted is not False and not obstacle, along, note, along and self._window > 0, idle)

    def _lone(self) -> MicroBatch:
        """One answer, as ranks get it that divide rows."""
        attends = Attends.SEGMENTS if self._context is not None else Attends.MASK
        return self._packed([[self._first[2]]], attends, shared=False)

    def _alone(self) -> list[Tensor]:
        """What a lone answer is by the class itself, once it is sure that this is what is learned from.

        Raises Refusal INVALID.
        """
        lone: Rows = [[self._first[2]]]
        path, kind = self._config.model.path, self.bodies[0].config.model_type
        try:
            with plain_attention(self.bodies), plain_experts(self.bodies):
                plain = self._probe(lone, Attends.MASK, shared=False, plain=True)
            own = self._probe(lone, Attends.MASK, shared=False)
        except torch.OutOfMemoryError:
            raise
        except BROKEN as error:
            raise invalid(
                breaks(path, kind, self._words(error), by="the trainer"), key="model.path"
            ) from error
        if off := self._off(own, plain):
            raise invalid(wrong(path, kind, off, by="the trainer"), key="model.path")
        return own

    def _problem(self, alone: list[Tensor], *, along: bool, shared: bool) -> str:
        """What is wrong with a form that will run; empty where all are right."""
        for attends, trees in self._forms(along=along, shared=shared):
            how = "share their prompt" if trees else "stand behind each other in a row"
            try:
                found, moved = (
                    self._middle(self._probe(_rows(each, trees=trees), attends, shared=trees))
                    for each in (self._first, self._second)
                )
            except torch.OutOfMemoryError:
                raise
            except BROKEN as error:
                return f"the model breaks where answers {how} ({self._words(error)})"
            far = self._agreed(max(float(apart(*both).max()) for both in zip(found, moved, strict=True)))
            if far > MOVED:
                return f"an answer's log-probs move by {far:.2g} nats where answers {how} and others are replaced"
            if off := self._off(found, alone):
                return f"an answer's log-probs are off by {off:.2g} nats where answers {how}"
        return ""

    def _forms(self, *, along: bool, shared: bool) -> Iterator[tuple[Attends, bool]]:
        """Each that micro-batches will have, and whether as trees."""
        on_cpu = self._ranks.device.type == "cpu" and self._context is None and not self._window
        if not along:
            yield from [(Attends.MASK, True)] if shared else []
        elif self._config.deterministic:
            yield from [(Attends.PATHS, False), *([(Attends.PATHS, True)] if shared else [])]
        elif not on_cpu:
            yield Attends.SEGMENTS, shared
        else:
            yield Attends.MASK, False
            kinds = (Attends.MASK, Attends.CHEAPEST, Attends.SEGMENTS)
            yield from [(attends, True) for attends in kinds] if shared else []

    def _probe(self, rows: Rows, attends: Attends, *, shared: bool, plain: bool = False) -> list[Tensor]:
        found: list[Tensor] = self._policy.probe(self._packed(rows, attends, shared=shared), plain=plain)
        return found

    def _packed(self, rows: Rows, attends: Attends, *, shared: bool) -> MicroBatch:
        batch = pack(
            rows,
            shared=shared,
            attends=attends,
            multiple=self._context.size if self._context else 1,
            experts=self._experts,
            images=self._images,
        )
        if self._context is not None and batch.segments is not None:
            batch = self._context.divided(batch)
        return batch.to(self._ranks.device)

    def _middle(self, found: Many[Tensor]) -> list[Tensor]:
        count = len(self._first[2].trained)
        return [each[2 * count : 3 * count] for each in found]

    def _off(self, found: Many[Tensor], expected: Many[Tensor]) -> float:
        """How far log-probs are off, or hidden states of a critic; 0 where they are not."""
        dtype = DTYPES[self._config.model.dtype]
        off = self._agreed(max(distance(*both, dtype) for both in zip(found, expected, strict=True)))
        return off if off > OFF[dtype] else 0.0

    def _words(self, error: Exception) -> str:
        """What broke. Raises where it was the group, of which a rank is lost."""
        self._model.release()
        self._agreed(0.0)
        return in_words(error)

    def _agreed(self, own: float) -> float:
        return self._ranks.maximum({"distance": own})["distance"]


def _rows(answers: Many[Sample], *, trees: bool) -> Rows:
    return [[answers[0]], list(answers[1:])] if trees else [[each] for each in answers]


def _answers(architecture: PreTrainedConfig, limit: int, window: int) -> tuple[list[Sample], list[Sample]]:
    answer = max(1, min(ANSWER, (limit - 1) // 2))
    beyond = window if window <= PROBED_WINDOW else 0  # beginnings that the last tokens do not see
    prompt = max(1, min(PROMPT + beyond, limit - answer))
    # Answers begin with different tokens, so that all have nodes of their own in a tree.
    tokens = list(probe_tokens(architecture, 7 * answer + 2 * prompt))
    begins, prompts, ends = tokens[:7], tokens[7 : 7 + 2 * prompt], tokens[7 + 2 * prompt :]
    asked = [prompts[:prompt], prompts[prompt:]]
    given = [[begin, *ends[at * (answer - 1) : (at + 1) * (answer - 1)]] for at, begin in enumerate(begins)]
    trained = list(range(prompt, prompt + answer))

    def sequence(which: int, number: int) -> Sample:
        return Sample(asked[which] + given[number], trained, [float("nan")] * answer)

    first = [sequence(0, 1), sequence(1, 2), sequence(1, 0), sequence(1, 3)]
    second = [sequence(0, 4), sequence(1, 5), sequence(1, 0), sequence(1, 6)]
    return first, second
