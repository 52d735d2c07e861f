"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

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
RunId = Annotated[str, typer.Argument(metavar="RUN", help="Id of a run, as `headrace run list` shows it.")]
DEFAULT_DATA_DIR = Path(".headrace")
