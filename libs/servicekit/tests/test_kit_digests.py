"""Digests: what they cover, and what they do not depend on."""

import random
from functools import partial

import pytest
from headrace.common.v1 import common_pb2
from headrace_servicekit.rpc import digests
from headrace_servicekit.rpc.digests import (
    digest_and_size,
    digest_bytes,
    digest_stretch,
    in_threads,
    joined_digest,
    manifest_digest,
    set_digest,
    stretches,
    tensor_digest,
    trajectory_digest,
)
from hypothesis import given, settings
from hypothesis import strategies as st


def trajectory(**changes):
    tokens = common_pb2.TokenSegment(token_ids=[5, 6], log_probs=[-0.5, -1.5])
    observation = {f"camera{i}": common_pb2.Tensor(shape=[i]) for i in range(20)}
    actions = common_pb2.ActionSegment(observation=observation)
    fields = {
        "sample": common_pb2.SlotKey(prompt_ordinal=3, sample_index=1),
        "attempt": 2,
        "branches": [
            common_pb2.Branch(
                segments=[common_pb2.Segment(tokens=tokens), common_pb2.Segment(actions=actions)]
            )
        ],
        "completion_text": "five six",
        "producer": "p",
    }
    return common_pb2.Trajectory(**{**fields, **changes})


def test_known_digest_of_bytes():
    assert digest_bytes(b"") == "99aa06d3014798d86001c324468d497f"


@given(size=st.integers(0, 40), threads=st.integers(1, 4))
@settings(deadline=None, max_examples=60)
def test_a_tensors_digest_does_not_depend_on_threads(size, threads):
    data, before = memoryview(random.Random(size).randbytes(size)), digests.STRETCH_BYTES
    digests.STRETCH_BYTES = 8
    try:
        parts = [b""] * len(stretches(size))
        in_threads(
            [partial(take, parts, place, data[a:b]) for place, (a, b) in enumerate(stretches(size))], threads
        )
        assert joined_digest(parts) == tensor_digest(data)
        assert size > 8 or tensor_digest(data) == digest_bytes(data)
        assert size == 0 or tensor_digest(data) != tensor_digest(memoryview(bytes([data[0] ^ 1, *data[1:]])))
    finally:
        digests.STRETCH_BYTES = before


def take(parts, place, piece):
    parts[place] = digest_stretch(piece)


def test_what_one_thread_raises_comes_when_the_others_are_done():
    done = []

    def act(index):
        if index in (3, 5):
            raise ValueError(index)
        done.append(index)

    with pytest.raises(ValueError, match="3"):
        in_threads([partial(act, index) for index in range(9)], 3)
    assert sorted(done) == [0, 1, 2, 4, 6, 7, 8]


def test_a_trajectorys_digest_covers_its_body_and_not_the_text():
    body = trajectory()
    digest = trajectory_digest(body)
    texts = {"completion_text": "other", "raw_prompt_text": "a", "images": [common_pb2.Image(data=b"file")]}
    assert trajectory_digest(trajectory(**texts, body_digest="x")) == digest
    assert body.completion_text == "five six"
    for changed in ({"attempt": 3}, {"producer": "q"}, {"branches": []}):
        assert trajectory_digest(trajectory(**changed)) != digest


def test_a_trajectorys_digest_does_not_depend_on_the_order_of_maps():
    one, other = trajectory(), trajectory()
    observation = other.branches[0].segments[1].actions.observation
    saved = sorted(observation.items(), reverse=True)
    observation.clear()
    for key, value in saved:
        observation[key].CopyFrom(value)
    assert trajectory_digest(one) == trajectory_digest(other)


@settings(deadline=None)
@given(st.text(max_size=300), st.text(max_size=3), st.text(max_size=40), st.booleans())
def test_a_trajectorys_digest_is_that_of_the_serialised_body(text, producer, digest, unknown):
    body = trajectory(completion_text=text, producer=producer, body_digest=digest)
    plain = trajectory(completion_text="", producer=producer)
    if unknown:  # a field of a newer contract: number 99, a varint
        for message in (body, plain):
            message.MergeFromString(b"\x98\x06\x05")
    assert trajectory_digest(body) == digest_bytes(plain.SerializeToString(deterministic=True))
    assert digest_and_size(body) == (trajectory_digest(body), body.ByteSize())


members = st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(1, 3), st.sampled_from(["a", "b"]))


@settings(deadline=None)
@given(st.sets(members), st.randoms(use_true_random=False))
def test_a_set_digest_is_free_of_order_and_sees_every_member(chosen, rng: random.Random):
    shuffled = list(chosen)
    rng.shuffle(shuffled)
    assert set_digest(shuffled) == set_digest(sorted(chosen))
    if shuffled:
        assert set_digest(shuffled[1:]) != set_digest(shuffled)


def test_a_set_digest_sees_doubles():
    assert set_digest([(1, 0, 1, "a")]) != set_digest([(1, 0, 1, "a"), (1, 0, 1, "a")])


def test_a_manifests_digest_sees_names_types_shapes_digests_and_order():
    first = common_pb2.WeightEntry(name="w", data_type=9, shape=[2, 3], digest="d")
    second = common_pb2.WeightEntry(name="b", data_type=9, shape=[3], digest="e")
    whole = manifest_digest([first, second])
    assert manifest_digest([second, first]) != whole
    for change in ({"name": "v"}, {"data_type": 8}, {"shape": [3, 2]}, {"digest": "f"}):
        fields = {"name": "w", "data_type": 9, "shape": [2, 3], "digest": "d", **change}
        assert manifest_digest([common_pb2.WeightEntry(**fields), second]) != whole
