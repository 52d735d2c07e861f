"""`headrace profile SPEC`: what a spec's stages cost on a fleet, measured and stored for `headrace plan`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headrace_cli.commands.options import DEFAULT_DATA_DIR, DataDirOption, JsonFlag, Url
from headrace_cli.connection import connect, find_target
from headrace_cli.errors import refused
from headrace_cli.launcher.data_dir import DataDir
from headrace_cli.output import console, error_console, print_json


def add_to(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("profile")(profile)


def profile(
    file: Annotated[Path, typer.Argument(metavar="SPEC", help="Run spec, a YAML file.")],
    sets: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the spec.")
    ] = None,
    stored: Annotated[
        bool, typer.Option("--stored", help="Use only runs that the fleet has made; start none.")
    ] = False,
    steps: Annotated[int, typer.Option(min=1, max=10, help="Steps of each short run that count.")] = 3,
    out: Annotated[
        Path | None,
        typer.Option(help="Write the YAML here instead of the data directory.", show_default=False),
    ] = None,
    url: Url = None,
    data_dir: DataDirOption = DEFAULT_DATA_DIR,
    as_json: JsonFlag = False,
) -> None:
    """Measure what the stages of a run cost, with three short runs, and store it for `headrace plan`."""
    from headrace.client import HeadraceError, load_spec
    from headrace_schema.spec import RunSpec

    from headrace_cli.dry_run import check_schema
    from headrace_cli.planning import check_profile, kind_of
    from headrace_cli.profiles import profile_file, store, text_of
    from headrace_cli.profiling import measured_document, runs_alike, short_runs

    try:
        document = load_spec(file, sets or [])
    except HeadraceError as error:
        raise refused(error) from error
    check_schema(document)
    spec = RunSpec.model_validate(document)
    with connect(find_target(url, data_dir)) as client:
        if not stored:
            short_runs(client, spec, steps, lambda words: error_console().print(words, markup=False))
        found = measured_document(client, spec, runs_alike(client, spec))
    errors = check_profile(found)
    place = out or profile_file(DataDir.at(data_dir).profiles, spec, kind_of(found))
    store(place, found)
    if as_json:
        print_json({"file": str(place), "profile": found, "fit_errors": errors})
        return
    console().print(text_of(found), markup=False)
    fits = ", ".join(f"{stage} {error:.1%}" for stage, error in errors.items() if error)
    console().print(f"worst error of the fits: {fits or 'none'}; stored in {place}", markup=False)
