"""What is checked before a job is submitted, and its submission."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.client import HeadraceError, load_spec
from headrace_cli.connection import Target
from headrace_cli.dry_run import check as check_spec
from headrace_cli.errors import refused, user_error
from headrace_schema.spec import RunSpec

from headrace_clusters.slurm.layout import idle_gpus, lay_out
from headrace_clusters.slurm.programs import Nodes, ask, partitions, seconds

if TYPE_CHECKING:
    from headrace_clusters.slurm.script import Asked, JobOptions

NO_FLEET = Target("", None, False)


def check(spec: Path, sets: Sequence[str], asked: Asked, options: JobOptions) -> Iterator[str]:
    """Warnings. Raises CommandError (exit code 2) for what no fleet of this size could run."""
    first = asked.array.partition(",")[0].partition("-")[0].partition(":")[0].partition("%")[0]
    try:
        loaded = load_spec(spec, [text.replace("%a", first) for text in sets])
    except HeadraceError as error:
        raise refused(error) from error
    found = check_spec(loaded, NO_FLEET)
    model = RunSpec.model_validate(loaded)
    lay_out(model, options, asked.nodes, asked.gpu_count)
    if asked.time:
        _require_time(asked)
    warnings = [f"{item['key']}: {item['problem']}; {item['fix']}" for item in found["warnings"]]
    return iter([*warnings, *idle_gpus(model, asked.nodes, asked.gpu_count)])


def _require_time(asked: Asked) -> None:
    try:
        limit = seconds(asked.time)
    except ValueError as error:
        fix = "write such as 12:00:00, 1-12:00:00, or minutes"
        raise user_error("--time", f"{asked.time!r} is not understood", fix) from error
    if limit <= asked.save_before:
        problem = f"{asked.time} is not longer than the {asked.save_before} s in which the job saves its run and ends"
        raise user_error("--time", problem, "give a longer one, or a shorter --save-before")


def require_room(asked: Asked) -> None:
    """Raises CommandError (exit code 2) where the cluster has too little, whoever uses it: the job would wait for
    ever.
    """
    known = partitions()
    default = dict.fromkeys(each.partition for each in known if each.default)
    names = asked.partition.split(",") if asked.partition else list(default)
    for name in names:
        if not any(each.partition == name for each in known):
            there = ", ".join(dict.fromkeys(each.partition for each in known))
            raise user_error(
                "--partition", f"{name!r} is no partition of this cluster", f"write one of: {there}"
            )
    found = [each for each in known if each.partition in names]
    if not found:
        return  # Without a default, Slurm has the last word.
    if asked.time and (longest := max(each.limit_s for each in found)) < seconds(asked.time):
        problem = f"{asked.time} is longer than the {longest / 3600:g} hours that {', '.join(names)} allows"
        raise user_error("--time", problem, "ask for less, and give --requeue-at-limit for a longer run")
    fitting = max(_fitting(found, name, asked) for name in names)
    if fitting < asked.nodes:
        each = (
            f" with {asked.gpus} GPUs each"
            if asked.gpu_count
            else f" with {asked.cpus} CPUs each"
            if asked.cpus
            else ""
        )
        has = "; ".join(f"{part.count} with {_gpus(part)} and {part.cpus} CPUs" for part in found)
        key = (
            "--nodes" if any(part.gpus_of(asked.gpu_type) >= asked.gpu_count for part in found) else "--gpus"
        )
        problem = f"{asked.nodes} nodes{each} are asked for, and {', '.join(names)} has {fitting:g} ({has})"
        raise user_error(key, problem, "ask for fewer, or name another --partition")


def _fitting(found: Sequence[Nodes], name: str, asked: Asked) -> float:
    return math.fsum(
        part.count
        for part in found
        if part.partition == name
        and part.gpus_of(asked.gpu_type) >= asked.gpu_count
        and part.cpus >= asked.cpus
    )


def _gpus(part: Nodes) -> str:
    return (
        ", ".join(f"{count} {kind or ''}".strip() + " GPUs" for kind, count in part.gpus.items()) or "no GPU"
    )


def submit_script(script: str) -> str:
    """The id of the job. Raises CommandError."""
    return ask("sbatch", "--parsable", given=script).partition(";")[0]
