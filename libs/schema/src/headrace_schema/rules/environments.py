"""What of the environments of a run does not fit together, of robots and of conversations. Knows no fleet."""

from __future__ import annotations

from collections.abc import Iterator

from headrace_schema.problems import problem
from headrace_schema.resources.views import KeyProblemView
from headrace_schema.rules.asked import EPISODES
from headrace_schema.sections.run import RunSections


def no_policy_directory(path: str) -> KeyProblemView:
    """What is wrong with a `model.path` of an embodied run that is no directory: no hub's id names a robot policy."""
    reason = f"there is no directory {path}, and a robot policy is one with policy.json: it comes from no hub by an id"
    fix = "convert a published checkpoint (python -m headrace_robots.convert), and name its directory"
    return problem("model.path", reason, fix)


def environment_problems(spec: RunSections) -> Iterator[KeyProblemView]:
    """Too few environments, and tasks, variants and instructions that are not there, or twice."""
    environment = spec.environment
    if (
        environment is None
        or spec.is_online
        or not (spec.acts_in_environments or spec.speaks_with_environments)
    ):
        return
    tasks = environment.tasks
    least = spec.rollout.instances * len({*tasks})
    if environment.count < least:
        few = f"{environment.count} environments are too few"
        reason = f"{few}: each of {spec.rollout.instances} rollout instances has one a task"
        yield problem("environment.count", reason, f"the nearest valid value is {least}")
    if len({*tasks}) < len(tasks):
        yield problem("environment.tasks", "a task is named twice", "name each task once")
    given = spec.data.options.get("tasks") if spec.data.source == EPISODES else None
    named = {*tasks} | {environment.variant_of(task)[0] for task in tasks}
    for key, there, listed, fix in (
        ("data.options.tasks", {*tasks}, given, "leave data.options.tasks out"),
        ("environment.instructions", named, [*environment.instructions], "name tasks of environment.tasks"),
    ):
        if strange := {*map(str, listed)} - there if isinstance(listed, list) else set():
            yield problem(key, f"{', '.join(sorted(strange))} is not among environment.tasks", fix)
    for variant in sorted({*environment.variants} - {environment.variant_of(task)[1] for task in tasks}):
        fix = f"add {tasks[0]}@{variant} to environment.tasks"
        yield problem(f"environment.variants.{variant}", "no task has it", fix)
