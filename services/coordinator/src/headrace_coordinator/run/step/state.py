"""Rewards in, whole groups out: a group settles once every member is finished with a final reward, or is dropped."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import isfinite

from headrace.reward.v1 import reward_pb2 as reward

from headrace_coordinator.domain import events as ev
from headrace_coordinator.domain.ledger.dispatch import plan_refill
from headrace_coordinator.domain.ledger.slot_index import FILTERED, FINISHED
from headrace_coordinator.run.context import RunContext
from headrace_coordinator.run.step.trajectories import Relay
from headrace_coordinator.run.workers.clients import SlotKey
from headrace_coordinator.waits import Notifier


@dataclass(slots=True)
class Shown:
    """What people see of a trajectory beside its slot."""

    completion: str
    finish_reason: int
    versions: list[tuple[int, int]]
    log_probs: array[float]
    text_bytes: array[int]
    advantage: float | None = None
    parts: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class Scored:
    """What the ledger does not have of a finished trajectory; its reward is None until a scorer gave it."""

    oldest: int
    shown: Shown | None
    reward: float | None = None


@dataclass
class Batch:
    """What a step attempt has gathered so far."""

    scored: dict[SlotKey, Scored] = field(default_factory=dict)
    stage_rewards: dict[SlotKey, dict[str, float]] = field(default_factory=dict)
    """What each stage gave an answer, in a workflow with several reward stages."""
    refused: int = 0
    """Chunks and results for slots that wait for something else."""


class Settle:
    """Ends the open groups of one step attempt."""

    def __init__(
        self,
        context: RunContext,
        relay: Relay,
        batch: Batch,
        news: Notifier,
        on_settled: Callable[[int], None],
        on_complete: Callable[[], None],
    ) -> None:
        self._context = context
        self._ledger = context.state.ledger
        self._relay = relay
        self._batch = batch
        self._news = news
        self._on_settled = on_settled
        self._on_complete = on_complete

    def take_scores(self, results: Iterable[reward.ScoreResult]) -> None:
        """Final results, in any order."""
        touched: dict[int, None] = {}
        for result in results:
            key = (result.sample.prompt_ordinal, result.sample.sample_index)
            slot, scored = self._ledger.slot(*key), self._batch.scored.get(key)
            if slot is None or scored is None or slot.attempt != result.attempt or slot.state != FINISHED:
                self._batch.refused += 1
            elif result.status == reward.SCORE_STATUS_SCORER_BROKEN:
                self.drop(key[0], "GROUP_INCOMPLETE", f"a scorer is broken: {result.detail}")
            elif not isfinite(result.reward):
                self.drop(key[0], "GROUP_INCOMPLETE", f"a scorer's reward is {result.reward}")
            else:
                scored.reward = result.reward
                if scored.shown:
                    scored.shown.parts = dict(result.parts)
                touched[key[0]] = None
        complete = [(prompt, rewards) for prompt in touched if (rewards := self._rewards(prompt))]
        for prompt, _ in complete:
            self._context.tail.grouped([slot.tokens for slot in self._ledger.group(prompt)])
        self._settle([group for group in complete if not self._filtered(*group)])

    def _filtered(self, prompt: int, rewards: list[float]) -> bool:
        """Drops the group when its rewards are all equal and the algorithm keeps no such group."""
        if not self._context.workers.leader.drop_equal or min(rewards) < max(rewards):
            return False
        self.drop(prompt, FILTERED, f"all {len(rewards)} rewards are {rewards[0]:g}", rewards[0])
        return True

    def refill(self) -> None:
        """Opens the next groups in place of those that were dropped, if the algorithm asks for it."""
        context, ledger = self._context, self._ledger
        limit = context.workers.leader.max_refill * ledger.prompts_per_step
        now, whole = context.event_log.now(), context.spec.deterministic
        context.event_log.post(*plan_refill(ledger, context.run_id, limit, now, whole=whole))

    def _rewards(self, prompt: int) -> list[float]:
        """Final rewards of a whole group, by sample; empty while one is missing or the group is dropped."""
        rewards: list[float] = []
        for slot in self._ledger.group(prompt):
            scored = self._batch.scored.get((prompt, slot.sample))
            if slot.state != FINISHED or scored is None or scored.reward is None:
                return []
            rewards.append(scored.reward)
        return rewards

    def _settle(self, groups: list[tuple[int, list[float]]]) -> None:
        if not groups:
            return
        now, run = self._context.event_log.now(), self._context.run_id
        self._context.event_log.post(ev.GroupsSettled(at=now, run=run, groups=groups))
        for prompt, _ in groups:
            self._on_settled(prompt)
        self._ended()

    def drop(self, prompt: int, reason: str, detail: str, reward: float = 0.0) -> None:
        """The group will not be trained; nothing for one that is no longer open."""
        if prompt not in self._ledger.index.open:
            return
        self._context.event_log.post(
            ev.GroupDropped(
                at=self._context.event_log.now(),
                run=self._context.run_id,
                step=self._ledger.step,
                prompt=prompt,
                reason=reason,
                detail=detail,
                reward=reward,
            )
        )
        self._relay.drop((prompt, sample) for sample in range(self._ledger.group_size))
        self._ended()

    def _ended(self) -> None:
        """The last group says so at once: streams still have to end before the stage returns."""
        self.refill()
        if not self._ledger.index.open:
            self._on_complete()
        self._news.beat()
