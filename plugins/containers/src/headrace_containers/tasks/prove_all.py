"""What `headrace tasks prove` does."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import typer
from headrace_cli.errors import EXIT_USER_ERROR, user_error
from headrace_cli.output import console, error_console, print_json

from headrace_containers.provider import BadSpec, ContainerError, EngineLost
from headrace_containers.providers import provider_of
from headrace_containers.tasks.proving import Proof, proofs_file, prove, read_proofs, unproven, write_proofs
from headrace_containers.tasks.reading import NoTasks, TaskSet
from headrace_containers.tasks.task import BadTask, Start, Task


def prove_all(path: Path, provider: str, at_once: int, *, anew: bool, as_json: bool) -> None:
    """Proves the tasks, `anew` also those that are proven, and tells. Raises CommandError, and Exit for a wrong one."""
    try:
        tasks, proofs = TaskSet.at(path), read_proofs(path)
    except (NoTasks, OSError, ValueError) as error:
        raise user_error("TASKS", str(error), "name a folder or a file of tasks") from error
    except BadTask as error:
        raise user_error(error.task, error.reason, error.fix) from error
    wrong: dict[str, tuple[str, str]] = {}
    wanted = list[Task]()
    for task in tasks.all():
        if isinstance(task, BadTask):
            wrong[task.task] = (task.reason, task.fix)
        elif anew or unproven(task, proofs) is not None:
            wanted.append(task)
    found, lost = _proven(wanted, provider, at_once)
    proofs = {name: each for name, each in proofs.items() if name in tasks.names} | found
    write_proofs(path, proofs)
    wrong |= lost | {name: each.wrong for name, each in proofs.items() if each.wrong is not None}
    _tell(path, tasks, proofs, wrong, as_json=as_json)
    if wrong:
        raise typer.Exit(EXIT_USER_ERROR)


def _proven(
    tasks: list[Task], name: str, at_once: int
) -> tuple[dict[str, Proof], dict[str, tuple[str, str]]]:
    """Proofs of tasks, and why there is none of others."""
    if not tasks:
        return {}, {}
    try:
        provider = provider_of(name, {})
    except (BadSpec, EngineLost) as error:
        raise user_error("--provider", str(error), "start the engine, or name another provider") from error
    found, lost = dict[str, Proof](), dict[str, tuple[str, str]]()
    try:
        with ThreadPoolExecutor(at_once) as threads:
            for task, outcome in zip(
                tasks, threads.map(lambda task: _outcome(provider.start, task), tasks), strict=True
            ):
                if isinstance(outcome, Proof):
                    found[task.name] = outcome
                else:
                    lost[task.name] = outcome
                error_console().print(f"{task.name}: {_said(outcome)}", highlight=False, soft_wrap=True)
    finally:
        provider.close()
    return found, lost


def _outcome(start: Start, task: Task) -> Proof | tuple[str, str]:
    try:
        return prove(start, task)
    except BadTask as error:
        return error.reason, error.fix
    except ContainerError as error:
        return str(error), "correct its environment, or start the engine"


def _said(outcome: Proof | tuple[str, str]) -> str:
    if isinstance(outcome, Proof):
        return "proven" if outcome.wrong is None else f"useless: {outcome.wrong[0]}"
    return f"not proven: {outcome[0]}"


def _tell(
    path: Path, tasks: TaskSet, proofs: dict[str, Proof], wrong: dict[str, tuple[str, str]], *, as_json: bool
) -> None:
    proven = [name for name in tasks.names if name in proofs and name not in wrong]
    if as_json:
        listed: list[dict[str, Any]] = [
            {"task": name, "problem": why, "fix": fix} for name, (why, fix) in wrong.items()
        ]
        print_json({"proven": proven, "wrong": listed, "file": str(proofs_file(path))})
        return
    for name, (why, fix) in sorted(wrong.items()):
        error_console().print(f"{name}: {why}; {fix}", highlight=False, soft_wrap=True)
    console().print(
        f"{len(proven)} of {len(tasks.names)} tasks are proven ({proofs_file(path)})", highlight=False
    )
