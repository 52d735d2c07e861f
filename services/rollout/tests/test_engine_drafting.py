"""Drafts of the built-in engine: answers are those that come without, in fewer passes where they repeat."""

from __future__ import annotations

import numpy as np
import pytest
from headrace_rollout.engines import ENGINES
from headrace_rollout.engines.base import EngineConfig, Policy
from headrace_rollout.engines.samples import Distribution, Group, Sample
from headrace_rollout.engines.transformers.drafting import MOST_ROWS, NGRAM, History, accepted


def test_a_draft_is_what_followed_the_newest_tokens_when_they_were_last_there():
    history = History([1, 2, 3, 4, 1, 2, 3, 5])
    assert history.draft(4) == []  # nothing followed 2 3 5 yet
    history.add([1, 2, 3])
    assert history.draft(2) == [5, 1] and history.draft(9) == [5, 1, 2, 3] and history.draft(0) == []
    assert History([7] * (NGRAM + 1)).draft(3) == [7]
    assert History([1]).draft(3) == []


def test_what_was_drawn_stands_up_to_the_first_wrong_guess_or_the_end():
    drawn = np.array([[5, 6, 7], [5, 6, 7], [9, 6, 7], [5, 2, 7], [4, 0, 0]])
    drafts = [[5, 6], [5, 8], [5, 6], [5, 2], []]
    assert accepted(drawn, drafts, np.array([2])).tolist() == [3, 2, 1, 2, 1]


@pytest.fixture
async def answers(model_config, weights, codec, new_collector):
    """Tokens and log-probs of samples with so many drafted tokens, and the engine's figures."""
    engines = []

    async def answers(groups, distribution, drafted, rows=4, **stream):
        chosen = ENGINES.choose("transformers", {"speculative_tokens": drafted})
        engine = chosen.build(EngineConfig(model_config, codec, rows))
        engines.append(engine)
        await engine.install(Policy(1, "one"), weights)
        collector = new_collector()
        await engine.submit(collector.stream(distribution, max_new_tokens=60, **stream), groups)
        ended = await collector.wait_ended(sum(len(group.samples) for group in groups))
        found = {key: (list(each.whole.token_ids), each.whole.log_probs) for key, each in ended.items()}
        sent = {key: [] for key in ended}
        for output in collector.outputs:
            assert output.offset == len(sent[output.key])
            sent[output.key] += output.token_ids
        assert sent == {key: tokens for key, (tokens, _) in found.items()}
        return found, engine.figures

    yield answers
    for engine in engines:
        await engine.close()


@pytest.mark.parametrize("distribution", [Distribution(0.0), Distribution(0.3), Distribution(1.0, 0.9, 5)])
async def test_answers_are_those_without_drafts(answers, codec, distribution):
    groups = [
        Group(ordinal, codec.encode_prompt(text=text), [Sample(index, 1) for index in range(2)])
        for ordinal, text in enumerate(["1+1+1+1+1+1+1+", "abcabcabcabcab"])
    ]
    plain, without = await answers(groups, distribution, 0, chunk_tokens=4)
    drafted, figures = await answers(groups, distribution, 3, chunk_tokens=4)
    for key, (tokens, log_probs) in plain.items():
        assert drafted[key][0] == tokens
        assert drafted[key][1] == pytest.approx(log_probs, abs=1e-4)
    assert figures.sampled_tokens == without.sampled_tokens
    if distribution.temperature == 0:
        assert figures.decode_steps < without.decode_steps


@pytest.mark.parametrize(("rows", "stream"), [(MOST_ROWS, {}), (2, {"stop": ("zz",)})])
async def test_nothing_is_drafted_where_it_costs_or_would_change_an_answer(
    answers, codec, monkeypatch, rows, stream
):
    def draft(*_):
        raise AssertionError("a draft")

    monkeypatch.setattr(History, "draft", draft)
    group = Group(0, codec.encode_prompt(text="1+1+1+1+"), [Sample(index, 1) for index in range(rows)])
    found, _ = await answers([group], Distribution(0.0, repetition_penalty=1.0), 3, rows, **stream)
    assert len(found) == rows
