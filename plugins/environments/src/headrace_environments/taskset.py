"""Tasksets of verifiers 0.4 (https://github.com/PrimeIntellect-ai/verifiers) as agents.

An environment of verifiers plays an episode in a fork of this process: its harness asks the policy through the
endpoint, and its tasks, judges and comparisons give the rewards. Runs in child processes only.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

from headrace_servicekit.registry import Options
from headrace_simulator.backends.agent import ForkedAgent
from headrace_simulator.backends.base import Agent, BackendError
from headrace_simulator.backends.options import parse, require
from headrace_simulator.child.conversations import LONGEST_NAME, MOST_FIGURES
from pydantic import ConfigDict, Field, PositiveInt, ValidationError
from typing_extensions import override

OLDEST = (0, 4)
"""Version of verifiers whose interfaces these are."""
WAY = (
    "pip install 'headrace-environments[verifiers]' into a Python of its own, or, in a checkout, "
    "`make simulators SIM=verifiers`; then headrace up --sim verifiers"
)
LIMITS = ("turn_limit", "context_length_exceeded")
"""What the endpoint refuses a request with where a limit of the run has ended the conversation."""
NAME, OPTIONS = "environment.name", "options_json"


class EnvironmentOptions(Options):
    """Options beside those of verifiers' own environment: `id`, `taskset`, `agent` and the like."""

    model_config = ConfigDict(extra="allow")

    tasks: PositiveInt = Field(1024, description="how many tasks of a taskset without an end are played")


class Tasksets:
    """Agents that play tasks; the name is a taskset's id, or path/to/taskset.py."""

    def environments(self) -> list[str]:
        """None that could be listed: a taskset is any package that is installed beside verifiers."""
        return []

    def agent(self, name: str, options: Mapping[str, Any]) -> Agent:
        """The agent, whose environment is made and whose tasks are read."""
        chosen = parse(EnvironmentOptions, options)
        # Whoever imports it may take these signals for itself, and this process is its parent's to end.
        kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            environment = _made(_importable(name), dict(chosen.model_extra or {}))
            return TasksetAgent(environment, _tasks(environment.taskset, chosen.tasks))
        finally:
            for number, handler in kept.items():
                signal.signal(number, handler)


class TasksetAgent(ForkedAgent):
    """Plays one task, the one at the seed's place among them."""

    def __init__(self, environment: Any, tasks: list[Any]) -> None:
        super().__init__()
        self._environment, self._tasks = environment, tasks

    @override
    async def called(self, seed: int, item: Mapping[str, Any]) -> Mapping[str, Any]:
        import verifiers.v1 as vf

        task = self._tasks[seed % len(self._tasks)]
        client = vf.EvalClientConfig(base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY")
        context = vf.ModelContext(model="policy", client=client)
        async with self._environment.serving():
            episode = await self._environment.run_episode(task, context)
        for trace in episode.traces:
            if _by_limit(trace):  # What was said until then is judged, by what needs no box.
                await task.score(trace)
        if why := _failure(episode, client.base_url):
            raise RuntimeError(why)
        learned = [trace for trace in episode.traces if trace.agent.trainable]
        return {"reward": sum(trace.reward for trace in learned), "figures": figures(episode)}


def figures(episode: Any) -> dict[str, float]:
    """What an episode was: turns, tokens and errors, and the means of its rewards and metrics, by name."""
    traces = episode.traces
    usages = [usage for trace in traces for usage in trace.extra_usage]
    found = {
        "turns": episode.num_turns,
        "input_tokens": episode.num_input_tokens,
        "output_tokens": episode.num_output_tokens,
        "errors": len(episode.errors) + sum(len(trace.errors) for trace in traces),
        **({"traces": len(traces)} if len(traces) > 1 else {}),
        **({"judge_tokens": sum(usage.total_tokens for usage in usages)} if usages else {}),
    }
    said = dict[str, list[float]]()
    for trace in traces:
        for name, reward in trace.rewards.items():
            said.setdefault(f"reward_{name}", []).extend([] if reward is None else [reward.value])
        for name, value in trace.metrics.items():
            said.setdefault(name, []).append(value)
    means = {name[:LONGEST_NAME]: fmean(values) for name, values in said.items() if values}
    return {**dict(islice(means.items(), MOST_FIGURES - len(found))), **found}


def build(options: Options) -> Tasksets:
    """The backend; BackendError where verifiers is not here, or is another."""
    require("verifiers", "verifiers", way=WAY)
    try:
        found = version("verifiers")
    except PackageNotFoundError:
        found = "0"
    if tuple(int(part) if part.isdecimal() else 0 for part in found.split(".")[:2]) < OLDEST:
        raise BackendError(
            "environment.backend", f"verifiers {found} is here, and 0.4 or later is needed: {WAY}"
        )
    return Tasksets()


def _importable(name: str) -> str:
    """The id of a taskset; one in a file, or a folder, becomes importable by it."""
    if "/" not in name and not name.endswith(".py"):
        return name
    path = Path(name).absolute()
    if name.endswith(".py") or path.is_dir():
        if not path.exists():
            raise BackendError(NAME, f"{name}: no such file {path}; paths start where the service does")
        sys.path.insert(0, str(path.parent))
        # Tool servers of a taskset are processes that import it too.
        os.environ["PYTHONPATH"] = os.pathsep.join(
            filter(None, (str(path.parent), os.environ.get("PYTHONPATH")))
        )
        return path.stem
    return name  # OWNER/NAME, as verifiers writes it too


def _made(name: str, given: dict[str, Any]) -> Any:
    """The environment that verifiers makes of a taskset and options."""
    from verifiers.v1.configs.agent import agent_config_fields
    from verifiers.v1.utils.loaders import (
        default_harness_id,
        env_config_type,
        load_environment,
        resolve_env_config,
    )

    taskset = given.get("taskset", {})
    if not isinstance(taskset, dict) or taskset.get("id", name) != name:
        raise BackendError(f"{OPTIONS}.taskset.id", f"the taskset is {name} already; remove it")
    try:
        roles = agent_config_fields(env_config_type(name, given.get("id", "")).model_construct())
        for role in roles:
            if isinstance(own := given.get(role, {}), dict):
                given[role] = _placed(own, default_harness_id(name))
        return load_environment(resolve_env_config({**given, "taskset": {**taskset, "id": name}}))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, (OPTIONS, *first["loc"])))
        raise BackendError(key, f"verifiers refuses it: {first['msg']}") from error
    except (ImportError, AttributeError, TypeError) as error:
        raise BackendError(NAME, _why_not(name, error)) from error
    except ValueError as error:
        raise BackendError(OPTIONS, f"verifiers refuses it: {error}") from error


def _placed(role: dict[str, Any], harness: str) -> dict[str, Any]:
    """A role's options, where verifiers itself would take a box of a hosted service, and its own harness."""
    placed = {"runtime": {"type": "subprocess"}, **role}
    if isinstance(options := placed.get("harness"), dict):
        placed["harness"] = {"id": harness, **options}
    return placed


def _why_not(name: str, error: Exception) -> str:
    """Why a taskset, a harness or an environment cannot be had, with what to do."""
    if isinstance(error, ModuleNotFoundError) and "not found" in str(error):
        return f"{error}; install it beside verifiers"
    module = sys.modules.get(name.rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_").lower())
    older = hasattr(module, "load_environment") or "'verifiers'" in str(error)
    if older:
        return (
            f"{name} is of another verifiers ({error}); this one is {version('verifiers')}, whose packages export a "
            "Taskset by __all__: install a release of it that is for verifiers 0.4"
        )
    return f"{name} is no taskset: {error}; a package exports its Taskset, and its Harness, by __all__"


def _tasks(taskset: Any, most: int) -> list[Any]:
    tasks = list(taskset if taskset.bounded else islice(taskset, most))
    if not tasks:
        raise BackendError(NAME, f"{type(taskset).__name__} has no task; look at its options")
    return tasks


def _by_limit(trace: Any) -> bool:
    last = trace.errors[-1] if trace.errors and not trace.ok else None
    return last is not None and last.type == "ProviderError" and any(code in last.message for code in LIMITS)


def _failure(episode: Any, base_url: str) -> str:
    """Why an episode cannot be learned from; empty where it can."""
    failed = [trace for trace in episode.traces if not trace.ok and not _by_limit(trace)]
    for error in _last(episode, *failed):
        return f"{error.type}: {error.message}"
    for trace in episode.traces:
        client = trace.agent.config.client
        if not trace.agent.trainable and client is not None and client.base_url == base_url:
            role = trace.agent.name
            return (
                f"its agent {role} does not learn, and is played by the policy: give it a model of its own "
                f"(agent.options.{role}: {{model, client: {{base_url, api_key_var}}}})"
            )
    return ""


def _last(*those: Any) -> Iterator[Any]:
    yield from (each.last_error for each in those if each.last_error is not None)
