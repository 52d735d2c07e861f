"""Follows a job of Slurm by its log until it has ended. Knows no fleet."""

from __future__ import annotations

import time
from pathlib import Path

from headrace_cli.errors import CommandError, user_error
from headrace_cli.output import console, error_console

from headrace_clusters.slurm.programs import fields_of

POLL_S = 1.0
AWAY_S = 300.0
"""How long Slurm's controller may be away."""
LAST_LINES = 20
CHUNK_BYTES = 1 << 20
LIVING = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "REQUEUED", "STOPPED", "SIGNALING")
FOR_EVER = {
    "PartitionNodeLimit": ("--nodes", "ask for at most what `sinfo -s` shows, or name another --partition"),
    "PartitionConfig": ("--nodes", "ask for at most what `sinfo -s` shows, or name another --partition"),
    "PartitionTimeLimit": ("--time", "ask for at most what `sinfo -s` shows"),
    "BadConstraints": ("--sbatch", "see `scontrol show job JOB`"),
    "AssocMaxJobsLimit": ("--array", "your account may have so many jobs at once; they follow"),
    "ReqNodeNotAvail": ("--sbatch", "its nodes are down or reserved; see `sinfo -R`"),
    "JobHeldUser": ("scontrol", "release it: scontrol release JOB"),
    "JobHeldAdmin": ("scontrol", "an administrator holds it"),
}
"""Reasons why a job waits that do not pass by themselves, with what to change."""


class JobLog:
    """A job's log from a place on; a job that is queued again goes on writing into it."""

    def __init__(self, path: Path, begin: int) -> None:
        self._path, self._begin = path, begin

    def print_new(self) -> None:
        """Prints what has been written since the last call."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._begin)
                while part := file.read(CHUNK_BYTES):
                    self._begin += len(part)
                    console().print(part.decode(errors="replace"), end="", markup=False, soft_wrap=True)
        except FileNotFoundError:
            return  # It has not started, or its folder is not this machine's.

    @classmethod
    def at_end(cls, path: Path) -> JobLog:
        """A log that is shown from its last lines on."""
        try:
            with path.open("rb") as file:
                size = file.seek(0, 2)
                file.seek(max(0, size - CHUNK_BYTES))
                last = b"".join(file.readlines()[-LAST_LINES:])
        except FileNotFoundError:
            return cls(path, 0)
        return cls(path, size - len(last))


def follow(job: str, log: JobLog | None = None) -> None:
    """Shows a job's log and why it waits, until it has ended. Raises CommandError unless it has completed."""
    found = fields_of(job)
    if found is None:
        raise user_error("JOB", f"Slurm knows no job {job}, or knows it no longer", "see `squeue --me`")
    path = Path(found["StdOut"])
    log = log or JobLog.at_end(path)
    said, asked = "", time.monotonic()
    while found is not None and found["JobState"] in LIVING:
        told = _told(job, found)
        if told != said:
            said = told
            error_console().print(told, markup=False)
        log.print_new()
        time.sleep(POLL_S)
        try:
            found = fields_of(job)
            asked = time.monotonic()
        except CommandError:
            if time.monotonic() - asked > AWAY_S:
                raise
    log.print_new()
    if found is None:
        raise CommandError(f"Slurm no longer knows job {job}; how it ended is in {path}")
    if found["JobState"] != "COMPLETED":
        status = found.get("ExitCode", "").partition(":")[0]
        raise CommandError(
            f"job {job} {found['JobState']}, exit status {status}; see {path}", reason=found["JobState"]
        )


def _told(job: str, found: dict[str, str]) -> str:
    state, reason = found["JobState"], found.get("Reason", "")
    if state != "PENDING":
        return f"job {job} is {state} on {found.get('NodeList', '')}"
    text = f"job {job} waits" + (f": {reason}" if reason not in ("", "None") else "")
    if fix := FOR_EVER.get(reason.partition(",")[0]):
        text += f"; {fix[0]}: {fix[1].replace('JOB', job)}"
    return text
