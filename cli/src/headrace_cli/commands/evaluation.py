"""`headrace eval …`: evaluate a model or a checkpoint on a suite, list evaluations, compare two."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from headrace_cli.commands.options import (
    DEFAULT_DATA_DIR,
    DataDirOption,
    JsonFlag,
    Url,
    Visibility,
    VisibilityName,
)
from headrace_cli.connection import CHECKING, Answer, asking, connect, find_target, saying, show
from headrace_cli.errors import EXIT_INTERRUPTED, CommandError, refused, writing
from headrace_cli.output import console, error_console
from headrace_cli.show.evaluations import (
    comparison_table,
    evaluations_list,
    progress_line,
    progress_lines,
    result_table,
    waiting,
)

if TYPE_CHECKING:
    from headrace.client import Client, EvaluationRun

PATIENCE_S = 60.0  # how long the coordinator of an evaluation that is watched may be away
LOOK_S = 0.5
SUBMIT = "submit"
VIDEOS = 4


class _FileFirst(TyperGroup):
    """A group whose first word may be a file: `headrace eval FILE` is `headrace eval submit FILE`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ("-h", "--help"):
            args = [SUBMIT, *args]
        parsed: list[str] = super().parse_args(ctx, args)
        return parsed


app = typer.Typer(
    cls=_FileFirst,
    help="Evaluate a model or a run's checkpoint on a suite: `headrace eval FILE`.",
    no_args_is_help=True,
)
EvaluationId = Annotated[
    str, typer.Argument(metavar="EVALUATION", help="Id, as `headrace eval list` shows it.")
]

RrdFlag = Annotated[
    bool,
    typer.Option(
        "--rrd",
        help="Also write a Rerun recording (.rrd) beside each video: pip install 'headrace[rerun]'.",
    ),
]


@app.command(SUBMIT)
def submit(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Evaluation spec, a YAML file.")],
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override, such as checkpoint.run=sums-1a2b3c."),
    ] = None,
    detach: Annotated[bool, typer.Option("--detach", help="Queue it and return.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check the spec and queue nothing.")] = False,
    videos: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Record episodes (suite.options.videos of each task, 4 where the file says nothing) into DIR.",
        ),
    ] = None,
    rrd: RrdFlag = False,
    idempotency_key: Annotated[str, typer.Option(help="Same key and spec: the same evaluation.")] = "",
    visibility: Visibility = VisibilityName.PRIVATE,
    url: Url = None,
    data_dir: DataDirOption = DEFAULT_DATA_DIR,
    as_json: JsonFlag = False,
) -> None:
    """Evaluate, and show the progress until the figures are there. Exit code 1 unless it succeeded."""
    from headrace.client import HeadraceError, load_spec

    if rrd and videos is None:
        raise CommandError("--rrd needs --videos DIR, which says where recordings go")
    _check_rerun(rrd)
    try:
        spec = load_spec(file, sets or [])
        if videos is not None:
            spec = load_spec(spec, {"suite.options.videos": _videos_asked(spec)})
    except HeadraceError as error:
        raise refused(error) from error
    with connect(find_target(url, data_dir), patience_s=0 if detach or dry_run else PATIENCE_S) as client:
        with saying(CHECKING):
            if dry_run:
                checked = client.check_evaluation(spec)
            else:
                key = idempotency_key or None
                made = client.evaluate(spec, idempotency_key=key, visibility=visibility.value)
        if dry_run:
            show(({"valid": True, "spec": checked}, lambda: "the spec is valid; nothing was queued"), as_json)
        elif detach:
            show(_figures(made), as_json)
        else:
            _finish(client, made, as_json, videos, rrd)


def _videos_asked(spec: dict[str, Any]) -> int:
    """How many episodes of a task the spec wants recorded; VIDEOS where it says nothing."""
    suite = spec.get("suite")
    options = suite.get("options") if isinstance(suite, dict) else None
    asked: int = (options.get("videos") if isinstance(options, dict) else None) or VIDEOS
    return asked


def _finish(client: Client, made: EvaluationRun, as_json: bool, videos: Path | None, rrd: bool) -> None:
    """Shows the progress on standard error, the end on standard output."""
    try:
        found = _watch(client, made.id)
    except KeyboardInterrupt:
        error_console().print(f"\nthe evaluation goes on; stop it with: headrace run cancel {made.id}")
        raise typer.Exit(EXIT_INTERRUPTED) from None
    show(_figures(found), as_json)
    if videos is not None:
        _save_videos(client, found.id, videos, rrd)
    if found.state != "SUCCEEDED":
        raise CommandError(f"evaluation {found.id} {found.state}: {found.reason}", reason=found.state)


def _watch(client: Client, evaluation: str) -> EvaluationRun:
    if sys.stderr.isatty():
        return _draw(client, evaluation)
    shown = ""
    while True:
        found = client.evaluation(evaluation)
        line = "; ".join(filter(None, (progress_line(found), waiting(found))))
        if line != shown:
            error_console().print(line, markup=False)
            shown = line
        if found.ended:
            return found
        time.sleep(LOOK_S)


def _draw(client: Client, evaluation: str) -> EvaluationRun:
    """The same as a picture that is drawn over itself."""
    from rich.live import Live
    from rich.text import Text

    with Live(console=error_console(), transient=True, auto_refresh=False) as live:
        while True:
            found = client.evaluation(evaluation)
            live.update(Text("\n".join(progress_lines(found, error_console().width))), refresh=True)
            if found.ended:
                return found
            time.sleep(LOOK_S)


def _figures(found: EvaluationRun) -> Answer:
    return found.raw, lambda: result_table(found)


@app.command("list")
@asking
def list_evaluations(client: Client) -> Answer:
    """List evaluations, newest first: state, place in the queue, progress and figures."""
    found = client.evaluations()
    document = {"evaluations": [each.raw for each in found]}
    return document, lambda: evaluations_list(found, console().width) if found else "no evaluations"


@app.command()
@asking
def get(client: Client, evaluation: EvaluationId) -> Answer:
    """Show one evaluation with its figures. Its transcripts: `headrace run trajectories EVALUATION`."""
    return _figures(client.evaluation(evaluation))


@app.command("videos")
def save_videos(
    evaluation: EvaluationId,
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Directory to write them to.")],
    rrd: RrdFlag = False,
    url: Url = None,
    data_dir: DataDirOption = DEFAULT_DATA_DIR,
) -> None:
    """Save the videos of an evaluation's episodes, if it recorded any (suite.options.videos)."""
    _check_rerun(rrd)
    with connect(find_target(url, data_dir)) as client:
        _save_videos(client, evaluation, directory, rrd)


@app.command()
def replay(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Id of a run of episodes, or of an evaluation.")],
    start: Annotated[
        str,
        typer.Argument(
            metavar="START", help="A start state, as 'push-v3, seed 17' of a trajectory, or a video's name."
        ),
    ],
    videos: Annotated[Path | None, typer.Option(metavar="DIR", help="Save the video into DIR.")] = None,
    url: Url = None,
    data_dir: DataDirOption = DEFAULT_DATA_DIR,
    as_json: JsonFlag = False,
) -> None:
    """Play one episode again from its start state, with the newest checkpoint of the run's policy."""
    from headrace.client import HeadraceError

    with connect(find_target(url, data_dir), patience_s=PATIENCE_S) as client:
        try:
            made = client.replay(run, start)
        except HeadraceError as error:
            raise refused(error) from error
        _finish(client, made, as_json, videos, rrd=False)


def _check_rerun(rrd: bool) -> None:
    if not rrd:
        return
    from headrace_cli.rerun_files import can_write

    if not can_write():
        raise CommandError("--rrd needs rerun-sdk: pip install 'headrace[rerun]'")


def _save_videos(client: Client, evaluation: str, directory: Path, rrd: bool) -> None:
    """Writes the files, and says on standard error what they show."""
    found = client.videos(evaluation)
    with writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
        for video in found:
            file, content = directory / Path(video.name).name, client.video(evaluation, video.name)
            file.write_bytes(content)
            if rrd:
                from headrace_cli.rerun_files import write_rrd

                episode = client.episode(evaluation, video.name)
                write_rrd(file.with_suffix(".rrd"), episode, content, name=f"{evaluation}-{file.stem}")
    won = sum(video.success for video in found)
    error_console().print(
        f"{len(found)} videos in {directory}: {won} of successes, {len(found) - won} of failures"
        + (", each with its recording (.rrd)" if rrd and found else ""),
        markup=False,
    )


@app.command()
@asking
def compare(client: Client, first: EvaluationId, second: EvaluationId) -> Answer:
    """Compare two evaluations of the same items: second minus first, item by item."""
    found = client.compare(first, second)
    return found.raw, lambda: comparison_table(found, console().width)
