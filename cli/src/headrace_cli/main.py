"""The `headrace` command. Imports little, so that `headrace --help` answers at once."""

from __future__ import annotations

import os
import sys
from importlib.metadata import entry_points, version
from typing import Annotated, Any

import typer

from headrace_cli.commands import (
    access,
    data,
    debug,
    demo,
    evaluation,
    fleet,
    inspect,
    plan,
    replay,
    run,
)
from headrace_cli.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USER_ERROR, CommandError
from headrace_cli.output import print_error, standard_streams

USAGE_ERROR: Any = (
    typer.BadParameter.__base__
)  # typer carries a click of its own and does not export its base

app = typer.Typer(
    name="headrace",
    help="Post-train foundation models with reinforcement learning, as a fleet of five small services.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"headrace {version('headrace')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Post-train foundation models with reinforcement learning, as a fleet of five small services."""


fleet.add_to(app)
demo.add_to(app)
app.add_typer(run.app, name="run")
app.add_typer(evaluation.app, name="eval")
inspect.add_to(app)
access.add_to(app)
plan.add_to(app, run.app)
debug.add_to(app)
replay.add_to(app)
data.add_to(app)
for _point in entry_points(group="headrace.commands"):  # what other packages publish
    try:
        app.add_typer(_point.load(), name=_point.name)
    except ImportError as _error:
        print(f"the commands {_point.name} ({_point.value}) cannot be imported: {_error}", file=sys.stderr)


def main() -> None:
    """Runs the command line; exit codes: 0 done, 2 a user's error, 130 interrupted, 1 otherwise."""
    as_json = "--json" in sys.argv
    if os.environ.get("NO_COLOR"):
        from typer import rich_utils

        rich_utils.COLOR_SYSTEM = None  # NO_COLOR alone would leave bold and dim
    with standard_streams():
        try:
            if as_json:
                _run_for_programs()
            else:
                app()
        except CommandError as error:
            print_error(error, as_json=as_json)
            sys.exit(error.exit_code)
        except OSError as error:
            print_error(_of_the_system(error), as_json=as_json)
            sys.exit(EXIT_FAILED)
        except KeyboardInterrupt:
            sys.exit(EXIT_INTERRUPTED)


def _of_the_system(error: OSError) -> CommandError:
    """What the system refused: no room, no permission, a folder that is gone."""
    names = " and ".join(str(name) for name in (error.filename, error.filename2) if name is not None)
    reason = error.strerror or str(error)
    return CommandError(f"{names}: {reason}" if names else reason)


def _run_for_programs() -> None:
    """Runs the command line; a wrong option is an error like others, so that it is printed as JSON too."""
    try:
        status = app(standalone_mode=False)
    except USAGE_ERROR as error:
        raise CommandError(error.format_message(), reason="INVALID", exit_code=EXIT_USER_ERROR) from error
    except typer.Abort:
        sys.exit(EXIT_INTERRUPTED)
    sys.exit(status if isinstance(status, int) else 0)


if __name__ == "__main__":
    main()
