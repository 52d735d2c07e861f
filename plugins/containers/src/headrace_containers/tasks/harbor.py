"""Reads a folder of tasks in Harbor's form (https://harborframework.com): task.toml, instruction.md, environment,
tests, solution. What is not run here is refused by name.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from headrace_containers.files import gather
from headrace_containers.provider import BadPath, File, Limits, Network, Spec
from headrace_containers.tasks.scripts import HarborTests, Script
from headrace_containers.tasks.task import (
    RESTORED,
    ROOT,
    BadTask,
    Health,
    Task,
    agent_user,
    digest_of,
    variables,
)

CONFIG, INSTRUCTION, ENVIRONMENT, TESTS, SOLUTION = (
    "task.toml",
    "instruction.md",
    "environment",
    "tests",
    "solution",
)
_CANARY = re.compile(r"^(<!--.*canary.*-->|#.*canary.*)$", re.IGNORECASE)
_WORKDIR = re.compile(r"^\s*WORKDIR\s+(\S+)\s*$", re.IGNORECASE | re.MULTILINE)
_SIZE = re.compile(r"([\d.]+)([GM])")
_FROM = re.compile(r"^\s*FROM\s", re.IGNORECASE | re.MULTILINE)
NOT_RUN = {
    "steps": "has several steps",
    "environment.gpus": "asks for GPUs",
    "environment.tpu": "asks for TPUs",
    "environment.mcp_servers": "has MCP servers",
    "verifier.collect": "has collect hooks",
}
"""Keys whose tasks cannot be run here, and why."""
PASSED_OVER = (
    *("schema_version", "task", "source", "multi_step_reward_strategy", "environment.gpu_types"),
    *("environment.skills_dir", "environment.build_timeout_sec", "environment.allow_internet"),
)
"""Keys that change nothing here: a build takes as long as it takes, and the internet is what `allowed_hosts` lists."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class _Phase(_Part):
    network_mode: Literal["no-network", "public", "allowlist"] | None = None
    allowed_hosts: list[str] | None = None


class AgentPart(_Phase):
    """Of the agent."""

    timeout_sec: float | None = None
    user: str | int | None = None


class HealthPart(_Part):
    """Of a check that a container is ready."""

    command: str
    interval_sec: float = 5.0
    timeout_sec: float = 30.0
    start_period_sec: float = 0.0
    start_interval_sec: float = 5.0
    retries: int = 3

    @property
    def health(self) -> Health:
        """It, as it is asked here."""
        within = self.start_period_sec + self.retries * (self.interval_sec + self.timeout_sec)
        return Health(self.command, self.interval_sec, within, self.timeout_sec)


class EnvironmentPart(_Phase):
    """Of the container."""

    docker_image: str | None = None
    cpus: float | None = None
    memory_mb: int | None = None
    storage_mb: int | None = None
    env: dict[str, str] = Field(default_factory=dict)
    workdir: str | None = None
    healthcheck: HealthPart | None = None
    os: str = "linux"

    @model_validator(mode="before")
    @classmethod
    def _older(cls, given: Any) -> Any:
        """Older tasks write memory and storage as "2G"."""
        if not isinstance(given, dict):
            return given
        found = dict(given)
        for old, new in (("memory", "memory_mb"), ("storage", "storage_mb")):
            if isinstance(size := found.get(old), str) and (parts := _SIZE.fullmatch(size.strip().upper())):
                found.setdefault(new, int(float(parts[1]) * {"G": 1024, "M": 1}[parts[2]]))
        return found


class VerifierPart(_Phase):
    """Of the tests."""

    timeout_sec: float = 600.0
    env: dict[str, str] = Field(default_factory=dict)
    user: str | int | None = None
    environment_mode: Literal["shared", "separate"] | None = None
    environment: EnvironmentPart | None = None


class SolutionPart(_Part):
    """Of the oracle."""

    env: dict[str, str] = Field(default_factory=dict)


class ArtifactPart(_Part):
    """A path that the tests find."""

    source: str
    destination: str | None = None
    exclude: list[str] = Field(default_factory=list)
    service: str | None = None


class TaskToml(_Part):
    """What is read of task.toml; other keys are `NOT_RUN` or `PASSED_OVER`."""

    metadata: dict[str, Any] = Field(default_factory=dict)
    verifier: VerifierPart = VerifierPart()
    agent: AgentPart = AgentPart()
    environment: EnvironmentPart = EnvironmentPart()
    solution: SolutionPart = SolutionPart()
    artifacts: list[str | ArtifactPart] = Field(default_factory=list)


def folders(path: Path) -> list[Path]:
    """The folders of tasks in a folder, or itself where it is one; sorted by name."""
    if (path / CONFIG).is_file():
        return [path]
    return sorted(each for each in path.iterdir() if each.is_dir() and not each.name.startswith("."))


def read_task(folder: Path) -> Task:
    """The task in a folder. Raises BadTask, which names what is missing, wrong, or not run here."""
    name, config = folder.name, _config(folder)
    environment, verifier = config.environment, config.verifier
    script = folder / TESTS / "test.sh"
    if not script.is_file():
        raise BadTask(
            name, f"there is no {TESTS}/test.sh, which judges it", "write one that makes a reward file"
        )
    if not (folder / INSTRUCTION).is_file():
        raise BadTask(name, f"there is no {INSTRUCTION}", "say there what is to be done")
    try:
        files = {part: tuple(gather(folder / part)) for part in (ENVIRONMENT, TESTS, SOLUTION)}
    except BadPath as error:
        raise BadTask(name, str(error), "copy what it leads to into the task") from error
    text = (folder / INSTRUCTION).read_text(encoding="utf-8")
    whole = [
        (f"{part}/{each.path}:{each.mode:o}", each.data) for part, found in files.items() for each in found
    ]
    whole += [(CONFIG, (folder / CONFIG).read_bytes()), (INSTRUCTION, text.encode())]
    spec = _spec(name, folder, config)
    own_judge = _spec(name, folder, config, verifier.environment) if verifier.environment else spec
    return Task(
        name=name,
        instruction=_without_canary(text),
        tests=HarborTests(
            files[TESTS],
            ROOT if verifier.user is None else str(verifier.user),
            variables(name, {**environment.env, **verifier.env}, "verifier.env"),
            verifier.timeout_sec,
        ),
        solution=_solution(name, files[SOLUTION], config),
        digest=digest_of(whole),
        spec=spec,
        agent_s=config.agent.timeout_sec or 0.0,
        shared=verifier.environment_mode == "shared",
        carried=tuple(_carried(name, config)),
        restored=_restored(name, config.metadata),
        judge=replace(own_judge, network=_network(verifier)),
        health=environment.healthcheck.health if environment.healthcheck else None,
    )


def _config(folder: Path) -> TaskToml:
    name = folder.name
    try:
        given = tomllib.loads((folder / CONFIG).read_text(encoding="utf-8"))
        config = TaskToml.model_validate(given)
    except FileNotFoundError as error:
        raise BadTask(name, f"there is no {CONFIG}", "give the folder of tasks, each with its own") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadTask(name, f"{CONFIG} is no TOML ({error})", "correct it") from error
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise BadTask(name, f"{CONFIG}: {key}: {first['msg']}", "correct it") from error
    for key, reason in NOT_RUN.items():
        section, _, last = key.rpartition(".")
        if (given.get(section, {}) if section else given).get(last):
            raise BadTask(name, f"{CONFIG}: {key}: it {reason}, which are not run here", "leave the task out")
    if config.environment.os.lower() != "linux":
        raise BadTask(name, f"{CONFIG}: environment.os is {config.environment.os}", "leave the task out")
    for phase, part in (
        ("environment", config.environment),
        ("agent", config.agent),
        ("verifier", config.verifier),
    ):
        if part.allowed_hosts and part.network_mode != "allowlist":
            fix = 'set network_mode = "allowlist"'
            raise BadTask(name, f"{CONFIG}: {phase}.allowed_hosts is of an allowlist alone", fix)
    return config


def _spec(name: str, folder: Path, config: TaskToml, own: EnvironmentPart | None = None) -> Spec:
    """The container of a task, or of its tests where they have their `own`."""
    environment, part = (own, TESTS) if own else (config.environment, ENVIRONMENT)
    build = folder / part
    if (build / "docker-compose.yaml").is_file() or (build / "docker-compose.yml").is_file():
        raise BadTask(name, f"{part}/docker-compose.yaml has several containers", "leave the task out")
    image = environment.docker_image or ""
    if not image and not (build / "Dockerfile").is_file():
        fix = f"write one, or name {'verifier.environment' if own else 'environment'}.docker_image"
        raise BadTask(name, f"there is no {part}/Dockerfile", fix)
    workdir = environment.workdir or (
        "" if image else _workdir((build / "Dockerfile").read_text(encoding="utf-8"))
    )
    known = Limits()
    return Spec(
        image=image,
        build=None if image else build,
        limits=Limits(
            cpus=environment.cpus or known.cpus,
            memory_mib=environment.memory_mb or known.memory_mib,
            disk_mib=environment.storage_mb or known.disk_mib,
        ),
        network=_network(config.agent if config.agent.network_mode else environment),
        user=agent_user(config.agent.user),
        workdir=workdir,
        env=variables(name, environment.env, "environment.env"),
        owned=(workdir,) if workdir else (),
    )


def _network(phase: _Phase) -> Network:
    """Off, but for hosts that are listed: Harbor's default, all of the internet, is not had here."""
    listed = phase.network_mode == "allowlist"
    return Network(allow=tuple(phase.allowed_hosts or ())) if listed else Network()


def _workdir(dockerfile: str) -> str:
    """The working directory of a Dockerfile's last image; empty where it names none."""
    last = _FROM.split(dockerfile)[-1]
    found = ""
    for each in _WORKDIR.findall(last):
        found = each if each.startswith("/") else f"{found.rstrip('/')}/{each}"
    return "" if "$" in found else found


def _solution(name: str, files: tuple[File, ...], config: TaskToml) -> Script | None:
    if not any(each.path == "solve.sh" for each in files):
        return None
    env = {"DEBIAN_FRONTEND": "noninteractive", **variables(name, config.solution.env, "solution.env")}
    return Script(files, env, config.agent.timeout_sec or 600.0)


def _restored(name: str, metadata: Mapping[str, Any]) -> tuple[str, ...]:
    """Names that stay as the image has them: of a task that is about such files, without those that it names."""
    more, fewer = (metadata.get(key, []) for key in ("restored", "carried"))
    for key, given in (("restored", more), ("carried", fewer)):
        if not isinstance(given, list) or not all(isinstance(each, str) for each in given):
            raise BadTask(name, f"{CONFIG}: metadata.{key} is no list of names", 'write it as ["tests/**"]')
    if strange := [each for each in fewer if each not in RESTORED]:
        fix = f"name some of {', '.join(RESTORED)}"
        raise BadTask(name, f"{CONFIG}: metadata.carried: {strange[0]} is carried in any case", fix)
    return (*(each for each in RESTORED if each not in fewer), *more)


def _carried(name: str, config: TaskToml) -> Iterator[str]:
    for each in config.artifacts:
        part = ArtifactPart(source=each) if isinstance(each, str) else each
        if part.service not in (None, "main"):
            raise BadTask(
                name, f"{CONFIG}: artifacts: {part.source} is of another container", "leave the task out"
            )
        if not part.source.startswith("/") or ".." in part.source.split("/"):
            raise BadTask(
                name, f"{CONFIG}: artifacts: {part.source!r} is no absolute path", "write it in full"
            )
        yield part.source


def _without_canary(text: str) -> str:
    """An instruction without the marks by which benchmarks are found in training data."""
    lines = text.split("\n")
    while lines and (_CANARY.match(lines[0].strip()) or not lines[0].strip()):
        lines.pop(0)
    return "\n".join(lines)
