"""Sessions of agents, without a network and without a model: what is kept as ids, and what goes on where."""

from __future__ import annotations

import asyncio

import pytest
from endpoint_desk import CHAT, END, TOOLS, Letters, user
from headrace_rollout.engines.base import Refused
from headrace_rollout.engines.samples import Finish, SlotKey
from headrace_rollout.sessions.session import Stopped


async def test_requests_that_extend_each_other_are_one_trajectory_of_exact_ids(desk):
    session, speaker = desk.open("yes", "no")
    first = await desk.said(
        session, [{"role": "developer", "content": "be"}, user("one")], temperature=0.7, logprobs=True
    )
    assert first["message"] == {"role": "assistant", "content": "yes"} and first["finish_reason"] == "stop"
    assert [each["token"] for each in first["logprobs"]["content"]] == ["y", "e", "s", ""]
    assert {each["logprob"] for each in first["logprobs"]["content"]} == {-0.5}
    # Clients send answers back with keys of their own, and lose blanks around them.
    echoed = {
        **first["message"],
        "content": " yes\n",
        "refusal": None,
        "annotations": [],
        "function_call": None,
    }
    parts = {"role": "user", "content": [{"type": "text", "text": "t"}, {"type": "text", "text": "wo"}]}
    await desk.said(session, [{"role": "system", "content": "be"}, user("one"), echoed, parts])
    one, two = speaker.asked
    assert Letters().decode(one.prompt_ids) == "s:beu:onea:"
    assert list(two.prompt_ids) == [
        *one.prompt_ids,
        *map(ord, "yes"),
        END,
        *map(ord, "u:two"),
        END,
        *map(ord, "a:"),
    ]
    assert (one.turn, two.turn, two.key) == (0, 1, SlotKey(1, 2))
    talk = session.join()
    assert [each[:2] for each in talk.messages] == [
        ("system", "be"),
        ("user", "one"),
        ("assistant", "yes"),
        ("user", "two"),
        ("assistant", "no"),
    ]
    (branch,) = talk.branches
    assert branch.context == [*two.prompt_ids, *map(ord, "no"), END]
    assert branch.spans == [(3, 4), (0, 8), (3, 3)] and len(branch.log_probs) == len(branch.tokens)


def versions(talk):
    """Of the spans of each branch."""
    return [[number for number, _ in branch.spans] for branch in talk.branches]


EDITED = {
    "the same again": ([user("one")], {}),
    "another answer": ([user("one"), {"role": "assistant", "content": "no"}, user("two")], {}),
    "another question": ([user("won"), {"role": "assistant", "content": "yes"}, user("two")], {}),
    "a summary": ([user("summary of all so far"), user("two")], {}),
    "words in its mouth": (
        [user("one"), {"role": "assistant", "content": "yes"}, {"role": "assistant", "content": "and no"}],
        {},
    ),
    "other tools": ([user("one"), {"role": "assistant", "content": "yes"}, user("two")], {"tools": TOOLS}),
}


@pytest.mark.parametrize("edited", EDITED)
async def test_messages_that_do_not_extend_what_was_said_begin_a_branch(desk, edited):
    """Of the same session: a line of its own, which reads its own prompt, and shares the reward."""
    messages, more = EDITED[edited]
    session, speaker = desk.open("yes", "no", "so")
    await desk.said(session, [user("one")])
    choice = await desk.said(session, messages, **more)
    assert choice["message"]["content"] == "no"
    await desk.said(session, [user("one"), {"role": "assistant", "content": "yes"}, user("two")])
    first, other, last = (asked.prompt_ids for asked in speaker.asked)
    letters = Letters()
    tools = more.get("tools")
    assert list(other) == letters.encode_prompt(chat=messages, arguments={"tools": tools} if tools else None)
    assert list(last[: len(first) + 4]) == [*first, *map(ord, "yes"), END], "the first line goes on"
    session.reward(1.0)
    talk = session.join()
    given = [*map(ord, "u:two"), END, *map(ord, "a:")]
    one, two = talk.branches
    assert (one.spans, two.spans) == ([(3, 4), (0, len(given)), (3, 3)], [(3, 3)])
    assert one.tokens == [*map(ord, "yes"), END, *given, *map(ord, "so"), END]
    assert two.context == [*other, *map(ord, "no"), END] and list(two.prompt_ids) == list(other)
    assert all(len(branch.log_probs) == len(branch.tokens) for branch in talk.branches)
    told = [(turn.tokens, turn.reward, talk.branches.index(turn.branch)) for turn in talk.turns]
    assert told == [(4, 0.0, 0), (3, 0.0, 1), (3, 1.0, 0)], "in the order of time"
    assert [turn.message[:2] for turn in talk.turns] == [
        ("assistant", "yes"),
        ("assistant", "no"),
        ("assistant", "so"),
    ]


async def test_a_line_that_branches_off_reads_the_ids_that_were_sampled(desk):
    """Whether from its end, twice at once, or from an earlier turn."""
    session, speaker = desk.open("yes", "no", "so", "oh")
    said = [user("one"), {"role": "assistant", "content": "yes"}]
    await desk.said(session, [user("one")])
    await asyncio.gather(*(desk.said(session, [*said, user(text)]) for text in ("two", "too")))
    await desk.said(session, [*said, user("to")])
    own = [*speaker.asked[0].prompt_ids, *map(ord, "yes"), END]
    for asked, text in zip(speaker.asked[1:], ("two", "too", "to"), strict=True):
        assert list(asked.prompt_ids) == [*own, *map(ord, f"u:{text}"), END, *map(ord, "a:")]
    assert len({asked.turn for asked in speaker.asked}) == 4, "each turn draws by a seed of its own"
    assert versions(session.join()) == [[3, 0, 3], [3], [3]]


async def test_each_of_several_choices_is_kept_and_the_one_that_is_extended_goes_on(desk):
    session, speaker = desk.open("yes", "no", "so")
    found = (await desk.post(session, {"messages": [user("one")], "n": 2})).json()
    assert [choice["message"]["content"] for choice in found["choices"]] == ["yes", "no"]
    assert [choice["index"] for choice in found["choices"]] == [0, 1]
    assert found["usage"] == {"prompt_tokens": 8, "completion_tokens": 7, "total_tokens": 15}
    await desk.said(session, [user("one"), {"role": "assistant", "content": "no"}, user("two")])
    assert list(speaker.asked[2].prompt_ids[:11]) == [*speaker.asked[0].prompt_ids, *map(ord, "no"), END]
    assert versions(session.join()) == [[3], [3, 0, 3]]


async def test_forged_keys_are_refused_and_no_session_is_told_of_another(desk):
    session, other = desk.open("yes")[0], desk.open("no")[0]
    for header in ({}, {"Authorization": "Bearer sk-headrace-forged"}, {"Authorization": session.api_key}):
        found = await desk.client.post(CHAT, json={"messages": [user("one")]}, headers=header)
        assert found.status_code == 401 and found.json()["error"]["code"] == "invalid_api_key"
    found = await desk.client.get("/v1/models")
    assert found.status_code == 401
    assert session.api_key != other.api_key
    await desk.refused(session, {"reward": 1.0}, 404, f"/v1/sessions/{other.id}/reward")
    with desk.endpoint.serving(session):
        pass
    await desk.refused(session, {"messages": [user("one")]}, 401)


async def test_requests_of_a_session_are_answered_side_by_side(desk):
    session, speaker = desk.open("yes", "no")
    speaker.waits.clear()
    both = [asyncio.create_task(desk.said(session, [user(text)])) for text in ("one", "mine")]
    while len(speaker.asked) < 2:  # noqa: ASYNC110  # a turn of the loop or two
        await asyncio.sleep(0)
    speaker.waits.set()
    assert [(await each)["message"]["content"] for each in both] == ["yes", "no"]


async def test_a_client_that_lost_an_answer_gets_it_again(desk):
    session, speaker = desk.open("yes", "no")
    body = {"messages": [user("one")]}
    first = await desk.post(session, body)
    again = await desk.post(session, body, **{"x-stainless-retry-count": "1"})
    assert again.json()["choices"] == first.json()["choices"] and len(speaker.asked) == 1
    await desk.post(session, body, **{"x-stainless-retry-count": "0"})
    assert len(speaker.asked) == 2, "a client that means it asks anew"


async def test_a_client_that_repeats_a_request_under_way_gets_its_answer(desk):
    session, speaker = desk.open("yes")
    speaker.waits.clear()
    body = {"messages": [user("one")]}
    first = asyncio.create_task(desk.post(session, body))
    while not speaker.asked:  # noqa: ASYNC110  # a turn of the loop or two
        await asyncio.sleep(0)
    again = asyncio.create_task(desk.post(session, body, **{"x-stainless-retry-count": "1"}))
    await asyncio.sleep(0.02)
    speaker.waits.set()
    assert (await again).json()["choices"] == (await first).json()["choices"] and len(speaker.asked) == 1


async def test_an_answer_is_as_long_as_agent_and_run_allow(desk):
    session, speaker = desk.open("yes" * 20, "yes" * 20)
    choice = await desk.said(session, [user("one")], max_completion_tokens=4, stop="!")
    assert choice["message"]["content"] == "yesy" and choice["finish_reason"] == "length"
    assert speaker.asked[0].draw.stop == ("!",) and not session.talk.cut, (
        "its own wish cut it, and it goes on"
    )
    said = [user("one"), {"role": "assistant", "content": "yesy"}, user("two")]
    choice = await desk.said(session, said, max_tokens=10_000)
    assert len(choice["message"]["content"]) == 40 and session.talk.cut
    # The end of the turn that was cut stands before what follows.
    assert list(speaker.asked[1].prompt_ids)[-9:-3] == [END, *map(ord, "u:two")]


async def test_limits_end_a_session(desk):
    session, _ = desk.open("yes", most_turns=1)
    await desk.said(session, [user("one")])
    assert session.limit is None, "an agent that stops by itself has met no limit"
    error = await desk.refused(
        session, {"messages": [user("one"), {"role": "assistant", "content": "yes"}, user("two")]}
    )
    assert error["code"] == "turn_limit" and session.limit is Finish.TRUNCATED
    session, _ = desk.open("yes", most_tokens=20)
    await desk.said(session, [user("one")])
    said = [user("one"), {"role": "assistant", "content": "yes"}, user("two" * 9)]
    error = await desk.refused(session, {"messages": said})
    assert error["code"] == "context_length_exceeded" and session.limit is Finish.LENGTH
    assert session.join().branches[0].spans == [(3, 4)], "what does not fit is not kept"
    session, _ = desk.open("yes")
    session.most_tokens = 4  # "yes" and its end
    await desk.said(session, [user("one")])
    error = await desk.refused(session, {"messages": [user("other")]})
    assert error["code"] == "turn_limit" and "4 tokens (environment.max_episode_tokens)" in error["message"]
    assert session.limit is Finish.TRUNCATED
    session, _ = desk.open("yes", most_tokens=20)
    await desk.refused(session, {"messages": [user("one" * 9)]})
    assert session.limit is Finish.PROMPT_TOO_LONG


@pytest.mark.parametrize(
    ("last", "line"),
    [("the first goes on", 0), ("the other goes on", 1), ("another begins", -1), ("it ends by itself", None)],
)
@pytest.mark.parametrize("limit", ["tokens of a turn", "context"])
async def test_a_session_says_which_of_its_lines_a_limit_has_cut(desk, last, line, limit):
    """The last request's: the other lines had come to an end; a request that begins anew cuts none that is there."""
    most = {"most_tokens": 60} if limit == "context" else {}
    session, _ = desk.open("yes", "no", "so" * 25 if last != "it ends by itself" else "so", **most)
    await desk.said(session, [user("one")])
    await desk.said(session, [user("other")])
    long = "two" * (20 if limit == "context" and last != "it ends by itself" else 1)
    before = {
        "the first goes on": [user("one"), {"role": "assistant", "content": "yes"}],
        "the other goes on": [user("other"), {"role": "assistant", "content": "no"}],
    }.get(last, [])
    if limit == "context" and last != "it ends by itself":
        await desk.refused(session, {"messages": [*before, user(long)]})
        assert session.limit is Finish.LENGTH
    else:
        await desk.said(session, [*before, user(long)])
    if last == "another begins" and limit == "tokens of a turn":
        line = 2
    talk = session.join()
    assert [place for place, branch in enumerate(talk.branches) if branch is talk.cut] == (
        [] if line in (None, -1) else [line]
    )


@pytest.mark.parametrize("end", [None, Refused("PAUSED", "the engine is paused")])
async def test_requests_of_a_sample_that_is_stopped_wait_and_do_not_fail(desk, end):
    session, _ = desk.open(end)
    waits = asyncio.create_task(desk.post(session, {"messages": [user("one")]}))
    await asyncio.wait({session.halted})
    await asyncio.sleep(0.05)
    assert not waits.done() and not session.talk.turns
    assert isinstance(session.halted.exception(), Stopped if end is None else Refused)
    session.over.set()
    assert (await waits).status_code == 503


async def test_rewards_are_of_the_turn_that_they_follow(desk):
    session, _ = desk.open("yes", "no")
    path = f"/v1/sessions/{session.id}/reward"
    assert (await desk.refused(session, {"reward": 1}, 409, path))["code"] == "no_turn"
    await desk.said(session, [user("one")])
    for wrong in (
        {"reward": "1"},
        {"reward": True},
        {},
        [1],
        b"NaN",
        b'{"reward": NaN}',
        {"reward": 1, "success": 1},
    ):
        await desk.refused(session, wrong, 400, path)
    assert not session.rewarded
    assert (await desk.post(session, {"reward": 0.5}, path)).json() == {"rewards": [0.5]}
    await desk.said(session, [user("one"), {"role": "assistant", "content": "yes"}, user("two")])
    await desk.post(session, {"reward": -1, "success": True}, path)
    await desk.post(session, {"reward": 0.25}, path)
    assert session.rewards == [0.5, -0.75] and session.talk.success and session.rewarded
