"""Conversations that outgrow their context or their tokens: they end, or go on with less of what was said."""

from __future__ import annotations

import grpc
import pytest
from conversation_parts import ANY, begins, pool_of, said, text_of
from headrace.common.v1 import common_pb2
from headrace_rollout.sessions.drivers import overflow
from headrace_rollout.sessions.drivers.overflow import ASKED
from headrace_servicekit.rpc.digests import trajectory_digest
from rollout_calls import check_log_probs
from simulator_rig import open_pool

TERMINATED, TRUNCATED = common_pb2.FINISH_REASON_TERMINATED, common_pb2.FINISH_REASON_TRUNCATED
LENGTH = common_pb2.FINISH_REASON_LENGTH
SHORT = {"stop": ANY, "max_new_tokens": 8}
"""Turns of some tokens, in a context of 64."""
TURNS = {"turns": 12, "says": "=" * 7 + "+"}
"""An environment that says so much that twelve turns do not fit."""


async def talk_of(talking, talks, **environment):
    rollout = await talking(**environment)
    found = await said(rollout, await pool_of(talks, options=TURNS), begins(range(8)), **SHORT)
    # A turn of a random model may reach its own limit, which ends a conversation as always.
    whole = [each for each in found.values() if not each.branches[-1].cut]
    assert len(found) == 8 and whole
    return whole


def prompts(codec, trajectory):
    return [text_of(codec, branch.segments[0].tokens.token_ids) for branch in trajectory.branches]


async def test_a_conversation_that_overflows_ends_by_itself(talking, talks):
    rollout = await talking()
    found = await said(rollout, await pool_of(talks, options=TURNS), begins(range(4)), **SHORT)
    for each in found.values():
        assert each.finish_reason == LENGTH and len(each.branches) == 1


async def test_the_newest_turns_are_kept_behind_the_beginning(talking, talks, codec, reference):
    """The environment never notices: its twelve turns come, each in the branch that it was said in."""
    for each in await talk_of(talking, talks, on_overflow="truncate"):
        talk = each.conversation
        assert each.finish_reason == TERMINATED and len(talk.turns) == 12
        assert each.body_digest == trajectory_digest(each)
        assert [turn.branch for turn in talk.turns] == sorted(turn.branch for turn in talk.turns)
        assert len({turn.branch for turn in talk.turns}) == len(each.branches) > 1
        told = [message.content for message in talk.messages]
        for prompt, branch in zip(prompts(codec, each)[1:], range(1, 12), strict=False):
            first = next(turn.message for turn in talk.turns if turn.branch == branch)
            opening, *_ = "".join(told[:2]), None
            assert prompt.startswith(opening) and "".join(told[:first]).endswith(prompt[len(opening) :])
            assert len(prompt) <= 32, "half of the context is free again"
        for branch in each.branches:
            assert sum(len(segment.tokens.token_ids) for segment in branch.segments) <= 64
        check_log_probs(each, reference)  # of each branch behind its own beginning alone


async def test_a_summary_is_a_turn_of_its_own_and_begins_the_next_branch(
    talking, talks, codec, reference, monkeypatch
):
    asked, carried = "?", ":"
    monkeypatch.setattr(overflow, "ASKED", ASKED._replace(content=asked))
    monkeypatch.setattr(overflow, "CARRIED", carried)
    for each in await talk_of(talking, talks, on_overflow="summarise"):
        talk = each.conversation
        told = [message.content for message in talk.messages]
        summaries = [at + 1 for at, content in enumerate(told) if content == asked]
        assert each.finish_reason == TERMINATED and len(talk.turns) == 12 + len(summaries)
        assert len(each.branches) == len(summaries) + 1 > 1
        turns = {turn.message: turn for turn in talk.turns}
        for number, at in enumerate(summaries):
            assert turns[at].branch == number and turns[at].reward == 0, "learned, where it was asked for"
            since = "".join([told[at - 2], *told[at + 1 : at + 2]])
            assert prompts(codec, each)[number + 1] == f"{told[0]}{told[1]}\n\n{carried}\n{told[at]}{since}"
        assert sum(turn.reward for turn in talk.turns) == sum(0.5 * turn for turn in range(1, 13))
        check_log_probs(each, reference)


async def test_a_turn_that_fits_no_branch_ends_the_conversation(talking, talks):
    rollout = await talking(on_overflow="truncate")
    found = await said(rollout, await pool_of(talks), begins(range(3), wrong="grows"), **SHORT)
    assert {each.finish_reason for each in found.values()} == {LENGTH}


async def test_roles_have_one_branch(talking, talks):
    rollout = await talking(on_overflow="truncate")
    groups = begins([4])
    groups[0].prompt.episode.task = "game.py:Game"
    pool = await open_pool(
        talks, "game.py:Game", backend="conversation", max_episode_steps=0, count=1, processes=1
    )
    with pytest.raises(grpc.aio.AioRpcError, match=r"environment.on_overflow.*set it to end"):
        await said(rollout, pool, groups, **SHORT)


async def test_a_conversation_has_so_many_tokens(talking, talks):
    """The turn that reaches the limit is the last one, and its environment judges it."""
    rollout = await talking(max_episode_tokens=3)
    found = await said(rollout, await pool_of(talks), begins(range(12)), stop=ANY[:20], max_new_tokens=20)
    cut = [each for each in found.values() if each.finish_reason == TRUNCATED]
    assert cut
    for each in found.values():
        tokens = [turn.tokens for turn in each.conversation.turns]
        assert sum(tokens[:-1]) < 3 and (each not in cut or sum(tokens) >= 3)
