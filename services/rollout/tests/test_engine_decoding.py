"""What the engine samples, against Hugging Face's own forward pass and generate."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import torch
from headrace_modelkit.logprobs import token_log_probs
from headrace_rollout.engines.base import Policy, Refused
from headrace_rollout.engines.samples import Distribution, Finish, Group, Prefix, Sample, SlotKey
from headrace_rollout.streams.generation import _failed
from headrace_servicekit import failpoints


def tokens_of(outputs):
    return {key: list(output.whole.token_ids) for key, output in outputs.items()}


def reference_log_probs(reference, output, temperature):
    ids = [*output.prompt_ids, *output.whole.token_ids]
    with torch.no_grad():
        logits = reference(torch.tensor([ids])).logits
    start = len(output.prompt_ids)
    return token_log_probs(logits[:, start - 1 : -1], torch.tensor([ids[start:]]), temperature)[0].tolist()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_log_probs_equal_the_references_for_mixed_lengths(
    engine, collector, groups, reference, temperature
):
    await engine.submit(collector.stream(Distribution(temperature)), groups)
    outputs = await collector.wait_ended(15)
    lengths = {len(output.whole.token_ids) for output in outputs.values()}
    assert len(lengths) > 3, "the answers should end at different tokens"
    for output in outputs.values():
        expected = reference_log_probs(reference, output, temperature)
        assert output.whole.log_probs == pytest.approx(expected, abs=1e-4)


async def test_greedy_equals_generate_and_reports_log_probs_at_temperature_one(
    engine, collector, groups, reference
):
    await engine.submit(collector.stream(Distribution(0.0), max_new_tokens=10), groups)
    for output in (await collector.wait_ended(15)).values():
        prompt = torch.tensor([output.prompt_ids])
        whole = reference.generate(prompt, max_new_tokens=10, do_sample=False, pad_token_id=0)
        assert list(output.whole.token_ids) == whole[0, prompt.shape[1] :].tolist()
        assert output.whole.log_probs == pytest.approx(reference_log_probs(reference, output, 1.0), abs=1e-4)


async def test_samples_do_not_depend_on_their_neighbours(new_engine, new_collector, groups):
    together = new_collector()
    await (await new_engine(16)).submit(together.stream(), groups)
    expected = tokens_of(await together.wait_ended(15))
    for rows, order in ((2, groups), (16, groups[::-1]), (5, groups[2:] + groups[:2])):
        alone = new_collector()
        await (await new_engine(rows)).submit(alone.stream(), order)
        assert tokens_of(await alone.wait_ended(15)) == expected


async def test_a_join_in_mid_batch_changes_nobodys_tokens(new_engine, new_collector, groups):
    calm = new_collector()
    await (await new_engine()).submit(calm.stream(Distribution(0.9)), groups)
    expected = tokens_of(await calm.wait_ended(15))

    engine, joined = await new_engine(), new_collector()
    stream = joined.stream(Distribution(0.9), chunk_tokens=1)
    for group in groups:
        before = len(joined.outputs)
        await engine.submit(stream, [group])
        await joined.wait(lambda c, before=before: len(c.outputs) > before)
    assert tokens_of(await joined.wait_ended(15)) == expected


async def test_a_groups_prompt_is_computed_once(new_engine, new_collector, groups):
    # Four rows: the groups' members join in several portions.
    engine, collector = await new_engine(4), new_collector()
    await engine.submit(collector.stream(), groups)
    await collector.wait_ended(15)
    computed = sum(len(group.prompt_ids) for group in groups)
    assert engine.figures.prefill_tokens == computed
    assert engine.figures.shared_prompt_tokens == 2 * computed


async def test_other_seeds_and_other_samples_differ(engine, new_collector, groups):
    found = []
    for seed in (1, 2):
        collector = new_collector()
        await engine.submit(collector.stream(seed=seed), groups[:1])
        found.append(tokens_of(await collector.wait_ended(3)))
    assert len({tuple(tokens) for samples in found for tokens in samples.values()}) == 6


async def test_an_aborted_sample_goes_on_elsewhere_as_if_it_had_not_stopped(
    new_engine, new_collector, groups, resumed
):
    calm = new_collector()
    await (await new_engine()).submit(calm.stream(), groups)
    expected = await calm.wait_ended(15)

    engine, first = await new_engine(), new_collector()
    await engine.submit(first.stream(chunk_tokens=4), groups)
    await first.wait(lambda c: len(c.outputs) > 4)
    assert await engine.abort(None) > 0
    await first.wait_ended(15)
    partials = {key: output for key, output in first.ended().items() if output.stopped}
    assert any(output.whole.token_ids for output in partials.values())

    second = new_collector()
    for group in groups:
        samples = [s for s in group.samples if SlotKey(group.prompt_ordinal, s.sample_index) in partials]
        rest = resumed(Group(group.prompt_ordinal, group.prompt_ids, samples), partials)
        await (await new_engine()).submit(second.stream(), [rest])
    finished = {**first.ended(), **(await second.wait_ended(len(partials)))}
    assert tokens_of(finished) == tokens_of(expected)
    for key, output in finished.items():
        assert output.whole.log_probs == pytest.approx(expected[key].whole.log_probs, abs=1e-5)
        kept = partials[key].whole.log_probs if key in partials else []
        assert list(output.whole.log_probs[: len(kept)]) == list(kept), "a prefix is never scored again"


async def test_a_moved_sample_goes_on_with_what_was_computed_of_it(
    new_engine, new_collector, groups, resumed
):
    """Its context is not computed again, and the answer is the one of a sample that stayed."""
    calm, first, second = new_collector(), new_collector(), new_collector()
    options = {"distribution": Distribution(repetition_penalty=1.3), "stop": ("99",)}
    await (await new_engine()).submit(calm.stream(**options), groups)
    expected = await calm.wait_ended(15)

    engine, stream = await new_engine(), first.stream(chunk_tokens=4, **options)
    await engine.submit(stream, groups)
    await first.wait(lambda c: len(c.outputs) > 4)
    stream.moving.set()
    await engine.abort(None, stream=stream)
    await first.wait_ended(15)
    partials = {key: output for key, output in first.ended().items() if output.stopped}
    assert partials and all(output.cache for output in partials.values())

    other = await new_engine()
    for group in groups:
        samples = [s for s in group.samples if SlotKey(group.prompt_ordinal, s.sample_index) in partials]
        if samples:
            rest = resumed(replace(group, samples=samples), partials)
            await other.submit(second.stream(**options), [rest])
    finished = {**first.ended(), **(await second.wait_ended(len(partials)))}
    assert tokens_of(finished) == tokens_of(expected)
    contexts = sum(len(each.prompt_ids) + len(each.whole.token_ids) for each in partials.values())
    assert (other.figures.prefill_tokens, other.figures.moved_tokens) == (0, contexts)


async def test_a_sample_whose_lease_is_away_leaves_what_was_computed_of_it(new_engine, new_collector, groups):
    engine, collector, held = await new_engine(), new_collector(), [True]
    await engine.submit(collector.stream(chunk_tokens=4, holds=lambda: held[0], max_new_tokens=80), groups)
    await collector.wait(lambda c: len(c.outputs) > 4)
    held[0] = False
    stopped = [output for output in (await collector.wait_ended(15)).values() if output.stopped]
    assert stopped and all(output.cache for output in stopped)


async def test_what_other_weights_computed_is_computed_again(
    new_engine, new_collector, groups, resumed, weights
):
    engine, first = await new_engine(), new_collector()
    stream = first.stream(chunk_tokens=4)
    await engine.submit(stream, groups[:1])
    await first.wait(lambda c: len(c.outputs) > 2)
    stream.moving.set()
    await engine.abort(None, stream=stream)
    partials = await first.wait_ended(3)
    for digest, computed in (("other", True), ("one", False)):
        other, second = await new_engine(install=False), new_collector()
        await other.install(Policy(1, digest), weights)
        await other.submit(second.stream(), [resumed(groups[0], partials)])
        await second.wait_ended(3)
        assert bool(other.figures.prefill_tokens) is computed, digest


async def test_a_prefix_keeps_its_versions(new_engine, new_collector, groups, weights):
    engine, collector = await new_engine(install=False), new_collector()
    await engine.install(Policy(5, "five"), weights)
    prefix = Prefix([5, 6, 7], [-1.0, -2.0, -3.0], [(3, 2), (4, 1)])
    group = Group(0, groups[0].prompt_ids, [Sample(0, 2, prefix)])
    await engine.submit(collector.stream(policy_number=5, max_new_tokens=6), [group])
    (output,) = (await collector.wait_ended(1)).values()
    assert output.offset == 3 and len(output.whole.token_ids) == 3 + len(output.token_ids)
    assert output.whole.spans == [(3, 2), (4, 1), (5, len(output.token_ids))]


async def test_ends_are_eos_length_and_prompt_too_long(engine, collector, groups, codec):
    await engine.submit(collector.stream(max_new_tokens=24), groups)
    await engine.submit(
        collector.stream(max_new_tokens=200),
        [
            Group(50, [7] * 120, [Sample(0, 1)]),
            Group(51, [7] * 127, [Sample(0, 1)]),
            Group(52, [7] * 128, [Sample(0, 1)]),
            Group(53, [], [Sample(0, 1)]),
            Group(54, [99], [Sample(0, 1)]),
        ],
    )
    outputs = await collector.wait_ended(20)
    finishes = set()
    for key, output in outputs.items():
        ids = output.whole.token_ids
        finishes.add(output.finish)
        if output.finish is Finish.EOS:
            assert ids[-1] in codec.eos_ids and not set(ids[:-1]) & codec.eos_ids
        if output.finish is Finish.LENGTH:
            assert len(ids) == {50: 8, 51: 1}.get(key.prompt_ordinal, 24)
            assert not set(ids) & codec.eos_ids
    assert {Finish.EOS, Finish.LENGTH} <= finishes
    assert outputs[SlotKey(52, 0)].finish is Finish.PROMPT_TOO_LONG
    assert outputs[SlotKey(53, 0)].finish is Finish.ERROR
    assert outputs[SlotKey(54, 0)].finish is Finish.ERROR
    assert not outputs[SlotKey(52, 0)].whole.token_ids


async def test_a_prefix_that_is_at_its_end_ends_at_once(engine, collector, groups):
    eos = Prefix([5, 1], [-1.0, -1.0], [(1, 2)])
    full = Prefix([5] * 4, [-1.0] * 4, [(1, 4)])
    group = Group(0, groups[0].prompt_ids, [Sample(0, 2, eos), Sample(1, 2, full)])
    await engine.submit(collector.stream(max_new_tokens=4), [group])
    outputs = await collector.wait_ended(2)
    assert outputs[SlotKey(0, 0)].finish is Finish.EOS
    assert outputs[SlotKey(0, 1)].finish is Finish.LENGTH
    assert list(outputs[SlotKey(0, 1)].whole.token_ids) == [5] * 4


async def test_stop_strings_cut_ids_and_log_probs_together(engine, new_collector, groups, codec):
    free = new_collector()
    await engine.submit(free.stream(), groups)
    plain = await free.wait_ended(15)
    longest = max(plain.values(), key=lambda output: len(output.whole.token_ids))
    ids = list(longest.whole.token_ids)

    def text(ids):
        return codec.decode(ids, skip_special_tokens=False)

    stop = text(ids[4:7])
    start = text(ids).index(stop)
    cut = max(count for count in range(len(ids)) if len(text(ids[:count])) <= start)

    for chunk_tokens in (0, 1):
        stopped = new_collector()
        await engine.submit(stopped.stream(stop=(stop,), chunk_tokens=chunk_tokens), groups)
        outputs = await stopped.wait_ended(15)
        output = outputs[longest.key]
        assert output.finish is Finish.STOP
        assert list(output.whole.token_ids) == ids[:cut]
        assert list(output.whole.log_probs) == pytest.approx(longest.whole.log_probs[:cut], abs=1e-5)
        pieces = [o for o in stopped.outputs if o.key == longest.key]
        assert [i for piece in pieces for i in piece.token_ids] == ids[:cut]
        for other in outputs.values():
            assert stop not in text(other.whole.token_ids)


async def test_an_answer_that_begins_with_the_stop_string_is_empty(engine, new_collector, groups, codec):
    free = new_collector()
    await engine.submit(free.stream(), groups[:1])
    (output, *_) = (await free.wait_ended(3)).values()
    stopped = new_collector()
    stop = codec.decode(output.whole.token_ids[:2], skip_special_tokens=False)
    await engine.submit(stopped.stream(stop=(stop,)), groups[:1])
    empty = (await stopped.wait_ended(3))[output.key]
    assert empty.finish is Finish.STOP and not empty.whole.token_ids and not empty.whole.log_probs


async def test_chunks_join_to_the_answer(engine, collector, groups):
    await engine.submit(collector.stream(chunk_tokens=3), groups)
    whole = await collector.wait_ended(15)
    for key, output in whole.items():
        pieces = [piece for piece in collector.outputs if piece.key == key]
        assert [piece.offset for piece in pieces] == [3 * index for index in range(len(pieces))]
        assert all(len(piece.token_ids) == 3 for piece in pieces[:-1])
        assert [i for piece in pieces for i in piece.token_ids] == list(output.whole.token_ids)
        assert [p for piece in pieces for p in piece.log_probs] == list(output.whole.log_probs)


async def test_rows_of_one_batch_keep_their_own_distribution(engine, new_collector, groups, reference):
    hot, cold = new_collector(), new_collector()
    await engine.submit(hot.stream(Distribution(2.0), chunk_tokens=1, max_new_tokens=60), groups)
    await hot.wait(lambda c: len(c.outputs) > 15)
    stream = cold.stream(Distribution(0.4), max_new_tokens=60)
    for group in groups:
        await engine.submit(stream, [group])
        await asyncio.sleep(0.01)
    for collector, temperature in ((hot, 2.0), (cold, 0.4)):
        for output in (await collector.wait_ended(15)).values():
            expected = reference_log_probs(reference, output, temperature)
            assert output.whole.log_probs == pytest.approx(expected, abs=1e-4)


async def test_pause_gives_everything_back_and_later_groups_too(engine, collector, groups):
    stream = collector.stream(chunk_tokens=1, max_new_tokens=80)
    await engine.submit(stream, groups)
    await collector.wait(lambda c: len(c.outputs) > 15)
    count = await engine.pause()
    assert count == sum(output.stopped for output in (await collector.wait_ended(15)).values()) > 0
    await engine.submit(stream, [Group(77, groups[0].prompt_ids, [Sample(0, 1)])])
    late = (await collector.wait_ended(16))[SlotKey(77, 0)]
    assert late.stopped and not late.whole.token_ids
    await engine.resume()
    await engine.submit(stream, [Group(78, groups[0].prompt_ids, [Sample(0, 1)])])
    assert (await collector.wait_ended(17))[SlotKey(78, 0)].finish is not None


async def test_abort_ends_only_what_it_names(engine, new_collector, groups):
    mine, other = new_collector(), new_collector()
    await engine.submit(mine.stream(max_new_tokens=90), groups[:2])
    await engine.submit(other.stream(max_new_tokens=90, seed=3), groups[2:3])
    await engine.abort([SlotKey(0, 1), SlotKey(99, 9)])
    outputs = await mine.wait_ended(6)
    assert [key for key, output in outputs.items() if output.stopped] in ([SlotKey(0, 1)], [])
    assert not any(output.stopped for output in (await other.wait_ended(3)).values())


async def test_a_failed_round_fails_its_streams_and_the_engine_lives_on(
    engine, new_collector, groups, weights
):
    broken, fine = new_collector(), new_collector()
    failpoints.arm("rollout.round=error@2")
    try:
        await engine.submit(broken.stream(), groups[:1])
        async with asyncio.timeout(10):
            while not broken.failures:
                await broken.changed.wait()
    finally:
        failpoints.arm("")
    assert "rollout.round" in broken.failures[0]
    await engine.install(Policy(2, "two"), weights)  # refused while a sequence lives
    await engine.submit(fine.stream(policy_number=2), groups[:1])
    assert len(await fine.wait_ended(3)) == 3


async def test_a_device_without_memory_gets_half_the_rows_once_and_then_the_run_ends(
    engine, new_collector, groups, weights, monkeypatch
):
    decode, most = engine._model.decode, engine._rows.most

    def full(tokens_NT, *arguments):
        if len(tokens_NT) > room:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        return decode(tokens_NT, *arguments)

    async def failure() -> str:
        collector = new_collector()
        await engine.submit(collector.stream(), groups[:3])
        async with asyncio.timeout(30):
            while not collector.failures:
                await collector.changed.wait()
        return collector.failures[0]

    monkeypatch.setattr(engine._model, "decode", full)
    room = most // 2
    reason = await failure()
    assert "CUDA out of memory" in reason and f"goes on with {most // 2} samples" in reason
    assert _failed(reason).reason == "ENGINE_FAILED"  # made again, with fewer at once
    fine = new_collector()
    await engine.submit(fine.stream(), groups[:3])
    assert len(await fine.wait_ended(9)) == 9

    room = 0
    ends = _failed(await failure())
    assert ends.reason == "INVALID" and ends.metadata["key"] == "rollout.max_concurrency"
    assert f"lower rollout.max_concurrency (now {most // 2})" in ends.message


async def test_the_event_loop_stays_responsive_while_it_decodes(engine, new_collector, groups):
    for _ in range(3):  # A busy machine may hold the loop once; what decodes on it holds it each time.
        collector, longest = new_collector(), 0.0
        await engine.submit(collector.stream(max_new_tokens=80), groups)
        while len(collector.ended()) < 15:
            start = asyncio.get_running_loop().time()
            await asyncio.sleep(0.001)
            longest = max(longest, asyncio.get_running_loop().time() - start)
        if longest < 0.25:
            return
    pytest.fail(f"the loop stood still for {longest:.2f} s")


@pytest.mark.parametrize("limit", [0, 1])
async def test_scores_equal_the_sampled_log_probs(engine, collector, groups, limit):
    distribution = Distribution(0.8)
    await engine.submit(collector.stream(distribution), groups)
    outputs = list((await collector.wait_ended(15)).values())
    sequences = [([*o.prompt_ids, *o.whole.token_ids], len(o.prompt_ids)) for o in outputs]
    scored, number = await engine.score(sequences[limit:], distribution)
    assert number == 1
    for output, values in zip(outputs[limit:], scored, strict=True):
        assert values == pytest.approx(output.whole.log_probs, abs=1e-4)


async def test_scoring_refuses_what_it_cannot_score(engine):
    for sequence in (([5, 6], 0), ([5, 6], 3), ([5, 99], 1), ([5] * 200, 1)):
        with pytest.raises(Refused, match=r"sequences\[0\]"):
            await engine.score([sequence], Distribution())
