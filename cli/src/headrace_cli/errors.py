"""What ends a command: a user's error (exit code 2) or anything else (exit code 1). Knows no terminal."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from headrace.client.errors import HeadraceError, Problem

ABSENT = re.compile(r"no such file|does not exist", re.IGNORECASE)
ABSOLUTE = re.compile(r"(?<![^\s'\"(])/[^\s'\",;:()]+")
EXIT_FAILED = 1
EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130


class CommandError(Exception):
    """Ends a command with one sentence and an exit code; `problems` name keys and fixes."""

    def __init__(
        self,
        message: str,
        *,
        reason: str = "FAILED",
        exit_code: int = EXIT_FAILED,
        problems: list[Problem] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason
        self.exit_code = exit_code
        self.problems = problems or []


def user_error(key: str, problem: str, fix: str) -> CommandError:
    """A user's error at one key or option."""
    return CommandError(
        f"{key}: {problem}; {fix}",
        reason="INVALID",
        exit_code=EXIT_USER_ERROR,
        problems=[Problem(key, problem, fix)],
    )


@contextmanager
def writing(place: Path) -> Iterator[None]:
    """Ends the command with one sentence where the system refuses what is written to `place`."""
    try:
        yield
    except OSError as error:
        raise CommandError(f"{place} cannot be written: {error.strerror or error}") from error


def refused(error: HeadraceError) -> CommandError:
    """A refusal by the coordinator, or its silence."""
    exit_code = EXIT_USER_ERROR if error.is_user_error else EXIT_FAILED
    problems = [_seen_here(problem) for problem in error.problems]
    return CommandError(error.message, reason=error.reason, exit_code=exit_code, problems=problems)


def _seen_here(found: Problem) -> Problem:
    """A problem; its fix says so where services, in containers or elsewhere, lack a file that this machine has."""
    paths = [Path(text) for text in ABSOLUTE.findall(found.problem)] if ABSENT.search(found.problem) else []
    here = paths[0] if paths else None  # The one that is absent; a folder that holds it may follow.
    if here is None or not here.exists():
        return found
    folder = here if here.is_dir() else here.parent
    hint = (
        f"{here} is on this machine and not where the services run: with compose, HEADRACE_FILES={folder} docker "
        "compose up -d shows them the folder"
    )
    return replace(found, fix=f"{found.fix}; {hint}" if found.fix else hint)
