"""The launcher's process: `python -m headrace_cli.launcher PLAN_JSON`, started by `headrace up`."""

from __future__ import annotations

import sys

from headrace_cli.errors import CommandError
from headrace_cli.launcher.fleet import serve
from headrace_cli.launcher.plan import FleetPlan


def main() -> int:
    """Runs the fleet that the only argument describes."""
    try:
        return serve(FleetPlan.from_json(sys.argv[1]))
    except CommandError as error:
        print(error.message, flush=True)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
