"""The debugger that breakpoint() starts in `headrace debug`: quitting it ends the run. Knows no run."""

from __future__ import annotations

import os
import pdb
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any


class Prompt:
    """Whether the terminal belongs to a debugger; what is to be shown meanwhile waits."""

    def __init__(self) -> None:
        self.over = False
        """The debugger was quit: no further breakpoint stops on the way out."""
        self._taken = threading.RLock()
        self._held = False
        self._waiting: list[Callable[[], None]] = []

    @contextmanager
    def take(self) -> Iterator[None]:
        """Keeps the terminal for the caller: a second thread at a breakpoint waits for the first one."""
        with self._taken:
            self._held = True
            try:
                yield
            finally:
                self._held = False
                self.show(lambda: None)

    def show(self, text: Callable[[], None]) -> None:
        """Calls `text`, which prints, now or when the debugger goes on."""
        self._waiting.append(text)
        while self._waiting and not self._held:
            self._waiting.pop(0)()


class Debugger(pdb.Pdb):
    """pdb with a terminal of its own; quitting interrupts the process, as Ctrl-C does."""

    prompt_of_run: Prompt

    def interaction(
        self, frame: FrameType | None, traceback: TracebackType | BaseException | None, *rest: Any
    ) -> None:
        """Reads commands until the program goes on."""
        with self.prompt_of_run.take():
            super().interaction(frame, traceback, *rest)  # type: ignore[arg-type]

    def set_quit(self) -> None:
        """Ends the run, and not only the scorer or the loss that has stopped."""
        super().set_quit()
        self.prompt_of_run.over = True
        signal.raise_signal(signal.SIGINT)


@contextmanager
def breakpoints() -> Iterator[Prompt]:
    """Makes breakpoint() start a Debugger, unless PYTHONBREAKPOINT names another one."""
    prompt, before = Prompt(), sys.breakpointhook

    def stop(*arguments: Any, **options: Any) -> None:
        if prompt.over:
            return
        debugger = Debugger(nosigint=True)
        debugger.prompt_of_run = prompt
        debugger.set_trace(sys._getframe(1))

    if not os.environ.get("PYTHONBREAKPOINT"):
        sys.breakpointhook = stop
    try:
        yield prompt
    finally:
        sys.breakpointhook = before
