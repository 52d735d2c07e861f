"""What a run says of the containers in which its coding tasks are solved."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from headrace_servicekit.registry import Options
from headrace_simulator.backends.base import BackendError
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from headrace_containers.client import Source
from headrace_containers.provider import Network
from headrace_containers.tasks.reading import NoTasks, TaskSet
from headrace_containers.tasks.task import BadTask, Task

Parser = Literal["hermes", "json", "llama3", "mistral", "qwen3_coder", "glm", "line"]


class TaskOptions(Options):
    """Of the tasks and their containers."""

    path: Path = Field(description="the tasks, as the simulator sees them: a folder, or a .jsonl file")
    allow: list[str] = Field(
        default_factory=list,
        description="hosts that an agent reaches beside those of its task: HOST, HOST:PORT or *.HOST; default: none",
    )
    tests_allow: list[str] = Field(
        default_factory=list, description="hosts that tests reach beside those of their task; default: none"
    )
    cpus: NonNegativeFloat = Field(0.0, description="cores of a container; 0: as its task says, else 1")
    memory_mib: NonNegativeInt = Field(0, description="memory of a container; 0: as its task says, else 1024")
    user: str = Field(
        "", description="who solves tasks: UID[:GID], or root; default: as its task says, else 1000:1000"
    )
    provider: str = Field("docker", description="where containers run, as of the task `shell`")
    provider_options: dict[str, Any] = Field(default_factory=dict, description="options of the provider")
    warm: NonNegativeInt = Field(
        0, le=16, description="containers of the current tasks that are started before they are asked for"
    )

    @property
    def source(self) -> Source:
        """Where containers come from."""
        return Source(self.provider, self.provider_options, self.warm)


class CodingOptions(TaskOptions):
    """Of the task `coding`."""

    turns: PositiveInt = Field(30, description="turns, after which the tests judge what is there")
    parser: Parser = Field(
        "hermes",
        description="form of calls, as of the task tools; line: the whole turn is a command for the shell, and turns "
        "alone end the conversation",
    )
    system: str = Field("", description="system message that the conversation begins with")
    deadline_s: PositiveFloat = Field(
        60.0, description="seconds that the commands of one turn may take together"
    )
    most_calls: PositiveInt = Field(8, description="calls of one turn that are answered")
    most_characters: PositiveInt = Field(
        8000, description="characters of an answer that are kept: its two ends"
    )


class AgentOptions(TaskOptions):
    """Of a command that is an agent."""

    command: list[str] = Field(min_length=1, description="follows from agent.command")
    runs: Literal["container", "host"] = Field(
        "container",
        description="where the command runs: in the task's container, or on the simulator's host, where `docker` leads "
        "into the container",
    )
    seconds: NonNegativeFloat = Field(
        0.0,
        description="seconds that the command may take; 0: as its task says, else 300; then the tests judge",
    )
    variables: dict[str, str] = Field(
        default_factory=dict, description="environment variables of the command"
    )


class Tasks:
    """The tasks of a run, in the containers that it wants."""

    def __init__(self, options: TaskOptions) -> None:
        self._options = options
        try:
            self._set = TaskSet.at(options.path)
        except (NoTasks, BadTask) as error:
            raise BackendError("options_json.path", str(error)) from error

    def named(self, name: str, digest: str) -> Task:
        """A task as the data source has it. Raises BackendError."""
        try:
            task = self._set.read(name)
        except BadTask as error:
            raise BackendError("options_json.path", str(error)) from error
        if digest and task.digest != digest:
            reason = f"{name} at {self._options.path} is not the one that data.options.path has"
            raise BackendError("options_json.path", f"{reason}; give both the same files")
        return self._fitted(task)

    def _fitted(self, task: Task) -> Task:
        options, limits = self._options, task.spec.limits
        limits = replace(
            limits, cpus=options.cpus or limits.cpus, memory_mib=options.memory_mib or limits.memory_mib
        )
        spec = replace(
            task.spec,
            limits=limits,
            network=_allowing(task.spec.network, options.allow),
            user=options.user or task.spec.user,
        )
        judge = task.judged_in
        judge = replace(judge, limits=limits, network=_allowing(judge.network, options.tests_allow))
        return replace(task, spec=spec, judge=judge)


def _allowing(network: Network, more: list[str]) -> Network:
    return replace(network, allow=(*network.allow, *more))
