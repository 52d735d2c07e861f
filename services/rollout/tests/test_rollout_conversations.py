"""Conversations over real gRPC: a real engine speaks with environments in real simulators' children."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from headrace.common.v1 import common_pb2
from headrace.rollout.v1 import rollout_pb2
from headrace_modelkit.loading import load_model
from headrace_modelkit.presets.tiny import tiny_model, write_tiny
from headrace_rollout.runs.opening import open_run
from headrace_schema.openings import RolloutConfig
from headrace_schema.sections.generating import ModelSection
from headrace_servicekit.rpc.digests import trajectory_digest
from rollout_calls import HEADER, check_log_probs, refused
from simulator_rig import SimulatorProcess, open_pool
from transformers import AutoTokenizer

# What it says depends on seed and turn alone; what its item says is done.
TALKS = """
import os
import time


class Talk:
    def __init__(self, turns=3, says=" +"):
        self.turns, self.says = turns, says

    def reset(self, seed, item):
        self.turn, self.item = 0, item
        first = item.get("first", "=")
        if item.get("unlike"):
            first += str(time.monotonic_ns() % 1000)
        return [{"role": "system", "content": "copy"}, {"role": "user", "content": f"{seed % 10}{first}"}]

    def step(self, message):
        assert message["role"] == "assistant"
        self.turn += 1
        wrong = self.item.get("wrong")
        if wrong == "dies" and self.turn == 2:
            os._exit(7)
        if wrong == "raises" and self.turn == 2:
            raise RuntimeError("the game fell over")
        if wrong == "hangs" and self.turn == 2:
            time.sleep(600)
        says = self.says * (40 if wrong == "grows" else 1)
        done = self.turn == self.turns
        return [{"role": "user", "content": says}], 0.5 * self.turn, done, {"success": done}
"""

# The asker asks twice and the teller tells once; each has heard what is to it alone.
GAME = """
class Game:
    roles = ("asker", "teller")

    def reset(self, seed, item):
        self.turn = 0
        rule = {"role": "system", "content": "copy", "to": "teller"}
        return [rule, {"role": "user", "content": f"{seed % 10}=", "to": "asker"}]

    def step(self, message):
        self.turn += 1
        if self.turn == 1:
            return [{"role": "user", "content": "+", "to": "teller"}], {"teller": 0.25}, False
        if self.turn == 2:
            return [{"role": "user", "content": "-", "to": "asker"}], {"teller": 0.5, "asker": 1.0}, False
        return [], {"asker": -3.0, "teller": 2.0}, True
"""
TASK = "talks.py:Talk"


@pytest.fixture(scope="module")
def talks(tmp_path_factory):
    directory: Path = tmp_path_factory.mktemp("talks")
    (directory / "talks.py").write_text(TALKS)
    (directory / "game.py").write_text(GAME)
    simulator = SimulatorProcess(directory)
    yield simulator.address
    simulator.kill()


@pytest.fixture
def talking(new_rollout, tiny_directory, publish, reference):
    """Opens a run of conversations and installs version 3."""

    async def start(others=None, policies=None, **environment):
        rollout = await new_rollout()
        rollout.model_path = tiny_directory
        config = {
            "policies": policies or {},
            "workflow": "agentic",
            "model": {"path": str(tiny_directory), "dtype": "float32", "max_context": 64},
            "environment": {"backend": "conversation", "tasks": [TASK], **environment},
            "rollout": {"max_concurrency": 16},
            "seed": 7,
        }
        await rollout.stub.OpenRun(rollout_pb2.OpenRunRequest(header=HEADER, config_json=json.dumps(config)))
        await rollout.install(publish(reference, 3, **(others or {})))
        return rollout

    return start


async def pool_of(address, *, options=None, **fields):
    return await open_pool(
        address,
        TASK,
        options=options,
        backend="conversation",
        **{"max_episode_steps": 0, "count": 3, "processes": 3, **fields},
    )


def begins(prompts, samples=1, *, attempt=1, **item):
    """Groups whose prompt number is the seed of their conversations."""
    return [
        rollout_pb2.GroupAssignment(
            prompt_ordinal=ordinal,
            prompt=rollout_pb2.Prompt(
                episode=rollout_pb2.EpisodeStart(task=TASK, seed=ordinal, options_json=json.dumps(item))
            ),
            samples=[
                rollout_pb2.SampleAssignment(sample_index=index, attempt=attempt) for index in range(samples)
            ],
        )
        for ordinal in prompts
    ]


async def said(rollout, pool, groups, **options):
    call = rollout.generate(groups, pools=[pool], **{"policy_number": 3, "max_new_tokens": 24, **options})
    return await (await call.start()).read_all()


def parts(trajectory):
    (branch,) = trajectory.branches
    return [(segment.policy_number, list(segment.tokens.token_ids)) for segment in branch.segments]


def text_of(codec, ids):
    return codec.decode(ids, skip_special_tokens=False)


ANY = [*"0123456789 =+->:,.?\nacdoprsty"]
"""Texts of which one ends each turn of a random model, at its first character or, most likely, soon after an <unk>."""


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


async def games(rollout, talks, stop=ANY[:20], **options):
    """Games of two roles that came to their end, of two samples for each of two prompts."""
    pool = await open_pool(
        talks, "game.py:Game", backend="conversation", max_episode_steps=0, count=3, processes=3
    )
    groups = begins([4, 7], 2)
    for group in groups:
        group.prompt.episode.task = "game.py:Game"
    found = await said(rollout, pool, groups, stop=stop, max_new_tokens=60, **options)
    ended = [each for each in found.values() if each.finish_reason == common_pb2.FINISH_REASON_TERMINATED]
    assert len(found) == 4 and ended
    return ended


async def test_each_role_reads_its_own_messages_in_a_sequence_of_its_own(talking, talks, codec, reference):
    rollout = await talking()
    ended = await games(rollout, talks)
    for trajectory in ended:
        talk = trajectory.conversation
        assert trajectory.body_digest == trajectory_digest(trajectory)
        assert [(each.role, each.party) for each in talk.messages] == [
            ("system", "teller"),
            ("user", "asker"),
            ("assistant", "asker"),
            ("user", "teller"),
            ("assistant", "teller"),
            ("user", "asker"),
            ("assistant", "asker"),
        ]
        # A reward is of the role's last turn; the teller's first came before it had spoken.
        told = [(turn.message, turn.branch, turn.reward) for turn in talk.turns]
        assert told == [(2, 0, 1.0), (4, 1, 0.25 + 0.5 + 2.0), (6, 0, -3.0)]
        seed = trajectory.sample.prompt_ordinal
        asker, teller = (branch.segments for branch in trajectory.branches)
        assert text_of(codec, asker[0].tokens.token_ids) == f"{seed}="
        assert text_of(codec, teller[0].tokens.token_ids) == "copy+"
        assert [text_of(codec, each.tokens.token_ids) for each in asker[1:] if not each.policy_number] == [
            "-"
        ]
        for line, roles in ((asker, [0, 2]), (teller, [1])):
            own = [segment for segment in line if segment.policy_number]
            assert sum(len(each.tokens.token_ids) for each in own) == sum(
                talk.turns[turn].tokens for turn in roles
            )
        check_log_probs(trajectory, reference)  # of each branch behind its own tokens alone


async def test_a_game_that_was_cut_says_whose_line_it_was(talking, talks):
    """That of whoever had the last turn: a turn of two tokens at most is cut, unless it ends by itself before."""
    rollout = await talking()
    pool = await open_pool(
        talks, "game.py:Game", backend="conversation", max_episode_steps=0, count=3, processes=3
    )
    groups = begins(range(8), 2)
    for group in groups:
        group.prompt.episode.task = "game.py:Game"
    found = await said(rollout, pool, groups, stop=ANY[:12], max_new_tokens=2)
    cut = []
    for each in found.values():
        ended = each.finish_reason == common_pb2.FINISH_REASON_TERMINATED
        talk = each.conversation
        last = talk.turns[-1]
        assert [branch.cut for branch in each.branches] == [
            not ended and number == last.branch for number in range(len(each.branches))
        ]
        if not ended:
            cut.append(talk.messages[last.message].party)
    assert {*cut} == {"asker", "teller"}, cut


async def test_a_frozen_model_plays_a_role_as_context_and_its_turns_are_its_own(
    talking, talks, codec, reference, tmp_path_factory
):
    """Greedy: what the teller says is what Hugging Face makes of the frozen model; only the asker carries loss."""
    frozen_directory = tmp_path_factory.mktemp("frozen") / "tiny"
    write_tiny(frozen_directory, seed=5)
    teller = {"path": str(frozen_directory), "temperature": 0, "max_new_tokens": 3}
    rollout = await talking(roles={"teller": teller})
    ended = await games(rollout, talks)
    frozen = load_model(ModelSection(path=str(frozen_directory), dtype="float32"))
    ids = codec.encode_prompt(chat=[{"role": "user", "content": "copy+"}])
    with torch.inference_mode():
        for _ in range(3):
            ids.append(int(frozen(torch.tensor([ids])).logits[0, -1].argmax()))
    # A stop string of the stream cuts its turn too.
    whole = codec.decode(ids[-3:])
    for trajectory in ended:
        talk = trajectory.conversation
        assert whole.startswith(talk.messages[4].content) and talk.messages[4].party == "teller"
        assert [(turn.message, turn.reward) for turn in talk.turns] == [(2, 1.0), (6, -3.0)]
        assert len(trajectory.branches) == 1
        check_log_probs(trajectory, reference)


async def test_another_policy_that_learns_plays_a_role_with_weights_of_its_own(
    talking, talks, reference, publish, tmp_path_factory
):
    """One version has both policies' tensors; each role's log-probs are those of its own model behind its own line."""
    directory = tmp_path_factory.mktemp("tutor") / "tiny"
    write_tiny(directory, seed=5)
    tutor = load_model(ModelSection(path=str(directory), dtype="float32"))
    policies = {"tutor": {"model": {"path": str(directory), "dtype": "float32"}}}
    rollout = await talking({"tutor": tutor}, policies=policies, roles={"teller": {"policy": "tutor"}})
    ended = await games(rollout, talks, stop=ANY[:6])
    for trajectory in ended:
        for branch, model in zip(trajectory.branches, (reference, tutor), strict=True):
            check_log_probs(SimpleNamespace(branches=[branch]), model)
    taught = [trajectory.branches[1] for trajectory in ended]
    with pytest.raises(AssertionError):
        check_log_probs(SimpleNamespace(branches=taught), reference)
    assert any(segment.policy_number == 3 for branch in taught for segment in branch.segments)
    await rollout.install(publish(reference, 4, tutor=reference))
    for trajectory in await games(rollout, talks, stop=ANY[:6], policy_number=4):
        check_log_probs(trajectory, reference)
    await refused(rollout.install(publish(reference, 5)), "WEIGHTS_MISMATCH", "tutor")


def test_models_with_devices_of_their_own_get_theirs(tiny_directory):
    """Each has its part of the devices, here two names of the CPU; on CPU slots, of the threads."""
    role = {"path": str(tiny_directory)}
    roles = {"teller": {**role, "own_devices": True}, "other": {**role, "revision": "same"}}
    config = RolloutConfig(
        model=ModelSection(path=str(tiny_directory), dtype="float32"),
        workflow="agentic",
        environment={"tasks": ["exchange"], "roles": roles},
    )

    async def placed(devices, threads):
        run = open_run("run", config, (), Path("/dev/shm"), None)
        try:
            await run.engine.place(devices, threads)
            engines = [run.engine._speaker, *(run.others[name].engine for name in roles)]
            return [(str(each._held.device), each._threads._most) for each in engines]
        finally:
            await run.engine.close()

    cpu, second = torch.device("cpu"), torch.device("cpu:0")
    assert asyncio.run(placed((cpu, second), 8)) == [("cpu", 4), ("cpu:0", 4), ("cpu", 4)]
    assert asyncio.run(placed((cpu,), 8)) == [("cpu", 4), ("cpu", 4), ("cpu", 4)]


async def test_a_conversation_in_which_nobody_learns_has_failed(talking, talks):
    rollout = await talking(roles={"asker": {"learns": False}})
    pool = await open_pool(
        talks, "game.py:Game", backend="conversation", max_episode_steps=1, count=1, processes=1
    )
    groups = begins([4])
    groups[0].prompt.episode.task = "game.py:Game"
    (found,) = (await said(rollout, pool, groups, stop=ANY, max_new_tokens=20)).values()
    assert found.finish_reason == common_pb2.FINISH_REASON_ERROR
    assert "before a role had a turn that is learned from" in found.conversation.failure
