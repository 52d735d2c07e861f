"""Checks a run spec without submitting it: by the coordinator when there is one, else by the schema alone."""

from __future__ import annotations

from typing import Any

from headrace.client.errors import Problem

from headrace_cli.connection import CHECKING, Target, connect, saying
from headrace_cli.errors import EXIT_MISTAKE, CommandError

BY_SCHEMA = "by the schema; scorers, engines and devices only with a fleet"
BY_FLEET = "by the schema and by the fleet"


def check(spec: dict[str, Any], target: Target) -> dict[str, Any]:
    """`{"valid": true, "checked": …}`; raises CommandError (exit code 2) with every problem otherwise."""
    if not target.known:
        check_schema(spec)
        return {"valid": True, "checked": BY_SCHEMA}
    with connect(target) as client, saying(CHECKING):
        client.check(spec)
    return {"valid": True, "checked": BY_FLEET}


def local_schema() -> dict[str, Any]:
    """JSON Schema of run specs as this installation knows it."""
    from headrace_schema.spec import RunSpec

    return RunSpec.model_json_schema()


def check_schema(spec: dict[str, Any]) -> None:
    """Raises CommandError (exit code 2) with every problem that the schema finds."""
    from headrace_schema.problems import explain
    from headrace_schema.spec import RunSpec
    from pydantic import ValidationError

    try:
        RunSpec.model_validate(spec)
    except ValidationError as error:
        problems = [Problem(item.key, item.problem, item.fix) for item in explain(error, RunSpec)]
        count = f"{len(problems)} problem{'s' if len(problems) > 1 else ''} in the spec"
        raise CommandError(count, reason="INVALID", exit_code=EXIT_MISTAKE, problems=problems) from error
