"""Conversations over real gRPC: a real engine speaks with environments in real simulators' children."""

from __future__ import annotations

import json

import pytest
from conversation_parts import ANY, TALKS, TASK, begins, parts, pool_of, said, text_of
from headrace.common.v1 import common_pb2
from headrace.rollout.v1 import rollout_pb2
from headrace_modelkit.presets.tiny import tiny_model, write_tiny
from headrace_servicekit.rpc.digests import trajectory_digest
from rollout_calls import HEADER, check_log_probs, refused
from simulator_rig import SimulatorProcess
from transformers import AutoTokenizer


async def test_turns_extend_the_ids_that_were_sampled_and_only_they_carry_log_probs(
    talking, talks, codec, reference
):
    rollout = await talking()
    pool = await pool_of(talks)
    stop = ["1", "2", "3", "4", "5"]
    found = await said(rollout, pool, begins([4, 7], 3), stop=stop, max_new_tokens=40)
    again = await said(rollout, pool, begins([4, 7], 3), stop=stop, max_new_tokens=40)
    assert {key: parts(each) for key, each in found.items()} == {
        key: parts(each) for key, each in again.items()
    }
    assert len(found) == 6
    whole = 0
    for (seed, _), trajectory in found.items():
        assert trajectory.body_digest == trajectory_digest(trajectory)
        prompt, *turns = parts(trajectory)
        assert text_of(codec, prompt[1]) == f"copy{seed}=" and prompt[0] == 0
        talk = trajectory.conversation
        spoken = [each.content for each in talk.messages if each.role == "assistant"]
        sampled = [ids for number, ids in turns if number]
        # A turn that a stop string cuts at its beginning has no ids.
        assert [each for each in spoken if each] == [text for ids in sampled if (text := codec.decode(ids))]
        assert all(text_of(codec, ids) == " +" for number, ids in turns if not number)
        assert [turn.reward for turn in talk.turns] == [0.5 * (turn + 1) for turn in range(len(talk.turns))]
        assert [turn.tokens for turn in talk.turns if turn.tokens] == [len(ids) for ids in sampled]
        assert len(talk.turns) == len(spoken), "a turn without ids has its place too"
        (branch,) = trajectory.branches
        assert [sum(segment.tokens.text_bytes) for segment in branch.segments if segment.policy_number] == [
            len(text) for text, turn in zip(spoken, talk.turns, strict=True) if turn.tokens
        ], "each sampled id is so many bytes of its own turn"
        assert trajectory.completion_text.startswith(f"system: copy\nuser: {seed}=\nassistant: ")
        if trajectory.finish_reason == common_pb2.FINISH_REASON_TERMINATED:
            whole += 1
            assert talk.success and len(talk.turns) == 3 and len(sampled) <= 3
        else:
            assert trajectory.finish_reason == common_pb2.FINISH_REASON_LENGTH
        check_log_probs(trajectory, reference)  # each turn's with all that came before as context
        for segment in branch.segments:
            if not segment.policy_number:
                assert not segment.tokens.log_probs and not segment.tokens.HasField("distribution")
    assert whole, "no conversation came to its end"


async def test_each_limit_is_a_finish_reason(talking, talks):
    rollout = await talking()
    free = {"stop": ANY, "max_new_tokens": 8}
    turns = await said(rollout, await pool_of(talks, max_episode_steps=2), begins(range(6)), **free)
    assert {each.finish_reason for each in turns.values()} == {common_pb2.FINISH_REASON_TRUNCATED}
    assert {len(each.conversation.turns) for each in turns.values()} == {2}
    cut = await said(rollout, await pool_of(talks), begins(range(3)), max_new_tokens=1)
    assert {each.finish_reason for each in cut.values()} == {common_pb2.FINISH_REASON_LENGTH}
    assert {turn.reward for each in cut.values() for turn in each.conversation.turns} == {0.5}, (
        "its environment judges a cut turn"
    )
    grows = await said(rollout, await pool_of(talks), begins(range(3), wrong="grows"), **free)
    assert {each.finish_reason for each in grows.values()} == {common_pb2.FINISH_REASON_LENGTH}
    for each in grows.values():
        assert len(each.conversation.turns) == 1 and sum(map(len, (ids for _, ids in parts(each)))) <= 64
    long = await said(rollout, await pool_of(talks), begins([1], first="=" * 80), **free)
    assert [each.finish_reason for each in long.values()] == [common_pb2.FINISH_REASON_PROMPT_TOO_LONG]


async def test_a_conversation_that_takes_too_long_is_cut_behind_a_turn(talking, talks):
    rollout = await talking(max_episode_s=1e-6)
    pool = await pool_of(talks, count=1, processes=1)
    found = await said(rollout, pool, begins([1]), stop=ANY, max_new_tokens=8)
    (late,) = found.values()
    assert late.finish_reason == common_pb2.FINISH_REASON_TIMED_OUT and len(late.conversation.turns) == 1


@pytest.mark.parametrize(
    ("wrong", "words"),
    [("dies", "exit code 7"), ("raises", "RuntimeError: the game fell over"), ("hangs", "longer than 1 s")],
)
async def test_a_lost_environment_costs_its_own_conversation_alone(talking, talks, wrong, words):
    rollout = await talking(step_timeout_s=1)
    pool = await pool_of(talks, step_timeout_s=1)
    groups = [*begins([1, 2]), *begins([3], wrong=wrong), *begins([4, 5])]
    found = await said(rollout, pool, groups, stop=ANY, max_new_tokens=8)
    lost = found.pop((3, 0))
    assert lost.finish_reason == common_pb2.FINISH_REASON_ERROR
    assert words in lost.conversation.failure and "environment" in lost.conversation.failure
    assert {each.finish_reason for each in found.values()} == {common_pb2.FINISH_REASON_TERMINATED}
    again = await said(rollout, pool, begins([3], attempt=2), stop=ANY, max_new_tokens=8)
    assert [each.finish_reason for each in again.values()] == [common_pb2.FINISH_REASON_TERMINATED]


async def test_samples_of_a_prompt_that_begin_otherwise_end_the_stream(talking, talks):
    rollout = await talking()
    call = rollout.generate(
        begins([1], 3, unlike=True), policy_number=3, max_new_tokens=4, pools=[await pool_of(talks)]
    )
    call = await call.start()
    await refused(call.read_all(), "INVALID", TASK, "begins otherwise for the same seed and item")


async def test_stopped_conversations_come_back_empty_and_begin_anew_with_the_next_version(
    talking, talks, publish
):
    rollout = await talking()
    pool = await pool_of(talks, options={"turns": 1000})
    call = rollout.generate(
        begins(range(6)), half_close=False, policy_number=3, max_new_tokens=2, pools=[pool], stop=["1"]
    )
    call = await call.start()
    await rollout.stub.Pause(rollout_pb2.PauseRequest(header=HEADER))
    await call.read_until(lambda call: len(call.partials) + len(call.finished()) == 6)
    assert all(not partial.state.token_ids for partial in call.partials)
    await rollout.install(publish(tiny_model(9), 4))
    await rollout.stub.Resume(rollout_pb2.ResumeRequest(header=HEADER))
    call.call.cancel()
    after = await said(rollout, pool, begins([1]), policy_number=4, max_new_tokens=8)
    assert {number for number, _ in parts(after[1, 0])} <= {0, 4}


async def test_a_lost_simulator_is_told_and_its_conversations_come_back(talking, tmp_path):
    (tmp_path / "talks.py").write_text(TALKS)
    simulator = SimulatorProcess(tmp_path)
    rollout = await talking()
    pool = await pool_of(simulator.address, options={"turns": 10_000, "says": ""})
    options = {"policy_number": 3, "max_new_tokens": 8, "stop": ANY, "pools": [pool]}
    call = rollout.generate(begins(range(4), wrong="hangs"), half_close=False, **options)
    call = await call.start()
    simulator.kill()
    await call.read_until(lambda call: len(call.partials) + len(call.finished()) == 4)
    assert call.lost_pools == [pool.pool]


async def test_what_does_not_fit_is_refused(talking, talks, new_rollout, tiny_directory):
    rollout = await talking()
    pool = await pool_of(talks)
    none = await rollout.generate(begins([1]), policy_number=3).start()
    await refused(none.read_all(), "INVALID", "pools: give at least one")
    text = rollout_pb2.GroupAssignment(prompt=rollout_pb2.Prompt(text="1"))
    wrong = await rollout.generate([text], policy_number=3, pools=[pool]).start()
    await refused(wrong.read_all(), "INVALID", "prompt: give episode")
    plain = await new_rollout("rollout-1")
    await plain.open(tiny_directory)
    await plain.install(rollout.last)
    named = await plain.generate(begins([1]), policy_number=3, pools=[pool]).start()
    await refused(named.read_all(), "INVALID", "names no environment")


async def test_a_template_that_rewrites_earlier_turns_is_refused_as_the_run_opens(new_rollout, tmp_path):
    directory = tmp_path / "forgets"
    write_tiny(directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    forgets = "{{ m['content'] if loop.last else m['content'].split('</think>')[-1].strip() }}"
    tokenizer.chat_template = f"{{% for m in messages %}}{forgets}{{% endfor %}}"
    tokenizer.save_pretrained(directory)
    rollout = await new_rollout()
    config = {
        "workflow": "agentic",
        "model": {"path": str(directory), "dtype": "float32"},
        "environment": {"backend": "conversation", "tasks": [TASK]},
    }
    request = rollout_pb2.OpenRunRequest(header=HEADER, config_json=json.dumps(config))
    words = ("environment.rewritten_turns", "rewrites earlier turns", "set it to append")
    await refused(rollout.stub.OpenRun(request), "MODEL_NOT_READABLE", *words)
    config["environment"]["rewritten_turns"] = "append"
    await rollout.stub.OpenRun(rollout_pb2.OpenRunRequest(header=HEADER, config_json=json.dumps(config)))
