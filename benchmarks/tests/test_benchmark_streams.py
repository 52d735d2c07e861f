"""The arithmetic of chunk_stream and weight_sync, on made-up times, and a few real messages."""

import chunk_stream
import pytest
import weight_sync
from chunk_stream import INLINE, MESSAGE, ONE, PIPELINED, REFERENCE, best_of, rate
from weight_sync import BOTH, COLLECTIVE, DELTA, GRPC, SHM, Sync


def test_one_outstanding_is_the_inverse_of_the_median_and_pipelined_the_median_of_the_steps():
    steps = [[(0.0, 0.1), (1.0, 1.2)], [(5.0, 5.3)]]
    assert rate(steps, ONE) == pytest.approx(1 / 0.2)
    assert rate([[(0.0, 1.0), (0.5, 2.0)], [(7.0, 8.0)], [(0.0, 9.0)] * 3], PIPELINED) == pytest.approx(1.0)


def rates(one, pipelined):
    return {
        (kind, name): value
        for kind in chunk_stream.SIZES
        for name, value in ((ONE, one), (PIPELINED, pipelined))
    }


def test_a_system_is_taken_at_its_best_round_and_a_figure_at_its_worse_pattern():
    rounds = [
        {"headrace": rates(90.0, 4000.0), "rlinf": rates(20.0, 100.0), "queue": rates(30.0, 500.0)},
        {"headrace": rates(100.0, 3000.0), "rlinf": rates(10.0, 200.0), "queue": rates(50.0, 400.0)},
    ]
    best = best_of(rounds)
    assert best["headrace"][MESSAGE, ONE] == 100.0 and best["headrace"][REFERENCE, PIPELINED] == 4000.0
    figures = chunk_stream.figures(best)
    assert figures["messages_vs_rlinf"] == pytest.approx(100 / 20)
    assert figures["bytes_inline_vs_ray_queue"] == pytest.approx(100 / 50)
    best["headrace"][INLINE, PIPELINED] = 300.0
    assert chunk_stream.figures(best)["bytes_inline_vs_rlinf"] == pytest.approx(300 / 200)


def sync(memcpy, cast, install, pause=0.01):
    parts = {SHM: install, GRPC: 3 * install, DELTA: 2 * install, COLLECTIVE: 4 * install, BOTH: 2 * install}
    moved = {SHM: 0, GRPC: 1000, DELTA: round(1000 * memcpy), COLLECTIVE: 1000, BOTH: round(2000 * memcpy)}
    pauses = {SHM: pause, GRPC: 2 * pause, DELTA: pause, COLLECTIVE: pause, BOTH: pause}
    return Sync(memcpy, 2 * memcpy, cast, 0.0, parts, parts, pauses, moved)


def test_a_sync_is_all_from_the_cast_to_the_reply_and_counts_at_its_fastest():
    syncs = [sync(0.02, 0.05, 0.05, 0.3), sync(0.03, 0.04, 0.04, 0.01), sync(0.04, 0.1, 0.1, 0.02)]
    figures = weight_sync.figures(syncs, 1000)
    assert figures["shm_s"] == pytest.approx(0.08) and figures["grpc_s"] == pytest.approx(0.16)
    assert figures["shm_vs_memcpy"] == pytest.approx(0.02 / 0.08)
    assert figures["grpc_vs_memcpy"] == pytest.approx(0.02 / 0.16)
    assert figures["pause_ms"] == pytest.approx(40)
    assert figures["shm_vs_bound"] == pytest.approx(0.04 / 0.08)
    assert figures["delta_bytes_vs_full"] == pytest.approx(0.04)
    assert figures["collective_delta_bytes_vs_full"] == pytest.approx(0.08)


def test_the_messages_have_the_sizes_that_they_claim():
    from _chunk_services import Producer
    from headrace.common.v1 import common_pb2

    producer = object.__new__(Producer)
    producer._data = bytes(chunk_stream.SIZES[INLINE])
    for kind in (MESSAGE, INLINE):
        producer._kind, body = kind, common_pb2.Trajectory()
        producer._fill(body)
        assert 0.95 < body.ByteSize() / chunk_stream.SIZES[kind] < 1.1


def test_messages_of_every_kind_and_pattern_go_through_the_coordinator():
    with chunk_stream.services() as coordinator:
        found = chunk_stream.headrace(coordinator, dict.fromkeys(chunk_stream.SIZES, 4), steps=1)
        costs = chunk_stream.answers(coordinator, 16, steps=1)
    assert found.keys() == rates(1.0, 1.0).keys() and min(found.values()) > 0
    assert costs["coordinator_us_per_answer"] / costs["coordinator_us_per_token"] == pytest.approx(192)
