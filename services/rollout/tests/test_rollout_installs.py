"""A rollout installs policies: by shared memory, by gRPC, and beside sequences that live."""

from __future__ import annotations

import grpc
import pytest
import torch
from headrace.common.v1 import common_pb2
from headrace.rollout.v1 import rollout_pb2
from headrace_modelkit.presets.tiny import tiny_model
from rollout_calls import HEADER, RUN, refused


async def test_install_takes_shared_memory_once_and_verifies(new_rollout, tiny_directory, publish, reference):
    rollout = await new_rollout()
    await rollout.open(tiny_directory)
    published = publish(reference, 1)
    first = await rollout.install(published)
    assert first.transport == common_pb2.WEIGHT_TRANSPORT_SHM and not first.fallbacks
    assert first.transfer_time.nanos > 0 and first.pause_time.nanos > 0
    again = await rollout.install(published)
    assert again.version == published.version
    assert again.transport == common_pb2.WEIGHT_TRANSPORT_UNSPECIFIED and again.bytes_moved == 0
    # A rewind: the same weights under a higher number.
    renumbered = publish(reference, 5)
    assert renumbered.version.digest == published.version.digest
    third = await rollout.install(renumbered)
    assert third.version.number == 5 and third.transport == common_pb2.WEIGHT_TRANSPORT_UNSPECIFIED
    code = await refused(rollout.install(published), "POLICY_MISMATCH", "version 1", "5")
    assert code is grpc.StatusCode.FAILED_PRECONDITION


async def test_install_by_grpc_gives_the_same_policy(rollout, assignments, publish):
    model = tiny_model(seed=3)
    published = publish(model, 2)
    del published.source.transports[:]
    published.source.transports.append(common_pb2.WEIGHT_TRANSPORT_GRPC)
    held = {entry.digest for entry in rollout.last.manifest.entries}
    response = await rollout.install(published)
    assert response.transport == common_pb2.WEIGHT_TRANSPORT_GRPC
    # Norms are ones in both versions: what is held is not sent again.
    others = [entry.size_bytes for entry in published.manifest.entries if entry.digest not in held]
    assert response.bytes_moved == sum(others) and 0 < len(others) < len(published.manifest.entries)
    assert rollout.instance.weights.find(RUN, 1) is None, "the replaced version's memory is released"
    call = await rollout.generate(assignments[:1], policy_number=2).start()
    assert all(t.branches[0].segments[1].policy_number == 2 for t in (await call.read_all()).values())


async def test_install_refuses_other_weights_and_keeps_the_installed_ones(rollout, assignments, publish):
    wrong = publish(tiny_model(seed=1, vocab_size=40), 2)
    await refused(rollout.install(wrong), "WEIGHTS_MISMATCH", "shape")
    forged = publish(tiny_model(seed=2), 3)
    forged.version.digest = "0" * 32
    await refused(rollout.install(forged), "DIGEST_MISMATCH")
    assert len(await (await rollout.generate(assignments[:1]).start()).read_all()) == 3


async def test_install_is_refused_while_a_sequence_of_another_version_lives(rollout, assignments, publish):
    call = await rollout.generate(assignments, half_close=False, chunk_tokens=1, max_new_tokens=100).start()
    await call.read_until(lambda call: call.chunks)
    published = publish(tiny_model(seed=3), 2)
    assert await refused(rollout.install(published), "POLICY_MISMATCH", "live") is (
        grpc.StatusCode.FAILED_PRECONDITION
    )
    await rollout.stub.Abort(rollout_pb2.AbortRequest(header=HEADER))
    await rollout.install(published)
    # The stream was opened for version 1: it takes no more work.
    await call.assign(assignments[:1])
    await refused(call.read_all(), "POLICY_MISMATCH", "version 1 is wanted and 2 is installed")


async def test_a_version_comes_beside_sequences_of_the_one_before_and_its_install_moves_no_byte(
    rollout, assignments, publish
):
    call = await rollout.generate(assignments, half_close=False, chunk_tokens=1, max_new_tokens=100).start()
    await call.read_until(lambda call: call.chunks)
    published = publish(tiny_model(seed=3), 2)
    found = await rollout.prefetch(published)
    assert found.transport == common_pb2.WEIGHT_TRANSPORT_SHM and not found.pause_time.nanos
    assert rollout.engine.policy.number == 1
    assert rollout.instance.weights.find(RUN, 2) and rollout.instance.weights.find(RUN, 1)
    await call.call.done_writing()
    finished = await call.read_all()
    assert {t.branches[0].segments[1].policy_number for t in finished.values()} == {1} and not call.partials
    published.source.shm_path = "/nowhere"
    published.source.address = "127.0.0.1:1"
    installed = await rollout.install(published)
    assert installed.transport == common_pb2.WEIGHT_TRANSPORT_UNSPECIFIED and not installed.fallbacks
    assert rollout.engine.policy.number == 2 and rollout.instance.weights.find(RUN, 1) is None


async def test_an_install_in_flight_leaves_segments_of_both_versions(
    rollout, assignments, publish, reference
):
    other = tiny_model(seed=3)
    call = await rollout.generate(assignments, half_close=False, chunk_tokens=1, max_new_tokens=100).start()
    await call.read_until(lambda call: call.chunks)
    response = await rollout.install(publish(other, 2), in_flight=True)
    assert response.pause_time.nanos > 0
    await call.assign([_renumbered(assignments[0], 50)])  # the stream goes on under version 2
    await call.call.done_writing()
    finished = await call.read_all()
    assert len(finished) == 3 * (len(assignments) + 1) and not call.partials
    made = {key: [s.policy_number for s in t.branches[0].segments[1:]] for key, t in finished.items()}
    assert [1, 2] in made.values(), "no sample lived through the install"
    assert all(numbers == [2] for (ordinal, _), numbers in made.items() if ordinal == 50)
    for trajectory in finished.values():
        prompt = list(trajectory.branches[0].segments[0].tokens.token_ids)
        answer = [token for s in trajectory.branches[0].segments[1:] for token in s.tokens.token_ids]
        at = 0
        for segment in trajectory.branches[0].segments[1:]:
            model = {1: reference, 2: other}[segment.policy_number]
            with torch.no_grad():
                logits = model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
            wanted = logits.log_softmax(-1).gather(-1, torch.tensor(answer)[:, None])[:, 0].tolist()
            count = len(segment.tokens.log_probs)
            assert segment.tokens.log_probs == pytest.approx(wanted[at : at + count], abs=1e-4)
            at += count


async def test_a_stream_opens_for_a_version_that_was_overtaken_in_flight_until_a_strict_install(
    rollout, assignments, publish
):
    """Its opening may have been on the way while the next version was installed."""
    await rollout.install(publish(tiny_model(seed=3), 2), in_flight=True)
    finished = await (await rollout.generate(assignments[:1], policy_number=1).start()).read_all()
    assert {t.branches[0].segments[1].policy_number for t in finished.values()} == {2}
    await rollout.install(publish(tiny_model(seed=4), 3))
    call = await rollout.generate(assignments[:1], policy_number=2).start()
    await refused(call.read_all(), "POLICY_MISMATCH", "version 2 is wanted and 3 is installed")


def _renumbered(group, ordinal):
    found = rollout_pb2.GroupAssignment()
    found.CopyFrom(group)
    found.prompt_ordinal = ordinal
    return found
