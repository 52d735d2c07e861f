"""`headrace token …`, `whoami`, `usage` and `quota …`: who may use a fleet, how much, and how much was used."""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from headrace_cli.connection import Answer, asking
from headrace_cli.errors import user_error
from headrace_cli.output import table

if TYPE_CHECKING:
    from headrace.client import Client
    from headrace_schema.resources.access import TokenView, UsageView

UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
"""Seconds of each."""
FIGURES = ("runs", "queued", "devices", "device_hours", "disk_gb", "streams")
"""What is shown of usage."""
quota_app = typer.Typer(help="Set and list what users and teams may use (admins).", no_args_is_help=True)
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
    main.add_typer(quota_app, name="quota")
    main.command()(whoami)
    main.command()(usage)


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


@asking
def usage(
    client: Client,
    as_csv: Annotated[bool, typer.Option("--csv", help="As CSV, for a spreadsheet.")] = False,
) -> Answer:
    """Show what you and your team use and may use; of everybody for those who operate the fleet."""
    found = client.access.usage()
    document = {"usage": [each.raw for each in found]}
    if as_csv:
        return document, lambda: _csv(found)
    rows = [(each.subject, *(_of(each, name) for name in FIGURES)) for each in found]
    return document, lambda: table(("whose", *(f">{name}" for name in FIGURES)), rows)


def _of(each: UsageView, name: str) -> str:
    """A figure, and its quota where there is one."""
    used, most = getattr(each, name), each.limits.get(name)
    text = f"{used:.2f}" if isinstance(used, float) else str(used)
    return text if most is None else f"{text} of {most:g}"


def _csv(found: Sequence[UsageView]) -> str:
    import csv
    import io

    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    limits = sorted({name for each in found for name in each.limits})
    writer.writerow(["subject", *FIGURES, *(f"quota_{name}" for name in limits)])
    for each in found:
        figures = [getattr(each, name) for name in FIGURES]
        writer.writerow([each.subject, *figures, *(each.limits.get(name, "") for name in limits)])
    return text.getvalue().rstrip()


@quota_app.command("list")
@asking
def list_quotas(client: Client) -> Answer:
    """List the quotas that are set."""
    found = client.access.quotas()
    rows = [
        (each.subject, ", ".join(f"{name} {most:g}" for name, most in each.limits.items())) for each in found
    ]
    document = {"quotas": [each.raw for each in found]}
    return document, lambda: table(("whose", "at most"), rows) if found else "no quotas"


@quota_app.command("set")
@asking
def set_quota(
    client: Client,
    subject: Annotated[str, typer.Argument(help="user:NAME, team:NAME, or 'user:*' for everybody else.")],
    limits: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME=NUMBER]...", help="Such as runs=4 device_hours=500; nothing: no quota."
        ),
    ] = None,
) -> Answer:
    """Set what a user or team may use, in place of what was set before. Runs that have begun are not ended."""
    asked: dict[str, float] = {}
    for text in limits or ():
        name, _, number = text.partition("=")
        try:
            asked[name] = float(number) if "." in number else int(number)
        except ValueError as error:
            raise user_error(name, f"{number!r} is no number", "write NAME=NUMBER, such as runs=4") from error
    found = client.access.set_quota(subject, asked)
    return found.raw, lambda: f"{subject}: {', '.join(limits or ()) or 'no quota'}"


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
