"""Turns of conversations on the built-in engine: the next one computes only what is new, and says the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from headrace_modelkit.logprobs import token_log_probs
from headrace_rollout.engines.base import Policy
from headrace_rollout.engines.samples import Group, Sample

NEW = [5, 6, 7]


async def say(engine, collector, groups, **options):
    await engine.submit(collector.stream(**{"max_new_tokens": 12, "goes_on": True, **options}), groups)
    return await collector.wait_ended(sum(len(group.samples) for group in groups))


def following(outputs, *, cut=0):
    """The next turn of each conversation: all before, and what is new."""
    found = []
    for key, output in sorted(
        outputs.items(), key=lambda each: (each[0].prompt_ordinal, each[0].sample_index)
    ):
        ids = [*output.prompt_ids, *output.whole.token_ids]
        context = [*ids[: len(ids) - cut], *NEW[: 1 + key.sample_index]]
        found.append(Group(key.prompt_ordinal, context, [Sample(key.sample_index, 1)]))
    return found


async def test_the_next_turn_computes_what_is_new_and_says_the_same(
    new_engine, new_collector, groups, reference
):
    engine, fresh = await new_engine(), await new_engine()
    turn = following(await say(engine, new_collector(), groups))
    before = engine.figures.prefill_tokens
    again = await say(engine, new_collector(), turn, seed=8)
    # The last token of the turn before was sampled, and not computed yet.
    assert engine.figures.prefill_tokens - before == sum(2 + group.samples[0].sample_index for group in turn)
    expected = await say(fresh, new_collector(), turn, seed=8)
    for key, output in again.items():
        assert list(output.whole.token_ids) == list(expected[key].whole.token_ids)
        ids, start = [*output.prompt_ids, *output.whole.token_ids], len(output.prompt_ids)
        with torch.no_grad():
            logits = reference(torch.tensor([ids])).logits
        found = token_log_probs(logits[:, start - 1 : -1], torch.tensor([ids[start:]]), 1.0)[0].tolist()
        assert output.whole.log_probs == pytest.approx(found, abs=1e-4)
    third = following(again)
    before = engine.figures.prefill_tokens
    await say(engine, new_collector(), third, seed=9)
    assert engine.figures.prefill_tokens - before == sum(2 + group.samples[0].sample_index for group in third)


async def test_only_exact_ids_of_these_weights_are_gone_on_with(new_engine, new_collector, groups, weights):
    engine = await new_engine()
    said = await say(engine, new_collector(), groups[1:2])
    whole = sum(len(group.prompt_ids) for group in following(said, cut=3))
    before = engine.figures.prefill_tokens
    await say(engine, new_collector(), following(said, cut=3), seed=8)
    assert engine.figures.prefill_tokens - before == whole, "it branches off before what is known"
    turn = following(said)
    await engine.install(Policy(2, "two"), weights)
    before = engine.figures.prefill_tokens
    await say(engine, new_collector(), turn, seed=8, policy_number=2)
    assert engine.figures.prefill_tokens - before == sum(len(group.prompt_ids) for group in turn)


async def test_what_is_kept_is_bounded_and_not_kept_where_nothing_goes_on(new_engine, new_collector, groups):
    engine = await new_engine()
    said = await say(engine, new_collector(), groups, goes_on=False)
    assert not engine._decoder.kept._kept
    await say(engine, new_collector(), groups)
    kept = engine._decoder.kept
    assert len(kept._kept) == len(said) and 0 < kept._size <= kept.budget_bytes
    kept.budget_bytes = kept._size // 2
    output = next(iter(said.values()))
    group = Group(99, [*output.prompt_ids], [replace(Sample(0, 1))])
    budget = kept.budget_bytes
    engine._decoder._joining.settle_budget = lambda: None  # as it was measured
    await say(engine, new_collector(), [group])
    assert kept._size <= budget and len(kept._kept) < len(said)
