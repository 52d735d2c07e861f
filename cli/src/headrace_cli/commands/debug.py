"""`headrace debug FILE`: one run in this process, where breakpoint() works."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from headrace_cli.commands.options import JsonFlag
from headrace_cli.errors import EXIT_USER_ERROR, CommandError, refused, user_error
from headrace_cli.output import console, print_json

SHOWN_CHARACTERS = 160
NEEDED = ("headrace_coordinator", "headrace_rollout", "headrace_trainer", "headrace_reward")


def add_to(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("debug")(debug)


def debug(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Run spec, a YAML file.")],
    sets: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override, such as steps=2.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Run a spec in one process without deadlines, so that breakpoint() works in a loss or a reward."""
    from headrace.client import HeadraceError, load_spec

    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise user_error(
            "headrace debug", f"{', '.join(missing)} is not installed", "pip install 'headrace[local]'"
        )
    try:
        spec = load_spec(file, sets or [])
    except HeadraceError as error:
        raise refused(error) from error
    _run(spec, as_json)


def _run(spec: dict[str, object], as_json: bool) -> None:
    """Runs the spec and prints its events; raises CommandError unless the run succeeds."""
    from headrace.client.errors import Problem
    from headrace_coordinator.api.refusal import Refused

    from headrace_cli.debugging import run_debug
    from headrace_cli.dry_run import check_schema

    check_schema(spec)
    reason = ""

    def say(kind: str, data: dict[str, object]) -> None:
        nonlocal reason
        if kind == "run_state_changed":
            reason = str(data.get("reason", ""))
        if as_json:
            print_json({"type": kind, **data})
        else:
            text = " ".join(f"{key}={value}" for key, value in data.items())
            console().print(f"{kind:<18} {text[:SHOWN_CHARACTERS]}", markup=False)

    try:
        state = run_debug(spec, say)
    except Refused as error:
        problems = [Problem(item.key, item.problem, item.fix) for item in error.problems]
        raise CommandError(
            error.message, reason=error.reason, exit_code=EXIT_USER_ERROR, problems=problems
        ) from error
    if state != "SUCCEEDED":
        raise CommandError(f"the run {state}: {reason}", reason=state)
