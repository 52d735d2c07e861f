"""One call of a loop of the user's own: log-probs and a loss over given sequences, and maybe its gradient.

Runs on the leader. Knows no wire; the step's rules are `learning.step`'s.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass
from itertools import chain
from typing import cast

import torch

from headrace_trainer.algorithms._base import OLD_LOG_PROBS, TokenBatch
from headrace_trainer.algorithms.asked import SAMPLED, WEIGHTS, AskedLosses
from headrace_trainer.errors import conflict
from headrace_trainer.learning import step as steps
from headrace_trainer.learning.learner import planned
from headrace_trainer.learning.policies import Learning
from headrace_trainer.learning.samples import Disposition, GroupRecord, Sample
from headrace_trainer.ranks.policy_rounds import PolicyRounds

BEGINNING = 32
"""Tokens that sequences have in common where nothing says how long their prompts are."""


@dataclass(frozen=True)
class Call:
    """A loss over sequences. One that `learns` belongs to an attempt, which remembers it by `key`."""

    samples: list[Sample]
    loss: str
    options: Mapping[str, float]
    step: int = 0
    attempt: int = 0
    key: tuple[int, int, int, str] = (0, 0, 0, "")
    """(prompt ordinal, sample index, attempt of the slot, digest)."""
    learns: bool = False


@dataclass(frozen=True)
class CallReply:
    """Log-probs of each sequence's targets, and the loss as a sum; `finite`: of all of them."""

    log_probs: list[list[float]]
    loss: float
    finite: bool
    policy_number: int


def compute(state: steps.StepState, policy: Learning, call: Call) -> tuple[steps.StepState, CallReply]:
    """The state after the call, and its reply. Where it is not finite, the open attempt can commit nothing any more.

    Raises Refusal NOT_OPEN, and CONFLICT for a call that the attempt has already.
    """
    version, algorithm = steps.held_version(state), policy.algorithm
    if not isinstance(algorithm, AskedLosses):
        raise conflict("the run is no session, whose calls have losses of their own")
    if call.learns:
        steps.check_open(state, call.step, call.attempt)
        if call.key[0] in state.groups:
            raise conflict(f"call {call.key[0]} is in step {call.step} attempt {call.attempt} already")
    algorithm.ask(call.loss, call.options)
    rounds, groups = cast(PolicyRounds, policy.rounds), by_prompt(call.samples)
    if call.learns:
        finite, found = rounds.compute([work for work, _ in planned(groups, rounds)])
    else:
        read = rounds.infer(groups, [OLD_LOG_PROBS])
        pairs = zip(chain(*groups), chain(*read), strict=True)
        finite, found = True, {id(sample): columns[OLD_LOG_PROBS] for sample, columns in pairs}
    log_probs = [found[id(sample)] for sample in call.samples]
    loss = _loss(algorithm, call.samples, log_probs)
    finite = finite and math.isfinite(loss)
    if call.learns:
        tokens = sum(_counted(sample) for sample in call.samples)
        record = GroupRecord(
            prompt_ordinal=call.key[0],
            digest=call.key[3],
            keys=(call.key,),
            disposition=Disposition.ACCUMULATED,
            sequences=1,
            trained_sequences=1,
            tokens=tokens,
            tokens_by_version=Counter({version.number: tokens}),
        )
        taint = "" if finite else f"the loss of call {call.key[0]} is not finite"
        state = steps.learned(state, record if finite else steps.not_finite(record), taint=taint)
    return state, CallReply(log_probs, loss, finite, version.number)


def by_prompt(samples: Many[Sample]) -> list[list[Sample]]:
    """Sequences with one prompt together: what they have in common is computed once, and a tree has no more branches.

    A prompt is what stands before the first target that counts; where all count, the first `BEGINNING` tokens.
    """
    found: dict[tuple[int, ...], list[Sample]] = {}
    for sample in samples:
        told = [sample.columns[WEIGHTS], *([sample.advantages] if any(sample.advantages) else [])]
        counts = zip(sample.trained, *told, strict=True)
        first = next((place for place, *values in counts if all(values)), 1)
        found.setdefault(tuple(sample.tokens[: first if first > 1 else BEGINNING]), []).append(sample)
    return list(found.values())


def _counted(sample: Sample) -> int:
    return sum(weight != 0 for weight in sample.columns[WEIGHTS])


def _loss(algorithm: AskedLosses, samples: Many[Sample], log_probs: Many[list[float]]) -> float:
    """The whole call's, from its log-probs, in double precision."""

    def flat(parts: Many[list[float]]) -> torch.Tensor:
        return torch.tensor([value for part in parts for value in part], dtype=torch.float64)

    lp_K = flat(log_probs)
    named = {name: flat([sample.columns[name] for sample in samples]) for name in samples[0].columns}
    advantages_K = flat([sample.advantages for sample in samples])
    return float(
        algorithm.loss(
            TokenBatch(
                log_probs_K=lp_K,
                old_log_probs_K=lp_K,
                engine_log_probs_K=lp_K,
                advantages_K=advantages_K,
                weights_K=torch.ones_like(lp_K),
                sequences_K=torch.zeros_like(lp_K, dtype=torch.int64),
                columns_K=named,
            )
        ).loss
    )


def sequence_sample(
    tokens: list[int],
    targets: list[int],
    weights: list[float],
    advantages: list[float],
    log_probs: list[float],
) -> Sample:
    """A sequence of a call as ranks compute it. Raises ValueError where its parts do not fit each other."""
    each, rest = divmod(len(targets), len(tokens))
    if rest or not each:
        raise ValueError(f"{len(targets)} targets of {len(tokens)} tokens: give as many for each position")
    for name, values in (("weights", weights), ("advantages", advantages), ("log_probs", log_probs)):
        if values and len(values) != len(targets):
            raise ValueError(f"{len(values)} {name} of {len(targets)} targets: give one for each")
    columns = {WEIGHTS: weights or [1.0] * len(targets)}
    if log_probs:
        columns[SAMPLED] = log_probs
    return Sample(
        tokens=[*tokens, targets[-1]],
        trained=[place for place in range(1, len(tokens) + 1) for _ in range(each)],
        engine_log_probs=[math.nan] * len(targets),
        advantages=advantages or [0.0] * len(targets),
        weight=1.0,
        columns=columns,
        targets=targets,
    )
