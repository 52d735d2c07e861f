"""The engine's keys and values: in buckets of like rows, within a budget, freed when long rows leave."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from headrace_rollout.engines import ENGINES
from headrace_rollout.engines.base import EngineConfig, Policy, Refused
from headrace_rollout.engines.samples import Distribution, Group, Sample
from headrace_rollout.engines.transformers.attention import Parts
from headrace_rollout.engines.transformers.buckets import PADDED, STEP, arrange, tokens_of
from headrace_rollout.engines.transformers.engine import TransformersEngine

LONG, SHORT = 440, 12


@pytest.fixture
def mixed(groups) -> list[Group]:
    """One prompt of 440 tokens and eight of 12."""
    ids = groups[2].prompt_ids
    long = Group(0, (list(ids) * 40)[:LONG], [Sample(0, 1)])
    return [long, *(Group(n, [*ids[:11], 20 + n], [Sample(0, 1)]) for n in range(1, 9))]


@pytest.fixture
async def build(in_step, model_config, weights, codec):
    """An engine over 512 tokens with options, and what its cache takes at each output."""
    engines = []

    async def build(rows: int = 16, *, free_bytes: int = 0, **options):
        model = model_config.model_copy(update={"max_context": 512})
        engine = ENGINES.choose("transformers", options).build(EngineConfig(model, codec, rows))
        engines.append(engine)
        engine._decoder.model.cache.free_bytes = free_bytes
        await engine.install(Policy(1, "one"), weights)
        return engine

    yield build
    for engine in engines:
        await engine.close()


def watched(engine, collector, **options):
    """A stream, and a list of (bytes of the cache, bytes that its rows need) at each of its outputs."""
    seen, stream = [], collector.stream(chunk_tokens=1, **options)
    decoder = engine._decoder
    cache, batch = decoder.model.cache, decoder._batch

    def sink(outputs):
        needed = int(batch.length[: batch.count].sum() + batch.count) * cache.token_bytes
        seen.append((cache.size_bytes, needed))
        collector.sink(outputs)

    return replace(stream, sink=sink), seen


def answers(outputs):
    return {key: list(output.whole.token_ids) for key, output in outputs.items()}


def test_buckets_hold_every_row_once_and_little_else():
    draw = random.Random(3)
    for count in range(1, 60):
        lengths = [draw.choice((draw.randint(1, 90), draw.randint(1, 2000))) for _ in range(count)]
        shapes = arrange(lengths, free=0, budget=1 << 40, split=True)
        assert sorted(row for shape in shapes for row in shape.rows) == list(range(count))
        for shape in shapes:
            longest = max(lengths[row] for row in shape.rows)
            assert longest + STEP <= shape.capacity <= longest + max(STEP, longest // 8)
        room = sum(shape.tokens - len(shape.rows) * max(lengths[r] for r in shape.rows) for shape in shapes)
        assert tokens_of(shapes) - room <= PADDED * sum(lengths)


def test_a_budget_takes_the_room_to_grow_first_and_all_padding_then():
    lengths = [1800, *[76] * 8, 90]
    needed = sum(length + 1 for length in lengths)
    roomy = tokens_of(arrange(lengths, free=0, budget=1 << 40, split=True))
    assert needed < roomy < 1.3 * needed
    assert tokens_of(arrange(lengths, free=0, budget=roomy - 1, split=True)) == needed
    (one,) = arrange(lengths, free=1 << 40, budget=1 << 40, split=True)
    assert one.rows == list(range(10)), "where memory is small nothing is split"
    assert len(arrange(lengths, free=0, budget=1 << 40, split=False)) == 1


async def test_mixed_lengths_take_what_they_need_and_sample_the_same(build, new_collector, mixed):
    found = []
    for free_bytes in (0, 1 << 40):
        engine, collector = await build(free_bytes=free_bytes), new_collector()
        stream, seen = watched(engine, collector, max_new_tokens=40)
        await engine.submit(stream, mixed)
        found.append((await collector.wait_ended(9), max(seen)))
    (split, (taken, needed)), (whole, (once, _)) = found
    assert taken < 1.9 * needed, "eight rows of 12 tokens have room for 32 more each"
    assert once > 4 * taken
    assert answers(split) == answers(whole)
    for key, output in split.items():
        assert output.whole.log_probs == pytest.approx(whole[key].whole.log_probs, abs=1e-5)


async def test_several_buckets_are_attended_one_by_one(build, collector, mixed, monkeypatch):
    engine, parts = await build(), []
    cache = engine._decoder.model.cache
    update = cache.update

    def noted(*arguments):
        keys, values = update(*arguments)
        parts.append(len(keys.tensors) if isinstance(keys, Parts) else 1)
        return keys, values

    monkeypatch.setattr(cache, "update", noted)
    await engine.submit(collector.stream(max_new_tokens=8), mixed)
    await collector.wait_ended(9)
    assert max(parts) == 2


async def test_memory_shrinks_when_the_long_row_leaves(build, new_collector, mixed):
    engine, collector = await build(), new_collector()
    stream, seen = watched(engine, collector, max_new_tokens=60)
    await engine.submit(stream, mixed)
    await collector.wait(lambda c: len(c.outputs) > 20)
    before = max(taken for taken, _ in seen)
    await engine.abort([next(o.key for o in collector.outputs if o.key.prompt_ordinal == 0)])
    await collector.wait(lambda c: len(c.ended()) > 7)
    assert seen[-1][0] < before / 2
    await collector.wait_ended(9)
    assert engine.kv_bytes == 0, "the last row's end gives everything back"


async def test_waiting_samples_join_when_there_is_room_and_the_budget_holds(build, new_collector, groups):
    free, fine = await build(), new_collector()
    await free.submit(fine.stream(max_new_tokens=20), groups)
    expected = answers(await fine.wait_ended(15))
    budget = 150 * free.kv_token_bytes
    engine, collector = await build(kv_cache_bytes=budget), new_collector()
    stream, seen = watched(engine, collector, max_new_tokens=20)
    await engine.submit(stream, groups)
    await collector.wait(lambda c: c.outputs)
    assert answers(await collector.wait_ended(15)) == expected
    assert 0 < max(taken for taken, _ in seen) <= budget
    assert engine.figures.decode_rows > engine.figures.decode_steps, "more than one fit at a time"


async def test_a_lone_sequence_may_take_the_whole_budget(build, new_collector, mixed):
    free, fine = await build(), new_collector()
    await free.submit(fine.stream(max_new_tokens=20), mixed)
    expected = answers(await fine.wait_ended(9))
    budget = (LONG + 20) * free.kv_token_bytes
    engine, collector = await build(kv_cache_bytes=budget), new_collector()
    stream, seen = watched(engine, collector, max_new_tokens=20)
    await engine.submit(stream, mixed)
    assert answers(await collector.wait_ended(9)) == expected
    assert max(taken for taken, _ in seen) <= budget


async def test_what_can_never_fit_is_refused_before_anything_is_queued(build, new_collector, mixed):
    free, fine = await build(), new_collector()
    await free.submit(fine.stream(max_new_tokens=2), mixed[1:])
    budget = 300 * free.kv_token_bytes
    engine, collector = await build(kv_cache_bytes=budget), new_collector()
    with pytest.raises(Refused, match=rf"kv_cache_bytes allows {budget}.*max_new_tokens") as refused:
        await engine.submit(collector.stream(max_new_tokens=20), mixed[::-1])
    assert refused.value.reason == "INVALID" and not engine._decoder.living
    await engine.submit(collector.stream(max_new_tokens=20), mixed[1:])
    assert len(await collector.wait_ended(8)) == 8


async def test_a_wave_is_bitwise_the_same_whatever_ran_before(build, new_collector, mixed):
    found = []
    for worked_before in (False, True):
        engine = await build()
        if worked_before:
            other = new_collector()
            await engine.submit(other.stream(Distribution(0.5), max_new_tokens=30, seed=9), mixed[2:])
            await other.wait_ended(7)
        collector = new_collector()
        await engine.submit(collector.stream(max_new_tokens=40), mixed)
        outputs = await collector.wait_ended(9)
        found.append({key: (list(o.whole.token_ids), list(o.whole.log_probs)) for key, o in outputs.items()})
    assert found[0] == found[1]


def test_what_an_instance_registers_of_the_engine_is_what_the_engine_offers():
    capabilities = vars(TransformersEngine.capabilities).items()
    offered = {name for name, value in capabilities if value and name != "files"}  # a part of `images`
    assert set(ENGINES.find("transformers").features) == offered
    assert "transformers:deterministic" in ENGINES.features(["transformers", "vllm", "nobody"])
    assert not any(text.startswith("vllm:determ") for text in ENGINES.features(["vllm"]))


async def test_rows_that_join_move_none_of_those_that_run(build, new_collector, mixed, monkeypatch):
    free, fine = await build(), new_collector()
    await free.submit(fine.stream(max_new_tokens=30), mixed)
    expected = answers(await fine.wait_ended(9))
    engine, collector, places = await build(), new_collector(), []
    cache = engine._decoder.model.cache
    join = cache.join

    def noted(lengths, contexts):
        before = [bucket.layers[0][0].data_ptr() for bucket in cache.buckets]
        join(lengths, contexts)
        places.append((before, [bucket.layers[0][0].data_ptr() for bucket in cache.buckets]))

    monkeypatch.setattr(cache, "join", noted)
    stream = collector.stream(chunk_tokens=1, max_new_tokens=30)
    for group in (mixed[0], mixed[1:]):  # the short ones come while the long one runs
        await engine.submit(stream, group if isinstance(group, list) else [group])
        await collector.wait(lambda c: len(c.outputs) > 2)
    assert answers(await collector.wait_ended(9)) == expected
    (_, first), (before, after) = places
    assert before == first and after[: len(before)] == before and len(after) > len(before)
