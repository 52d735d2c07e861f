"""The `headrace` command. Imports little, so that `headrace --help` answers at once."""

from __future__ import annotations

import sys

import typer

from headrace_cli.commands import debug, demo, fleet, inspect, plan, run
from headrace_cli.errors import EXIT_INTERRUPTED, CommandError
from headrace_cli.output import print_error
from headrace_cli.pipes import quiet_pipes

app = typer.Typer(
    name="headrace",
    help="Post-train foundation models with reinforcement learning, as a fleet of five small services.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
fleet.add_to(app)
demo.add_to(app)
app.add_typer(run.app, name="run")
inspect.add_to(app)
plan.add_to(app)
debug.add_to(app)


def main() -> None:
    """Runs the command line; exit codes: 0 done, 2 the user's mistake, 130 interrupted, 1 otherwise."""
    with quiet_pipes():
        try:
            app()
        except CommandError as error:
            print_error(error, as_json="--json" in sys.argv)
            sys.exit(error.exit_code)
        except KeyboardInterrupt:
            sys.exit(EXIT_INTERRUPTED)


if __name__ == "__main__":
    main()
