"""Exchanges: a second policy replies inside a trajectory, over real gRPC and with real engines."""

from __future__ import annotations

import json

import pytest
import torch
from headrace.rollout.v1 import rollout_pb2
from headrace_modelkit.loading import load_model
from headrace_modelkit.presets.tiny import tiny_model, write_tiny
from headrace_rollout.engines.samples import Distribution, Finish, Prefix, Sample, SlotKey, TrajectoryUpdate
from headrace_rollout.exchanges.exchange import Exchange, Rules, Turn
from headrace_schema.sections.generating import ModelSection
from headrace_servicekit.rpc.digests import trajectory_digest
from rollout_calls import HEADER, check_log_probs, refused

BEFORE, AFTER = " 0", "="


@pytest.fixture(scope="module")
def frozen_directory(tmp_path_factory):
    """Another model with the same tokenizer."""
    directory = tmp_path_factory.mktemp("frozen") / "tiny"
    write_tiny(directory, seed=5)
    return directory


@pytest.fixture
def conversing(new_rollout, tiny_directory, publish, reference):
    """Opens a run with a `reply` section and installs version 3."""

    async def open_with(reply, **model):
        rollout = await new_rollout()
        rollout.model_path = tiny_directory
        config = {
            "model": {"path": str(tiny_directory), "dtype": "float32", "max_context": 128, **model},
            "rollout": {"max_concurrency": 16},
            "reply": {"before": BEFORE, "after": AFTER, "max_new_tokens": 5, **reply},
            "seed": 7,
        }
        request = rollout_pb2.OpenRunRequest(header=HEADER, config_json=json.dumps(config))
        await rollout.stub.OpenRun(request)
        await rollout.install(publish(reference, 3))
        return rollout

    return open_with


def likeliest(model, ids, count, eos):
    """Greedy tokens of a Hugging Face model behind `ids`."""
    found = []
    with torch.inference_mode():
        while len(found) < count and (not found or found[-1] not in eos):
            logits = model(torch.tensor([[*ids, *found]])).logits[0, -1]
            found.append(int(logits.argmax()))
    return found


def parts(trajectory):
    return [(segment.policy_number, list(segment.tokens.token_ids)) for segment in trajectory.segments]


async def test_a_frozen_policy_replies_and_the_policy_answers_again(
    conversing, frozen_directory, assignments, codec, reference
):
    """Greedy on both sides: every turn is what Hugging Face makes of the same ids."""
    reply = {"path": str(frozen_directory), "turns": 2, "temperature": 0}
    rollout = await conversing(reply)
    call = await rollout.generate(assignments, policy_number=3, max_new_tokens=6, temperature=0.0).start()
    trajectories = await call.read_all()
    assert len(trajectories) == 12 and not call.partials
    frozen = load_model(ModelSection(path=str(frozen_directory), dtype="float32"))
    before, after = (codec.tokenizer.encode(text, add_special_tokens=False) for text in (BEFORE, AFTER))
    for (ordinal, _), trajectory in trajectories.items():
        found = parts(trajectory)
        ids = codec.encode_prompt(text=assignments[ordinal].prompt.text)
        expected, said = [(0, list(ids))], []
        for turn in range(3):
            answer = likeliest(reference, [*ids, *said], 6, codec.eos_ids)
            expected.append((3, answer))
            said += answer
            if turn < 2:
                replied = likeliest(frozen, [*ids, *said, *before], 5, codec.eos_ids)
                expected += [(0, list(before)), (0, [*replied, *after])]
                said += [*before, *replied, *after]
        assert found == expected
        given = [segment.tokens for segment in trajectory.segments if not segment.policy_number]
        assert all(not part.log_probs and not part.HasField("distribution") for part in given)
        made = [segment.tokens for segment in trajectory.segments if segment.policy_number]
        assert all(len(part.log_probs) == len(part.token_ids) and not part.text_bytes for part in made)
        assert trajectory.completion_text == codec.decode(said)
        assert trajectory.body_digest == trajectory_digest(trajectory)


async def test_turns_draw_apart_and_the_log_probs_are_the_models(conversing, assignments, codec, reference):
    """Self-play: the policy replies to itself; its answers alone carry log-probs, which are of the whole context."""
    rollout = await conversing({"turns": 1, "scored": "last"})
    call = await rollout.generate(assignments, policy_number=3, max_new_tokens=8).start()
    again = await rollout.generate(assignments, policy_number=3, max_new_tokens=8).start()
    trajectories, repeated = await call.read_all(), await again.read_all()
    assert {k: parts(t) for k, t in trajectories.items()} == {k: parts(t) for k, t in repeated.items()}
    for trajectory in trajectories.values():
        assert [number for number, _ in parts(trajectory)] == [0, 3, 0, 0, 3]
        check_log_probs(trajectory, reference)
        assert trajectory.completion_text == codec.decode(trajectory.segments[-1].tokens.token_ids)
    first, reply = zip(*[(parts(t)[1][1], parts(t)[3][1]) for t in trajectories.values()], strict=True)
    assert any(a[: len(b) - 1] != b[: len(a)] for a, b in zip(first, reply, strict=True))


async def test_stopped_exchanges_come_back_empty_and_a_new_version_waits_for_them(
    conversing, frozen_directory, assignments, publish, reference
):
    rollout = await conversing({"path": str(frozen_directory), "turns": 8})
    call = await rollout.generate(assignments, policy_number=3, half_close=False, max_new_tokens=8).start()
    next_version = publish(tiny_model(9), 4)
    # A version may not change between two turns of an exchange, whichever of both policies is at work.
    await refused(rollout.install(next_version), "POLICY_MISMATCH", "live; pause first")
    await rollout.stub.Pause(rollout_pb2.PauseRequest(header=HEADER))
    await call.read_until(lambda call: len(call.partials) + len(call.finished()) == 12)
    assert call.partials and all(not partial.state.token_ids for partial in call.partials)
    await rollout.stub.Suspend(rollout_pb2.SuspendRequest(header=HEADER))
    wake = rollout_pb2.WakeRequest(header=HEADER, scope=rollout_pb2.WAKE_SCOPE_WEIGHTS)
    await rollout.stub.Wake(wake)
    await rollout.install(next_version)
    wake.scope = rollout_pb2.WAKE_SCOPE_KV_CACHE
    await rollout.stub.Wake(wake)
    await rollout.stub.Resume(rollout_pb2.ResumeRequest(header=HEADER))
    call.call.cancel()
    after = await rollout.generate(assignments[:1], policy_number=4, max_new_tokens=4).start()
    for trajectory in (await after.read_all()).values():
        assert {number for number, _ in parts(trajectory)} == {0, 4}
        assert len(parts(trajectory)) == 2 + 8 * 3


async def test_an_abort_between_turns_leaves_nothing_behind(conversing, frozen_directory, assignments):
    rollout = await conversing({"path": str(frozen_directory), "turns": 8})
    for _ in range(5):
        call = await rollout.generate(
            assignments, policy_number=3, half_close=False, max_new_tokens=4
        ).start()
        await rollout.stub.Abort(rollout_pb2.AbortRequest(header=HEADER))
        await call.call.done_writing()
        await call.read_until(lambda _: False)
        assert len(call.partials) + len(call.finished()) in (0, 12)
    whole = await (await rollout.generate(assignments, policy_number=3, max_new_tokens=4).start()).read_all()
    assert len(whole) == 12


async def test_a_model_with_another_tokenizer_is_refused(new_rollout, tiny_directory, tmp_path):
    other = tmp_path / "other"
    write_tiny(other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    one, two = sorted(vocabulary, key=vocabulary.get)[5:7]
    vocabulary[one], vocabulary[two] = vocabulary[two], vocabulary[one]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    rollout = await new_rollout()
    config = {"model": {"path": str(tiny_directory), "dtype": "float32"}, "reply": {"path": str(other)}}
    request = rollout_pb2.OpenRunRequest(header=HEADER, config_json=json.dumps(config))
    await refused(rollout.stub.OpenRun(request), "MODEL_NOT_READABLE", "reply.path", "another tokenizer")


async def test_a_model_that_is_not_there_is_named_by_the_replys_key(new_rollout, tiny_directory, tmp_path):
    rollout = await new_rollout()
    config = {
        "model": {"path": str(tiny_directory), "dtype": "float32"},
        "reply": {"path": str(tmp_path / "none")},
    }
    request = rollout_pb2.OpenRunRequest(header=HEADER, config_json=json.dumps(config))
    await refused(rollout.stub.OpenRun(request), "MODEL_NOT_READABLE", "reply.path", str(tmp_path / "none"))


def output(ids, finish=Finish.EOS, number=3):
    prefix = Prefix(ids, [-1.0] * len(ids), [(number, len(ids))])
    return TrajectoryUpdate(
        SlotKey(0, 0), 1, 0, ids, prefix.log_probs, number, [9], finish=finish, whole=prefix
    )


def test_an_exchange_that_the_context_has_no_room_for_ends_with_its_last_answer():
    rules = Rules(4, (7,), (8,), Distribution(), 4, (), context_limit=14)
    exchange = Exchange(rules, [9, 9], SlotKey(0, 0), Sample(0, 1))
    assert exchange.take(output([1, 2, 3])) is None and exchange.turn == Turn(0, reply=True)
    assert list(exchange.group().prompt_ids) == [9, 9, 1, 2, 3, 7]
    assert exchange.take(output([4, 4])) is None and exchange.turn == Turn(1, reply=False)
    assert exchange.take(output([5, 5, 5])) is Finish.LENGTH
    ended = exchange.output(3, finish=Finish.LENGTH)
    assert list(ended.whole.token_ids) == [1, 2, 3, 7, 4, 4, 8, 5, 5, 5]
    assert ended.whole.spans == [(3, 3), (0, 1), (0, 3), (3, 3)]
    short = Exchange(rules, [9] * 8, SlotKey(0, 0), Sample(0, 1))
    assert short.take(output([1, 2])) is None
    assert short.take(output([4, 4, 4])) is Finish.LENGTH
    assert list(short.tokens) == [1, 2] and short.spans == [(3, 2)] and short.log_probs == [-1.0, -1.0]


def test_every_turn_has_a_seed_of_its_own():
    turns = [Turn(index, reply=reply) for index in range(20) for reply in (False, True)]
    seeds = {turn.seed(7) for turn in turns}
    assert len(seeds) == 40 and Turn(0, reply=False).seed(7) == 7
    assert all(0 <= seed < 2**63 for seed in seeds)
