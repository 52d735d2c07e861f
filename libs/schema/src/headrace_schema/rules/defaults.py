"""What a run may leave out: what follows from its environment, its agent or its clients, or from given answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from headrace_schema.rules.agentic import CONVERSATION
from headrace_schema.rules.asked import COMPARING_TWO, EPISODES, IMITATING, JUDGING, STEPWISE
from headrace_schema.sections.agent import AGENT_SECONDS, AGENTS, ONLINE, AgentSection
from headrace_schema.workflow import (
    CONVERSATIONS,
    PREFERENCE,
    REWARD_MODEL,
    SESSION,
    SUPERVISED,
    acts_in_environments,
    has_given_answers,
    trains_robots,
)

ENDLESS = 2**31 - 1
"""Steps of a session: it ends when its loop says so."""
ONLINE_STEP_S = 30 * 86400.0
EXPORT_OF_ANOTHER = "(the export of the run that this one follows)"
"""`model.path` of a run that begins `after` another one, until that is known."""
_RETURN = {"scorers": [{"name": "episode"}]}
_OUTCOME = {"evaluation": [{"name": "episode", "options": {"of": "outcome"}}]}
_LEARNT = {SUPERVISED: IMITATING[0], PREFERENCE: COMPARING_TWO[0], REWARD_MODEL: JUDGING[0]}
"""The algorithm of a workflow whose answers the data gives, where none is named."""
_ONLINE: dict[str, dict[str, Any]] = {
    "data": {"source": EPISODES, "options": {"tasks": [ONLINE]}},
    "algorithm": {"name": "reinforce_pp", "group_size": 1},  # It compares the samples of a whole step.
    "limits": {"step_timeout_s": ONLINE_STEP_S},
    "reward": _RETURN,
}
"""Of a run that outside clients speak with: no data, groups of one, and steps that wait for people."""


def with_defaults(given: Any) -> Any:
    """A spec as its user wrote it, with what its workflow lets it leave out filled in."""
    if not isinstance(given, Mapping):
        return given
    if given.get("after") is not None and isinstance(model := given.get("model", {}), Mapping):
        given = {**given, "model": {"path": EXPORT_OF_ANOTHER, **model}}
    if acts_in_environments(given.get("workflow")):
        return _embodied(dict(given))
    if given.get("workflow") == SESSION:
        return _session(dict(given))
    if has_given_answers(given.get("workflow")):
        return _given_answers(dict(given))
    return _agentic(dict(given)) if given.get("workflow") == CONVERSATIONS else given


def _embodied(spec: dict[str, Any]) -> dict[str, Any]:
    data = _start_states(spec.get("data", {}), spec.get("environment"))
    return _robot(spec | {"data": data, "reward": spec.get("reward", {**_RETURN, **_OUTCOME})})


def _robot(spec: dict[str, Any]) -> dict[str, Any]:
    """What follows from a policy that is a robot's."""
    data, model = spec.get("data"), spec.get("model")
    if isinstance(data, Mapping) and isinstance(prompt := data.get("prompt", {}), Mapping):
        spec["data"] = {**data, "prompt": {"chat": False, **prompt}}
    if isinstance(model, Mapping):
        spec["model"] = {"dtype": "float32", **model}
    return spec


def _given_answers(spec: dict[str, Any]) -> dict[str, Any]:
    """No scorer, devices for the trainers alone, and one answer a row, or two that are compared."""
    asked = spec.get("algorithm")
    name = (asked.get("name") if isinstance(asked, Mapping) else None) or _LEARNT[spec["workflow"]]
    follows: dict[str, dict[str, Any]] = {
        "algorithm": {"name": name, "group_size": 1 if name in (*IMITATING, *STEPWISE) else 2},
        "placement": {"mode": "collocated"},
        "reward": {"scorers": []},
    }
    for key, section in follows.items():
        if isinstance(own := spec.get(key, {}), Mapping):
            spec[key] = {**section, **own}
    source = data.get("source") if isinstance(data := spec.get("data"), Mapping) else None
    return _robot(spec) if trains_robots(spec["workflow"], source) else spec


def _session(spec: dict[str, Any]) -> dict[str, Any]:
    """No data, no scorer, no last step, and no evaluation but the loop's own."""
    follows: dict[str, dict[str, Any]] = {
        "algorithm": {"name": "session", "group_size": 1, "prompts_per_step": 1},
        "data": {"source": "copy_digits", "options": {"digits": 1}},
        "placement": {"mode": "collocated"},
        "reward": {"scorers": []},
        "session": {},
    }
    for key, section in follows.items():
        if isinstance(own := spec.get(key, {}), Mapping):
            spec[key] = {**section, **own}
    return {"steps": ENDLESS, **spec}


def _agentic(spec: dict[str, Any]) -> dict[str, Any]:
    agent, environment = spec.get("agent"), spec.get("environment")
    if isinstance(agent, Mapping) and agent.get("online") is not None:
        for key, section in _ONLINE.items():
            if isinstance(own := spec.get(key, {}), Mapping):
                spec[key] = {**section, **own}
        return spec
    started = _started(agent)
    if isinstance(environment, Mapping) or (started and environment is None):
        own = dict(environment or {})
        if started and own.get("backend", AGENTS) != AGENTS and isinstance(own.get("options", {}), Mapping):
            own["options"] = {**own.get("options", {}), **started["options"]}
        spec["environment"] = environment = {"backend": CONVERSATION, **started, **own}
    return spec | {
        "data": _start_states(spec.get("data", {}), environment),
        "reward": spec.get("reward", _RETURN),
    }


def _start_states(data: Any, environment: Any) -> Any:
    """`data` with the environment's tasks for start states."""
    if not isinstance(data, Mapping):
        return data
    filled = {"source": EPISODES, **data}
    tasks = environment.get("tasks") if isinstance(environment, Mapping) else None
    options = filled.get("options", {})
    if filled["source"] == EPISODES and isinstance(options, Mapping) and tasks is not None:
        filled["options"] = {"tasks": tasks, **options}
    return filled


def _started(agent: Any) -> dict[str, Any]:
    """The environment's keys that follow from what an agent is; none where the section is wrong or missing."""
    try:
        section = AgentSection.model_validate(agent)
    except ValidationError:
        return {}
    return {**section.started, "max_episode_s": AGENT_SECONDS}
