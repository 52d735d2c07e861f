"""What of the agent, the roles and the tasks of a run of conversations does not fit. Knows no fleet."""

from __future__ import annotations

from collections.abc import Iterator

from headrace_schema.problems import choose, problem
from headrace_schema.resources.views import KeyProblemView
from headrace_schema.rules.asked import EPISODES
from headrace_schema.sections.agent import AGENTS, AgentSection
from headrace_schema.sections.embodied import EnvironmentSection
from headrace_schema.sections.policies import OWN
from headrace_schema.sections.run import RunSections

SEEDED = ("reasoning_gym", "textarena")
"""Libraries whose environments begin by their seed alone; tasks are LIBRARY:NAME."""
ASKING = ("skyrl_gym",)
"""Libraries whose environments ask what a data item says."""
CONVERSATION = "conversation"
"""The backend of conversations, which starts no agents."""
UNREWARDED = ("tools", "exchange")
"""Built-in environments that give no reward: scorers judge what was said."""


def agentic_problems(spec: RunSections) -> Iterator[KeyProblemView]:
    """What does not fit together in a run of conversations."""
    if not spec.speaks_with_environments:
        return
    yield from _policies(spec)
    if spec.environment is None or spec.is_online:
        return
    yield from _roles(spec.environment)
    yield from _tasks(spec) if spec.agent is None else _agent(spec.agent, spec.environment)


def _roles(environment: EnvironmentSection) -> Iterator[KeyProblemView]:
    for name, role in environment.roles.items():
        key = f"environment.roles.{name}"
        if role.revision is not None and not role.path:
            yield problem(
                f"{key}.revision", "is of a frozen model, and path is empty", "remove it, or give path"
            )
        if role.policy and (role.path or not role.learns):
            which = "path is" if role.path else "learns: false is"
            reason = f"{role.policy} learns from the roles that it plays, and {which} given too"
            yield problem(f"{key}.policy", reason, "remove one of the two")
        if role.own_devices and not role.path:
            reason = "are of a frozen model, and path is empty"
            fix = f"set policies.{role.policy}.own_devices" if role.policy else "remove it, or give path"
            yield problem(f"{key}.own_devices", reason, fix)
        if any(not text for text in role.stop or ()):
            yield problem(f"{key}.stop", "an empty text ends every turn at once", "remove it")
        for option in ("temperature", "max_new_tokens", "stop"):
            if role.trained and getattr(role, option) is not None:
                reason = "the role is learned from, and its tokens are drawn as sampling says"
                yield problem(f"{key}.{option}", reason, "remove it, or set learns: false, or give path")


def _policies(spec: RunSections) -> Iterator[KeyProblemView]:
    """Policies that learn beside the run's own one: each plays a role, and each role's policy is there."""
    for role, name in spec.played.items():
        if name not in spec.policies:
            reason = f"no policy {name!r} is among policies"
            fix = choose(name, spec.policies, extra=f"add policies.{name}")
            yield problem(f"environment.roles.{role}.policy", reason, fix)
    for name in spec.policies:
        key = f"policies.{name}"
        if name == OWN:
            yield problem(key, "this is what figures call the run's own policy", "give it another name")
        elif name not in spec.played.values():
            fix = f"add environment.roles.ROLE: {{policy: {name}}}, or remove it"
            yield problem(key, "it plays no role, and would learn nothing", fix)


def _agent(agent: AgentSection, environment: EnvironmentSection) -> Iterator[KeyProblemView]:
    given = [key for key in ("python", "command", "backend") if getattr(agent, key)]
    if len(given) != 1:
        reason = f"{' and '.join(given)} are given" if given else "it does not say what to start"
        yield problem(
            "agent",
            reason,
            "give one: python: path/to/file.py:function, command: [program, argument], or backend: NAME with its task",
        )
        return
    for key in ("task", "options"):
        if getattr(agent, key) and not agent.backend:
            yield problem(f"agent.{key}", "is what agent.backend starts, and none is named", "remove it")
    if agent.backend and not agent.task:
        reason = f"it does not say what {agent.backend} starts"
        yield problem("agent.task", reason, "name it, such as a taskset of verifiers")
    if agent.python and ".py:" not in agent.python:
        reason = f"{agent.python!r} names no function in a file"
        yield problem("agent.python", reason, "write path/to/file.py:function")
    elsewhere = not agent.backend and environment.backend not in (AGENTS, CONVERSATION)
    if elsewhere and not agent.command:
        reason = f"{environment.backend} starts commands, and agent names none"
        yield problem("environment.backend", reason, "give agent.command, or remove it")
    follows = {**agent.started, "processes": 0}
    if elsewhere:  # a plug-in starts it, with options of its own
        del follows["backend"], follows["options"]
    for key, value in follows.items():
        if getattr(environment, key) != value:
            reason = "it follows from agent" if value else "each agent has a process of its own"
            yield problem(f"environment.{key}", reason, "remove it")


def _tasks(spec: RunSections) -> Iterator[KeyProblemView]:
    assert spec.environment is not None
    tasks, source = spec.environment.tasks, spec.data.source
    for task in tasks:
        library = task.partition(":")[0]
        if library in SEEDED and source != EPISODES:
            reason = f"{task} makes what it asks from the seed, and would not ask what {source} says"
            yield problem("data.source", reason, f"leave it out ({EPISODES})")
        elif library in ASKING and source == EPISODES:
            reason = f"{task} asks what a data item says, and {EPISODES} has seeds alone"
            yield problem("data.source", reason, "name the source of its questions, such as jsonl")
    if {scorer.name for scorer in spec.reward.scorers} == {"episode"} and {*tasks} <= {*UNREWARDED}:
        reason = f"the scorer episode takes the environment's rewards, and {tasks[0]} gives none"
        yield problem("reward.scorers", reason, "name scorers that judge what was said, such as exact")
    if len(tasks) > 1 and source != EPISODES:
        reason = (
            f"an item of {source} does not say with which of {len(tasks)} environments it is spoken about"
        )
        yield problem("environment.tasks", reason, f"name one, or set data.source: {EPISODES}")
    for index, task in enumerate(tasks):
        if task.endswith((".py", ".py:")):
            reason = f"{task} names a file but no class in it"
            yield problem(f"environment.tasks[{index}]", reason, f"write {task.rstrip(':')}:Class")
