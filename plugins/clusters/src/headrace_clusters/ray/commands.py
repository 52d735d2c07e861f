"""`headrace ray`: fleets on Ray. What it needs is imported as it runs."""

from __future__ import annotations

import typer

app = typer.Typer(help="Fleets on Ray.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Keeps the commands in a group of their own."""
