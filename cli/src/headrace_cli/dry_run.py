"""Checks a run spec without submitting it: by the coordinator when there is one, else by what is installed here."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.client.errors import Problem

from headrace_cli.connection import CHECKING, Target, connect, saying
from headrace_cli.errors import EXIT_USER_ERROR, CommandError

if TYPE_CHECKING:
    from headrace.client import Client

BY_SCHEMA = "by the schema alone: install headrace[local], or name a fleet"
BY_RULES = "by the schema, and this machine's models, data and plug-ins; engines, devices, your own code with a fleet"
BY_FLEET = "by the schema and by the fleet, which has run your own scorers and environments once"


def check(spec: dict[str, Any], target: Target) -> dict[str, Any]:
    """`{"valid": true, "checked": …, "warnings": […]}`; raises CommandError (exit code 2) with every problem."""
    if not target.known:
        elsewhere = check_offline(spec)
        if elsewhere is None:
            return {"valid": True, "checked": BY_SCHEMA, "warnings": warnings(spec)}
        told = {item["key"] for item in elsewhere}
        others = [item for item in warnings(spec) if item["key"] not in told]
        return {"valid": True, "checked": BY_RULES, "warnings": [*elsewhere, *others]}
    with connect(target) as client:
        return check_with(client, spec)


def check_with(client: Client, spec: dict[str, Any]) -> dict[str, Any]:
    """`check` by a coordinator; with `note` where the spec leaves something to the fleet."""
    with saying(CHECKING):
        client.check(spec)
    note = {"note": client.note} if client.note else {}
    return {"valid": True, "checked": BY_FLEET, "warnings": warnings(spec), **note}


def warnings(spec: dict[str, Any]) -> list[dict[str, str]]:
    """What is valid and rarely meant, by key; nothing where another release's schema made it valid."""
    from headrace_schema.rules.combinations import doubtful_values
    from headrace_schema.rules.environments import no_policy_directory
    from headrace_schema.spec import RunSpec
    from headrace_schema.workflow import trains_robots
    from pydantic import ValidationError

    try:
        found = [item.model_dump() for item in doubtful_values(RunSpec.model_validate(spec))]
    except ValidationError:
        return []
    name = str(spec["model"].get("path", ""))
    named = bool(name) and not name.startswith(("/", "~", "."))
    data = spec.get("data") or {}
    if named and trains_robots(spec.get("workflow"), data.get("source")):
        found.append(no_policy_directory(name).model_dump())
    elif named and not _is_cached(name):
        problem = f"there is no directory {name}, nor a copy in Hugging Face's cache of this machine"
        found.append(
            {"key": "model.path", "problem": problem, "fix": "it is fetched from Hugging Face by that id"}
        )
    return found


def _is_cached(hub_id: str) -> bool:
    home = os.environ.get("HF_HOME") or Path(os.path.expanduser("~"), ".cache", "huggingface")
    hub = Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub")
    return (hub / f"models--{hub_id.replace('/', '--')}").is_dir()


def local_schema() -> dict[str, Any]:
    """JSON Schema of run specs as this installation knows it."""
    from headrace_schema.spec import RunSpec

    return RunSpec.model_json_schema()


def check_offline(spec: dict[str, Any]) -> list[dict[str, str]] | None:
    """Raises CommandError (exit code 2) with every problem that can be found here.

    Returns what is not on this machine, by key; None where only the schema could be asked.
    """
    check_schema(spec)
    from headrace_schema.spec import RunSpec

    from headrace_cli.offline import problems_without_a_fleet

    found = problems_without_a_fleet(RunSpec.model_validate(spec))
    if found is None:
        return None
    problems, elsewhere = found
    if problems:
        raise _refused([Problem(item.key, item.problem, item.fix) for item in problems])
    return [item.model_dump() for item in elsewhere]


def check_schema(spec: dict[str, Any]) -> None:
    """Raises CommandError (exit code 2) with every problem that the schema finds."""
    from headrace_schema.problems import explain
    from headrace_schema.spec import RunSpec
    from pydantic import ValidationError

    try:
        RunSpec.model_validate(spec)
    except ValidationError as error:
        raise _refused(
            [Problem(item.key, item.problem, item.fix) for item in explain(error, RunSpec)]
        ) from error


def _refused(problems: list[Problem]) -> CommandError:
    count = f"{len(problems)} problem{'s' if len(problems) > 1 else ''} in the spec"
    return CommandError(count, reason="INVALID", exit_code=EXIT_USER_ERROR, problems=problems)
