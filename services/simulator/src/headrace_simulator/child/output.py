"""What other people's code may print: so much of a child's stdout and stderr is passed on, and the rest is dropped."""

from __future__ import annotations

import os
import threading

MOST_BYTES = 1 << 20
_PIECE = 1 << 16


def bound_output(most_bytes: int = MOST_BYTES) -> None:
    """From now on, of what this process and its children print, the first `most_bytes` go where all of it went.

    What comes behind them is read and dropped, so that nothing that prints ever waits, and no log fills a disk.
    """
    passed_on, (reader, writer) = os.dup(2), os.pipe()
    os.set_inheritable(passed_on, False)
    for printed in (1, 2):
        os.dup2(writer, printed)
    os.close(writer)
    threading.Thread(target=_pass_on, args=(reader, passed_on, most_bytes), daemon=True).start()


def _pass_on(reader: int, to: int, left: int) -> None:
    while piece := os.read(reader, _PIECE):
        if left <= 0:
            continue
        os.write(to, piece[:left])
        left -= len(piece)
        if left <= 0:
            os.write(to, b"\n[what this process prints from here on is left out]\n")
