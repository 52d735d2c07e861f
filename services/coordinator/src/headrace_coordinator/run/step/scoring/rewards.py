"""From a finished trajectory to its final reward, and from the rewards of a whole group to the settled group.

In a workflow with several reward stages, `domain/ledger/reward_flow.py` says which stage sees a trajectory next and
what it is worth; this module asks. Knows no reward instance.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import zip_longest
from math import isfinite

from headrace.common.v1 import common_pb2 as common
from headrace.reward.v1 import reward_pb2 as reward
from headrace_servicekit.causes import cause_first

from headrace_coordinator.data.items import DataItem
from headrace_coordinator.domain import events as ev
from headrace_coordinator.domain.ledger.reward_flow import Question, RewardFlow
from headrace_coordinator.domain.ledger.slot_index import FILTERED, FINISHED
from headrace_coordinator.run.step.scoring.scoring import Scoring, add_pictures, score_item
from headrace_coordinator.run.step.state import AttemptState
from headrace_coordinator.run.step.trajectories import Trajectory
from headrace_coordinator.run.step.warnings import UNJUDGED
from headrace_coordinator.run.workers.clients import SlotKey, slot_key


class Rewards:
    """The rewards of trajectories of open steps."""

    def __init__(self, attempt: AttemptState) -> None:
        context, spec = attempt.context, attempt.context.spec
        self._attempt = attempt
        self._context = context
        self._groups = defaultdict[int, dict[int, str]](dict) if "group" in spec.reward.give else None
        """Texts of answers by prompt and sample, for scorers that get them."""
        ordered = spec.reward.stages or self._groups is not None
        self._flow = RewardFlow(spec.graph, spec.algorithm.group_size) if ordered else None
        deliver = self._settle if self._flow is None else self._take_stages
        self.scoring = Scoring(context.staffing, attempt.timer, deliver, spec.main_stage)
        self._main = spec.main_stage
        self._ends_truncated = spec.reward.truncated_reward is not None
        # With several stages, of trajectories without their final reward:
        self._items: dict[SlotKey, reward.ScoreItem] = {}
        self._parts: dict[SlotKey, dict[str, float]] = {}
        self._turn_rewards: dict[SlotKey, dict[str, list[float]]] = {}
        self._unscored: dict[int, list[SlotKey]] = defaultdict(list)

    def forget(self, prompts: Iterable[int]) -> None:
        """Removes what is known of the groups of a step that has ended."""
        for prompt in prompts:
            self._unscored.pop(prompt, None)
            if self._groups is not None:
                self._groups.pop(prompt, None)
            if self._flow is not None:
                for key in self._flow.forget(prompt):
                    self._items.pop(key, None)
                    self._parts.pop(key, None)
                    self._turn_rewards.pop(key, None)

    def ask(self, trajectory: Trajectory, message: common.Trajectory, question: DataItem) -> None:
        """Asks for the reward of a finished trajectory, an answer to `question`."""
        key = trajectory.slot.key
        item = score_item(question, message, trajectory.tokens, evaluation=False)
        if self._context.spec.reward.pictures:
            add_pictures(item, message)
            asked = {**question.metadata, "instruction": self._context.modality.instruction(question)}
            item.metadata_json = json.dumps(asked)
        if self._flow is None:
            self.scoring.put(item)
            return
        self._items[key], self._parts[key], self._turn_rewards[key] = item, {}, {}
        if self._groups is not None:
            self._groups[key[0]][key[1]] = item.completion
        self._unscored[key[0]].append(key)
        cut = self._ends_truncated and item.finish_reason == common.FINISH_REASON_LENGTH
        self._ask_stages(self._flow.enter(key, self._main if cut else ""))

    def _ask_stages(self, questions: Iterable[Question]) -> None:
        for key, stage in questions:
            if key[0] in self._attempt.ledger.index.open:
                item = reward.ScoreItem(stage="" if stage == self._main else stage)
                item.MergeFrom(self._items[key])
                if self._groups is not None and stage in self._context.spec.graph.whole_groups:
                    item.group.extend(text for _, text in sorted(self._groups[key[0]].items()))
                self.scoring.put(item)

    def _take_stages(self, results: list[reward.ScoreResult]) -> None:
        """Takes results of single stages; settles with final ones, whose rewards are what the stages add up to."""
        assert self._flow is not None
        final: list[reward.ScoreResult] = []
        for result in results:
            key, stage = slot_key(result.sample), result.stage or self._main
            self._note_verdict(result)
            if key not in self._parts:  # Its group was dropped, and its step has ended.
                self._attempt.refused += 1
                continue
            prefix = f"{result.stage}/" if result.stage else ""
            self._parts[key].update({prefix + part: score for part, score in result.parts.items()})
            if result.status == reward.SCORE_STATUS_SCORER_BROKEN or not isfinite(result.reward):
                result.detail = f"stage {stage}: {result.detail}"
                final.append(result)  # It ends the group, of which nothing more is asked.
            else:
                self._turn_rewards[key][stage] = list(result.turns)
                self._ask_stages(self._flow.scored(key, stage, result.reward))
                final += self._through(self._flow, key[0])
        if final:
            self._settle(final)

    def _through(self, flow: RewardFlow, prompt: int) -> Iterator[reward.ScoreResult]:
        """Final results of those of a group's trajectories that no stage will see any more, each once."""
        staying: list[SlotKey] = []
        for key in self._unscored[prompt]:
            value = flow.final(key)
            if value is None:
                staying.append(key)
                continue
            item = self._items.pop(key)
            self._attempt.trajectories[key].stage_rewards = flow.rewards(key)
            yield reward.ScoreResult(
                sample=item.sample,
                attempt=item.attempt,
                status=reward.SCORE_STATUS_OK,
                reward=value,
                parts=self._parts[key],
                turns=added_up([self._turn_rewards[key][stage] for stage in flow.counted(key)]),
            )
        self._unscored[prompt] = staying

    def _settle(self, results: Iterable[reward.ScoreResult]) -> None:
        """Notes final rewards, in any order, and settles or drops the groups that are complete with them."""
        attempt, touched = self._attempt, dict[int, None]()
        for result in results:
            if self._flow is None:
                self._note_verdict(result)
            key = slot_key(result.sample)
            slot, trajectory = attempt.ledger.slot(*key), attempt.trajectories.get(key)
            if slot is None or trajectory is None or slot.attempt != result.attempt or slot.state != FINISHED:
                attempt.refused += 1
            elif result.status == reward.SCORE_STATUS_SCORER_BROKEN:
                attempt.drop(key[0], "GROUP_INCOMPLETE", f"a scorer is broken: {result.detail}")
            elif not isfinite(result.reward):
                attempt.drop(key[0], "GROUP_INCOMPLETE", f"a scorer's reward is {result.reward}")
            elif problem := turns_problem(result, trajectory):
                attempt.drop(key[0], "GROUP_INCOMPLETE", problem)
            else:
                trajectory.reward = result.reward
                trajectory.turn_rewards = by_turn(result, trajectory)
                if trajectory.shown:
                    trajectory.shown.parts = dict(result.parts)
                touched[key[0]] = None
        complete = [(prompt, rewards) for prompt in touched if (rewards := self._of_group(prompt))]
        for prompt, _ in complete:
            self._context.tail.grouped([slot.tokens for slot in attempt.ledger.group(prompt)])
        attempt.settle([group for group in complete if not self._filtered(*group)])

    def _note_verdict(self, result: reward.ScoreResult) -> None:
        """Notes the first answer that a scorer failed at: the run goes on with a reward that nobody gave."""
        context = self._context
        if result.status == reward.SCORE_STATUS_OK:
            context.judged = True
        elif result.status == reward.SCORE_STATUS_ANSWER_FAILED:
            self._attempt.timer.figures[UNJUDGED] += 1
            if not context.state.totals.scorer_failed:
                what = "a scorer failed so at an answer, which gets reward.failed_reward"
                log, text = context.event_log, cause_first(result.detail, what)
                log.post(ev.ScorerFailed(run=context.run_id, text=text, detail=result.detail))

    def _of_group(self, prompt: int) -> list[float]:
        """Final rewards of a whole group, by sample; empty while one is missing or the group is dropped."""
        rewards: list[float] = []
        for slot in self._attempt.ledger.group(prompt):
            trajectory = self._attempt.trajectories.get(slot.key)
            if slot.state != FINISHED or trajectory is None or trajectory.reward is None:
                return []
            rewards.append(trajectory.reward)
        return rewards

    def _filtered(self, prompt: int, rewards: list[float]) -> bool:
        """Drops the group when its rewards are all equal and the algorithm keeps no such group."""
        leader = self._context.workers.leader
        if not leader.drop_equal or min(rewards) < max(rewards):
            return False
        if not self._equal_by_turn(prompt, by_turn=leader.by_turn):
            return False
        self._attempt.drop(prompt, FILTERED, f"all {len(rewards)} rewards are {rewards[0]:g}", rewards[0])
        return True

    def _equal_by_turn(self, prompt: int, *, by_turn: bool) -> bool:
        """Whether the group's rewards are equal for each turn, or for each role, where credit goes to these."""
        members = [self._attempt.trajectories[slot.key] for slot in self._attempt.ledger.group(prompt)]
        if not by_turn:
            return all(member.by_role == members[0].by_role for member in members)
        return all(
            (member.turn_rewards, member.turn_roles) == (members[0].turn_rewards, members[0].turn_roles)
            for member in members
        )


def by_turn(result: reward.ScoreResult, trajectory: Trajectory) -> list[float]:
    """The final reward of a conversation by turn: what scorers say of each, else what its environment gave for it.

    What these leave of the reward, or have too much, belongs to the last turn: then all of it was known.
    Empty for what has no turns.
    """
    found = list(result.turns or trajectory.turn_rewards)
    if found:
        found[-1] = result.reward - sum(found[:-1])
    return found


def turns_problem(result: reward.ScoreResult, trajectory: Trajectory) -> str:
    """What is wrong with the rewards by turn of a result; empty where nothing is."""
    told, turns = result.turns, len(trajectory.turn_rewards)
    if told and len(told) != turns:
        return f"a scorer gave {len(told)} rewards for {turns} turns"
    return "" if all(map(isfinite, told)) else f"a scorer's rewards by turn are {list(told)}"


def added_up(several: list[list[float]]) -> list[float]:
    """Rewards by turn of several stages, turn by turn. Stages that tell none leave theirs to the last turn."""
    return [sum(of_turn) for of_turn in zip_longest(*several, fillvalue=0.0)]
