"""An evaluation as the run that carries it out: what its spec means, and whose weights it asks. Pure."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from headrace_schema.evaluating import EvaluationSpec
from headrace_schema.openings import policy_model
from headrace_schema.problems import Impossible, choose, explain, problem
from headrace_schema.resources.views import CheckpointView, KeyProblemView, RunView
from headrace_schema.sections.generating import ModelSection
from headrace_schema.sections.policies import PolicySection
from headrace_schema.spec import RunSpec
from pydantic import ValidationError

from headrace_coordinator.api.submission.submission import Evaluated, Origin, Submission
from headrace_coordinator.data.builtin.episodes import Episodes
from headrace_coordinator.data.dataset import Dataset
from headrace_coordinator.domain.runs import SuiteEvaluation
from headrace_coordinator.projections.videos import start_of
from headrace_coordinator.suites import Suite, open_suite

PACKAGES = ("headrace-coordinator", "reasoning-gym", "datasets")
_KEYS = (
    ("data.prompt.", "prompt."),
    ("environment", "suite.options.environment"),
    ("placement.rollout", "devices"),
    ("placement.trainer", "devices"),
    ("trainer.draft", "rollout.engine"),
)


def resolve_evaluation(asked: EvaluationSpec, origin: Origin | None) -> tuple[RunSpec, Evaluated]:
    """The spec of the run that carries an evaluation out, and what it evaluates.

    `origin` is the run whose checkpoint is evaluated, if any.

    Raises:
        Impossible: in the keys of the evaluation's spec.
    """
    suite = open_suite(asked.suite.name, asked.suite.options)
    model, checkpoint, digest, draft = asked.model, None, "", None
    if origin is not None:
        run, checkpoint = _checkpoint(asked, origin)
        theirs = _their_model(run, asked.checkpoint.policy if asked.checkpoint else "")
        model = model or theirs
        draft = (run.spec.get("trainer") or {}).get("draft")
        # In another type the same masters are other weights; of several policies the digest is of all.
        if theirs.dtype == model.dtype and not run.spec.get("policies"):
            digest = checkpoint.version.digest
    assert model is not None
    name = model.path or str((model.policy or {}).get("kind", ""))
    return _run_spec(asked, model, suite, draft), Evaluated(asked, suite, name, checkpoint, digest)


def replayed(run: RunView, start: str) -> EvaluationSpec:
    """One episode from a start state of a run's, or an evaluation's, episodes, with the policy as it is now.

    `start`: the words of the start state, as trajectories have them in place of a prompt, or the name of its video.

    Raises:
        Impossible: it names no start state of the run.
    """
    spec = RunSpec.model_validate(run.spec)
    if spec.environment is None or spec.speaks_with_environments or spec.data.source != "episodes":
        reason = f"{run.id} acts from no start states of environments"
        raise Impossible([problem("start", reason, "name a run with workflow: embodied")])
    source = Episodes.model_validate({"tasks": spec.environment.tasks, **spec.data.options})
    found = source.named(start_of(start) or start)
    if found is None:
        fix = (
            "use the words that its trajectories have in place of a prompt, or the name of one of its videos"
        )
        raise Impossible([problem("start", f"{run.id} has no start state {start!r}", fix)])
    task, number = found
    environment = spec.environment.model_copy(update={"tasks": [task], "count": 1, "videos": None})
    suite = source.model_dump(exclude={"tasks"})  # its defaults are not the suite's
    suite |= {"environment": environment.model_dump(mode="json"), "only": number, "videos": 1}
    sampling = {"temperature": 0.0 if spec.evaluation.greedy else 1.0}
    asked: dict[str, Any] = {"checkpoint": {"run": run.id}, "sampling": sampling}
    if run.suite is not None:
        asked = {key: run.suite.spec[key] for key in ("model", "checkpoint", "sampling", "seed")}
        asked["checkpoint"] = asked["checkpoint"] and {**asked["checkpoint"], "step": None}
    return EvaluationSpec.model_validate(
        {"name": "replay", "suite": {"name": "episodes", "options": suite}, **asked}
    )


def _their_model(run: RunView, policy: str) -> ModelSection:
    """The model of a run's policy; "" is its own one. Raises Impossible for a policy that it does not have."""
    policies = {
        name: PolicySection.model_validate(each) for name, each in (run.spec.get("policies") or {}).items()
    }
    own = ModelSection.model_validate(run.spec["model"])
    if not policy:
        return own
    if policy not in policies:
        reason = f"run {run.id} has no policy {policy!r} beside its own"
        fix = choose(policy, policies, extra="leave it out for the run's own policy")
        raise Impossible([problem("checkpoint.policy", reason, fix)])
    return policy_model(own, policies[policy])


def _checkpoint(asked: EvaluationSpec, origin: Origin) -> tuple[RunView, CheckpointView]:
    assert asked.checkpoint is not None
    wanted = asked.checkpoint.step
    if origin.run is None:
        raise Impossible([origin.unknown("checkpoint.run")])
    if not origin.checkpoints:
        fix = "wait until it has one" if not origin.run.ended else "name a run that has one"
        raise Impossible([problem("checkpoint.run", f"run {origin.name} has no checkpoint", fix)])
    for found in origin.checkpoints:
        if wanted in (None, found.step):
            return origin.run, found
    assert wanted is not None
    raise Impossible([origin.no_checkpoint_of("checkpoint.step", wanted)])


def suite_evaluation(submission: Submission) -> SuiteEvaluation:
    """What the run of an evaluation keeps of it, once its rules hold."""
    evaluated, data = submission.evaluated, submission.data
    assert evaluated is not None and isinstance(data, Dataset)
    made = SuiteEvaluation(
        spec=evaluated.asked.model_dump(mode="json"),
        model=evaluated.model,
        items=min(data.asked_size, evaluated.asked.suite.limit or data.asked_size),
        versions=_versions(),
    )
    if (
        submission.origin is not None
        and submission.origin.run is not None
        and evaluated.checkpoint is not None
    ):
        origin, checkpoint = submission.origin.run, evaluated.checkpoint
        made.checkpoint_run, made.checkpoint_step = origin.id, checkpoint.step
        made.checkpoint_directory = str(Path(origin.run_directory) / "checkpoints" / checkpoint.name)
        made.digest = evaluated.digest
        assert evaluated.asked.checkpoint is not None
        made.policy = evaluated.asked.checkpoint.policy
    return made


def in_users_keys(problems: list[KeyProblemView], suite: Suite | None) -> list[KeyProblemView]:
    """Problems of a run in the keys of what was asked: a suite, or the run itself."""
    if suite is None:
        return problems
    found = []
    for each in problems:
        key = each.key
        for own, users in _KEYS:
            key = key.replace(own, users, 1) if key.startswith(own) else key
        if key.startswith("data."):
            key = suite.key(key)
        found.append(each.model_copy(update={"key": key}))
    return found


def _run_spec(
    asked: EvaluationSpec, model: ModelSection, suite: Suite, draft: dict[str, Any] | None
) -> RunSpec:
    """`draft`: a head is part of the checkpoint's version."""
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
        **({"trainer": {"draft": draft}} if draft else {}),
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
