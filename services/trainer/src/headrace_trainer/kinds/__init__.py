"""What a run learns from: answers of a language model, or episodes of a robot policy. Nothing else asks which it is.

A kind checks a run as it opens and chooses its parts: how groups are read, algorithm, backend, learner, export.
"""

from __future__ import annotations

from headrace_modelkit.errors import ModelNotReadable
from headrace_modelkit.robot.directory import policy_of
from headrace_schema.openings import TrainerConfig

from headrace_trainer.errors import invalid
from headrace_trainer.kinds._base import AnyLearner as AnyLearner
from headrace_trainer.kinds._base import RunKind as RunKind
from headrace_trainer.kinds.answers import AnswersRun
from headrace_trainer.kinds.episodes import EpisodesRun
from headrace_trainer.kinds.policies import PoliciesRun
from headrace_trainer.learning.policies import OWN


def run_kind(config: TrainerConfig) -> RunKind:
    """What the run learns from, by its model. Raises Refusal MODEL_NOT_READABLE."""
    try:
        policy = policy_of(config.model)
    except ModelNotReadable as error:
        key = "model.policy" if config.model.policy is not None else "model.path"
        raise invalid(f"{key}.{error}", "MODEL_NOT_READABLE", key=key) from error
    if policy is not None:
        return EpisodesRun(config, policy)
    if not config.policies:
        return AnswersRun(config)
    kinds = {name: AnswersRun(config.of_policy(name)) for name in (OWN, *sorted(config.policies))}
    return PoliciesRun(config, kinds)
