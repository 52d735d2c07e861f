"""Held-out items under the installed policy. Nothing here is trained or kept retained."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from headrace.common.v1 import common_pb2 as common
from headrace.reward.v1 import reward_pb2 as reward
from headrace.rollout.v1 import rollout_pb2 as rollout
from headrace_schema.resources.views import EvaluationView

from headrace_coordinator.data.items import DataItem
from headrace_coordinator.domain.estimates import interval, pass_at
from headrace_coordinator.run.context import RunContext
from headrace_coordinator.run.evaluation.answering import Answers, Questions, answer
from headrace_coordinator.run.step.scoring.scoring import score_all, score_item
from headrace_coordinator.run.step.trajectories import sampled
from headrace_coordinator.run.workers.clients import Published
from headrace_coordinator.run.workers.rollout_client import Opening

EXAMPLES = 5
SEEDS = 2**63
"""How many seeds there are: what `seed` of the spec and of GenerateOpen can be."""


async def evaluate(
    context: RunContext, published: Published, kind: str, prefill: str | None
) -> EvaluationView:
    """Generates and scores every held-out item with the installed version."""
    items = context.dataset.heldout_items()
    questions = Questions(items, context.spec.evaluation.samples, _opening(context, published), prefill)
    done: Answers = {}
    await answer(context, published, questions, range(len(items)), done)
    bodies = [done[key] for key in sorted(done)]
    scores = await score_all(
        context.workers,
        [score_item(items[b.sample.prompt_ordinal], b, sampled(b)[0], evaluation=True) for b in bodies],
    )
    return _view(context, published, kind, items, bodies, scores)


def evaluation_seed(seed: int, ordinal: int) -> int:
    """A stream of its own for a version's answers, which so share no randomness with training; below 2^63."""
    return (seed + 1_000_003 * (ordinal + 1)) % SEEDS


def _opening(context: RunContext, published: Published) -> Opening:
    spec = context.spec
    if spec.environment is not None:
        return rollout.RunEpisodesOpen(
            policy_number=published.version.number,
            seed=evaluation_seed(spec.seed, published.version.ordinal),
            greedy=spec.evaluation.greedy,
            evaluation=True,
            until_success=spec.reward.judges_success_alone,
        )
    return rollout.GenerateOpen(
        policy_number=published.version.number,
        distribution=context.distribution(0.0 if spec.evaluation.greedy else spec.evaluation.temperature),
        max_new_tokens=spec.evaluation.max_new_tokens or spec.sampling.max_new_tokens,
        stop=spec.sampling.stop,
        seed=evaluation_seed(spec.seed, published.version.ordinal),
        deterministic=spec.deterministic,
        evaluation=True,
    )


def _view(
    context: RunContext,
    published: Published,
    kind: str,
    items: Sequence[DataItem],
    bodies: Sequence[common.Trajectory],
    scores: Sequence[reward.ScoreResult],
) -> EvaluationView:
    by_slot = {(s.sample.prompt_ordinal, s.sample.sample_index): s for s in scores}
    parts: dict[str, float] = defaultdict(float)
    examples: list[dict[str, Any]] = []
    for body in bodies:
        score = by_slot[body.sample.prompt_ordinal, body.sample.sample_index]
        for name, value in score.parts.items():
            parts[name] += value / len(bodies)
        if body.sample.sample_index == 0 and len(examples) < EXAMPLES:
            item = items[body.sample.prompt_ordinal]
            examples.append(
                {
                    "prompt": item.question,
                    "completion": body.completion_text,
                    "reference": item.answer,
                    "reward": score.reward,
                }
            )
    by_prompt: dict[int, list[float]] = defaultdict(list)
    for score in scores:
        by_prompt[score.sample.prompt_ordinal].append(score.reward)
    low, high = interval([*by_prompt.values()]) or (None, None)
    passed = pass_at([*by_prompt.values()], context.spec.evaluation.pass_reward)
    return EvaluationView(
        kind=kind,
        step=published.version.ordinal,
        version=published.version.number,
        score=sum(score.reward for score in scores) / max(len(scores), 1),
        parts=dict(parts),
        answers=len(bodies),
        score_low=low,
        score_high=high,
        pass_at={str(k): share for k, share in passed.items()},
        examples=examples,
    )
