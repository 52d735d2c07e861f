"""What every engine does alike, against Hugging Face in fp32; the environment variable ENGINE picks the engine."""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from headrace_modelkit.presets.tiny import character_tokenizer
from headrace_rollout.engines.base import Policy, Refused, Scope
from headrace_rollout.engines.samples import Distribution, Finish, Group, Prefix, Sample, SlotKey
from rig import START_S, Collector, expected_log_probs, group, tokens

pytestmark = pytest.mark.timeout(START_S)

PROMPTS = [[5, 6, 7], [3, 4, 5, 6, 7, 8, 9, 10], [11] * 40, [12, 3, 12, 3, 9], [20, 21, 22, 23]]
LONG = [3 + index % 20 for index in range(300)]
"""Longer than any engine's cache block, so that its prefix is cached."""


def groups(samples: int = 3) -> list[Group]:
    return [group(ordinal, ids, samples) for ordinal, ids in enumerate(PROMPTS)]


@pytest.mark.parametrize(
    "distribution",
    [
        Distribution(),
        Distribution(temperature=0.8),
        Distribution(top_p=0.9),
        Distribution(top_k=5),
        Distribution(temperature=0.8, top_p=0.9, top_k=12),
    ],
    ids=["plain", "temperature", "top-p", "top-k", "all"],
)
async def test_log_probs_are_of_the_processed_distribution(rig, distribution):
    if distribution.top_p < 1 and distribution.top_k and not rig.engine.capabilities.top_p_after_others:
        with pytest.raises(Refused, match="top_p"):
            await rig.generate(groups(), distribution)
        return
    for output in (await rig.generate(groups(), distribution)).values():
        answer = list(output.whole.token_ids)
        expected = expected_log_probs(rig.model_a, output.prompt_ids, answer, distribution)
        assert output.whole.log_probs == pytest.approx(expected, abs=1e-4)
        assert output.finish in (Finish.EOS, Finish.LENGTH)


async def test_a_repetition_penalty_counts_the_prompt_or_is_refused(rig):
    wanted = Distribution(0.0, repetition_penalty=50.0)
    if not rig.engine.capabilities.penalty_counts_prompt:
        with pytest.raises(Refused, match="repetition_penalty"):
            await rig.generate(groups(1), wanted)
        return
    for output in (await rig.generate(groups(1), wanted, max_new_tokens=4)).values():
        ids = list(output.whole.token_ids)
        assert not set(ids) & set(output.prompt_ids) and len(ids) == len(set(ids))


async def test_tokens_come_as_often_as_the_distribution_says(rig):
    count, prompt, distribution = 800, PROMPTS[1], Distribution(temperature=1.5)
    outputs = await rig.generate([group(0, prompt, count)], distribution, max_new_tokens=1)
    with torch.no_grad():
        logits = rig.model_a(torch.tensor([prompt])).logits[0, -1]
    wanted = (logits / 1.5).softmax(-1) * count
    seen = torch.bincount(
        torch.tensor([output.whole.token_ids[0] for output in outputs.values()]), minlength=len(wanted)
    )
    rare = wanted < 5
    wanted = torch.cat([wanted[~rare], wanted[rare].sum()[None]])
    seen = torch.cat([seen[~rare], seen[rare].sum()[None]])
    chosen = wanted > 0
    statistic = (((seen - wanted) ** 2) / wanted)[chosen].sum().item()
    freedom = int(chosen.sum()) - 1
    # Wilson and Hilferty: about standard normal; beyond 4.5 once in 300,000 runs.
    z = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    assert freedom >= 5 and z < 4.5, (statistic, freedom)


async def test_greedy_is_the_likeliest_token_at_temperature_one(rig):
    for output in (await rig.generate(groups(1), Distribution(0.0), max_new_tokens=10)).values():
        prompt = torch.tensor([output.prompt_ids])
        whole = rig.model_a.generate(prompt, max_new_tokens=10, do_sample=False, pad_token_id=0)
        answer = list(output.whole.token_ids)
        assert answer == whole[0, prompt.shape[1] :].tolist()
        expected = expected_log_probs(rig.model_a, output.prompt_ids, answer, Distribution())
        assert output.whole.log_probs == pytest.approx(expected, abs=1e-4)


async def test_members_of_a_group_differ_and_a_greedy_one_is_greedy(rig):
    mixed = replace(
        group(0, PROMPTS[0], 5), samples=[Sample(index, 1, greedy=index == 0) for index in range(5)]
    )
    found = await rig.generate([mixed], Distribution(temperature=1.5))
    alone = await rig.generate([group(0, PROMPTS[0])], Distribution(0.0))
    assert tokens(found)[SlotKey(0, 0)] == tokens(alone)[SlotKey(0, 0)]
    assert len({tuple(answer) for answer in tokens(found).values()}) >= 4


async def test_seeds_hold_by_position_and_name_the_answers(rig):
    if rig.engine.capabilities.position_keyed_sampling:
        first = tokens(await rig.generate(groups()))
        assert tokens(await rig.generate(groups()[::-1])) == first
    other = tokens(await rig.generate(groups(), Distribution(1.5), seed=1))
    assert other != tokens(await rig.generate(groups(), Distribution(1.5), seed=2))


async def test_an_abort_gives_a_prefix_of_the_answer_and_a_resume_the_rest(rig):
    greedy = Distribution(0.0)
    calm = tokens(await rig.generate(groups(1), greedy, max_new_tokens=120))
    collector = Collector()
    await rig.engine.submit(rig.stream(collector, greedy, max_new_tokens=120, chunk_tokens=2), groups(1))
    await collector.wait(lambda c: len(c.outputs) > 5)
    await rig.engine.abort(None)
    first = await collector.wait_ended(5)
    resumed, kept = [], {}
    for each in groups(1):
        key = SlotKey(each.prompt_ordinal, 0)
        whole = first[key].whole
        assert len(whole.token_ids) == len(whole.log_probs) == sum(count for _, count in whole.spans)
        assert list(whole.token_ids) == calm[key][: len(whole.token_ids)]
        if first[key].stopped:
            kept[key] = whole
            resumed.append(Group(each.prompt_ordinal, each.prompt_ids, [Sample(0, 2, whole)]))
    assert any(whole.token_ids for whole in kept.values()), "the abort came after the end"
    second = await rig.generate(resumed, greedy, max_new_tokens=120)
    for key, whole in kept.items():
        assert list(second[key].whole.token_ids) == calm[key]
        assert list(second[key].whole.log_probs[: len(whole.log_probs)]) == list(whole.log_probs)


async def test_chunks_join_to_the_answer_and_stop_strings_cut_it(rig):
    collector = Collector()
    await rig.engine.submit(rig.stream(collector, chunk_tokens=3), groups())
    for key, output in (await collector.wait_ended(15)).items():
        pieces = [piece for piece in collector.outputs if piece.key == key]
        assert [piece.offset for piece in pieces] == [3 * index for index in range(len(pieces))]
        assert [token for piece in pieces for token in piece.token_ids] == list(output.whole.token_ids)
        assert [value for piece in pieces for value in piece.log_probs] == list(output.whole.log_probs)
    free = tokens(await rig.generate(groups(1), Distribution(0.0)))
    key, answer = max(free.items(), key=lambda item: len(item[1]))
    stop = character_tokenizer().decode(answer[4:6], skip_special_tokens=False)
    output = (await rig.generate(groups(1), Distribution(0.0), stop=(stop,), chunk_tokens=1))[key]
    assert output.finish is Finish.STOP
    assert list(output.whole.token_ids) == answer[: len(output.whole.token_ids)]
    assert len(output.whole.token_ids) <= 4 and len(output.whole.log_probs) == len(output.whole.token_ids)


async def test_what_cannot_run_ends_at_once(rig):
    outputs = await rig.generate(
        [group(0, [7] * 512), group(1, []), group(2, [99]), group(3, [7] * 511)], max_new_tokens=9
    )
    found = {key.prompt_ordinal: output.finish for key, output in outputs.items()}
    assert found[0] is Finish.PROMPT_TOO_LONG and found[1] is found[2] is Finish.ERROR
    assert len(outputs[SlotKey(3, 0)].whole.token_ids) == 1
    eos = Prefix([5, 1], [-1.0, -1.0], [(1, 2)])
    ended = await rig.generate([Group(0, PROMPTS[0], [Sample(0, 2, eos)])])
    assert ended[SlotKey(0, 0)].finish is Finish.EOS


async def test_given_tokens_are_scored(rig):
    sequences = [([*PROMPTS[1], 4, 5, 6], 8), ([7, 8], 1), (LONG, 250), ([9] * 512, 500)]
    found, number = await rig.engine.score(sequences, Distribution())
    assert number == rig.engine.policy.number
    for (ids, start), scored in zip(sequences, found, strict=True):
        expected = expected_log_probs(rig.model_a, ids[:start], ids[start:], Distribution())
        assert scored == pytest.approx(expected, abs=1e-4)
    narrow = Distribution(temperature=0.7, top_p=0.9)
    if rig.engine.capabilities.score_processed:
        (scored,), _ = await rig.engine.score([(PROMPTS[2], 20)], narrow)
        expected = expected_log_probs(rig.model_a, PROMPTS[2][:20], PROMPTS[2][20:], narrow)
        assert scored == pytest.approx(expected, abs=1e-4)
    else:
        with pytest.raises(Refused, match="temperature 1 without top_p"):
            await rig.engine.score(sequences, narrow)


async def test_the_likeliest_words_are_told_where_an_engine_can(rig):
    sequences = [([*PROMPTS[1], 4, 5, 6], 8), ([7, 8], 1), ([9] * 512, 500)]
    words = rig.engine.vocabulary_size
    if not rig.engine.capabilities.likeliest:
        with pytest.raises(Refused, match="does not tell the likeliest words"):
            await rig.engine.likeliest(sequences, 1)
        return
    for top in (1, 5, words):
        found = await rig.engine.likeliest(sequences, top)
        for (ids, start), told in zip(sequences, found, strict=True):
            with torch.inference_mode():
                log_probs_TV = rig.model_a(torch.tensor([ids])).logits[0, start - 1 : -1].log_softmax(-1)
            assert len(told) == len(ids) - start
            for (best, values), own_V in zip(told, log_probs_TV, strict=True):
                assert len(set(best)) == top and values == sorted(values, reverse=True)
                assert values == pytest.approx(own_V[best].tolist(), abs=1e-4)
                assert values == pytest.approx(own_V.topk(top).values.tolist(), abs=1e-4)
    with pytest.raises(Refused, match="start at 1 or later"):
        await rig.engine.likeliest([([7, 8], 0)], 1)


async def test_a_new_version_is_what_answers_and_no_cached_prefix_is_left(rig):
    greedy = Distribution(0.0)
    before = await rig.generate([group(0, LONG)], greedy)
    await rig.install(rig.model_b)
    after = (await rig.generate([group(0, LONG)], greedy))[SlotKey(0, 0)]
    answer = list(after.whole.token_ids)
    expected = expected_log_probs(rig.model_b, LONG, answer, Distribution())
    assert after.whole.log_probs == pytest.approx(expected, abs=1e-4)
    assert answer != tokens(before)[SlotKey(0, 0)]
    assert after.whole.spans == [(rig.number, len(answer))]


async def test_a_version_of_another_model_is_refused_and_the_one_before_serves_on(rig):
    weights, number = rig.weights(rig.model_b), rig.engine.policy.number
    first, *others = weights.entries
    for entries in ([replace(first, shape=(1, *first.shape)), *others], others):
        with pytest.raises(ValueError, match=first.name):
            await rig.engine.install(Policy(number + 1, "c"), replace(weights, entries=tuple(entries)))
    assert rig.engine.policy.number == number
    output = (await rig.generate([group(0, LONG)], Distribution(0.0)))[SlotKey(0, 0)]
    expected = expected_log_probs(rig.model_a, LONG, list(output.whole.token_ids), Distribution())
    assert output.whole.log_probs == pytest.approx(expected, abs=1e-4)


async def test_a_strict_install_is_refused_while_sequences_live(rig):
    collector = Collector()
    await rig.engine.submit(rig.stream(collector, max_new_tokens=400), groups())
    with pytest.raises(Refused) as refused:
        await rig.install(rig.model_b)
    assert refused.value.reason == "POLICY_MISMATCH"
    await rig.engine.abort(None)
    await collector.wait_ended(15)


async def test_an_update_in_flight_keeps_the_sequences_and_says_which_version_made_what(rig):
    if not rig.engine.capabilities.inflight_update:
        with pytest.raises(Refused, match="in_flight"):
            await rig.install(rig.model_b, in_flight=True)
        return
    prompt, collector, before = LONG[:200], Collector(), rig.engine.policy.number
    stream = rig.stream(collector, Distribution(1.5), max_new_tokens=300, chunk_tokens=4)
    await rig.engine.submit(stream, [group(0, prompt, 24)])  # more than run at once: some wait
    await collector.wait(lambda c: len(c.outputs) > 8)
    after = await rig.install(rig.model_b, in_flight=True)
    await rig.engine.submit(stream, [group(1, prompt, 2)])  # the stream goes on, too
    outputs = await collector.wait_ended(26)
    assert not any(output.stopped for output in outputs.values())
    crossed = [output.whole for output in outputs.values() if len(output.whole.spans) == 2]
    assert crossed, "no sample lived through the update"
    for key, output in outputs.items():
        answer, at = list(output.whole.token_ids), 0
        if key.prompt_ordinal == 1:
            assert output.whole.spans == [(after, len(answer))]
        for number, count in output.whole.spans:
            model = {before: rig.model_a, after: rig.model_b}[number]
            expected = expected_log_probs(model, prompt, answer, Distribution(1.5))[at : at + count]
            assert output.whole.log_probs[at : at + count] == pytest.approx(expected, abs=1e-4)
            at += count
        assert at == len(answer)
        pieces = [piece for piece in collector.outputs if piece.key == key]
        assert [token for piece in pieces for token in piece.token_ids] == answer
        assert {piece.policy_number for piece in pieces} == {number for number, _ in output.whole.spans}
    with pytest.raises(Refused, match="is wanted"):
        await rig.engine.submit(rig.stream(Collector(), policy_number=before - 1), groups(1))


async def test_a_stream_without_its_lease_gets_its_samples_back(rig):
    held, collector = True, Collector()
    stream = rig.stream(collector, Distribution(0.0), max_new_tokens=400, chunk_tokens=1, holds=lambda: held)
    await rig.engine.submit(stream, [group(0, PROMPTS[0], 3)])
    await collector.wait(lambda c: len(c.outputs) > 4)
    held = False
    outputs = await collector.wait_ended(3)
    late = await rig.generate([group(9, PROMPTS[0])], holds=lambda: False)
    assert late[SlotKey(9, 0)].stopped and not late[SlotKey(9, 0)].whole.token_ids
    assert all(output.stopped or output.finish is Finish.EOS for output in outputs.values())


async def test_pause_suspend_and_wake_in_every_order(rig):
    engine, collector = rig.engine, Collector()
    await engine.submit(rig.stream(collector, max_new_tokens=400, chunk_tokens=1), groups())
    await collector.wait(lambda c: len(c.outputs) > 4)
    with pytest.raises(Refused, match="Pause"):
        await engine.suspend()
    assert await engine.pause() >= 1
    await collector.wait_ended(15)
    late = await rig.generate([group(8, PROMPTS[0])])
    assert late[SlotKey(8, 0)].stopped
    await engine.resume()
    assert (await rig.generate([group(8, PROMPTS[0])]))[SlotKey(8, 0)].finish is not None
    await engine.pause()
    await engine.suspend()
    for call in (engine.resume(), engine.wake(Scope.KV_CACHE), rig.install(rig.model_b)):
        with pytest.raises(Refused) as refused:
            await call
        assert refused.value.reason == "SUSPENDED"
    assert engine.policy is None
    await engine.wake(Scope.WEIGHTS)
    await engine.wake(Scope.WEIGHTS)
    with pytest.raises(Refused, match="install a policy"):
        await engine.wake(Scope.KV_CACHE)
    await rig.install(rig.model_b)
    await engine.wake(Scope.KV_CACHE)
    output = (await rig.generate([group(0, LONG)], Distribution(0.0)))[SlotKey(0, 0)]
    expected = expected_log_probs(rig.model_b, LONG, list(output.whole.token_ids), Distribution())
    assert output.whole.log_probs == pytest.approx(expected, abs=1e-4)
    await engine.pause()
    await engine.suspend()
    await engine.wake(Scope.ALL)
    await rig.install(rig.model_a)
    assert (await rig.generate([group(8, PROMPTS[0])]))[SlotKey(8, 0)].finish is not None


@pytest.mark.parametrize("suspended", [True, False], ids=["suspended", "awake"])
async def test_a_lease_hand_over_leaves_an_engine_that_the_next_lease_can_use(rig, suspended):
    engine, before = rig.engine, rig.pids()
    await engine.pause()
    if suspended:
        await engine.suspend()
    freed = await engine.release()
    assert freed.free_bytes > 0 and engine.policy is None and not engine.paused
    await engine.place((torch.device("cpu"),), 1)
    if suspended:  # as the coordinator wakes it; an evaluation installs at once
        await engine.wake(Scope.WEIGHTS)
    await rig.install(rig.model_b)
    await engine.wake(Scope.KV_CACHE)
    output = (await rig.generate([group(0, LONG)], Distribution(0.0)))[SlotKey(0, 0)]
    expected = expected_log_probs(rig.model_b, LONG, list(output.whole.token_ids), Distribution())
    assert output.whole.log_probs == pytest.approx(expected, abs=1e-4)
    assert rig.pids() == before


async def test_64_samples_with_joins_and_leaves(rig):
    collectors = [Collector() for _ in range(4)]
    for turn, collector in enumerate(collectors):
        stream = rig.stream(collector, Distribution(1.2), max_new_tokens=12 + 9 * turn, chunk_tokens=1)
        await rig.engine.submit(stream, [group(10 * turn + n, PROMPTS[n % 5], 4) for n in range(4)])
        await collector.wait(lambda c: len(c.outputs) > 3)
    gone = SlotKey(30, 0)
    await rig.engine.abort([gone])
    for collector in collectors:
        for key, output in (await collector.wait_ended(16)).items():
            answer = list(output.whole.token_ids)
            assert output.finish is not None or key == gone
            expected = (
                expected_log_probs(rig.model_a, output.prompt_ids, answer, Distribution(1.2))
                if answer
                else []
            )
            assert output.whole.log_probs == pytest.approx(expected, abs=1e-4)


async def test_more_prompts_at_once_than_an_engine_prefills_in_one_pass(rig):
    prompts = [[3 + (index * 7 + ordinal) % 20 for index in range(400)] for ordinal in range(16)]
    asked = [group(ordinal, ids) for ordinal, ids in enumerate(prompts)]
    for output in (await rig.generate(asked, max_new_tokens=4)).values():
        answer = list(output.whole.token_ids)
        expected = expected_log_probs(rig.model_a, output.prompt_ids, answer, Distribution())
        assert output.whole.log_probs == pytest.approx(expected, abs=1e-4)
        assert output.finish is not None


async def test_a_closed_stream_leaves_the_others(rig):
    mine, others = Collector(), Collector()
    stream = rig.stream(mine, max_new_tokens=400)
    await rig.engine.submit(stream, groups(1))
    await rig.engine.submit(rig.stream(others, Distribution(0.0), max_new_tokens=30), groups(1))
    await rig.engine.abort(None, stream=stream)
    await mine.wait_ended(5)
    assert not any(output.stopped for output in (await others.wait_ended(5)).values())
    await asyncio.sleep(0)


async def test_prefill_is_told_apart_from_decoding_or_not_at_all(rig):
    before = time.perf_counter()
    await rig.generate(groups(2), max_new_tokens=8)
    after = time.perf_counter()
    found = [span for prefills in rig.engine.prefills for span in prefills.ended_after(before)]
    if not rig.engine.prefills:
        return
    assert found and found == sorted(found)
    assert all(before < start < end < after for start, end in found)
    assert all(first[1] <= second[0] for first, second in pairwise(found)), "one after the other"
    assert not [span for each in rig.engine.prefills for span in each.ended_after(after)]
    decoding = after - before - sum(end - start for start, end in found)
    assert decoding > 0
