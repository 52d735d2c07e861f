"""Ray jobs, by the API of Ray's dashboard."""

from __future__ import annotations

import asyncio
import shlex
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from headrace_cli.errors import EXIT_INTERRUPTED, CommandError
from headrace_cli.output import error_console

from headrace_clusters.ray.connecting import require_ray

EXCLUDES = ["/.headrace", "/.git", "/.venv"]
"""Of a working directory: what a fleet keeps, and what no run reads."""
OF_THE_SHELL = ("data_dir", "foreground", "as_json")
"""Options of whoever submits a job, not of what it runs."""


def submit_job(address: str, folder: Path, command: Sequence[str]) -> str:
    """The id of a job that runs a command in a copy of a folder. Raises CommandError."""
    client = _client(address)
    environment = {"working_dir": str(folder), "excludes": EXCLUDES}
    try:
        return str(client.submit_job(entrypoint=shlex.join(command), runtime_env=environment))
    except RuntimeError as error:
        raise CommandError(f"the Ray cluster does not take the job: {error}", reason="REFUSED") from error


def words_of(*groups: Any) -> list[str]:
    """Options of a command as words: those that are not as they are by default, of what the job has no own."""
    found = []
    for group in groups:
        for each in fields(group):
            value, option = getattr(group, each.name), f"--{each.name.replace('_', '-')}"
            if each.name in OF_THE_SHELL or value == each.default:
                continue
            if value is True:
                found.append(option)
            else:
                values = value if isinstance(value, list) else [value]
                found += [word for one in values for word in (option, f"{one}")]
    return found


def follow(address: str, job: str) -> None:
    """Prints a job's output until it ends. Raises CommandError unless it succeeded."""
    client = _client(address)
    try:
        asyncio.run(_print(client, job))
    except KeyboardInterrupt:
        error_console().print(f"\nthe job goes on; stop it with: ray job stop {job} --address {address}")
        raise SystemExit(EXIT_INTERRUPTED) from None
    found = client.get_job_info(job)
    if found.status != "SUCCEEDED":
        raise CommandError(
            f"job {job} {found.status}: {found.message or 'see its output'}", reason=str(found.status)
        )


async def _print(client: Any, job: str) -> None:
    async for lines in client.tail_job_logs(job):
        sys.stdout.write(lines)
        sys.stdout.flush()


def _client(address: str) -> Any:
    require_ray()
    from ray.job_submission import JobSubmissionClient

    try:
        return JobSubmissionClient(address)
    except (ConnectionError, RuntimeError, ValueError) as error:
        line = str(error).splitlines()[0] if str(error) else type(error).__name__
        fix = "name Ray's dashboard: --address http://HEAD:8265"
        raise CommandError(
            f"--address: {address} takes no jobs ({line}); {fix}", reason="UNREACHABLE"
        ) from error
