"""`headrace tasks`: proves coding tasks before a run learns from them. What it needs is imported as it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from headrace_cli.commands.options import JsonFlag

app = typer.Typer(help="Coding tasks in containers.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Keeps `prove` a command of its own."""


@app.command(name="prove")
def prove_tasks(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="TASKS", help="A folder of tasks in Harbor's form, or a .jsonl file in SWE-bench's."
        ),
    ],
    provider: Annotated[str, typer.Option(help="Where containers run.")] = "docker",
    at_once: Annotated[int, typer.Option(min=1, max=64, help="Tasks that are proven at the same time.")] = 2,
    anew: Annotated[
        bool, typer.Option("--anew", help="Also tasks that have been proven and have not changed.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Play each task twice, as its own solution says and without doing anything; write what the tests gave beside them.

    Runs learn from proven tasks alone.
    """
    from headrace_containers.tasks.prove_all import prove_all

    prove_all(path.absolute(), provider, at_once, anew=anew, as_json=as_json)
