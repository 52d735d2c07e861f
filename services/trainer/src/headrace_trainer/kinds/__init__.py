"""What a run learns from: answers of a language model, or what a workload of a plug-in knows. Nothing else asks which.

A kind checks a run as it opens and chooses its parts: how groups are read, algorithm, backend, learner, export.
"""

from __future__ import annotations

from headrace_modelkit.errors import ModelNotReadable
from headrace_schema.openings import TrainerConfig
from headrace_servicekit.registry import PluginError

from headrace_trainer.errors import invalid, refused
from headrace_trainer.kinds._base import AnyLearner as AnyLearner
from headrace_trainer.kinds._base import RunKind as RunKind
from headrace_trainer.kinds.answers import AnswersRun
from headrace_trainer.kinds.policies import PoliciesRun
from headrace_trainer.learning.policies import OWN
from headrace_trainer.workloads import WORKLOADS


def run_kind(config: TrainerConfig) -> RunKind:
    """What the run learns from, by its model. Raises Refusal MODEL_NOT_READABLE, and INVALID for a broken plug-in."""
    try:
        for workload in WORKLOADS.build_all():
            if (kind := workload.run_kind(config)) is not None:
                return kind
    except PluginError as error:
        raise refused(error) from error
    except ModelNotReadable as error:
        key = "model.policy" if config.model.policy is not None else "model.path"
        raise invalid(f"{key}.{error}", "MODEL_NOT_READABLE", key=key) from error
    if config.model.policy is not None:
        reason = "no plug-in of this trainer recognises it; install the one of its kind where trainers run"
        raise invalid(f"model.policy: {reason}", key="model.policy")
    if not config.policies:
        return AnswersRun(config)
    kinds = {name: AnswersRun(config.of_policy(name)) for name in (OWN, *sorted(config.policies))}
    return PoliciesRun(config, kinds)
