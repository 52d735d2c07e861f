"""Rounds: the leader says what all ranks do next and the others follow; nothing else moves a trainer group.

A header is answered by each rank's vote on its lease before anybody begins, so that a rank whose lease lapsed
never leaves the others in a collective. One rank uses rounds too. `Rank` does what a round says; steps are `Session`'s.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from contextlib import contextmanager, suppress
from typing import Any

import msgspec
from headrace_modelkit.devices import is_out_of_memory
from torch import Tensor

from headrace_trainer.backends._base import PrivateGradient, StateReader
from headrace_trainer.checkpoints.parts import StateCopy
from headrace_trainer.errors import OutOfMemory, Quiesced, Refusal
from headrace_trainer.ranks import messages
from headrace_trainer.ranks.messages import AnyRound, Header
from headrace_trainer.ranks.rank import Rank

STUCK_EXIT_CODE = 70
DEADLINE_S = 900.0
RESTORE_DEADLINE_S = 3600.0
"""Restoring downloads or dequantises a model and may run a supervised warm-up; a snapshot may write the state."""
LOOK_S = 5.0
IDLE_LOOKS = 12
"""After so many looks without a round the thread that looks ends; the next round starts another one."""


class RoundLost(RuntimeError):
    """A rank of the trainer group is gone: the trainer group must be formed anew and the run restored."""


class Rounds:
    """The rounds of one trainer group: rank 0 leads them, the others follow.

    Every round that is led raises Refusal TRAINER_GROUP_LOST when a rank is gone, OutOfMemory when a rank's device had
    no room for it, and a governed one Quiesced when the lease of one has lapsed: then no rank began it.
    """

    def __init__(self, rank: Rank, *, holds_lease: Callable[[], bool], deadlines: bool = True) -> None:
        self.rank = rank
        self.lost = False
        """A rank is gone: these rounds are over."""
        self.memory_released = False
        """This rank has suspended: all ranks release what a forward gathers before the next governed round."""
        self.attempt = (0, 0)
        """Step and attempt that are open; the message about a stuck round names them."""
        self.micro_rounds = 0
        """How many micro-batches were learned from."""
        self.infer_seconds = 0.0
        """How long infer rounds have run in the open attempt."""
        self.between = threading.Lock()
        """Held while a round runs: membership, suspend and wake act between rounds."""
        self._holds_lease = holds_lease
        self._deadlines = deadlines
        self._number = 0
        self._watchdog = _Watchdog()

    def lead(self, round: AnyRound | Many[AnyRound]) -> Any:
        """Announces a round and does this rank's part; what `Rank.execute` returns.

        Or a round for each replica of a policy's model, of which its ranks get their own alone.
        """
        rank, self._number = self.rank, self._number + 1
        each = round if isinstance(round, Many) else [round]
        headers = [Header(rank.ranks.generation, self._number, *self.attempt, own) for own in each]
        replicas = rank.replicas[each[0].policy] if len(each) > 1 else [0] * rank.ranks.world_size
        own = headers[replicas[rank.ranks.rank]]
        try:
            with self._running(own):
                if rank.ranks.world_size > 1:
                    bodies = [_ENCODER.encode(messages.packed(header)) for header in headers]
                    rank.ranks.announce([bodies[at] for at in replicas] if len(bodies) > 1 else bodies[0])
                self._vote(own)
                return rank.execute(own.round)
        except RoundLost as error:
            self.lost = True
            if rank.ranks.lost_for_memory:
                raise OutOfMemory(str(error), group_lost=True) from error
            message = f"{error}; form the trainer group anew and restore a checkpoint"
            raise Refusal("TRAINER_GROUP_LOST", message, "unavailable") from error

    def follow(self) -> None:
        """Does what the leader announces until it says leave. Raises RoundLost when the leader is gone."""
        ranks = self.rank.ranks
        while True:
            try:
                data = ranks.announce(None)
            except Exception as error:
                if not isinstance(error, RuntimeError) and not ranks.lost:
                    raise
                why = ranks.why_lost() or f"the leader is gone: {error}"
                raise RoundLost(f"generation {ranks.generation} is over: {why}") from error
            header = messages.unpacked(_DECODER.decode(data))
            if isinstance(header.round, messages.LeaveRound):
                return
            with self._running(header), suppress(Quiesced):
                self._vote(header)
                self.rank.execute(header.round)

    def _vote(self, header: Header) -> None:
        """Each rank tells all whether it holds its lease, before anybody begins a governed round."""
        if not header.round.governed:
            return
        votes = self.rank.ranks.votes(self._holds_lease(), self.memory_released)
        if lapsed := [rank for rank, (holds, _) in enumerate(votes) if not holds]:
            raise Quiesced(
                f"round {header.number} ({header.round.kind}) was not begun: the lease of rank "
                f"{', '.join(map(str, lapsed))} was not renewed in time or is not held; try again once it is"
            )
        if any(memory_released for _, memory_released in votes):
            self.rank.release()
            self.memory_released = False

    @contextmanager
    def _running(self, header: Header) -> Iterator[None]:
        """Nothing else happens to the rank meanwhile; a stuck round ends the process, and a lost rank RoundLost."""
        long = isinstance(header.round, messages.RestoreRound | messages.SnapshotRound)
        limit = RESTORE_DEADLINE_S if long else DEADLINE_S
        with self.between:
            if self._deadlines:
                self._watchdog.watch(limit, (header, self.rank.ranks.rank, limit))
            what = f"round {header.number} ({header.round.kind}) lost a rank"
            full = ""
            try:
                with self.rank.ranks.in_collective():
                    if lost := self.rank.ranks.lost:
                        raise RoundLost(f"{what}: {lost}")
                    yield
                if lost := self.rank.ranks.lost:  # What an aborted collective has left is not used.
                    raise RoundLost(f"{what}: {lost}")
            except Refusal:
                raise
            except Exception as error:
                if isinstance(error, RoundLost):
                    raise
                if is_out_of_memory(error):
                    full = str(error).splitlines()[0]
                    traceback.clear_frames(error.__traceback__)  # what they hold is what there is no room for
                elif (reason := self._why_lost(error)) is None:
                    raise
                else:
                    raise RoundLost(f"{what}: {reason}") from error
            finally:
                self._watchdog.rest()
            if full:
                self._end_without_memory(header, full)

    def _end_without_memory(self, header: Header, what: str) -> None:
        """Of one rank nothing but the round is over. Several cannot go on: the others are in collectives with it."""
        ranks, round = self.rank.ranks, f"round {header.number} ({header.round.kind})"
        step = f"step {header.step} attempt {header.attempt}"
        message = f"the device of rank {ranks.rank} had no room for {round} of {step}"
        self.rank.free_memory()
        if ranks.world_size == 1:
            raise OutOfMemory(f"{message}: {what}", group_lost=False)
        ranks.end_without_memory()
        raise RoundLost(f"{message}: {what}")

    def _why_lost(self, error: Exception) -> str | None:
        """Why an error in a round means that a rank is lost; None where it means something else."""
        if lost := self.rank.ranks.lost:
            return lost
        # What gloo and NCCL raise when a peer's connection breaks or a collective runs out of time.
        text = str(error)
        marks = ("gloo", "Connection", "NCCL", "timed out", "Timed out")
        if not isinstance(error, RuntimeError) or not any(mark in text for mark in marks):
            return None
        return self.rank.ranks.why_lost() or text.splitlines()[0]

    # What the session asks for

    def restore(
        self,
        checkpoint: str,
        number: int,
        reader: StateReader | None,
        directory: str = "",
        digest: str = "",
        *,
        weights_only: bool = False,
    ) -> None:
        """Loads weights and optimizer state on all ranks: the initial ones without a reader.

        The followers read them too where they see `directory`, below the one of all runs, with the state `digest`.
        """
        self.rank.reader = reader
        self.lead(
            messages.RestoreRound(checkpoint, number, directory, digest, self.rank.reduced.told, weights_only)
        )

    def help(self, reader: StateReader) -> None:
        """Loads a published version's weights."""
        self.rank.reader = reader
        self.lead(messages.HelpRound())

    def add(self, given: PrivateGradient) -> None:
        """Adds a helper's gradient to what the ranks have accumulated."""
        self.rank.contributed = given
        try:
            self.lead(messages.AddRound())
        finally:
            self.rank.contributed = None

    def hold(self) -> None:
        self.lead(messages.HoldRound())

    def end_hold(self, *, back: bool) -> None:
        self.lead(messages.EndHoldRound(back))

    def drop(self) -> None:
        self.lead(messages.AbortRound())

    def gather(
        self,
        collect: Callable[[Iterator[tuple[str, Tensor]]], None],
        what: messages.Gathered,
        *,
        published: bool = False,
    ) -> None:
        """Gives `collect` whole tensors by name. `published`: weights may have their published types already."""
        self.rank.collect = collect
        try:
            self.lead(messages.PublishRound(what, published))
        finally:
            self.rank.collect = None

    def snapshot(self, directory: str, *, durable: bool = True) -> StateCopy:
        """A copy of the leader's part of the state; the others write theirs into `directory`, below all runs'.

        Where the backend saves in place, it is written there when this returns. Raises OSError.
        """
        in_place = any(backend.saves_in_place for backend in self.rank.backends.values())
        copy: StateCopy = self.lead(messages.SnapshotRound(directory, durable, in_place))
        return copy

    def leave(self) -> None:
        """Ends the followers' loops. Raises Refusal TRAINER_GROUP_LOST when they are gone already."""
        self.lead(messages.LeaveRound())


class _Watchdog:
    """Ends the process when a round is stuck. One thread looks now and then: a timer a round costs as much as it."""

    def __init__(self) -> None:
        self._watched: tuple[float, tuple[Header, int, float]] | None = None
        self._thread: threading.Thread | None = None

    def watch(self, limit_s: float, what: tuple[Header, int, float]) -> None:
        """Until `rest`, which has to come within the limit."""
        self._watched = time.monotonic() + limit_s, what
        if self._thread is None:
            every_s = min(LOOK_S, limit_s / 4)
            self._thread = threading.Thread(target=self._look, args=(every_s,), name="watchdog", daemon=True)
            self._thread.start()

    def rest(self) -> None:
        """The round is over."""
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


def _exit_stuck(header: Header, rank: int, limit: float) -> None:
    # The thread that is stuck in a collective cannot be interrupted; the supervisor starts a fresh process.
    line = (
        f"headrace-trainer: rank {rank} is stuck in round {header.number} ({header.round.kind}) of generation "
        f"{header.generation}, step {header.step} attempt {header.attempt}, for {limit:g} s; exiting\n"
    )
    sys.stderr.write(line)
    sys.stderr.flush()
    os._exit(STUCK_EXIT_CODE)


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Header)
