"""`headrace run …`: submit runs, look at them, steer them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace_cli.commands.options import (
    DEFAULT_DATA_DIR,
    DataDirOption,
    JsonFlag,
    Place,
    RunId,
    Url,
    Visibility,
    VisibilityName,
    complete_key,
    complete_run,
    grouped,
)
from headrace_cli.commands.results import PATIENCE_S, certificates, endpoint, export, logs, trajectories
from headrace_cli.connection import CHECKING, Answer, asking, connect, find_target, saying, show
from headrace_cli.errors import EXIT_INTERRUPTED, CommandError, refused, user_error
from headrace_cli.output import console, error_console, print_json
from headrace_cli.show.runs import (
    columns_table,
    heldout,
    policies_table,
    run_table,
    runs_list,
    steps_table,
)

if TYPE_CHECKING:
    from headrace.client import Client, Run

app = typer.Typer(help="Submit, watch and steer runs.", no_args_is_help=True)


Sets = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override, such as optimizer.lr=2e-5.",
        autocompletion=complete_key,
    ),
]
Tags = Annotated[
    list[str] | None, typer.Option("--tag", metavar="TAG", help="A word to find it by; may be repeated.")
]


@dataclass(frozen=True)
class Submitting(Place):
    """What `submit` and `fork` are told beside a spec."""

    sets: Sets = None
    priority: Annotated[
        int | None,
        typer.Option(help="Runs of a higher one go first; sets scheduling.priority.", show_default=False),
    ] = None
    watch: Annotated[bool, typer.Option("--watch", help="Show the run until it ends.")] = False
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check the spec and submit nothing.")] = False
    idempotency_key: Annotated[str, typer.Option(help="Same key and spec: the same run.")] = ""
    visibility: Visibility = VisibilityName.PRIVATE
    tags: Tags = None

    @property
    def overrides(self) -> list[str]:
        """--set, and --priority as one of them."""
        own = [] if self.priority is None else [f"scheduling.priority={self.priority}"]
        return [*(self.sets or []), *own]

    @property
    def patience_s(self) -> float:
        """How long the coordinator may be away."""
        return PATIENCE_S if self.watch else 0


@app.command()
@grouped
def submit(
    options: Submitting,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Run spec, a YAML file.")],
) -> None:
    """Submit a run, or the runs of a file of several documents: one may begin `after` another one."""
    from headrace.client import HeadraceError, load_specs

    try:
        specs = load_specs(file, options.overrides)
    except HeadraceError as error:
        raise refused(error) from error
    target = find_target(options.url, options.data_dir)
    if options.dry_run:
        from headrace_cli.dry_run import check

        names = {spec.get("name") for spec in specs}
        for spec in specs:
            if (
                spec.get("after") is None or spec["after"] not in names
            ):  # What comes after a run that is not there is checked with it.
                _show_check(check(spec, target), options.as_json)
        return
    with connect(target, patience_s=options.patience_s) as client:
        for run in _all_submitted(client, specs, options):
            _show_submitted(client, run, options, "submitted")


def _all_submitted(client: Client, specs: list[dict[str, Any]], options: Submitting) -> list[Run]:
    """The runs of a file. Where one is refused, those before it are cancelled."""
    from headrace.client import HeadraceError

    made: dict[str, Run] = {}
    for number, spec in enumerate(specs):
        before = made.get(str(spec.get("after")))
        own = {**spec, "after": before.id} if before else spec
        try:
            run = _submitted(client, own, options, number)
        except HeadraceError:
            for earlier in made.values():
                client.cancel(earlier.id)
            raise
        made[str(spec.get("name", run.id))] = run
    return list(made.values())


@app.command()
@grouped
def fork(
    options: Submitting,
    run: RunId,
    at: Annotated[
        int | None,
        typer.Option(
            min=0, help="Step of the checkpoint; default: the newest valid one.", show_default=False
        ),
    ] = None,
) -> None:
    """Submit a run that continues from a checkpoint of RUN, with RUN's spec and overrides."""
    from headrace.client import fork_spec

    from headrace_cli.dry_run import check_with

    with connect(find_target(options.url, options.data_dir), patience_s=options.patience_s) as client:
        spec = fork_spec(client.get(run), at, options.overrides)
        if options.dry_run:
            _show_check(check_with(client, spec), options.as_json)
            return
        made = _submitted(client, spec, options)
        _show_submitted(client, made, options, f"forked from {made.forked_from}")


def _submitted(client: Client, spec: dict[str, Any], options: Submitting, number: int = 0) -> Run:
    key = (
        f"{options.idempotency_key}-{number}"
        if options.idempotency_key and number
        else options.idempotency_key
    )
    with saying(CHECKING):
        run = client.submit(spec, idempotency_key=key or None, visibility=options.visibility.value)
    return client.label(run.id, options.tags) if options.tags else run


def _show_submitted(client: Client, run: Run, options: Submitting, done: str) -> None:
    if options.watch:
        _watch(client, run.id, options.as_json)
    else:
        show(_steered(run, f"{done}; next: headrace run watch {run.id}"), options.as_json)


def _show_check(answer: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(answer)
    else:
        for item in answer["warnings"]:
            warning = f"warning: {item['key']}: {item['problem']}; {item['fix']}"
            error_console().print(warning, markup=False)
        if "note" in answer:
            console().print(answer["note"], markup=False)
        console().print(f"the spec is valid ({answer['checked']}); nothing was submitted")


@app.command("list")
@asking
def list_runs(
    client: Client,
    column: Annotated[
        list[str] | None,
        typer.Option(
            help="A key of the spec (optimizer.lr), a figure of the newest step (figures.entropy) or a score "
            "(scores.heldout) to show in place of why; may be repeated."
        ),
    ] = None,
) -> Answer:
    """List runs, newest first: state, place in the queue, progress, and why or what each waits for."""
    runs = client.list()
    document = {"runs": [item.raw for item in runs]}
    if not runs:
        return document, lambda: "no runs"
    return document, lambda: columns_table(runs, column) if column else runs_list(runs, console().width)


@app.command()
@asking
def get(client: Client, run: RunId) -> Answer:
    """Show one run with its last steps."""
    found = client.get(run)

    def text() -> Any:
        from rich.console import Group

        steps = client.metrics(run)
        tables = [run_table(found)]
        if steps:
            tables.append(steps_table(steps[-12:], heldout(found), console().width))
        if (policies := policies_table(steps)) is not None:
            tables.append(policies)
        return Group(*tables)

    return found.raw, text


@app.command()
@asking
def compare(
    client: Client,
    runs: Annotated[
        list[str],
        typer.Argument(metavar="RUN RUN...", help="Two or more.", autocompletion=complete_run),
    ],
) -> Answer:
    """Show in what the specs of runs differ, and what came of each."""
    from headrace_cli.show.comparing import comparison, comparison_tables

    if len(set(runs)) < 2:
        raise user_error("RUN", "one run is nothing to compare", "name two or more")
    found = comparison([(client.get(run), client.metrics(run)) for run in runs])
    return found, lambda: comparison_tables(found, console().width)


@app.command()
def watch(
    run: RunId, url: Url = None, data_dir: DataDirOption = DEFAULT_DATA_DIR, as_json: JsonFlag = False
) -> None:
    """Show a run until it ends. Exit code 1 unless it succeeded. With --json: its events, then the run."""
    with connect(find_target(url, data_dir)) as client:
        client.get(run)
    with connect(find_target(url, data_dir), patience_s=PATIENCE_S) as client:
        _watch(client, run, as_json)


def _watch(client: Client, run_id: str, as_json: bool) -> None:
    try:
        run = _stream_events(client, run_id) if as_json else _draw(client, run_id)
    except KeyboardInterrupt:
        error_console().print(f"\nthe run goes on; stop it with: headrace run cancel {run_id}")
        raise typer.Exit(EXIT_INTERRUPTED) from None
    if run.state != "SUCCEEDED":
        raise CommandError(f"run {run.id} {run.state}: {run.reason or 'no reason given'}", reason=run.state)


def _stream_events(client: Client, run_id: str) -> Run:
    for event in client.events(run_id):
        print_json(event.raw)
    run = client.get(run_id)
    print_json(run.raw)
    return run


def _draw(client: Client, run_id: str) -> Run:
    from headrace_cli.show.reporters import make_reporter
    from headrace_cli.watching import follow

    reporter = make_reporter()
    try:
        run = follow(client, run_id, reporter).run
    finally:
        reporter.close()
    console().print(run_table(run))
    return run


def _steered(run: Run, sentence: str) -> Answer:
    return run.raw, lambda: f"run {run.id} is {run.state}; {sentence}"


@app.command()
@asking
def pause(
    client: Client,
    run: RunId,
    now: Annotated[
        bool, typer.Option("--now", help="At once; the current step is made again on resume.")
    ] = False,
) -> Answer:
    """Pause a run after its current step."""
    return _steered(client.pause(run, now=now), f"go on with: headrace run resume {run}")


@app.command()
@asking
def resume(client: Client, run: RunId) -> Answer:
    """Go on with a paused run."""
    return _steered(client.resume(run), f"watch it with: headrace run watch {run}")


@app.command("set")
@asking
def set_keys(
    client: Client,
    run: RunId,
    changes: Annotated[list[str], typer.Argument(metavar="KEY=VALUE...", help="Such as trainer.ranks=2.")],
) -> Answer:
    """Change a run from its next step on: the ranks of its trainer group."""
    changed = client.set(run, changes)
    wanted = changed.wanted_ranks
    sentence = f"from its next step on it has {wanted} ranks" if wanted else f"it has {changed.ranks} ranks"
    return _steered(changed, f"{sentence}; see: headrace run get {run}")


@app.command()
@asking
def share(
    client: Client,
    run: RunId,
    visibility: Annotated[VisibilityName, typer.Argument(help="Who sees it from now on.")],
) -> Answer:
    """Change who sees a run of yours: you, your team too, or everybody; works on ended runs too."""
    return _steered(client.share(run, visibility.value), f"its visibility is {visibility.value}")


@app.command()
@asking
def cancel(client: Client, run: RunId) -> Answer:
    """End a run; the checkpoints that it has stay."""
    cancelled = client.cancel(run)
    return _steered(cancelled, cancelled.reason if cancelled.ended else f"see: headrace run get {run}")


@app.command()
@asking
def label(
    client: Client,
    run: RunId,
    tags: Tags = None,
    note: Annotated[str | None, typer.Option(help="What you say of it.", show_default=False)] = None,
) -> Answer:
    """Give a run tags in place of those it has, or a note; `--tag "" --note ""` removes both."""
    if tags is None and note is None:
        raise user_error("--tag", "nothing is given", "write --tag WORD, --note TEXT, or both")
    found = client.label(run, None if tags is None else [tag for tag in tags if tag], note)
    return _steered(found, "labelled")


@app.command()
def delete(
    run: RunId,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    url: Url = None,
    data_dir: DataDirOption = DEFAULT_DATA_DIR,
    as_json: JsonFlag = False,
) -> None:
    """Delete an ended run with its checkpoints, export and files, for ever."""
    with connect(find_target(url, data_dir)) as client:
        found = client.get(run)
        if as_json and not yes:
            raise user_error("--yes", "is missing, and with --json nobody is asked", "write --yes --json")
        if not yes:
            kept = f"its checkpoints and files below {found.raw['run_directory']}"
            typer.confirm(f"Delete run {run} ({found.state}), {kept}, for ever?", abort=True, err=True)
        client.delete(run)
    show(({"id": run}, lambda: f"run {run} is deleted"), as_json)


app.command()(export)


@app.command("open")
def open_run(
    run: RunId,
    browser: Annotated[bool, typer.Option(help="Open it, where there is a browser.")] = True,
    url: Url = None,
    data_dir: DataDirOption = DEFAULT_DATA_DIR,
    as_json: JsonFlag = False,
) -> None:
    """Open a run's page in a browser and print its address: a link that is good once and for a minute."""
    from headrace_cli.commands.fleet import show_link

    with connect(find_target(url, data_dir)) as client:
        link = client.link(client.get(run).id)
    show_link(link, browser, as_json)


for _command in (logs, trajectories, endpoint, certificates):
    app.command()(_command)
