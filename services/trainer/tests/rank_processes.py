"""Processes of ranks, forked from one that has imported the trainer, which takes 6 s of a core, with Megatron 14."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path
from unittest.mock import patch

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    # The last one as far as it is there.
    ["headrace_trainer.service", "headrace_trainer.backends.fsdp.backend", "headrace_megatron.backend"]
)
RUN = "import runpy, sys; sys.argv = arguments; runpy.run_path(arguments[0], run_name='__main__')"


class RankProcess:
    """`python SCRIPT ARGUMENTS…`, the script being a file of this folder."""

    def __init__(self, script: str, *arguments: str) -> None:
        words = [str(Path(__file__).parent / script), *arguments]
        self._process = FORKS.Process(target=exec, args=(RUN, {"arguments": words}))
        # Read once, by what all are forked from.
        with patch.dict(os.environ, {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}):
            self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def lives(self) -> bool:
        return self._process.is_alive()

    def wait(self, timeout_s: float | None = None) -> int:
        """Its exit status; raises TimeoutError when it has not ended by then."""
        self._process.join(timeout_s)
        if self._process.exitcode is None:
            raise TimeoutError(f"a rank still runs after {timeout_s} s")
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()


def end(processes: list[RankProcess]) -> None:
    """Kills what still runs."""
    for process in processes:
        process.kill()
        process.wait()
