"""Slurm's own programs, and what they say as sentences with a key and a fix. Knows no fleet."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headrace_cli.errors import CommandError, user_error

PATIENCE_S = 60.0
GPUS = re.compile(r"gpu(?::(?P<type>[^:,()]+))?:(?P<count>\d+)")
FIELD = re.compile(r"(?:^| )([A-Z][\w:/]*)=(.*?)(?= [A-Z][\w:/]*=|$)")
CLOCKS = "set both by NTP (`chronyc tracking` says how far one is)"
REFUSALS = {
    r"[Ii]nvalid partition": ("--partition", "name one of `sinfo -s`"),
    r"account|[Aa]ssociation": ("--sbatch", "name an account of yours: --sbatch --account=NAME"),
    r"\bQOS\b": ("--sbatch", "name a quality of service that you may use: --sbatch --qos=NAME"),
    r"[Mm]emory": ("--sbatch", "ask for what a node has: --sbatch --mem=…"),
    r"time limit": ("--time", "ask for at most what `sinfo -o '%P %l'` shows"),
    r"node configuration|[Nn]ode count": ("--nodes", "ask for what `sinfo -o '%P %D %c %G'` shows"),
    r"array": ("--array", "write such as 0-3 or 1,2,5"),
    r"unrecognized option|[Ii]nvalid (--|option)": ("--sbatch", "see `man sbatch`"),
}
"""What sbatch says of a job, and the option that says otherwise."""


@dataclass(frozen=True)
class Nodes:
    """Nodes of a partition that are alike. `gpus` is by type; `limit_s` is the longest job in seconds."""

    partition: str
    default: bool
    count: int
    cpus: int
    gpus: Mapping[str, int]
    limit_s: float

    def gpus_of(self, kind: str) -> int:
        """Of a type; of all types for ""."""
        return self.gpus.get(kind, 0) if kind else sum(self.gpus.values())


def ask(program: str, *words: str, given: str | None = None) -> str:
    """What a program of Slurm prints. Raises CommandError with one sentence."""
    done = call(program, *words, given=given)
    if done.returncode:
        raise _failure(program, done.stderr.strip() or f"it ended with status {done.returncode}")
    return done.stdout.strip()


def call(program: str, *words: str, given: str | None = None) -> subprocess.CompletedProcess[str]:
    """Runs a program of Slurm. Raises CommandError where there is none, or it does not answer."""
    if shutil.which(program) is None:
        problem = f"there is no {program} in the PATH of this machine"
        raise user_error(
            "Slurm", problem, "run it where Slurm's commands are, on a login node of the cluster"
        )
    try:
        # Without an input of its own, a program reads what the user types.
        return subprocess.run(
            [program, *words], input=given or "", capture_output=True, text=True, timeout=PATIENCE_S
        )
    except subprocess.TimeoutExpired as error:
        raise _failure(program, f"no answer within {PATIENCE_S:g} s") from error


def _failure(program: str, said: str) -> CommandError:
    """What a program said, by its last words."""
    told = [line.partition("error: ")[2] or line for line in said.splitlines() if line.strip()]
    text = "; ".join(dict.fromkeys(told[-2:]))
    if re.search(r"[Rr]ewound|[Ee]xpired|authentication", said):
        problem = (
            f"{program}: {text}; the clocks of this machine and of Slurm's controller may be minutes apart"
        )
        return user_error("clocks", problem, CLOCKS)
    if re.search(r"[Uu]nable to contact|[Cc]onnection refused|no answer|timed out|Unable to establish", said):
        return CommandError(
            f"Slurm's controller does not answer ({program}: {text}); see `scontrol ping`",
            reason="UNREACHABLE",
        )
    for pattern, (key, fix) in REFUSALS.items():
        if re.search(pattern, said):
            return user_error(key, f"{program}: {text}", fix)
    return CommandError(f"{program}: {text}")


def partitions() -> list[Nodes]:
    """What the cluster has, as sinfo tells it."""
    found = []
    for line in ask("sinfo", "-h", "-o", "%P|%D|%c|%G|%l").splitlines():
        name, count, cpus, gres, limit = line.split("|")
        gpus: dict[str, int] = {}
        for each in GPUS.finditer(gres):
            kind = each["type"] or ""
            gpus[kind] = gpus.get(kind, 0) + int(each["count"])
        found.append(
            Nodes(
                name.rstrip("*"), name.endswith("*"), int(count), int(cpus.rstrip("+")), gpus, seconds(limit)
            )
        )
    return found


def seconds(text: str) -> float:
    """Seconds of a time as Slurm writes it: minutes, M:S, H:M:S, D-H, D-H:M and D-H:M:S. Raises ValueError.

    >>> seconds("90"), seconds("1:30:00"), seconds("1-12"), seconds("infinite")
    (5400.0, 5400.0, 129600.0, inf)
    """
    if text.lower() in ("infinite", "unlimited", "n/a"):
        return float("inf")
    days, dash, rest = text.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if len(parts) > 3:
        raise ValueError(text)
    if dash:
        hours, minutes, left = [*parts, 0, 0][:3]
    elif len(parts) == 1:
        hours, minutes, left = 0, parts[0], 0
    else:
        hours, minutes, left = [0, *parts][-3:]
    return float(int(days or 0) * 86400 + hours * 3600 + minutes * 60 + left)


def fields_of(job: str) -> dict[str, str] | None:
    """What Slurm knows of a job; None for one that it does not know, or knows no longer."""
    done = call("scontrol", "show", "job", "-o", job)
    if done.returncode == 0 and done.stdout.strip():
        return dict(FIELD.findall(done.stdout.strip().splitlines()[0]))
    if "Invalid job id" in done.stderr or not done.stderr.strip():
        return None
    raise _failure("scontrol", done.stderr)


def host_names(nodes: str) -> Sequence[str]:
    """The nodes that a list such as n[1-4] names."""
    return ask("scontrol", "show", "hostnames", nodes).split()
