"""Which coordinator a command speaks to, and with which token."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from headrace_cli.commands.options import DEFAULT_DATA_DIR
from headrace_cli.errors import CommandError, refused
from headrace_cli.launcher.data_dir import DataDir
from headrace_cli.launcher.plan import DEFAULT_PORT
from headrace_cli.launcher.state import living_state

if TYPE_CHECKING:
    from headrace.client import Client


@dataclass(frozen=True)
class Target:
    """A coordinator's address, empty when there is none; `known` is false when it is only the default guess."""

    url: str
    token: str | None
    known: bool


def find_target(url: str | None, data_dir: Path) -> Target:
    """`--url` or HEADRACE_URL, else the fleet that lives on the data directory.

    The default port is a guess for the default data directory alone: whoever names a directory means its fleet.
    """
    token = os.environ.get("HEADRACE_TOKEN")
    url = url or None  # an empty variable names nothing
    state = living_state(DataDir.at(data_dir))
    if state and url in (None, state.url):
        return Target(state.url, token or _read_token(state.token_file), True)
    guess = f"http://127.0.0.1:{DEFAULT_PORT}" if data_dir == DEFAULT_DATA_DIR else ""
    return Target(url or guess, token, url is not None)


def _read_token(path: str) -> str | None:
    try:
        return Path(path).read_text(encoding="ascii").strip()
    except OSError:
        return None


@contextmanager
def connect(target: Target, *, patience_s: float = 0.0) -> Iterator[Client]:
    """A client whose errors end the command with the right exit code."""
    from headrace.client import Client, HeadraceError

    if not target.url:
        hint = "start one there with `headrace up`, or name a coordinator with --url or HEADRACE_URL"
        raise CommandError(f"no fleet runs on the given --data-dir; {hint}", reason="UNREACHABLE")
    with Client(target.url, target.token, patience_s=patience_s) as client:
        try:
            yield client
        except HeadraceError as error:
            if error.reason == "UNREACHABLE" and not error.status:
                hint = "start a fleet with `headrace up`, or name one with --url or HEADRACE_URL"
                raise CommandError(f"{error.message}; {hint}", reason=error.reason) from error
            raise refused(error) from error
