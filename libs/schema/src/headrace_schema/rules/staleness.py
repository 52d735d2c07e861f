"""What cannot work with answers of older versions: `algorithm.max_staleness` above 0. Knows no fleet."""

from __future__ import annotations

from collections.abc import Iterator

from headrace_schema.problems import problem
from headrace_schema.resources.views import KeyProblemView
from headrace_schema.sections.run import RunSections
from headrace_schema.workflow import CONVERSATIONS

ON_POLICY = frozenset({"opo"})
"""Built-in algorithms that are right only for answers of the version that learns from them; a trainer refuses others
as a run opens, by their `on_policy_only`."""
STRICT = ", or set algorithm.max_staleness: 0"


def staleness(spec: RunSections) -> Iterator[KeyProblemView]:
    """Problems of `algorithm.max_staleness` with what else the spec asks for."""
    if not spec.algorithm.max_staleness:
        if spec.rollout.install is not None:
            reason = "with algorithm.max_staleness: 0 no answer is in hand when a version is installed"
            yield problem("rollout.install", reason, "remove it, or set algorithm.max_staleness to 1 or more")
        return
    yield from _placing(spec)
    if spec.deterministic:
        reason = "which version makes which token depends on times, so no two runs are alike"
        yield problem("algorithm.max_staleness", reason, "set it to 0, or set deterministic: false")
    if spec.algorithm.name in ON_POLICY:
        reason = f"{spec.algorithm.name} is right only for answers of the version that learns from them"
        fix = "use an algorithm that corrects for older versions, such as grpo"
        yield problem("algorithm.name", reason, f"{fix}{STRICT}")
    if spec.data.curriculum is not None:
        reason = "it chooses a step's items by the pass rates of the step before, which has not ended when they start"
        yield problem("data.curriculum", reason, f"remove it{STRICT}")
    if spec.rollout.install in ("in_flight", "abort_and_resume"):
        what = (
            "an episode"
            if spec.workflow == "embodied"
            else "a conversation"
            if spec.workflow == CONVERSATIONS
            else ""
        )
        if what:
            reason = f"{what} is made with one version"
            yield problem("rollout.install", reason, "set rollout.install: drain, or remove it")


def _placing(spec: RunSections) -> Iterator[KeyProblemView]:
    placement = spec.placement
    if placement.share:
        reason = "a run that shares holds the devices of one side at a time, so nothing is generated while it learns"
        yield problem("placement.share", reason, f"set placement.share: false{STRICT}")
    elif placement.mode == "collocated":
        reason = (
            "rollout and trainer take turns on the same devices, so nothing is generated while the trainer learns, "
            "and answers would only become older"
        )
        yield problem("placement.mode", reason, f"set placement.mode: disaggregated or hybrid{STRICT}")
    for key, helpers in (("trainer", spec.trainer.helpers), ("rollout", spec.rollout.helpers)):
        if helpers:
            reason = "the last answers of a step decode beside those of the next ones, so no device is idle in a step"
            yield problem(f"{key}.helpers", reason, f"set {key}.helpers: 0{STRICT}")
