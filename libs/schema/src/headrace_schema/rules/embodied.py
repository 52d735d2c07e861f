"""What a run of a robot policy may leave out, and what of its environment does not fit. Knows no fleet."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from headrace_schema.problems import problem
from headrace_schema.resources.views import KeyProblemView
from headrace_schema.rules.asked import EPISODES
from headrace_schema.sections.run import RunSections
from headrace_schema.workflow import acts_in_environments


def with_defaults(given: Any) -> Any:
    """Fills in what an embodied spec may leave out: data, rewards, the type of the weights."""
    if not isinstance(given, Mapping) or not acts_in_environments(given.get("workflow")):
        return given
    spec, environment = dict(given), given.get("environment")
    tasks = environment.get("tasks") if isinstance(environment, Mapping) else None
    spec["data"] = _start_states(spec.get("data", {}), tasks)
    spec.setdefault(
        "reward",
        {
            "scorers": [{"name": "episode"}],
            "evaluation": [{"name": "episode", "options": {"of": "outcome"}}],
        },
    )
    if isinstance(model := spec.get("model"), Mapping):
        spec["model"] = {"dtype": "float32", **model}
    return spec


def _start_states(data: Any, tasks: Any) -> Any:
    if not isinstance(data, Mapping):
        return data
    filled = {"source": EPISODES, **data}
    prompt, options = filled.get("prompt", {}), filled.get("options", {})
    if isinstance(prompt, Mapping):
        filled["prompt"] = {"chat": False, **prompt}
    if filled["source"] == EPISODES and isinstance(options, Mapping) and tasks is not None:
        filled["options"] = {"tasks": tasks, **options}
    return filled


def no_policy_directory(path: str) -> KeyProblemView:
    """What is wrong with a `model.path` of an embodied run that is no directory: no hub's id names a robot policy."""
    reason = f"there is no directory {path}, and a robot policy is one with policy.json: it comes from no hub by an id"
    fix = "fetch a published checkpoint, convert it (python -m headrace_modelkit.robot.convert), and name its directory"
    return problem("model.path", reason, fix)


def embodied_problems(spec: RunSections) -> Iterator[KeyProblemView]:
    """What of an embodied run's environment does not fit together."""
    if not spec.acts_in_environments or spec.environment is None:
        return
    yield from _start_state_tasks(spec)
    count, least = spec.environment.count, spec.rollout.instances * len(set(spec.environment.tasks))
    if count < least:
        reason = f"{count} environments are too few: each of {spec.rollout.instances} rollout instances has one a task"
        yield problem("environment.count", reason, f"the nearest valid value is {least}")
    known = {name for task in spec.environment.tasks for name in (task, spec.environment.variant_of(task)[0])}
    if strange := set(spec.environment.instructions) - known:
        reason = f"{', '.join(sorted(strange))} is not among environment.tasks"
        yield problem("environment.instructions", reason, "name tasks of environment.tasks")
    used = {spec.environment.variant_of(task)[1] for task in spec.environment.tasks}
    for variant in sorted(set(spec.environment.variants) - used):
        task = spec.environment.tasks[0]
        yield problem(
            f"environment.variants.{variant}", "no task has it", f"add {task}@{variant} to environment.tasks"
        )
    if len(set(spec.environment.tasks)) < len(spec.environment.tasks):
        yield problem("environment.tasks", "a task is named twice", "name each task once")


def _start_state_tasks(spec: RunSections) -> Iterator[KeyProblemView]:
    assert spec.environment is not None
    if spec.data.source != EPISODES:
        reason = f"{spec.data.source} has questions, and an episode begins with a start state"
        yield problem("data.source", reason, f"set data.source: {EPISODES}, or leave data.source out")
        return
    listed = spec.data.options.get("tasks")
    strange = set(listed) - set(spec.environment.tasks) if isinstance(listed, list) else set()
    if strange:
        reason = f"{', '.join(sorted(map(str, strange)))} is not among environment.tasks"
        yield problem("data.options.tasks", reason, "leave data.options.tasks out")
