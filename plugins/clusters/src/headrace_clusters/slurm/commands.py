"""`headrace slurm`: runs as jobs of Slurm. What it needs is imported as it runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from headrace_cli.commands.options import JsonFlag, grouped
from headrace_cli.errors import EXIT_INTERRUPTED
from headrace_cli.output import console, error_console, print_json

from headrace_clusters.slurm.script import Asked, JobOptions

app = typer.Typer(help="Runs on the nodes of Slurm jobs.", no_args_is_help=True)
Spec = Annotated[Path, typer.Argument(metavar="SPEC", help="Run spec, a YAML file that all nodes see.")]
Sets = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override, such as optimizer.lr=2e-5."),
]


@app.command()
@grouped
def submit(
    spec: Spec,
    asked: Asked,
    options: JobOptions,
    sets: Sets = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the batch script, for sbatch, and submit nothing.")
    ] = False,
    watch: Annotated[bool, typer.Option(help="Show the job's log until it ends.")] = True,
    as_json: JsonFlag = False,
) -> None:
    """Submit a job that starts a fleet over its nodes, makes one run on it, and ends with the run.

    Ctrl-C leaves the job alone.
    """
    from headrace_clusters.slurm.script import render
    from headrace_clusters.slurm.submitting import check, require_room, submit_script

    for text in check(spec, sets or (), asked, options):
        error_console().print(f"warning: {text}", markup=False)
    script = render(asked, options, spec, sets or (), Path.cwd())
    if dry_run:
        sys.stdout.write(script)
        return
    require_room(asked)
    job = submit_script(script)
    log, files = _places(job, asked, options)
    if as_json:
        print_json({"job": job, "log": str(log), "data_dir": files})
        return
    console().print(f"job {job}; log: {log}; files: {files}", markup=False)
    if asked.array:
        console().print(f"follow one: headrace slurm watch {job}_N; see all: squeue --jobs {job}")
    elif watch:
        _follow(job, log)
    else:
        console().print(f"follow it: headrace slurm watch {job}")


@app.command("watch")
def watch_job(
    job: Annotated[str, typer.Argument(metavar="JOB", help="Id of a job, of an array JOB_N.")],
) -> None:
    """Show a job's log until the job ends. Exit code 1 unless it completes. Ctrl-C leaves the job alone."""
    _follow(job, None)


def _follow(job: str, log: Path | None) -> None:
    from headrace_clusters.slurm.watching import JobLog, follow

    try:
        follow(job, JobLog(log, 0) if log else None)
    except KeyboardInterrupt:
        error_console().print(
            f"\njob {job} goes on; follow it again: headrace slurm watch {job}; end it: scancel {job}"
        )
        raise typer.Exit(EXIT_INTERRUPTED) from None


def _places(job: str, asked: Asked, options: JobOptions) -> tuple[Path, str]:
    """The job's log and data directory; of an array with what stands for the number of one."""
    folder = Path.cwd()
    files = str(folder / (options.data_dir or ("headrace-%A_%a" if asked.array else "headrace-%j")))
    names = {"%j": job, "%A": job, "%a": "N"}
    log = str(asked.log(folder))
    for name, value in names.items():
        log, files = log.replace(name, value), files.replace(name, value)
    return Path(log), files


@app.command("job", hidden=True)
@grouped
def run_job(spec: Spec, options: JobOptions, sets: Sets = None) -> None:
    """Make a run on a fleet over the nodes of the job that this is the batch script of."""
    from headrace_clusters.slurm.batch import run_job

    if status := run_job(spec, sets or (), options):
        raise typer.Exit(status)


@app.command("part", hidden=True, context_settings={"ignore_unknown_options": True})
def run_part(
    head: Annotated[Path, typer.Argument(metavar="DIRECTORY")],
    words: Annotated[list[str], typer.Argument(metavar="COMMAND...")],
) -> None:
    """Run a node's part of a fleet whose head has its data in DIRECTORY."""
    from headrace_clusters.slurm.part import run_part

    if status := run_part(head, [sys.executable, "-m", "headrace_cli", *words]):
        raise typer.Exit(status)
