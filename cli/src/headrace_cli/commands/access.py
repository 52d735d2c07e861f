"""`headrace token …` and `headrace whoami`: who may use a fleet."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from headrace_cli.connection import Answer, asking
from headrace_cli.errors import user_error
from headrace_cli.output import table

if TYPE_CHECKING:
    from headrace.client import Client
    from headrace_schema.resources.access import TokenView

UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
"""Seconds of each."""
app = typer.Typer(help="Make, list and revoke the tokens of a fleet (admins).", no_args_is_help=True)


class ScopeName(StrEnum):
    """What a token may do."""

    READ = "read"
    SUBMIT = "submit"
    OPERATE = "operate"
    ADMIN = "admin"


def add_to(main: typer.Typer) -> None:
    """Registers the commands."""
    main.add_typer(app, name="token")
    main.command()(whoami)


@app.command("create")
@asking
def create_token(
    client: Client,
    name: Annotated[str, typer.Argument(help="What lists and the audit call it.")],
    owner: Annotated[str, typer.Option(help="Whose runs it makes; default: NAME.", show_default=False)] = "",
    team: Annotated[str, typer.Option(help="The owner's team.", show_default=False)] = "",
    scopes: Annotated[
        list[ScopeName] | None,
        typer.Option("--scope", help="May be repeated; default: read and submit.", show_default=False),
    ] = None,
    expires: Annotated[
        str, typer.Option(metavar="TIME", help="Such as 12h or 30d; default: never.", show_default=False)
    ] = "",
) -> Answer:
    """Make a token, and print its secret: it is shown this once."""
    made = client.access.create_token(
        name,
        owner=owner,
        team=team,
        scopes=[each.value for each in scopes] if scopes else ("read", "submit"),
        expires_in_s=seconds(expires) if expires else None,
    )
    return made.raw, lambda: made.token


@app.command("list")
@asking
def list_tokens(client: Client) -> Answer:
    """List tokens that are not revoked, without their secrets."""
    found = client.access.tokens()
    headers = ("token", "owner", "team", "scopes", "made", "expires")
    rows = [(each.name, each.owner, each.team, ", ".join(each.scopes), *_times(each)) for each in found]
    return {"tokens": [each.raw for each in found]}, lambda: table(headers, rows) if found else "no tokens"


@app.command("revoke")
@asking
def revoke_token(
    client: Client, name: Annotated[str, typer.Argument(help="As `headrace token list` shows it.")]
) -> Answer:
    """End a token at once, and what is open under it."""
    client.access.revoke_token(name)
    return {"name": name}, lambda: f"token {name} is revoked"


@asking
def whoami(client: Client) -> Answer:
    """Say whose token this is, and what it may do."""
    found = client.access.me()

    def text() -> str:
        teams = f" of {', '.join(found.teams)}" if found.teams else ""
        return f"{found.name}{teams}: {', '.join(found.scopes) or 'no scope'}"

    return found.raw, text


def seconds(text: str) -> float:
    """A time such as 30d, 12h, 90m or 60s, in seconds."""
    found = re.fullmatch(r"([1-9][0-9]{0,8})([smhd])", text)
    if found is None:
        raise user_error("--expires", f"{text!r} is no time", "write a number and s, m, h or d, such as 30d")
    return float(int(found[1]) * UNITS[found[2]])


def _times(token: TokenView) -> tuple[str, str]:
    from headrace_cli.show.runs import age

    if token.expires_at is None:
        return age(token.created_at), "never"
    return age(token.created_at), "expired" if token.expired else _date(token.expires_at)


def _date(time: float) -> str:
    from datetime import UTC, datetime

    return datetime.fromtimestamp(time, UTC).strftime("%Y-%m-%d %H:%M UTC")
