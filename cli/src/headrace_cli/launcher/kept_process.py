"""One child process that is started again when it dies, with a growing pause. Knows nothing of what it runs."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from headrace_cli.launcher.tether import tether

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0
HEALTHY_AFTER_S = 10.0


class KeptProcess:
    """A child that dies with this process and is restarted until `stop`.

    `on_change` is called after every start. `prepare` runs before every start, such as to remove a stale socket.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log_file: Path,
        environment: Mapping[str, str],
        on_change: Callable[[], None],
        prepare: Callable[[], None] = lambda: None,
    ) -> None:
        self.name = name
        self.pid = 0
        self.restarts = -1
        self._command = list(command)
        self._log_file = log_file
        self._environment = dict(environment)
        self._on_change = on_change
        self._prepare = prepare
        self._process: asyncio.subprocess.Process | None = None
        self._keeping: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Starts the process and keeps it."""
        await self._spawn()
        self._keeping = asyncio.create_task(self._keep(), name=f"keep {self.name}")

    async def stop(self, grace_s: float) -> None:
        """Ends the process: SIGTERM, and SIGKILL after `grace_s` seconds. No restart follows."""
        if self._keeping:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)
        process = self._process
        if process is None or process.returncode is not None:
            return
        process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(grace_s):
                await process.wait()
        except TimeoutError:
            print(f"{self.name} did not end within {grace_s:g} s of SIGTERM and is killed", flush=True)
            process.kill()
            await process.wait()

    async def _spawn(self) -> None:
        self._prepare()
        with self._log_file.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment,
                preexec_fn=tether(),
            )
        self.pid = self._process.pid
        self.restarts += 1
        self._on_change()

    async def _keep(self) -> None:
        pause = FIRST_PAUSE_S
        while True:
            started_at = time.monotonic()
            assert self._process is not None
            status = await self._process.wait()
            pause = FIRST_PAUSE_S if time.monotonic() - started_at > HEALTHY_AFTER_S else pause
            print(f"{self.name} ended with status {status}; started again in {pause:g} s", flush=True)
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)
            await self._spawn()
