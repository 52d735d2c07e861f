"""`python -m ci.engines ENGINE`: makes the engine's environment for the CPU, then runs its contract suite in it.

`--options` go to every engine that the suite makes: '{"tensor_parallel_size": 2}' tries two ranks.
Where the environment cannot be made (no package index), it fails under CI=true and skips elsewhere; it says why.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from ci.engines.environments import ENGINES

CONTRACT = "services/rollout/tests/engines"
RUNS = "integration_tests/engines"


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m ci.engines", description=__doc__)
    parser.add_argument("engine", choices=sorted(ENGINES))
    parser.add_argument("--run", action="store_true", help="a whole run on the real services too")
    parser.add_argument("--options", default="{}", help="rollout.engine_options of the contract, in JSON")
    parser.add_argument("--nightly", action="store_true", help="what takes too long for every change, too")
    options = parser.parse_args(arguments)
    engine = options.engine
    started = time.monotonic()
    make = [sys.executable, "-m", "ci.engines.environments", engine, "--device", "cpu"]
    made = subprocess.run(make, check=False)
    if made.returncode:
        sentence = (
            f"{engine}: .envs/{engine} could not be made (status {made.returncode}; pip's words are above)"
        )
        required = os.environ.get("CI") == "true"
        print(f"{sentence}; {'this is an error under CI=true' if required else 'its tests are skipped'}")
        return 1 if required else 0
    print(f"{engine}: its environment is ready after {time.monotonic() - started:.0f} s", flush=True)
    python, more = Path(f".envs/{engine}/bin/python"), ("-m", "") if options.nightly else ()
    status = _tests(engine, python, CONTRACT, *more, engine_options=options.options)
    if options.run:
        status = _tests(engine, Path(sys.executable), RUNS, *more) or status
    print(f"{engine}: {time.monotonic() - started:.0f} s in all")
    return status


def _tests(engine: str, python: Path, folder: str, *more: str, engine_options: str = "{}") -> int:
    """Runs the tests of a folder for the engine; returns pytest's status."""
    variables = {**os.environ, "ENGINE": engine, "ENGINE_OPTIONS": engine_options, "HF_HUB_OFFLINE": "1"}
    command = [str(python), "-m", "pytest", "-p", "no:cacheprovider", "--durations=5", *more, folder]
    return subprocess.run(command, env=variables, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
