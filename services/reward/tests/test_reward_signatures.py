"""Functions of users with the parameters of verl, TRL and our own; batches, coroutines, abstaining."""

from __future__ import annotations

import grpc
import pytest
from headrace.common.v1 import common_pb2
from headrace.reward.v1 import reward_pb2
from headrace_servicekit.rpc.errors import message_of

USER = common_pb2.ChatMessage(role="user", content="1 + 1?")

VERL = """#file
def score(data_source, solution_str, ground_truth, extra_info=None):
    assert data_source == "sums" and extra_info == {"index": 7}
    return {"score": float(solution_str == ground_truth), "acc": solution_str == ground_truth, "pred": "two"}
"""
TRL = """#file
def score(prompts, completions, solution, **kwargs):
    assert len(prompts) == len(completions) == len(solution) == len(kwargs["level"])
    texts = [each if isinstance(each, str) else each[0]["content"] for each in completions]
    assert all(isinstance(each, list) == isinstance(prompt, list) for each, prompt in zip(completions, prompts))
    return [float(text == right) + len(texts) / 100 for text, right in zip(texts, solution)]
"""
CURIOUS = """#file
def score(messages, finish_reason, token_count, _prompt):
    asked = [{"role": "user", "content": _prompt}]
    return float(messages == asked and finish_reason == "length" and token_count == 3)
"""
WAITING = """#file
import asyncio
async def score(completion):
    await asyncio.sleep(0.2)
    return 1 / int(completion)
"""
MIXED = """#file
import os, time
def score(completions):
    for each in completions:
        each == "die" and os._exit(3)
        each == "hang" and time.sleep(60)
        assert each != "raise"
    return [1.0 for _ in completions]
"""
METADATA = {"solution": "2", "level": 1, "data_source": "sums", "extra_info": {"index": 7}}


async def test_a_function_of_verl_works_as_it_is(reward, scorer_file):
    await reward.open(scorer_file(VERL))
    right, wrong = await reward.answers("2", "3", reference="2", metadata=METADATA)
    assert (right.reward, wrong.reward) == (1.0, 0.0)
    assert dict(right.parts) == {"mine.py:score": 1.0, "mine.py:score/score": 1.0, "mine.py:score/acc": 1.0}


@pytest.mark.parametrize(
    ("truth", "reference"),
    [({"target": 4}, '{"target": 4}'), (4, "4"), ("4", "4"), ("4", "a text to learn from")],
)
async def test_a_ground_truth_of_verl_is_what_its_row_holds(reward, scorer_file, truth, reference):
    """Functions of verl compare numbers with numbers, and read objects; their text would be wrong in silence."""
    source = f"#file\ndef score(solution_str, ground_truth):\n    return float(ground_truth == {truth!r})\n"
    await reward.open(scorer_file(source))
    metadata = {"reward_model": {"style": "rule", "ground_truth": truth}}
    (found,) = await reward.answers("4", reference=reference, metadata=metadata)
    assert found.reward == 1.0


KWARGS = "#file\ndef score(solution_str, ground_truth, scale, bonus=0.0):\n    return scale + bonus\n"


async def test_options_are_arguments_of_the_users_function_as_verls_reward_kwargs_are(reward, scorer_file):
    scorer = {"name": scorer_file(KWARGS)}
    await reward.open({**scorer, "options": {"scale": 0.25, "bonus": 0.5}})
    (found,) = await reward.answers("4", reference="4")
    assert found.reward == 0.75


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"bonus": 1}, "its parameter 'scale' is none of"),
        ({"scale": 1, "bonsu": 1}, "it has no parameter 'bonsu', which the options give"),
        ({"scale": 1, "ground_truth": 1}, "'ground_truth' is a parameter that the run itself gives"),
    ],
)
async def test_options_that_the_function_does_not_take_are_refused_by_name(
    reward, scorer_file, options, words
):
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await reward.open({"name": scorer_file(KWARGS), "options": options})
    assert words in refused.value.details()


@pytest.mark.parametrize("messages", [[], [USER]], ids=["text", "conversations"])
async def test_a_function_of_trl_works_as_it_is(reward, scorer_file, messages):
    await reward.open(scorer_file(TRL))
    found = await reward.answers(*["2", "3"] * 4, prompt="1 + 1?", metadata=METADATA, messages=messages)
    assert [int(each.reward) for each in found] == [1, 0] * 4
    assert max(each.reward % 1 for each in found) > 0.011, "several answers in one call"


async def test_a_column_that_an_item_lacks_is_named(reward, scorer_file):
    await reward.open(scorer_file(TRL))
    (found,) = await reward.answers("2", metadata={"level": 1})
    assert found.status == reward_pb2.SCORE_STATUS_SCORER_BROKEN
    assert "it takes the column 'solution', which an item lacks; columns: answer, level" in found.detail


async def test_a_scorer_may_ask_for_the_conversation_and_the_end(reward, scorer_file):
    await reward.open(scorer_file(CURIOUS))
    fields = {"prompt": "1 + 1?", "messages": [USER], "token_count": 3}
    cut, ended = [
        *await reward.answers("2", finish_reason=common_pb2.FINISH_REASON_LENGTH, **fields),
        *await reward.answers("2", finish_reason=common_pb2.FINISH_REASON_STOP, **fields),
    ]
    assert (cut.reward, ended.reward) == (1.0, 0.0)


async def test_coroutines_wait_side_by_side(reward, scorer_file):
    """Forty answers that wait 0.2 s each, and one that raises spoils no other."""
    await reward.open(scorer_file(WAITING), timeout_s=20.0)
    found = await reward.answers(*(str(number) for number in range(40)), reference="1")
    assert [each.reward for each in found[1:]] == pytest.approx([1 / number for number in range(1, 40)])
    assert found[0].status == reward_pb2.SCORE_STATUS_ANSWER_FAILED and "ZeroDivisionError" in found[0].detail
    assert sum(each.wall_time.ToNanoseconds() for each in found) / 1e9 < 0.5 * 40 * 0.2


async def test_none_abstains_and_is_counted(reward, scorer_file):
    words = "return None if metadata['kind'] == 'sum' else 1.0"
    sums = "return float(completion == reference) if metadata['kind'] == 'sum' else None"
    await reward.open((scorer_file(words, "words.py"), 0.5), (scorer_file(sums, "sums.py"), 2.0))
    first, second = [
        *await reward.answers("2", reference="2", metadata={"kind": "sum"}),
        *await reward.answers("2", reference="2", metadata={"kind": "word"}),
    ]
    assert (first.reward, second.reward) == (2.0, 0.5)
    assert first.parts["words.py:score/abstained"] == 1.0 and "words.py:score" not in first.parts


async def test_an_answer_of_which_every_scorer_abstains_is_told(reward, scorer_file):
    await reward.open(scorer_file("pass"))
    (found,) = await reward.answers("2")
    assert found.status == reward_pb2.SCORE_STATUS_SCORER_BROKEN
    assert "every scorer abstained" in found.detail


async def test_one_bad_answer_spoils_no_other_of_its_batch(reward, scorer_file):
    await reward.open(scorer_file(MIXED), timeout_s=0.5, failed_reward=-1.0)
    found = await reward.answers("a", "raise", "b", "die", "c", "hang", "d")
    assert [each.reward for each in found] == [1.0, -1.0, 1.0, -1.0, 1.0, -1.0, 1.0]
    assert "exit code 3" in found[3].detail and "took longer" in found[5].detail


async def test_a_scorer_that_ends_its_process_with_each_answer_is_broken(reward, scorer_file):
    """And not the answers: reward 0 for all of them would train on nothing and say so to nobody."""
    await reward.open(scorer_file("import os\ncompletion and os._exit(0)\nreturn 1.0"))
    found = [(await reward.answers(str(number)))[0] for number in range(4)]
    assert found[0].status == reward_pb2.SCORE_STATUS_ANSWER_FAILED
    assert found[3].status == reward_pb2.SCORE_STATUS_SCORER_BROKEN
    assert "with each of 4 answers" in found[3].detail


TOKENS = """#file
def score(raw_prompt, raw_completion, prompt_ids, completion_ids):
    assert raw_prompt == "<s>1 + 1?" and prompt_ids == [1, 5, 6]
    return float(raw_completion == "2</s>") + len(completion_ids) / 10
"""
OF_TRL = """#file
def score(completions, completion_ids, prompt_ids, raw_completions):
    return [len(ids) + len(prompt) / 10 for ids, prompt in zip(completion_ids, prompt_ids)]
"""
RANKED = """#file
def score(completion, group):
    return sorted(group).index(completion)
"""
READ = {
    "raw_prompt": "<s>1 + 1?",
    "prompt_ids": [1, 5, 6],
    "raw_completion": "2</s>",
    "completion_ids": [7, 2],
}


async def test_scorers_get_tokens_where_the_spec_gives_them(reward, scorer_file):
    await reward.open(scorer_file(TOKENS), (scorer_file(OF_TRL, "trl.py"), 10.0), give=["tokens"])
    (found,) = await reward.answers("2", **READ)
    assert (found.parts["mine.py:score"], found.parts["trl.py:score"]) == (1.2, 2.3)
    (without,) = await reward.answers("2")
    assert without.status == reward_pb2.SCORE_STATUS_SCORER_BROKEN and "comes without" in without.detail


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (TOKENS, r"it takes 'raw_prompt', which scorers get with reward.give: \[tokens\]"),
        (OF_TRL, r"it takes 'completion_ids', which scorers get with reward.give: \[tokens\]"),
        (RANKED, r"it takes 'group', which scorers get with reward.give: \[group\]"),
    ],
)
async def test_what_the_spec_does_not_give_is_refused_by_name(reward, scorer_file, body, words):
    with pytest.raises(grpc.aio.AioRpcError, match=words):
        await reward.open(scorer_file(body))


async def test_a_scorer_may_compare_the_answers_of_a_group(reward, scorer_file):
    await reward.open(scorer_file(RANKED), give=["group"])
    found = await reward.answers("c", "a", "b", group=["c", "a", "b"])
    assert [each.reward for each in found] == [2.0, 0.0, 1.0]
    (alone,) = await reward.answers("d")
    assert alone.status == reward_pb2.SCORE_STATUS_SCORER_BROKEN and "wait for groups" in alone.detail


TURNS = """#file
def score(episode, completion):
    return {"score": 0.75, "turns": [0.25, 0.5], "note": 3} if completion != "sum" else {"turns": [1, 2]}
"""
SAID = common_pb2.Conversation(
    messages=[common_pb2.ChatMessage(role="assistant", content="x")] * 2,
    turns=[common_pb2.Turn(message=place, reward=reward) for place, reward in enumerate((1.0, -0.5))],
)


async def test_a_scorer_may_reward_each_turn(reward, scorer_file):
    """Weighted, beside what the environment gave by turn, and a score for the whole, which the last turn gets."""
    whole = scorer_file("return 0.125", "whole.py")
    scorers = [
        (scorer_file(TURNS), 2.0),
        (whole, 4.0),
        {"name": "episode", "weight": 1.0, "options": {"scale": 2}},
    ]
    await reward.open(*scorers)
    first, summed = await reward.answers("a", "sum", conversation=SAID)
    assert list(first.turns) == [2 * 0.25 + 2.0, 2 * 0.5 + 0.5 - 1.0] and first.reward == sum(first.turns)
    assert dict(first.parts) == {
        "mine.py:score": 0.75,
        "mine.py:score/score": 0.75,
        "mine.py:score/note": 3.0,
        "whole.py:score": 0.125,
        "episode": 1.0,
    }
    assert summed.parts["mine.py:score"] == 3.0 and sum(summed.turns) == summed.reward
    await reward.close()
    await reward.open(whole)
    assert list((await reward.answers("a", conversation=SAID))[0].turns) == []


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        ('{"turns": [1.0]}', "returned 1 turns of an answer with 2; return a number for each assistant turn"),
        ('{"score": 1.0, "turns": [1.0, 1.0]}', "returned score 1, and turns that add up to 2"),
        ('{"score": 1.0, "turns": ["a", 1.0]}', "turns that are no list of finite numbers"),
        ('{"score": 1.0, "turns": [float("inf"), 1.0]}', "turns that are no list of finite numbers"),
        ('{"score": 1.0, "turns": 2}', "turns that are no list of finite numbers"),
    ],
)
async def test_turns_that_do_not_fit_are_the_scorers_fault(reward, scorer_file, returned, words):
    await reward.open(scorer_file(f"return {returned} if completion else 0.0"))
    (found,) = await reward.answers("a", conversation=SAID)
    assert found.status == reward_pb2.SCORE_STATUS_SCORER_BROKEN and words in found.detail


READS_SECRETS = """#file
def score(completion, key, headers):
    right = key == "secret-of-the-service" and headers == {"Authorization": "Bearer secret-of-the-file"}
    if completion == "fails":
        raise ValueError("401 for " + "x" * 280 + key + str(headers))
    return float(right)
"""


async def test_options_refer_to_secrets_which_no_verdict_shows(reward, scorer_file, tmp_path, monkeypatch):
    (tmp_path / "secret").write_text("secret-of-the-file\n")
    (tmp_path / "secret").chmod(0o600)
    monkeypatch.setenv("A_KEY", "secret-of-the-service")
    options = {"key": "env:A_KEY", "headers": {"Authorization": f"Bearer file:{tmp_path}/secret"}}
    name = scorer_file(READS_SECRETS)
    await reward.open({"name": name, "options": options})
    good, failed = await reward.answers("a", "fails")
    assert good.reward == 1.0
    assert "401 for" in failed.detail and "secret" not in failed.detail, "nor what is left of one that is cut"
    await reward.close()
    for reference, words in (("env:NO_SUCH", "no variable NO_SUCH"), ("file:/no/key", "cannot be read")):
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await reward.open({"name": name, "options": {**options, "key": reference}})
        assert "reward.scorers[0].options.key: " in message_of(raised.value)
        assert words in message_of(raised.value)
    (tmp_path / "data").mkdir(exist_ok=True)
    (tmp_path / "data" / "token").write_text("of-the-fleet")
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await reward.open({"name": name, "options": {**options, "key": f"file:{tmp_path}/data/token"}})
    assert "a file of the fleet's own" in message_of(raised.value)
