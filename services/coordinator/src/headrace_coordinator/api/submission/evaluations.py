"""An evaluation as it is submitted: what its spec means on this fleet, as the run that carries it out."""

from __future__ import annotations

import asyncio
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec
from headrace_schema.evaluating import EvaluationSpec
from headrace_schema.problems import Impossible, explain, problem
from headrace_schema.resources.views import CheckpointView, KeyProblemView, RunView
from headrace_schema.sections.generating import ModelSection
from headrace_schema.spec import RunSpec
from pydantic import ValidationError

from headrace_coordinator.data.dataset import Dataset
from headrace_coordinator.domain.runs import SuiteEvaluation
from headrace_coordinator.suites import Suite, open_suite

PACKAGES = ("headrace-coordinator", "reasoning-gym", "datasets")
_KEYS = (
    ("data.prompt.", "prompt."),
    ("environment", "suite.options.environment"),
    ("placement.rollout", "devices"),
    ("placement.trainer", "devices"),
)


class Prepared(msgspec.Struct, frozen=True):
    """The run that carries an evaluation out."""

    spec: RunSpec
    evaluation: SuiteEvaluation


def origin_of(asked: EvaluationSpec, origin: RunView, checkpoints: list[CheckpointView]) -> CheckpointView:
    """The checkpoint that is evaluated; raises `Impossible` naming the ones that there are."""
    assert asked.checkpoint is not None
    wanted = asked.checkpoint.step
    if not checkpoints:
        fix = "wait until it has one" if not origin.ended else "name a run that has one"
        raise Impossible([problem("checkpoint.run", f"run {origin.id} has no checkpoint", fix)])
    for found in checkpoints:
        if wanted in (None, found.step):
            return found
    steps = sorted({found.step for found in checkpoints})
    close = min(steps, key=lambda step: abs(step - (wanted or 0)))
    reason = f"run {origin.id} has no checkpoint of step {wanted}"
    fix = f"the nearest is {close}; it has checkpoints of steps {', '.join(map(str, steps))}"
    raise Impossible([problem("checkpoint.step", reason, fix)])


async def prepare(
    asked: EvaluationSpec, origin: RunView | None, checkpoint: CheckpointView | None
) -> Prepared:
    """The run of an evaluation, its suite opened; raises `Impossible` in the keys of the evaluation's spec."""
    suite = open_suite(asked.suite.name, asked.suite.options)
    given = asked.model
    if given is None:
        assert origin is not None
        given = ModelSection.model_validate(origin.spec["model"])
    spec = _run_spec(asked, given, suite)
    try:
        data = await asyncio.to_thread(Dataset.open, spec.data, spec.seed)
    except Impossible as error:
        raise Impossible(in_users_keys(error.problems, suite)) from error
    count, limit = len(data.asked()), asked.suite.limit
    if limit is not None and limit > count:
        reason = f"the suite has {count} items"
        raise Impossible([problem("suite.limit", reason, f"the nearest valid value is {count}")])
    evaluation = SuiteEvaluation(
        spec=asked.model_dump(mode="json"),
        model=given.path or str((given.policy or {}).get("kind", "")),
        items=min(count, limit or count),
        versions=_versions(),
    )
    if origin is not None and checkpoint is not None:
        evaluation.checkpoint_run, evaluation.checkpoint_step = origin.id, checkpoint.step
        evaluation.checkpoint_directory = str(Path(origin.run_directory) / "checkpoints" / checkpoint.name)
        if (
            origin.spec["model"]["dtype"] == given.dtype
        ):  # In another type the same masters are other weights.
            evaluation.digest = checkpoint.version.digest
    return Prepared(spec, evaluation)


def in_users_keys(problems: list[KeyProblemView], suite: Suite) -> list[KeyProblemView]:
    """Problems of the run of an evaluation as problems of the evaluation."""
    found = []
    for each in problems:
        key = each.key
        for own, users in _KEYS:
            key = key.replace(own, users, 1) if key.startswith(own) else key
        if key.startswith("data."):
            key = suite.key(key)
        found.append(each.model_copy(update={"key": key}))
    return found


def _run_spec(asked: EvaluationSpec, model: ModelSection, suite: Suite) -> RunSpec:
    data, reward = suite.data(), asked.reward or suite.reward()
    sections: dict[str, Any] = {
        "name": asked.name,
        "steps": 1,
        "seed": asked.seed,
        "deterministic": asked.deterministic,
        "export": False,
        "model": model,
        "data": data.model_copy(update={"prompt": asked.prompt}) if asked.prompt else data,
        "sampling": {"max_new_tokens": asked.sampling.max_new_tokens, "stop": asked.sampling.stop},
        "reward": reward,
        "rollout": asked.rollout,
        "placement": {"rollout": asked.devices, "trainer": asked.devices},
        "checkpoint": {"enabled": False},
        "scheduling": asked.scheduling,
        "limits": asked.limits,
    }
    if (environment := suite.acts_in()) is not None:
        sections |= {"workflow": "embodied", "environment": environment, "sampling": {}}
    try:
        return RunSpec.model_validate(sections)
    except ValidationError as error:
        raise Impossible(in_users_keys(explain(error, RunSpec), suite)) from error


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
