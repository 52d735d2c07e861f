"""Ranks of Gloo groups for the tests of liveness: one process that has torch, and forks a rank for each line it reads.

A line is JSON with what the rank is and two named pipes: the rank says what happens as JSON lines on `out`, and does
what the lines of `in` tell it: it waits in a collective, or for the header as a follower does, or computes.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
from headrace_trainer.errors import Refusal
from headrace_trainer.group import forming
from headrace_trainer.group.forming import join_trainer_group, own_facts
from headrace_trainer.group.group import Member, TrainerGroup


class Rank:
    """What one rank says and does."""

    def __init__(self, job: dict[str, Any], out: TextIO) -> None:
        self._job, self._out = job, out

    def say(self, what: str, **fields: object) -> None:
        """One line."""
        self._out.write(json.dumps({"what": what, **fields}) + "\n")
        self._out.flush()

    def run(self) -> None:
        """Joins, says so, and does what it is told."""
        job, rank = self._job, self._job["rank"]
        self.say("joins", pid=os.getpid())
        forming.LEAST_FORMING_S = min(forming.LEAST_FORMING_S, job["timeout_s"])
        try:
            group = join_trainer_group(
                1,
                rank,
                job["world"],
                f"127.0.0.1:{job['port']}",
                job["timeout_s"],
                torch.device("cpu"),
                member=Member(f"trainer-{rank}", f"i{rank}", own_facts(torch.device("cpu")) | job["facts"]),
                on_lost=lambda lost: self.say("lost", members=[each.name for each in lost]),
                silent_s=job["silent_s"],
            )
        except Refusal as refusal:
            return self.say("refused", reason=refusal.reason, message=refusal.message)
        self.say("formed")
        with Path(job["in"]).open() as told:
            for line in told:
                if not self._obey(group, *line.split()):
                    return None

    def _obey(self, group: TrainerGroup, word: str, more: str = "") -> bool:
        """Does one thing; whether the rank is still in its group."""
        try:
            match word:
                case "reduce":
                    dist.all_reduce(torch.ones(1 << 16))
                case "header":
                    group.announce(None)
                case "announce":
                    group.announce(b"a header")
                case "compute":
                    compute(float(more))
                case "leave":
                    group.leave()
                    self.say("left")
                    return False
        except (RuntimeError, ValueError) as error:
            self.say("failed", word=word, error=str(error)[:200], lost=group.why_lost())
            group.leave()
            return False
        self.say("done", word=word)
        return True


def compute(seconds: float) -> None:
    """Keeps the interpreter busy, as a long pass of the caller's does."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sum(range(20_000))


def main() -> None:
    """Forks a rank for each line."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for a rank
    print("ready", flush=True)
    for line in sys.stdin:
        if os.fork() == 0:
            job = json.loads(line)
            with Path(job["out"]).open("w") as out:
                Rank(job, out).run()
            os._exit(0)


main()
