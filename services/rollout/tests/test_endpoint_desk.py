"""Sessions of an online run, without a network, a model or a coordinator: which of them fill which slots."""

from __future__ import annotations

import asyncio
import json
import time

import httpx2
import pytest
from endpoint_desk import CHAT, Says, policy, user
from headrace_rollout.endpoint.answers import Terms
from headrace_rollout.endpoint.routes import make_app
from headrace_rollout.endpoint.server import GROUP, SESSION, Endpoint
from headrace_rollout.engines.base import Refused
from headrace_rollout.engines.samples import Distribution, SlotKey, Stream
from headrace_rollout.sessions.drivers.online import Desk, Slot
from headrace_schema.sections.agent import OnlineSection
from headrace_servicekit.session_marks import own_key

KEY = "sk-headrace-run"


class Shop:
    """A desk behind an endpoint, a policy that says what it is told to, and a client with the run's key."""

    def __init__(self, group_size=1, **section):
        stream = Stream(0, Distribution(), 40, 7, lambda _: None, lambda _: None)
        terms, online = Terms("run", "hermes"), OnlineSection(**section)
        self.kept: set[SlotKey] = set()
        self.desk = Desk(KEY, online, terms, policy(), stream, group_size, self.kept.__contains__)
        self.endpoint = Endpoint("127.0.0.1", "127.0.0.1")
        self.endpoint.desk = self.desk
        self.filled = []
        self.client = httpx2.AsyncClient(
            transport=httpx2.ASGITransport(make_app(self.endpoint)), base_url="http://endpoint"
        )

    def offer(self, ordinals, *, samples=1, oldest=0, attempt=1, owner="stream"):
        self.desk.offer(
            Slot(SlotKey(ordinal, sample), attempt, oldest, self.filled.append, owner)
            for ordinal in ordinals
            for sample in range(samples)
        )

    async def ask(self, text="one", status=200, **headers):
        headers = {"Authorization": f"Bearer {KEY}", **headers}
        found = await self.client.post(CHAT, json={"messages": [user(text)]}, headers=headers)
        assert found.status_code == status, found.text
        return found.json()

    async def post(self, path, body, status=200, key=KEY):
        found = await self.client.post(path, json=body, headers={"Authorization": f"Bearer {key}"})
        assert found.status_code == status, found.text
        return found.json()

    async def feedback(self, answer, reward=1.0, **more):
        return (await self.post("/v1/feedback", {"completion": answer["id"], "reward": reward, **more}))[
            "state"
        ]

    def keys(self):
        return [(each.key.prompt_ordinal, each.key.sample_index, each.attempt) for each in self.filled]


@pytest.fixture
async def shop():
    made = []

    def open(*texts, **more):
        made.append(Shop(**more))
        made[-1].desk.opened(Says(*texts))
        return made[-1]

    yield open
    for each in made:
        each.desk.close()
        await each.client.aclose()


async def test_a_completion_that_is_rewarded_by_its_id_fills_a_slot(shop):
    run = shop("yes", "no", "so")
    run.offer([4, 5])
    first, second, third = [await run.ask() for _ in range(3)]
    assert await run.feedback(second, 0.5, success=True) == "taken"
    (update,) = run.filled
    assert (
        run.keys() == [(4, 0, 1)]
        and [turn.reward for turn in update.talk.turns] == [0.5]
        and update.talk.success
    )
    assert [each[:2] for each in update.talk.messages] == [("user", "one"), ("assistant", "no")]
    assert await run.feedback(first) == "taken" and run.keys() == [(4, 0, 1), (5, 0, 1)]
    assert await run.feedback(third) == "waiting", "the step has enough: it is of the next one"
    run.offer([6])
    assert run.keys()[-1] == (6, 0, 1) and run.filled[-1].talk.messages[-1].content == "so"
    await run.post("/v1/feedback", {"completion": first["id"], "reward": 1}, 404)


async def test_a_session_has_turns_and_rewards_of_its_own_and_ends_with_its_last_one(shop):
    run = shop("yes", "no")
    run.offer([0])
    session = await run.post("/v1/sessions", {}, 201)
    own = {"Authorization": f"Bearer {session['api_key']}"}
    await run.ask("one", **own)
    path = f"/v1/sessions/{session['id']}/reward"
    assert (await run.post(path, {"reward": 0.25, "final": False}, key=session["api_key"]))["state"] == "open"
    said = [user("one"), {"role": "assistant", "content": "yes"}, user("two")]
    # The run's key and the session's name do as well.
    headers = {"Authorization": f"Bearer {KEY}", SESSION: session["id"]}
    found = await run.client.post(CHAT, json={"messages": said}, headers=headers)
    assert found.headers[SESSION] == session["id"]
    assert (await run.post(path, {"reward": 1}))["rewards"] == [0.25, 1.0]
    assert [turn.reward for turn in run.filled[0].talk.turns] == [0.25, 1.0]
    assert [n for n, _ in run.filled[0].talk.branches[0].spans] == [3, 0, 3]
    await run.ask(status=401, **own)


async def test_only_the_runs_key_begins_sessions(shop):
    run = shop("yes")
    for key in ("sk-headrace-forged", ""):
        await run.post("/v1/sessions", {}, 401, key=key)
        await run.ask(status=401, Authorization=f"Bearer {key}")
    other, mine = [await run.post("/v1/sessions", {}, 201) for _ in range(2)]
    await run.post(f"/v1/sessions/{other['id']}/reward", {"reward": 1}, 404, key=mine["api_key"])
    await run.post("/v1/feedback", {"completion": "chatcmpl-x", "reward": 1}, 400)
    await run.post(f"/v1/sessions/{mine['id']}/reward", {"reward": 1}, 409)


async def test_samples_of_older_versions_than_a_step_may_have_are_dropped_and_counted(shop):
    run = shop("yes", "no")
    first, second = [await run.ask() for _ in range(2)]
    run.offer([7], oldest=4)  # These were said by version 3.
    assert await run.feedback(first) == "stale" and not run.filled
    run.offer([8], oldest=3)
    assert await run.feedback(second) == "taken" and run.keys() == [(8, 0, 1)]
    counts = (await run.client.get("/v1/sessions", headers={"Authorization": f"Bearer {KEY}"})).json()
    assert counts["ended"] == {"stale": 1, "taken": 1} and counts["wanted"] == 1


async def test_requests_wait_between_streams_and_go_on_behind_what_was_told(shop):
    run = shop(Refused("PAUSED", "the engine is paused"))
    speaker = run.desk._speaker
    asking = asyncio.create_task(run.ask())
    while not speaker.asked:  # noqa: ASYNC110  # a turn of the loop or two
        await asyncio.sleep(0)
    run.desk.left(speaker, "stream")
    await asyncio.sleep(0.08)
    assert not asking.done()
    following = Says(None, "yes")  # stopped once more, as a lease lapses
    run.desk.opened(following)
    assert (await asking)["choices"][0]["message"]["content"] == "yes" and len(following.asked) == 2


async def test_a_slot_that_is_asked_for_again_is_filled_by_the_same_session(shop):
    """Its stream broke, or the coordinator was started again: what was acknowledged is not lost."""
    run = shop("yes")
    run.offer([0, 1])
    await run.feedback(await run.ask())
    run.kept.add(SlotKey(0, 0))
    run.desk.left(run.desk._speaker, "stream")
    run.offer([0, 1], attempt=2, owner="next")
    assert run.keys() == [(0, 0, 1), (0, 0, 2)] and run.filled[0].whole == run.filled[1].whole
    run.kept.clear()  # trained
    run.offer([0], attempt=3)
    assert len(run.filled) == 2


async def test_groups_of_sessions_fill_the_samples_of_one_prompt(shop):
    run = shop(*"abcde", group_size=2)
    run.offer([0, 1], samples=2)
    assert "group" in (await run.ask(status=400))["error"]["message"]
    answers = [await run.ask(**{GROUP: group}) for group in ("x", "y", "y", "x")]
    assert [await run.feedback(each) for each in answers] == ["waiting", "waiting", "taken", "taken"]
    assert run.keys() == [(0, 0, 1), (0, 1, 1), (1, 0, 1), (1, 1, 1)]
    assert [each.talk.messages[-1][1] for each in run.filled] == ["b", "c", "a", "d"]


async def test_sessions_without_a_reward_and_groups_that_stay_short_are_dropped_and_counted(shop):
    run = shop(*"abc", group_size=2, reward_within_s=100, max_sessions=3)
    run.offer([0], samples=2)
    await run.ask(**{GROUP: "x"})
    await run.feedback(await run.ask(**{GROUP: "y"}))
    session = await run.post("/v1/sessions", {"group": "z"}, 201)
    assert (await run.ask(status=429, **{GROUP: "x"}))["error"]["code"] == "too_many_sessions"
    run.desk.look()
    assert len(run.desk._open) == 2
    later = time.monotonic() + 101
    run.desk.look.__globals__["time"] = type("Later", (), {"monotonic": staticmethod(lambda: later)})
    try:
        run.desk.look()
    finally:
        run.desk.look.__globals__["time"] = time
    assert run.desk.counts == {"unrewarded": 1, "incomplete": 1} and not run.desk._open
    assert run.desk.news() == {"unrewarded": 1, "incomplete": 1} and run.desk.news() == {}
    await run.post(f"/v1/sessions/{session['id']}/reward", {"reward": 1}, 404)


async def test_a_stopped_stream_gets_its_slots_back(shop):
    run = shop("yes")
    run.offer([0, 1], owner="a")
    run.offer([2], owner="b")
    run.desk.stop("a")
    assert [each.stopped for each in run.filled] == [True, True]
    await run.feedback(await run.ask())
    assert run.keys()[-1] == (2, 0, 1) and json.dumps(run.desk.figures()["wanted"]) == "0"


async def test_a_response_goes_on_from_an_earlier_one_with_the_runs_key(shop):
    run = shop("yes", "no")
    run.offer([0])
    first = await run.post("/v1/responses", {"input": "one"})
    second = await run.post("/v1/responses", {"input": "two", "previous_response_id": first["id"]})
    assert second["id"].rpartition("_")[0] == first["id"].rpartition("_")[0]
    assert await run.feedback(second) == "taken"
    assert [each.content for each in run.filled[0].talk.messages] == ["one", "yes", "two", "no"]


async def test_a_session_without_anything_drawn_by_chance_is_told_so_and_fills_no_slot(shop):
    run = shop("yes", "no")
    run.offer([0])
    body = {"messages": [user("one")], "temperature": 0}
    greedy = await run.post(CHAT, body)
    assert await run.feedback(greedy) == "untrained" and not run.filled
    assert await run.feedback(await run.ask()) == "taken"
    assert run.desk.counts == {"untrained": 1, "taken": 1}


async def test_a_sessions_own_key_rewards_its_last_answer_without_naming_it(shop):
    run = shop("yes")
    run.desk.mark = "abcdef"
    run.offer([0])
    session = await run.post("/v1/sessions", {}, 201)
    assert session["id"].startswith("abcdef")
    assert session["api_key"] == own_key(run.desk.key, session["id"]), (
        "the coordinator's relay knows it again"
    )
    await run.ask(Authorization=f"Bearer {session['api_key']}")
    assert (await run.post("/v1/feedback", {"reward": 1}, key=session["api_key"]))["state"] == "taken"
