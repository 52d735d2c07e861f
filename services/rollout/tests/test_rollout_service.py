"""The rollout service over real gRPC, with weights from a real store."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import grpc
import pytest
from headrace.common.v1 import common_pb2
from headrace.rollout.v1 import rollout_pb2
from headrace_modelkit.presets.tiny import tiny_model
from headrace_rollout.streams.trajectories import SHOWN_CHARACTERS, fill_branch_texts
from headrace_servicekit.rpc.digests import trajectory_digest
from rollout_calls import HEADER, RUN, refused


def sampled(trajectory):
    return [i for segment in trajectory.branches[0].segments[1:] for i in segment.tokens.token_ids]


async def test_generate_sends_whole_trajectories(rollout, assignments, codec):
    call = await rollout.generate(assignments, stop=["zz"]).start()
    trajectories = await call.read_all()
    assert len(trajectories) == 12 and not call.partials
    for (ordinal, _), trajectory in trajectories.items():
        prompt, *answer = trajectory.branches[0].segments
        assert list(prompt.tokens.token_ids) == codec.encode_prompt(text=assignments[ordinal].prompt.text)
        assert prompt.policy_number == 0 and not prompt.tokens.log_probs
        assert [segment.policy_number for segment in answer] == [1]
        tokens = answer[0].tokens
        assert len(tokens.log_probs) == len(tokens.token_ids)
        assert tokens.distribution.log_prob_kind == common_pb2.LOG_PROB_KIND_PROCESSED
        assert trajectory.completion_text == codec.decode(tokens.token_ids)
        assert trajectory.body_digest == trajectory_digest(trajectory)
        assert trajectory.producer == rollout.instance.config.incarnation
        assert trajectory.attempt == 1


async def test_longer_prompts_than_the_run_trains_end_at_once_and_texts_come_raw(rollout, assignments, codec):
    """Of held-out items none ends so: they are measured as far as the context goes."""
    lengths = [len(codec.encode_prompt(text=each.prompt.text)) for each in assignments]
    most = sorted(lengths)[-2]
    await rollout.stub.CloseRun(rollout_pb2.CloseRunRequest(header=HEADER))
    published = rollout.last
    await rollout.open(rollout.model_path, {"longest_prompt": most, "raw_texts": True})
    await rollout.install(published)
    found = await (await rollout.generate(assignments).start()).read_all()
    assert len(found) == sum(len(each.samples) for each in assignments)
    for (ordinal, _), trajectory in found.items():
        long = lengths[ordinal] > most
        assert (trajectory.finish_reason == common_pb2.FINISH_REASON_PROMPT_TOO_LONG) == long
        assert trajectory.body_digest == trajectory_digest(trajectory)
        prompt, ids = trajectory.branches[0].segments[0].tokens.token_ids, sampled(trajectory)
        assert trajectory.raw_prompt_text == codec.decode(prompt, skip_special_tokens=False)
        assert trajectory.raw_completion_text == codec.decode(ids, skip_special_tokens=False)
        assert bool(ids) != long
    heldout = await (await rollout.generate(assignments, evaluation=True).start()).read_all()
    assert all(sampled(trajectory) for trajectory in heldout.values())


async def test_what_the_model_read_goes_with_the_samples_that_are_shown(rollout, assignments, codec):
    shown = (assignments[0].prompt_ordinal, assignments[0].samples[0].sample_index)
    assignments[0].samples[0].shown = True
    found = await (await rollout.generate(assignments).start()).read_all()
    texts = {key: [list(branch.parts) for branch in each.branch_texts] for key, each in found.items()}
    prompt = found[shown].branches[0].segments[0].tokens.token_ids
    assert texts.pop(shown) == [[codec.decode(prompt, skip_special_tokens=False)]]
    assert texts and not any(texts.values())
    assert found[shown].body_digest == trajectory_digest(found[shown])


def test_the_texts_of_a_conversations_branches_have_what_was_given_and_sampled_in_turns(codec):
    """Two segments of one turn, of two versions, are one part; what is very long loses its middle."""
    message = common_pb2.Trajectory()
    message.conversation.SetInParent()
    branch = message.branches.add()
    texts = [(0, "1+"), (0, "2"), (3, "="), (4, "3"), (0, "7" * 2 * SHOWN_CHARACTERS), (4, "9")]
    for number, text in texts:
        ids = codec.encode_prompt(text=text)
        branch.segments.add(policy_number=number).tokens.token_ids.extend(ids)
    fill_branch_texts(message, codec)
    (given, turn, long, end) = message.branch_texts[0].parts
    assert (given, turn, end) == ("1+2", "=3", "9")
    assert long.startswith("777") and long.endswith("777") and "characters …]" in long
    assert len(long) < SHOWN_CHARACTERS


async def test_responses_tell_when_prompts_were_computed(rollout, assignments):
    began = time.perf_counter()
    call = await rollout.generate(assignments).start()
    await call.read_all()
    lasted = [prefill.lasted.ToNanoseconds() / 1e9 for prefill in call.prefills]
    ago = [prefill.began_ago.ToNanoseconds() / 1e9 for prefill in call.prefills]
    assert lasted and all(0 < span <= since for span, since in zip(lasted, ago, strict=True))
    assert sum(lasted) < time.perf_counter() - began


async def test_chunks_stream_while_it_decodes(rollout, assignments):
    call = await rollout.generate(assignments, chunk_tokens=2).start()
    trajectories = await call.read_all()
    assert len(call.chunks) > 24
    for (ordinal, index), trajectory in trajectories.items():
        key = common_pb2.SlotKey(prompt_ordinal=ordinal, sample_index=index)
        chunks = [chunk for chunk in call.chunks if chunk.sample == key]
        assert [i for chunk in chunks for i in chunk.token_ids] == sampled(trajectory)
        assert [chunk.token_offset for chunk in chunks] == list(range(0, 2 * len(chunks), 2))


async def test_groups_assigned_later_on_the_same_stream_are_filled(rollout, assignments):
    call = await rollout.generate(assignments[:1], half_close=False).start()
    await call.read_until(lambda call: len(call.finished()) == 3)
    await call.assign(assignments[1:])
    await call.call.done_writing()
    assert len(await call.read_all()) == 12


async def test_a_chat_prompt_goes_through_the_template(rollout, codec):
    chat = rollout_pb2.ChatPrompt(
        messages=[common_pb2.ChatMessage(role="user", content="copy 12")], prefill=" ="
    )
    group = rollout_pb2.GroupAssignment(
        prompt=rollout_pb2.Prompt(chat=chat), samples=[rollout_pb2.SampleAssignment(attempt=1)]
    )
    (trajectory,) = (await (await rollout.generate([group]).start()).read_all()).values()
    assert list(trajectory.branches[0].segments[0].tokens.token_ids) == codec.encode_prompt(text="copy 12 =")


async def test_a_prompt_that_does_not_fit_ends_with_a_reason(rollout):
    prompts = [rollout_pb2.TokenIds(values=[7] * 128), rollout_pb2.TokenIds(values=[7] * 120)]
    groups = [
        rollout_pb2.GroupAssignment(
            prompt_ordinal=ordinal,
            prompt=rollout_pb2.Prompt(token_ids=ids),
            samples=[rollout_pb2.SampleAssignment(attempt=1)],
        )
        for ordinal, ids in enumerate(prompts)
    ]
    trajectories = await (await rollout.generate(groups).start()).read_all()
    assert trajectories[0, 0].finish_reason == common_pb2.FINISH_REASON_PROMPT_TOO_LONG
    assert len(trajectories[0, 0].branches[0].segments) == 1
    assert len(sampled(trajectories[1, 0])) <= 8


async def test_paused_samples_go_on_at_another_instance_as_if_nothing_happened(
    rollout, new_rollout, assignments, tiny_directory, publish, reference
):
    expected = await (await rollout.generate(assignments, evaluation=True).start()).read_all()

    call = await rollout.generate(assignments, chunk_tokens=1).start()
    await call.read_until(lambda call: len(call.chunks) > 20)
    paused = await rollout.stub.Pause(rollout_pb2.PauseRequest(header=HEADER))
    done = await call.read_all()
    assert paused.partial_count == len(call.partials) == 12 - len(done) > 0

    other = await new_rollout("rollout-1")
    await other.open(tiny_directory, max_concurrency=16)
    await other.install(publish(reference, 2))
    groups = [
        rollout_pb2.GroupAssignment(
            prompt_ordinal=partial.sample.prompt_ordinal,
            prompt=assignments[partial.sample.prompt_ordinal].prompt,
            samples=[
                rollout_pb2.SampleAssignment(
                    sample_index=partial.sample.sample_index, attempt=2, resume=partial.state
                )
            ],
        )
        for partial in call.partials
    ]
    resumed = await (await other.generate(groups, policy_number=2).start()).read_all()
    everything = {**done, **resumed}
    assert {key: sampled(t) for key, t in everything.items()} == {
        key: sampled(t) for key, t in expected.items()
    }
    for partial in call.partials:
        trajectory = resumed[partial.sample.prompt_ordinal, partial.sample.sample_index]
        if count := len(partial.state.token_ids):
            first, *rest = trajectory.branches[0].segments[1:]
            assert (first.policy_number, len(first.tokens.token_ids)) == (1, count)
            assert list(first.tokens.log_probs) == list(partial.state.log_probs)
            assert [segment.policy_number for segment in rest] == [2]


async def test_state_that_cannot_be_restored_starts_the_sample_again(rollout, assignments):
    expected = await (await rollout.generate(assignments[:1], evaluation=True).start()).read_all()
    state = {"token_ids": [5], "log_probs": [-1.0], "version_spans": [{"policy_number": 1, "token_count": 1}]}
    for unknown in ({"rng_position": 9}, {"rng_position": 1, "extra_json": {"grammar": "{}"}}):
        group = rollout_pb2.GroupAssignment()
        group.CopyFrom(assignments[0])
        group.samples[0].resume.CopyFrom(common_pb2.ResumeState(**state, **unknown))
        found = await (await rollout.generate([group], evaluation=True).start()).read_all()
        assert sampled(found[0, 0]) == sampled(expected[0, 0])


async def test_abort_sends_partials_on_the_stream(rollout, assignments):
    call = await rollout.generate(assignments, chunk_tokens=1, max_new_tokens=90).start()
    await call.read_until(lambda call: call.chunks)
    answer = await rollout.stub.Abort(rollout_pb2.AbortRequest(header=HEADER))
    done = await call.read_all()
    assert answer.aborted_count == len(call.partials) == 12 - len(done) > 0


async def test_suspend_gives_memory_back_and_wake_takes_it_in_order(
    new_rollout, tmp_path, assignments, publish
):
    from headrace_modelkit.loading import save_model
    from headrace_modelkit.presets.tiny import character_tokenizer

    # Wide enough to be seen in the resident memory: 33 million parameters, 134 MB.
    wide = tiny_model(hidden_size=1024, intermediate_size=4096, num_hidden_layers=2, head_dim=64)
    save_model(wide, character_tokenizer(), tmp_path / "wide")
    size = 4 * sum(parameter.numel() for parameter in wide.parameters())
    first, second = publish(wide, 1), publish(wide, 2)
    rollout = await new_rollout()
    await rollout.open(tmp_path / "wide")
    await rollout.install(first)
    before = await (await rollout.generate(assignments, evaluation=True).start()).read_all()

    def wake(scope):
        return rollout.stub.Wake(rollout_pb2.WakeRequest(header=HEADER, scope=scope))

    suspend = rollout_pb2.SuspendRequest(header=HEADER)
    await refused(rollout.stub.Suspend(suspend), "NOT_PAUSED", "Pause first")
    await rollout.stub.Pause(rollout_pb2.PauseRequest(header=HEADER))
    freed = await rollout.stub.Suspend(suspend)
    assert 0.8 * size < freed.released_bytes < 2.5 * size, "the weights, and what they are packed into"
    assert freed.free_memory_bytes > size
    assert (await rollout.stub.Suspend(suspend)).released_bytes < size / 10

    await refused(rollout.install(second), "SUSPENDED", "Wake WEIGHTS first")
    await refused(rollout.stub.Resume(rollout_pb2.ResumeRequest(header=HEADER)), "SUSPENDED")
    await refused(wake(rollout_pb2.WAKE_SCOPE_KV_CACHE), "SUSPENDED")
    await wake(rollout_pb2.WAKE_SCOPE_WEIGHTS)
    await refused(wake(rollout_pb2.WAKE_SCOPE_KV_CACHE), "POLICY_MISMATCH", "install")
    await rollout.install(second)
    await wake(rollout_pb2.WAKE_SCOPE_KV_CACHE)
    await wake(rollout_pb2.WAKE_SCOPE_UNSPECIFIED)
    after = await (await rollout.generate(assignments, policy_number=2).start()).read_all()
    assert {key: sampled(t) for key, t in after.items()} == {key: sampled(t) for key, t in before.items()}


async def test_a_greedy_sample_stands_beside_sampled_ones(rollout, assignments):
    greedy = await (await rollout.generate(assignments, temperature=0.0).start()).read_all()
    plain = await (await rollout.generate(assignments, temperature=1.5).start()).read_all()
    for group in assignments:
        group.samples[0].greedy = True
    mixed = await (await rollout.generate(assignments, temperature=1.5).start()).read_all()
    for key, found in mixed.items():
        same = greedy if key[1] == 0 else plain
        assert sampled(found) == sampled(same[key])
        assert (
            found.branches[0].segments[1].tokens.distribution
            == same[key].branches[0].segments[1].tokens.distribution
        )
    assert any(sampled(greedy[key]) != sampled(plain[key]) for key in greedy)


async def test_score_gives_the_sampled_log_probs(rollout, assignments):
    trajectories = await (await rollout.generate(assignments, temperature=0.5).start()).read_all()
    sequences, expected = [], []
    for trajectory in trajectories.values():
        prompt = list(trajectory.branches[0].segments[0].tokens.token_ids)
        ids = [*prompt, *sampled(trajectory)]
        sequences.append(rollout_pb2.ScoreSequence(token_ids=ids, start=len(prompt)))
        expected.append(list(trajectory.branches[0].segments[1].tokens.log_probs))
    request = rollout_pb2.ScoreRequest(
        header=HEADER, sequences=sequences, distribution=common_pb2.SamplingDistribution(temperature=0.5)
    )
    response = await rollout.stub.Score(request)
    assert response.policy_number == 1
    for scored, values in zip(response.sequences, expected, strict=True):
        assert list(scored.log_probs) == pytest.approx(values, abs=1e-4)
    request.sequences[0].start = 0
    assert await refused(rollout.stub.Score(request), "INVALID", "sequences[0]") is (
        grpc.StatusCode.INVALID_ARGUMENT
    )


async def test_open_run_says_what_is_wrong(new_rollout, tiny_directory, tmp_path):
    rollout = await new_rollout()
    await refused(rollout.open(tiny_directory, engin="x"), "INVALID", "rollout.engin", "engine")
    await refused(
        rollout.open(tiny_directory, engine="transformer"), "INVALID", "rollout.engine", "'transformers'"
    )
    options = {"engine_options": {"paged": True}}
    await refused(
        rollout.open(tiny_directory, **options), "INVALID", "rollout.engine_options.paged", "unknown key"
    )
    await refused(rollout.open(tiny_directory, engine="warp"), "INVALID", "rollout.engine", "transformers")
    await refused(rollout.open(tmp_path / "nothing"), "MODEL_NOT_READABLE", "model.path", "config.json")
    opened = await rollout.open(tiny_directory, max_concurrency=3)
    assert (opened.max_concurrency, opened.max_context_tokens) == (3, 128)
    assert await rollout.open(tiny_directory, max_concurrency=3) == opened
    await refused(rollout.open(tiny_directory, max_concurrency=4), "CONFLICT", "close it first")
    other = common_pb2.CommandHeader(run="runs/other", coordinator_epoch=1)
    config = json.dumps({"model": {"path": str(tiny_directory)}})
    request = rollout_pb2.OpenRunRequest(header=other, config_json=config)
    await refused(rollout.stub.OpenRun(request), "BUSY", RUN)
    for _ in range(2):
        await rollout.stub.CloseRun(rollout_pb2.CloseRunRequest(header=HEADER))
    await rollout.stub.OpenRun(request)
    await refused(rollout.stub.Pause(rollout_pb2.PauseRequest(header=HEADER)), "NOT_OPEN")


@pytest.mark.parametrize(
    ("group", "words"),
    [
        (rollout_pb2.GroupAssignment(), ["prompt"]),
        (
            rollout_pb2.GroupAssignment(
                prompt=rollout_pb2.Prompt(text="1"),
                samples=[
                    rollout_pb2.SampleAssignment(resume=common_pb2.ResumeState(token_ids=[5], rng_position=1))
                ],
            ),
            ["log_probs"],
        ),
    ],
)
async def test_assignments_that_cannot_be_filled_are_refused(rollout, group, words):
    call = await rollout.generate([group]).start()
    assert await refused(call.read_all(), "INVALID", *words) is grpc.StatusCode.INVALID_ARGUMENT


async def test_generate_needs_the_version_and_an_awake_engine(rollout, assignments):
    for options, reason in (({"policy_number": 2}, "POLICY_MISMATCH"), ({"max_new_tokens": 0}, "INVALID")):
        call = await rollout.generate(assignments, **options).start()
        await refused(call.read_all(), reason)
    await rollout.stub.Pause(rollout_pb2.PauseRequest(header=HEADER))
    call = await rollout.generate(assignments).start()
    await refused(call.read_all(), "PAUSED", "Resume")
    await rollout.stub.Resume(rollout_pb2.ResumeRequest(header=HEADER))
    assert len(await (await rollout.generate(assignments).start()).read_all()) == 12


async def test_figures_reach_the_session(rollout, assignments):
    await (await rollout.generate(assignments).start()).read_all()
    reports = rollout.instance._take_metrics()
    assert {report.stage for report in reports} == {"generate"}
    assert sum(report.items for report in reports) == 12
    assert reports[-1].values["retained_trajectories"] == 12
    shared, computed = (
        sum(report.values[name] for report in reports) for name in ("shared_prompt_tokens", "prefill_tokens")
    )
    assert shared == 2 * computed > 0


def test_the_command_line_starts_without_torch():
    script = "import sys, headrace_rollout.__main__; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], timeout=60, check=False).returncode == 0


async def test_a_fault_while_reading_assignments_ends_the_stream(rollout, assignments, monkeypatch):
    def broken(groups, codec, caches):
        raise RuntimeError("a broken tokenizer")

    monkeypatch.setattr("headrace_rollout.sessions.drivers.base.groups_of", broken)
    call = await rollout.generate(assignments).start()
    await refused(call.read_all(), "BUG", "a broken tokenizer")
