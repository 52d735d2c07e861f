"""Which coordinator a command speaks to, and with which token."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.client.tokens import fleet_ca, fleet_token, same_place

from headrace_cli.commands.options import DEFAULT_DATA_DIR, Place, expanded
from headrace_cli.errors import EXIT_USER_ERROR, CommandError, refused
from headrace_cli.launcher.data_dir import DataDir
from headrace_cli.launcher.plan import DEFAULT_PORT
from headrace_cli.launcher.state import living_state
from headrace_cli.output import console, error_console, print_json

if TYPE_CHECKING:
    from headrace.client import Client

Answer = tuple[Any, Callable[[], Any]]
"""The document for programs, and what makes the text for people: it may ask the client for more."""
SAY_S = 3.0
CHECKING = (
    "the coordinator checks the spec; a fleet loads the scorers first, for reward.load_timeout_s at most, and makes an "
    "environment where sizes of a policy are to be compared"
)
TOKEN_HINT = (
    "name the --data-dir of its fleet, or put the token that lies there in `http-token` into HEADRACE_TOKEN"
)


@dataclass(frozen=True)
class Target:
    """A coordinator's address, empty when there is none; `known` is false when it is only the default guess."""

    url: str
    token: str | None
    known: bool
    ca_file: Path | None = None


def find_target(url: str | None, data_dir: Path) -> Target:
    """`--url` or HEADRACE_URL, else the fleet that lives on the data directory.

    The default port is a guess for the default data directory alone: whoever names a directory means its fleet.
    """
    token = os.environ.get("HEADRACE_TOKEN")  # else the client looks for one
    url = url or None  # an empty variable names nothing
    state = living_state(DataDir.at(data_dir))
    if state and (url is None or same_place(url, state.url)):
        ca_file = fleet_ca(state.url, data_dir)
        return Target(state.url, token or fleet_token(state.url, data_dir), True, ca_file)
    guess = f"http://127.0.0.1:{DEFAULT_PORT}" if data_dir == DEFAULT_DATA_DIR else ""
    return Target(url or guess, token, url is not None)


def process_ids(target: Target, data_dir: Path) -> dict[str, int]:
    """Process ids by instance; empty unless the target is the fleet on the data directory."""
    state = living_state(DataDir.at(data_dir))
    if state is None or not same_place(target.url, state.url):
        return {}
    return {process.name: process.pid for process in state.processes if process.pid}


@contextmanager
def saying(what: str) -> Iterator[None]:
    """Says on standard error what the command waits for, once it has waited for a while."""
    timer = threading.Timer(SAY_S, lambda: error_console().print(f"waiting: {what}", markup=False))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def connect(target: Target, *, patience_s: float = 0.0) -> Iterator[Client]:
    """A client whose errors end the command with the right exit code."""
    from headrace.client import Client, HeadraceError

    if not target.url:
        hint = "start one there with `headrace up`, or name a coordinator with --url or HEADRACE_URL"
        raise CommandError(f"no fleet runs on the given --data-dir; {hint}", reason="UNREACHABLE")
    try:
        with Client(target.url, target.token, patience_s=patience_s, ca_file=target.ca_file) as client:
            yield client
    except HeadraceError as error:
        if error.reason == "UNREACHABLE" and not error.status:
            hint = "start a fleet with `headrace up`, or name one with --url or HEADRACE_URL"
            raise CommandError(f"{error.message}; {hint}", reason=error.reason) from error
        if error.status == 401:
            raise CommandError(
                f"{error.message}; {TOKEN_HINT}",
                reason=error.reason,
                exit_code=EXIT_USER_ERROR,
            ) from error
        raise refused(error) from error


def show(answer: Answer, as_json: bool) -> None:
    """Prints an answer, for a program or for people."""
    document, text = answer
    if as_json:
        print_json(document)
    else:
        console().print(text())


def asking(command: Callable[..., Answer]) -> Callable[..., None]:
    """A command that returns its answer, made of a function with a client in place of --url, --data-dir and --json."""

    def ask(client: Place, **options: Any) -> None:
        with connect(find_target(client.url, client.data_dir)) as found:
            show(command(found, **options), client.as_json)

    return expanded(command, ask, {"client": Place})
