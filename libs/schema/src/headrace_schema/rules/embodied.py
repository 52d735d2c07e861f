"""What a run of a robot policy leaves out, and which keys make no sense in it. Knows no fleet."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from headrace_schema.problems import problem
from headrace_schema.resources.views import KeyProblemView
from headrace_schema.sections.run import RunSections
from headrace_schema.workflow import CONVERSATIONS

EPISODES = "episodes"
"""The data source of start states, and what is short for it: `data: {heldout: 48}`."""
OF_TEXT = {
    "sampling": "a robot policy draws actions from its own distribution",
    "data.prompt.system": "a policy's instruction has no system message",
    "data.prompt.longest": "an instruction is no prompt",
    "data.prompt.prefill": "an episode begins with an observation",
    "data.exclude": "start states are no questions",
    "trainer.reference": "no term of it is computed for robot policies",
    "trainer.helpers": "an episode does not go on elsewhere, so no device is released inside a step",
    "rollout.helpers": "an episode does not go on elsewhere, so no device is released inside a step",
    "trainer.shared_prefix": "episodes have no common beginning",
    "rollout.engine": "a robot policy runs in the rollout service itself",
    "rollout.engine_options": "a robot policy runs in the rollout service itself",
    "rollout.chunk_tokens": "episodes come whole",
    "evaluation.data": "data.options name the start states; headrace eval FILE judges a policy on others",
    "evaluation.temperature": "a robot policy draws actions from its own distribution",
    "evaluation.max_new_tokens": "environment.max_episode_steps bounds an episode",
    "evaluation.baseline_prefill": "an episode begins with an observation",
    "algorithm.truncated": "an episode that is cut counts with the value of what follows",
    "reward.give": "an episode has no tokens, and its answer no text",
    "reward.truncated_reward": "an episode that is cut keeps its rewards",
    "model.gguf_file": "a robot policy is policy.json and model.safetensors",
    "model.max_context": "environment.max_episode_steps bounds an episode",
}
"""Keys of the other workflow, and why an embodied run has none of them."""


def with_defaults(given: Any) -> Any:
    """Fills in what an embodied spec may leave out: data, rewards, the type of the weights."""
    if not isinstance(given, Mapping) or given.get("workflow") != "embodied":
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
    fix = "convert a published checkpoint (python -m headrace_robots.convert), and name its directory"
    return problem("model.path", reason, fix)


def embodied_problems(spec: RunSections) -> Iterator[KeyProblemView]:
    """What does not fit together in a spec with, or without, an environment."""
    if spec.workflow != "embodied":
        of_robots = {
            "environment": spec.environment is not None and spec.workflow != CONVERSATIONS,
            "model.policy": spec.model.policy is not None,
            "trainer.warmup.demonstrations": bool(spec.trainer.warmup.demonstrations),
        }
        for key, given in of_robots.items():
            if given:
                yield problem(
                    key, f"is of embodied runs, and workflow is {spec.workflow}", "set workflow: embodied"
                )
        return
    if spec.environment is None:
        yield problem("environment", "an embodied run acts in one", "give environment.tasks")
        return
    yield from _of_text(spec)
    yield from _start_state_tasks(spec)
    yield from _demonstrations(spec)
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


def _demonstrations(spec: RunSections) -> Iterator[KeyProblemView]:
    warmup = spec.trainer.warmup
    if warmup.steps and not warmup.demonstrations:
        reason = "a robot policy imitates demonstrations, and there are none"
        fix = "give trainer.warmup.demonstrations, a directory that `headrace demonstrations collect` writes"
        yield problem("trainer.warmup.steps", reason, fix)
    if warmup.demonstrations and not warmup.steps:
        reason = "they are not imitated in 0 steps"
        yield problem("trainer.warmup.demonstrations", reason, "set trainer.warmup.steps, or leave it out")


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


def _of_text(spec: RunSections) -> Iterator[KeyProblemView]:
    for key, why in OF_TEXT.items():
        place: Any = spec
        for name in key.split("."):
            parent, place = place, getattr(place, name)
        default = type(parent).model_fields[key.rpartition(".")[2]].get_default(call_default_factory=True)
        if place == default:
            continue
        inner = next(
            (
                f".{name}"
                for name in (type(place).model_fields if key == "sampling" else ())
                if getattr(place, name) != getattr(default, name)
            ),
            "",
        )
        yield problem(f"{key}{inner}", f"an embodied run has none: {why}", "remove it")
