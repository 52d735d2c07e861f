"""Options that several commands share, and the completion of run ids."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

COMPLETION_S = 2.0
DEFAULT_DATA_DIR = Path(".headrace")


def complete_run(ctx: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Ids of runs that begin with `incomplete`, with their states; none where no coordinator answers at once."""
    from headrace.client import Client, HeadraceError

    from headrace_cli.connection import find_target

    target = find_target(ctx.params.get("url"), Path(ctx.params.get("data_dir") or DEFAULT_DATA_DIR))
    if not target.url:
        return []
    try:
        with Client(
            target.url, target.token, timeout_s=COMPLETION_S, patience_s=0, ca_file=target.ca_file
        ) as client:
            runs = client.list()
    except HeadraceError:
        return []
    return [(run.id, run.state) for run in runs if run.id.startswith(incomplete)]


JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else on standard output.")]
Url = Annotated[
    str | None,
    typer.Option(
        "--url",
        envvar="HEADRACE_URL",
        help="Coordinator; default: the fleet of --data-dir.",
        show_default=False,
    ),
]
DataDirOption = Annotated[
    Path, typer.Option("--data-dir", envvar="HEADRACE_DATA_DIR", help="Where a local fleet keeps its files.")
]
NoToken = Annotated[
    bool,
    typer.Option(
        "--no-token",
        help="Ask nobody for a token: every user of this machine can then submit runs, and so run code as you.",
    ),
]
RunId = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="Id of a run, as `headrace run list` shows it.",
        autocompletion=complete_run,
    ),
]
