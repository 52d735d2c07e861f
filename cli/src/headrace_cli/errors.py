"""What ends a command: a user's error (exit code 2) or anything else (exit code 1). Knows no terminal."""

from __future__ import annotations

from headrace.client.errors import HeadraceError, Problem

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


def refused(error: HeadraceError) -> CommandError:
    """A refusal by the coordinator, or its silence."""
    exit_code = EXIT_USER_ERROR if error.is_user_error else EXIT_FAILED
    return CommandError(error.message, reason=error.reason, exit_code=exit_code, problems=error.problems)
