"""The batch script of a job: what is asked of Slurm, and what the job is told. Starts nothing."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

import typer
from headrace_cli.errors import user_error

SIGNAL = "USR1"
"""Says that the time limit is near. SIGTERM says that somebody ends the job, and a job so ended is not queued again."""
SCRIPT = """#!/bin/bash
{directives}
# One fleet over the nodes of this job, and one run on it. Written by `headrace slurm submit`.
trap '' {signal} # until the command below listens
exec {command}
"""


@dataclass(frozen=True)
class JobOptions:
    """What a job is told of its fleet; on its command line in the script."""

    data_dir: Annotated[
        str,
        typer.Option(
            "--data-dir",
            help="The fleet's files, which all nodes see; %j is the job's id. A job with the same one goes on with its "
            "runs. Default: headrace-%j, of an array headrace-%A_%a.",
            show_default=False,
        ),
    ] = ""
    rollout: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=256,
            help="Rollouts on each node; default: what its GPUs hold, without any rollout.instances over the nodes.",
            show_default=False,
        ),
    ] = None
    trainer: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=256,
            help="Trainers on each node that has any; default: trainer.ranks, at most one a GPU.",
            show_default=False,
        ),
    ] = None
    trainer_nodes: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="The first so many nodes have trainers; default: as many as trainer.ranks needs.",
            show_default=False,
        ),
    ] = None
    simulator: Annotated[int, typer.Option(min=0, max=256, help="Simulators, on the first node.")] = 1
    engine: Annotated[str, typer.Option(help="As of `headrace up`.")] = "auto"
    backend: Annotated[str, typer.Option(help="As of `headrace up`.")] = "fsdp"
    sim: Annotated[str, typer.Option(help="As of `headrace up`.")] = "gymnasium"
    devices: Annotated[
        str, typer.Option(help="Devices of each node, such as cpu:0,cpu:1; default: what Slurm gives.")
    ] = ""
    interface: Annotated[
        str,
        typer.Option(
            help="Network interface between the nodes, such as ib0; default: that of Slurm's own address.",
            show_default=False,
        ),
    ] = ""
    port: Annotated[
        int,
        typer.Option(
            min=0,
            max=65534,
            help="Of the HTTP API, gRPC is one above it; default: free ones by the job's id.",
        ),
    ] = 0
    tls: Annotated[bool, typer.Option("--tls", help="Encrypt all traffic between the nodes.")] = False
    timeout: Annotated[float, typer.Option(min=1, help="Longest start in seconds.")] = 600
    requeue_at_limit: Annotated[
        bool,
        typer.Option(
            "--requeue-at-limit",
            help="Queue the job again before its time limit, until its run has ended; each time goes on from the last "
            "step.",
        ),
    ] = False

    def words(self) -> list[str]:
        """What is not the default, as options."""
        found = []
        for each in fields(self):
            value, option = getattr(self, each.name), f"--{each.name.replace('_', '-')}"
            if value != each.default:
                found += (
                    [option]
                    if value is True
                    else [option, f"{value:g}" if isinstance(value, float) else str(value)]
                )
        return found


@dataclass(frozen=True)
class Asked:
    """What is asked of Slurm."""

    nodes: Annotated[int, typer.Option(min=1, max=4096, help="Nodes of the job.")] = 1
    gpus: Annotated[
        str, typer.Option(metavar="[TYPE:]N", help="GPUs of each node, such as 8 or h100:8; 0: CPUs alone.")
    ] = "0"
    cpus: Annotated[
        int,
        typer.Option(
            min=0,
            help="CPUs of each node, which others may share then; default: whole nodes.",
            show_default=False,
        ),
    ] = 0
    time: Annotated[
        str, typer.Option(help="Time limit, such as 12:00:00; default: the partition's.", show_default=False)
    ] = ""
    partition: Annotated[str, typer.Option(help="Default: Slurm's.", show_default=False)] = ""
    array: Annotated[
        str,
        typer.Option(
            help="So many jobs, such as 0-3, each with a fleet and a run of its own; %a in --set is their number.",
            show_default=False,
        ),
    ] = ""
    name: Annotated[str, typer.Option(help="The job's name.")] = "headrace"
    sbatch: Annotated[
        list[str] | None,
        typer.Option(metavar="OPTION", help="Another option of sbatch, such as --sbatch --account=us."),
    ] = None
    save_before: Annotated[
        int,
        typer.Option(
            min=10, max=65535, help="Seconds before the time limit at which the job saves its run and ends."
        ),
    ] = 180

    @property
    def gpu_count(self) -> int:
        """Of each node. Raises CommandError (exit code 2)."""
        number = self.gpus.rpartition(":")[2]
        if not number.isascii() or not number.isdigit() or self.gpus.count(":") > 1:
            raise user_error("--gpus", f"{self.gpus!r} is not understood", "write such as 8, h100:8 or 0")
        return int(number)

    @property
    def gpu_type(self) -> str:
        """Of the GPUs; "" for any."""
        return self.gpus.rpartition(":")[0]

    def log(self, folder: Path) -> Path:
        """The pattern of the job's log, which Slurm completes."""
        return folder / ("headrace-%A_%a.out" if self.array else "headrace-%j.out")

    def directives(self, folder: Path) -> list[str]:
        """For `#SBATCH`. `--exclusive` and no number of CPUs: all that a node has."""
        found = [f"--job-name={self.name}", f"--nodes={self.nodes}", "--ntasks-per-node=1"]
        found += [f"--gpus-per-node={self.gpus}"] if self.gpu_count else []
        found += [f"--cpus-per-task={self.cpus}"] if self.cpus else ["--exclusive"]
        given = {"time": self.time, "partition": self.partition, "array": self.array}
        found += [f"--{name}={value}" for name, value in given.items() if value]
        found += ["--requeue", "--open-mode=append", f"--output={self.log(folder)}"]
        return [*found, f"--signal=B:{SIGNAL}@{self.save_before}", *(self.sbatch or ())]


def render(asked: Asked, options: JobOptions, spec: Path, sets: Sequence[str], folder: Path) -> str:
    """The script of a job that is submitted from a folder."""
    words = [sys.executable, "-m", "headrace_cli", "slurm", "job", str(spec.absolute())]
    words += [word for text in sets for word in ("--set", text)]
    directives = (f"#SBATCH {_directive(each)}" for each in asked.directives(folder))
    return SCRIPT.format(
        directives="\n".join(directives), signal=SIGNAL, command=shlex.join([*words, *options.words()])
    )


def _directive(option: str) -> str:
    """An option as sbatch reads it from a script: it takes quotes. Raises CommandError (exit code 2)."""
    if "\n" in option or not option.startswith("-"):
        raise user_error(
            "--sbatch", f"{option!r} is no option of sbatch", "write such as --sbatch --account=us"
        )
    name, equals, value = option.partition("=")
    return f"{name}{equals}{shlex.quote(value)}" if value else option
