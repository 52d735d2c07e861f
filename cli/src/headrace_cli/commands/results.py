"""`headrace run export`: the weights of any checkpoint, as a directory that transformers, vLLM and SGLang load."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from headrace_cli.commands.options import DEFAULT_DATA_DIR, DataDirOption, JsonFlag, RunId, Url
from headrace_cli.connection import connect, find_target, saying
from headrace_cli.errors import EXIT_USER_ERROR, CommandError, user_error
from headrace_cli.launcher.data_dir import DataDir
from headrace_cli.output import console, print_json


def export(
    run: RunId,
    at: Annotated[
        int | None,
        typer.Option(min=0, help="Step of the checkpoint; default: the newest one.", show_default=False),
    ] = None,
    to: Annotated[
        Path | None,
        typer.Option(help="New directory; default: RUN-step-STEP here.", show_default=False),
    ] = None,
    url: Url = None,
    data_dir: DataDirOption = DEFAULT_DATA_DIR,
    as_json: JsonFlag = False,
) -> None:
    """Write a checkpoint of a run as a Hugging Face directory. Reads the run's files alone: needs no fleet or GPU."""
    if find_spec("headrace_trainer") is None:
        raise user_error(
            "headrace run export", "headrace_trainer is not installed", "pip install 'headrace[local]'"
        )
    directory = _files_of(run, url, data_dir)
    command = [sys.executable, "-m", "headrace_trainer.export", str(directory), "--json"]
    command += ["--to", str(to)] if to else []
    command += ["--at", str(at)] if at is not None else []
    with saying("reading the checkpoint"):
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    try:
        told = json.loads(done.stdout)
    except ValueError as error:
        raise CommandError(f"headrace_trainer.export ended with status {done.returncode}") from error
    if done.returncode:
        raise CommandError(told["message"], reason=told["reason"], exit_code=EXIT_USER_ERROR)
    if as_json:
        print_json({"run": run, **told})
    else:
        console().print(f"step {told['step']} of {run} is in {told['directory']}", markup=False)


def _files_of(run: str, url: str | None, data_dir: Path) -> Path:
    """A run's directory on this host. Raises CommandError where it is on another."""
    directory = DataDir.at(data_dir).root / "runs" / run
    if url is None and directory.is_dir():
        return directory
    with connect(find_target(url, data_dir)) as client:
        directory = Path(client.get(run).raw["run_directory"])
    if not directory.is_dir():
        fix = f"where they are, say: python -m headrace_trainer.export {directory} --to DIRECTORY"
        raise user_error("RUN", f"the files of {run} are not on this host", fix)
    return directory
