"""What a run learns from: answers of a language model, or what a workload of a plug-in recognises. Nothing else asks.

Importing this loads no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from headrace_modelkit.errors import ModelNotReadable
from headrace_servicekit.registry import PluginError, Registry

from headrace_trainer.errors import invalid, refused

if TYPE_CHECKING:
    from headrace_schema.openings import TrainerConfig

    from headrace_trainer.kinds._base import RunKind


class Workload(Protocol):
    """What an entry point of `headrace.trainer_workloads` names, as a Plugin; it is built without torch."""

    def facets(self) -> dict[str, list[str]]:
        """What an instance registers that can learn so, by facet."""

    def run_kind(self, config: TrainerConfig) -> RunKind | None:
        """A run of this workload; None where its model is of another. Raises ModelNotReadable."""


WORKLOADS: Registry[Workload] = Registry("headrace.trainer_workloads", "workload", "model", "model", {})


def run_kind(config: TrainerConfig) -> RunKind:
    """What the run learns from, by its model. Raises Refusal MODEL_NOT_READABLE, and INVALID for a broken plug-in."""
    from headrace_trainer.kinds.answers import AnswersRun  # loads torch
    from headrace_trainer.kinds.policies import PoliciesRun
    from headrace_trainer.learning.policies import OWN

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
