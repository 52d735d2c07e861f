"""A process that outlives its broker by seconds, and removes what that one has left.

The engine removes the containers of a broker that is gone by itself, but for one that was being made at that moment.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from headrace_servicekit.process.spawn import TREE_VARIABLE

_AFTER_S = (0.0, 2.0, 8.0)
"""An engine may still be at work for who is gone."""


class Reaper:
    """The process, as its broker has it. It is no part of the service's tree, which is killed whole."""

    def __init__(self) -> None:
        environment = {name: value for name, value in os.environ.items() if name != TREE_VARIABLE}
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )

    def tell(self, provider: str, options: Mapping[str, Any]) -> None:
        """There is something of this provider to remove."""
        assert self._process.stdin is not None
        with suppress(OSError):  # somebody has killed it: whoever comes next removes what is left
            self._process.stdin.write(json.dumps([provider, options]).encode() + b"\n")
            self._process.stdin.flush()

    def close(self) -> None:
        """Ends it: its broker has removed everything."""
        self._process.kill()
        self._process.wait()


def main() -> None:
    """Waits for its broker's end."""
    told = [json.loads(line) for line in sys.stdin]
    if not told:
        return
    from headrace_containers.provider import ContainerError
    from headrace_containers.providers import provider_of

    for pause in _AFTER_S:
        time.sleep(pause)
        for name, options in told:
            with suppress(ContainerError):
                provider_of(name, options).reap()


if __name__ == "__main__":
    main()
