"""A teacher beside the policy: answers carry the words that it finds likeliest, under the lease that made them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from headrace.rollout.v1 import rollout_pb2
from headrace_modelkit.loading import save_model
from headrace_modelkit.presets.tiny import character_tokenizer, tiny_model
from headrace_servicekit.rpc.digests import trajectory_digest
from headrace_servicekit.rpc.trajectories import unpack_top
from rollout_calls import HEADER, refused

TOP = 6


@pytest.fixture
def teacher(tmp_path):
    """A model of more words than the policy."""
    model = tiny_model(seed=9, vocab_size=40)
    save_model(model, character_tokenizer(), tmp_path / "teacher")
    return model


async def reopen(rollout, tmp_path, top=TOP, section=None, **options):
    published = rollout.last
    await rollout.stub.CloseRun(rollout_pb2.CloseRunRequest(header=HEADER))
    section = {"path": str(tmp_path / "teacher"), "dtype": "float32", "max_context": 128, **(section or {})}
    await rollout.open(rollout.model_path, {"teacher": section, "teacher_top": top}, **options)
    await rollout.install(published)


def ids_of(trajectory):
    parts = [list(segment.tokens.token_ids) for segment in trajectory.branches[0].segments]
    return parts[0], [token for part in parts[1:] for token in part]


async def test_answers_carry_the_words_that_the_teacher_finds_likeliest(
    rollout, assignments, teacher, tmp_path
):
    await reopen(rollout, tmp_path)
    words = rollout.engine.vocabulary_size
    found = await (await rollout.generate(assignments).start()).read_all()
    assert len(found) == 12
    for trajectory in found.values():
        prompt, answer = ids_of(trajectory)
        assert trajectory.body_digest == trajectory_digest(trajectory), "the digest covers them"
        ids_TM, values_TM = unpack_top(trajectory.branches[0].teacher_top, len(answer), TOP)
        with torch.inference_mode():
            logits_TV = teacher(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        best = logits_TV.log_softmax(-1).topk(TOP)
        known = best.indices.numpy() < words
        np.testing.assert_allclose(values_TM[known], best.values.numpy()[known], atol=1e-4)
        assert (ids_TM[known] == best.indices.numpy()[known]).mean() > 0.98  # but for ties
        assert (values_TM[~known] == -np.inf).all() and (ids_TM[~known] == 0).all()
    kept = await rollout.stub.FetchTrajectories(
        rollout_pb2.FetchTrajectoriesRequest(header=HEADER, samples=[each.sample for each in found.values()])
    ).read()
    assert {each.body_digest for each in kept.trajectories} <= {each.body_digest for each in found.values()}
    assert all(each.branches[0].teacher_top for each in kept.trajectories)


async def test_an_evaluation_asks_no_teacher(rollout, assignments, teacher, tmp_path):
    await reopen(rollout, tmp_path)
    found = await (await rollout.generate(assignments, evaluation=True).start()).read_all()
    assert len(found) == 12 and not any(each.branches[0].teacher_top for each in found.values())


async def test_an_answer_whose_lease_ends_before_the_teacher_has_read_it_is_handed_back_unbegun(
    rollout, assignments, teacher, tmp_path, monkeypatch
):
    await reopen(rollout, tmp_path)
    engine = rollout.servicer._run.teacher
    reads = engine.likeliest

    async def too_late(*asked):
        rollout.instance.fence.release(1)
        return await reads(*asked)

    monkeypatch.setattr(engine, "likeliest", too_late)
    call = await rollout.generate(assignments[:1], half_close=False).start()
    await call.read_until(lambda call: len(call.partials) == 3)
    assert not call.chunks
    call.call.cancel()


async def test_a_teacher_that_reads_less_than_the_policy_is_refused(rollout, teacher, tmp_path):
    reading = reopen(rollout, tmp_path, section={"max_context": 64})
    await refused(reading, "INVALID", "the teacher reads 64 tokens", "set model.max_context: 64")


async def test_a_teacher_that_is_not_there_is_refused_by_its_key(rollout, tmp_path):
    await refused(reopen(rollout, tmp_path), "MODEL_NOT_READABLE", "trainer.reference.path")
