"""Rounds: the leader says what all ranks do next and the others follow; nothing else moves a trainer group.

A header is answered by each rank's vote on its lease before anybody begins, so that a rank whose lease lapsed
never leaves the others in a collective.
Knows no model: what a round means is the caller's function. One rank uses rounds too.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Literal

import msgspec

from headrace_trainer.errors import Quiesced
from headrace_trainer.group.group import TrainerGroup
from headrace_trainer.learning.episodes.data import CreditData, EpisodeData
from headrace_trainer.learning.samples import Rows

Kind = Literal[
    "restore",
    "help",
    "micro",
    "check",
    "infer",
    "read",
    "credit",
    "chunks",
    "end_episodes",
    "hold",
    "add",
    "commit",
    "end_hold",
    "publish",
    "snapshot",
    "abort",
    "leave",
]

GOVERNED: frozenset[Kind] = frozenset(
    {
        *("restore", "help", "micro", "check", "infer", "hold", "add", "commit"),
        *("read", "credit", "chunks"),
    }
)
"""Rounds that need every rank's lease. The others end or hand out what such a round has made."""

STUCK_EXIT_CODE = 70
# Restoring downloads or dequantises a model and may run a supervised warm-up.
DEADLINES_S: dict[str, float] = {"restore": 3600.0}
DEADLINE_S = 900.0
LOOK_S = 5.0
IDLE_LOOKS = 12
"""After so many looks without a round the thread that looks ends; the next round starts another one."""


class Round(msgspec.Struct, frozen=True, omit_defaults=True):
    """What all ranks do next.

    `work` has one entry a replica (micro, infer); an empty one is a zero-weight dummy's. `columns` says
    what an infer computes; `algorithm_state` is `Algorithm.state`, for a micro; `back` is an end_hold's: to what was
    held. `episodes`, `credit` and `chunks` (an entry a replica) are what a learner of episodes has in place of `work`;
    `learned` is an end_episodes's.
    """

    generation: int
    number: int
    kind: Kind
    step: int = 0
    attempt: int = 0
    work: list[Rows] = msgspec.field(default_factory=list)
    denominator: float = 1.0
    learning_rate: float = 0.0
    critic_rate: float = 0.0
    checkpoint: str = ""
    back: bool = False
    algorithm_state: dict[str, float] = msgspec.field(default_factory=dict)
    columns: list[str] = msgspec.field(default_factory=list)
    episodes: list[EpisodeData] = msgspec.field(default_factory=list)
    credit: CreditData | None = None
    chunks: list[list[int]] = msgspec.field(default_factory=list)
    learned: bool = False


class RoundLost(RuntimeError):
    """A rank of the trainer group is gone: the trainer group must be formed anew and the run restored."""


class Rounds:
    """The sequence of rounds of one trainer group, led on rank 0 and followed on the others."""

    def __init__(
        self,
        ranks: TrainerGroup,
        execute: Callable[[Round], object],
        *,
        holds_lease: Callable[[], bool],
        release: Callable[[], None],
        deadlines: bool = True,
    ) -> None:
        self.ranks = ranks
        self.gave_back = False
        """This rank has suspended: all ranks `release` before the next governed round, which gathers on all or none."""
        self._execute = execute
        self._holds_lease = holds_lease
        self._release = release
        self._deadlines = deadlines
        self._number = 0
        self._watchdog = _Watchdog()
        # Held while a round runs: membership, suspend and wake act between rounds.
        self.between = threading.Lock()

    def lead(self, kind: Kind, **fields: Any) -> object:
        """Announces a round and does this rank's part.

        Raises RoundLost when a rank is gone, and Quiesced when one's lease has lapsed: then nobody began.
        """
        self._number += 1
        header = Round(generation=self.ranks.generation, number=self._number, kind=kind, **fields)
        with self.between, self._deadline(header):
            with _watching(header):
                self.ranks.announce(_ENCODER.encode(header))
                return self._take_part(header)

    def follow(self) -> None:
        """Does what the leader announces until it says leave. Raises RoundLost when the leader is gone."""
        while True:
            try:
                data = self.ranks.announce(None)
            except RuntimeError as error:
                raise RoundLost(
                    f"the leader of generation {self.ranks.generation} is gone: {error}"
                ) from error
            header = _DECODER.decode(data)
            if header.kind == "leave":
                return
            with self.between, self._deadline(header), _watching(header), suppress(Quiesced):
                self._take_part(header)

    def _take_part(self, header: Round) -> object:
        if header.kind in GOVERNED:
            votes = self.ranks.votes(self._holds_lease(), self.gave_back)
            if lapsed := [rank for rank, (holds, _) in enumerate(votes) if not holds]:
                raise Quiesced(
                    f"round {header.number} ({header.kind}) was not begun: the lease of rank "
                    f"{', '.join(map(str, lapsed))} was not renewed in time or is not held; try again once it is"
                )
            if any(gave_back for _, gave_back in votes):
                self._release()
                self.gave_back = False
        return self._execute(header)

    @contextmanager
    def _deadline(self, header: Round) -> Iterator[None]:
        if not self._deadlines:
            yield
            return
        limit = DEADLINES_S.get(header.kind, DEADLINE_S)
        self._watchdog.watch(limit, (header, self.ranks.rank, limit))
        try:
            yield
        finally:
            self._watchdog.rest()


class _Watchdog:
    """Ends the process when a round is stuck. One thread looks now and then: a timer a round costs as much as it."""

    def __init__(self) -> None:
        self._watched: tuple[float, tuple[Round, int, float]] | None = None
        self._thread: threading.Thread | None = None

    def watch(self, limit_s: float, what: tuple[Round, int, float]) -> None:
        """Until `rest`, which has to come within the limit."""
        self._watched = time.monotonic() + limit_s, what
        if self._thread is None:
            every_s = min(LOOK_S, limit_s / 4)
            self._thread = threading.Thread(target=self._look, args=(every_s,), name="watchdog", daemon=True)
            self._thread.start()

    def rest(self) -> None:
        """Nothing is watched."""
        self._watched = None

    def _look(self, every_s: float) -> None:
        idle = 0
        while idle < IDLE_LOOKS:
            time.sleep(every_s)
            watched = self._watched
            idle = 0 if watched is not None else idle + 1
            if watched is not None and time.monotonic() > watched[0]:
                _exit_stuck(*watched[1])
        self._thread = None
        if (watched := self._watched) is not None:  # it came while the thread ended
            self.watch(watched[0] - time.monotonic(), watched[1])


@contextmanager
def _watching(header: Round) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        # What gloo and NCCL raise when a peer's connection breaks or a collective runs out of time.
        text = str(error)
        if any(mark in text for mark in ("gloo", "Connection", "NCCL", "timed out", "Timed out")):
            raise RoundLost(
                f"round {header.number} ({header.kind}) lost a rank: {text.splitlines()[0]}"
            ) from error
        raise


def _exit_stuck(header: Round, rank: int, limit: float) -> None:
    # The thread that is stuck in a collective cannot be interrupted; the supervisor starts a fresh process.
    line = (
        f"headrace-trainer: rank {rank} is stuck in round {header.number} ({header.kind}) of generation "
        f"{header.generation}, step {header.step} attempt {header.attempt}, for {limit:g} s; exiting\n"
    )
    sys.stderr.write(line)
    sys.stderr.flush()
    os._exit(STUCK_EXIT_CODE)


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Round)
