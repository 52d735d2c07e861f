"""Submissions without a coordinator, for tests of their rules."""

from dataclasses import replace

from headrace_coordinator.api.submission.fleet_view import FleetView
from headrace_coordinator.api.submission.rules import problems_of
from headrace_coordinator.api.submission.submission import Evaluated, Submission
from headrace_coordinator.data.dataset import Dataset
from headrace_coordinator.suites import open_suite
from headrace_schema.evaluating import EvaluationSpec
from headrace_schema.problems import Impossible, sentence
from headrace_schema.spec import RunSpec

SCHEMA = '{"additionalProperties": false, "properties": {"cap": {"type": "number", "exclusiveMinimum": 0}}}'
OPTIONS = frozenset({f"grpo={SCHEMA}", "grpo-like={}"})
FLEET = FleetView(
    capabilities={
        "rollout": {"engines": frozenset({"transformers", "vllm"})},
        "trainer": {
            "backends": frozenset({"fsdp"}),
            "algorithms": frozenset({"grpo"}),
            "algorithm_options": OPTIONS,
        },
        "reward": {"scorers": frozenset({"exact", "last_number"})},
    },
    instances={"rollout": 2, "trainer": 1, "reward": 1},
    devices=["h/cpu:0", "h/cpu:1"],
)
ENGINES = {
    "engines": frozenset({"transformers", "vllm"}),
    "engine_features": frozenset({"transformers:deterministic", "vllm:resume_from_prefix"}),
}
BOTH = replace(FLEET, capabilities={**FLEET.capabilities, "rollout": ENGINES})
GPUS = replace(BOTH, devices=["h/gpu:0", "h/gpu:1"])
SPAN = "rollout.engine_options.tensor_parallel_size"
ONE = replace(FLEET, capabilities={**FLEET.capabilities, "rollout": {"engines": frozenset({"transformers"})}})


async def checked(coordinator, asked):
    """What a coordinator finds wrong with a spec; empty when the run could start."""
    try:
        await coordinator.submissions.check(asked)
    except Impossible as error:
        return error.problems
    return []


def submission_of(spec, fleet, **more):
    """A spec on a fleet, its data opened."""
    try:
        data = Dataset.open(spec.data, spec.seed)
    except Impossible as error:
        data = error
    return Submission(spec, fleet, data, **more)


def spec_of(**changes):
    """A small spec with some sections changed."""
    made = {
        "model": {"path": "owner/model"},
        "data": {"source": "copy_digits"},
        "reward": {"scorers": [{"name": "exact"}]},
    }
    return RunSpec.model_validate(made | changes)


def problems(changes: dict | None = None, fleet: FleetView = FLEET) -> dict[str, str]:
    """What a fleet cannot satisfy of a small spec with some sections changed, by key."""
    spec = {
        "model": {"path": "owner/model"},
        "data": {"source": "copy_digits", "heldout": 10},
        "reward": {"scorers": [{"name": "exact"}]},
        **(changes or {}),
    }
    found = problems_of(submission_of(RunSpec.model_validate(spec), fleet))
    return {item.key: sentence(item) for item in found}


def spans(size, **rollout):
    """A section whose engine spans GPUs, the problems of which are at SPAN."""
    return {"rollout": {"engine": "vllm", "engine_options": {"tensor_parallel_size": size}, **rollout}}


def evaluated(spec, fleet, **sampling):
    """An evaluation of `copy_digits` that samples so, carried out by a run of `spec`."""
    model, suite = {"path": "owner/model"}, {"name": "items", "options": {"source": "copy_digits"}}
    asked = EvaluationSpec.model_validate({"model": model, "suite": suite, "sampling": sampling})
    return Submission(spec, fleet, evaluated=Evaluated(asked, open_suite(**suite), "owner/model"))
