"""Games of two roles over real gRPC: each reads and learns its own line, and who plays one."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conversation_parts import ANY, begins, said, text_of
from headrace.common.v1 import common_pb2
from headrace_modelkit.loading import load_model
from headrace_modelkit.presets.tiny import write_tiny
from headrace_rollout.runs.opening import open_run
from headrace_schema.openings import RolloutConfig
from headrace_schema.sections.generating import ModelSection
from headrace_servicekit.rpc.digests import trajectory_digest
from rollout_calls import check_log_probs, refused
from simulator_rig import open_pool


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
