"""The service over real gRPC: opening, weights, declared rewards, idempotency."""

from __future__ import annotations

import asyncio
import json
import math
from importlib.metadata import entry_points

import grpc
import pytest
from headrace.common.v1 import common_pb2
from headrace.reward.v1 import reward_pb2
from headrace_servicekit.rpc.errors import message_of, reason_of

OK = reward_pb2.SCORE_STATUS_OK
FAILED = reward_pb2.SCORE_STATUS_ANSWER_FAILED


async def refused(call, code=grpc.StatusCode.INVALID_ARGUMENT) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    assert raised.value.code() is code, raised.value
    return raised.value


async def test_lists_scorers_page_by_page(reward):
    names, token = [], ""
    while True:
        page = await reward.stub.ListScorers(reward_pb2.ListScorersRequest(page_size=3, page_token=token))
        assert len(page.scorers) <= 3
        names += [each.name for each in page.scorers]
        schemas = {each.name: json.loads(each.options_schema_json) for each in page.scorers}
        assert all(each.description for each in page.scorers)
        if "regex" in schemas:
            assert "pattern" in schemas["regex"]["properties"]
        token = page.next_page_token
        if not token:
            break
    of_plugins = {each.name for each in entry_points(group="headrace.scorers")}
    assert [name for name in names if name not in of_plugins] == [
        "capture",
        "code",
        "episode",
        "exact",
        "format",
        "judge",
        "judge_group",
        "last_number",
        "length",
        "math_verify",
        "reasoning_gym",
        "regex",
        "reward_model",
    ]


async def test_registers_scorer_names_as_capability(instance):
    assert "math_verify" in instance.capabilities["scorers"]


async def test_weights_and_parts(reward):
    starts = {"name": "format", "weight": 0.2, "options": {"starts_with": "[0-9]"}}
    ends = {"name": "format", "weight": 0.1, "options": {"ends_with": "!"}}
    await reward.open(("last_number", 0.5), ("exact", 0.5), starts, ends)
    right, shaped, empty = await reward.answers("3", "3 + 0 is 3", "", reference="3")
    assert right.reward == pytest.approx(1.2)
    assert dict(right.parts) == {"last_number": 1, "exact": 1, "format": 1, "format#2": 0}
    assert shaped.reward == pytest.approx(0.7)
    assert (empty.status, empty.reward) == (OK, 0)


@pytest.mark.parametrize("weights", [(0.7, 0.2, 0.1), (0.1,) * 10])
async def test_weights_of_one_in_all_make_a_full_reward(reward, weights):
    await reward.open(*(("exact", weight) for weight in weights))
    (right,) = await reward.answers("3", reference="3")
    assert right.reward == 1.0


async def test_truncated_reward_replaces_training_rewards_only(reward):
    await reward.open("last_number", truncated_reward=-1.0)
    cut = common_pb2.FINISH_REASON_LENGTH
    (shaped,) = await reward.answers("3", reference="3", finish_reason=cut)
    (measured,) = await reward.answers("3", reference="3", finish_reason=cut, evaluation=True)
    (ended,) = await reward.answers("3", reference="3", finish_reason=common_pb2.FINISH_REASON_EOS)
    assert (shaped.reward, measured.reward, ended.reward) == (-1, 1, 1)
    assert shaped.parts["last_number"] == 1


async def test_a_further_stage_has_scorers_of_its_own_and_judges_the_same_answer(reward):
    stages = {"judge": [{"name": "last_number", "weight": 0.5}]}
    await reward.open("exact", stages=stages, truncated_reward=-1.0)
    cut = {"reference": "3", "ordinal": 0, "finish_reason": common_pb2.FINISH_REASON_LENGTH}
    first, second = await reward.score(
        reward.item("it is 3", **cut), reward.item("it is 3", stage="judge", **cut)
    )
    assert (first.reward, first.stage, dict(first.parts)) == (-1, "", {"exact": 0})
    assert (second.reward, second.stage, dict(second.parts)) == (0.5, "judge", {"last_number": 1})
    error = await refused(reward.answers("3", stage="jugde"))
    assert "items.stage" in message_of(error) and "judge" in message_of(error)


async def test_evaluation_has_scorers_of_its_own(reward):
    await reward.open("exact", evaluation=[{"name": "last_number"}])
    (trained,) = await reward.answers("it is 3", reference="3")
    (evaluated,) = await reward.answers("it is 3", reference="3", evaluation=True)
    assert (trained.reward, evaluated.reward) == (0, 1)
    assert evaluated.evaluation and dict(evaluated.parts) == {"last_number": 1}


async def test_evaluation_of_a_slot_may_be_repeated_with_a_new_answer(reward):
    await reward.open("exact")
    (before,) = await reward.answers("no", reference="yes", ordinal=7, evaluation=True)
    (after,) = await reward.answers("yes", reference="yes", ordinal=7, evaluation=True)
    assert (before.reward, after.reward) == (0, 1)


async def test_first_recorded_result_wins(reward, scorer_file):
    name = scorer_file("import random; return random.random()")
    await reward.open(name)
    item = reward.item("a", ordinal=1)
    (first,) = await reward.score(item)
    (second,) = await reward.score(item)
    (other_attempt,) = await reward.score(reward.item("a", ordinal=1, attempt=2))
    assert first.reward == second.reward != other_attempt.reward


async def test_same_attempt_with_another_answer_is_a_conflict(reward):
    await reward.open("exact")
    await reward.score(reward.item("a", ordinal=1))
    error = await refused(reward.score(reward.item("b", ordinal=1)), grpc.StatusCode.ALREADY_EXISTS)
    assert reason_of(error) == "CONFLICT"


async def test_open_is_idempotent_and_its_digest_follows_options_and_code(reward, scorer_file):
    name = scorer_file("return 1.0")
    first = await reward.open(name, ("exact", 0.5))
    assert await reward.open(name, ("exact", 0.5)) == first
    error = await refused(reward.open("exact"), grpc.StatusCode.ALREADY_EXISTS)
    assert reason_of(error) == "CONFLICT"
    digests = {first}
    for scorers in [
        (name, ("exact", 0.6)),
        (name, {"name": "exact", "weight": 0.5, "options": {"ignore_case": True}}),
    ]:
        await reward.close()
        digests.add(await reward.open(*scorers))
    await reward.close()
    scorer_file("return 1.0 + 0.0")
    digests.add(await reward.open(name, ("exact", 0.5)))
    assert len(digests) == 4


async def test_score_needs_an_open_run(reward):
    error = await refused(reward.answers("a"), grpc.StatusCode.FAILED_PRECONDITION)
    assert reason_of(error) == "NOT_OPEN"
    await reward.open("exact")
    await reward.close()
    error = await refused(reward.answers("a"), grpc.StatusCode.FAILED_PRECONDITION)
    assert reason_of(error) == "NOT_OPEN"


async def test_a_past_coordinator_is_refused(reward):
    await reward.open("exact")
    late = reward_pb2.CloseRunRequest(header=reward.header(epoch=0))
    error = await refused(reward.stub.CloseRun(late), grpc.StatusCode.FAILED_PRECONDITION)
    assert reason_of(error) == "EPOCH_STALE"


async def test_open_runs_are_registered(reward, instance):
    await reward.open("exact")
    assert instance.open_runs.names() == ["runs/test"]
    await reward.close()
    assert not instance.open_runs.names()


@pytest.mark.parametrize(
    ("scorers", "section", "expected"),
    [
        (["exat"], {}, "reward.scorers[0].name: there is no scorer 'exat'; did you mean 'exact'"),
        (["exact", "no/such.py:score"], {}, "reward.scorers[1].name: no/such.py:score: no such file"),
        ([{"name": "regex"}], {}, "reward.scorers[0].options.pattern"),
        (
            ["exact"],
            {"evaluation": [{"name": "exact", "options": {"x": 1}}]},
            "reward.evaluation[0].options.x",
        ),
        (["exact"], {"timeout": 3}, "timeout_s"),
        (["exact"], {"timeout_s": 0}, "timeout_s"),
        ([("exact", "heavy")], {}, "weight"),
        ([], {}, "scorers"),
    ],
)
async def test_bad_sections_are_refused_with_the_key(reward, scorers, section, expected):
    error = await refused(reward.open(*scorers, **section))
    assert expected in message_of(error)


async def test_bad_metadata_is_the_callers_mistake(reward):
    await reward.open("exact")
    item = reward.item("a")
    item.metadata_json = "[1]"
    assert "metadata_json" in message_of(await refused(reward.score(item)))


async def test_a_long_stream_is_scored_whole(reward):
    await reward.open("last_number", "exact")
    texts = [str(number) for number in range(5000)]
    results = await reward.answers(*texts, reference="17")
    assert sum(result.reward for result in results) == 2
    assert all(math.isfinite(result.reward) and result.status == OK for result in results)


async def test_two_runs_with_different_scorers_work_side_by_side(reward, scorer_file):
    other = type(reward)(reward.stub, run="runs/other")
    await reward.open(scorer_file("return 1.0", "one.py"))
    await other.open(scorer_file("return 2.0", "two.py"))
    streams = {each.run: each.stub.Score() for each in (reward, other)}
    for turn in range(3):
        for each, worth in ((reward, 1.0), (other, 2.0)):
            item = each.item("x", ordinal=turn)
            await streams[each.run].write(reward_pb2.ScoreRequest(header=each.header(), items=[item]))
            [result] = (await streams[each.run].read()).results
            assert result.reward == worth
    await reward.close()
    assert await asyncio.wait_for(streams[reward.run].read(), 10) is grpc.aio.EOF, "the idle stream ends"
    results = await other.score(*(other.item("x", ordinal=ordinal) for ordinal in (8, 9)))
    assert [result.reward for result in results] == [2.0, 2.0]
    await other.close()
