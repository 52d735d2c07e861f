"""What commands have in common, wherever they run: what may be asked, how output is kept, how all of one are killed."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from headrace_containers.provider import MIB, BadSpec, Output

MARK = "HEADRACE_EXEC"
"""Variable of all processes of one command, by which they are found and killed."""
KILL = (
    'for p in /proc/[0-9]*; do case "$(tr "\\0" "\\n" < $p/environ)" in *'
    + MARK
    + "=$1*) kill -9 ${p#/proc/};; esac; done 2>/dev/null"
)
"""A script that kills them; its argument is their mark."""
MOST_DROPPED = 256 * MIB
"""Bytes of output beyond its limit after which a command is killed."""
_MOST_WORDS = 120_000
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class Collected:
    """Output as it comes: the first bytes are kept, the rest is counted."""

    def __init__(self, most_bytes: int, on_output: Output | None) -> None:
        self.stdout, self.stderr, self.left_out = bytearray(), bytearray(), 0
        self.left, self._on_output = most_bytes, on_output

    def add(self, number: int, piece: bytes) -> None:
        """Takes a piece of a stream."""
        kept = piece[: self.left]
        self.left -= len(kept)
        self.left_out += len(piece) - len(kept)
        (self.stderr if number == 2 else self.stdout).extend(kept)
        if kept and self._on_output is not None:
            self._on_output(number, kept)


def check(command: Sequence[str], env: Mapping[str, str]) -> None:
    """Raises BadSpec for what no process can be given."""
    words = [*command, *env, *env.values()]
    if not command or not command[0]:
        raise BadSpec("command", "it is empty")
    if any("\0" in word for word in words):
        raise BadSpec("command", "a word of it, or a variable, has a NUL")
    if strange := [name for name in env if not _NAME.fullmatch(name)]:
        raise BadSpec("env", f"{strange[0][:80]!r} is no name of a variable: letters, digits and _")
    if any(len(word.encode(errors="surrogateescape")) > _MOST_WORDS for word in words):
        raise BadSpec(
            "command", f"a word of it is longer than {_MOST_WORDS} bytes; write it to a file, and run that"
        )
