"""Drafts of a head that learns beside the policy: answers are those without, whatever it drafts, and a head that has
learned is right more often.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from headrace_modelkit.families.draft_files import add_draft, open_draft
from headrace_modelkit.families.drafts import Features
from headrace_modelkit.loading import load_model
from headrace_modelkit.logprobs import Head
from headrace_modelkit.presets.families import write_predicting
from headrace_modelkit.weights import load_weights
from headrace_rollout.engines import ENGINES
from headrace_rollout.engines.base import EngineConfig, Policy
from headrace_rollout.engines.samples import Distribution, Group, Sample, SlotKey
from headrace_rollout.engines.transformers import drafting
from headrace_schema.sections.generating import ModelSection
from headrace_schema.sections.learning import DraftSection
from model_weights import weights_of_model

FAMILY = {"mtp": "deepseek_v3", "eagle3 beside states": "qwen3_5_text", "mtp beside states": "qwen3_next"}
"""Whose tiny model has a head of a form; of `eagle3` alone it is the tiny model that runs have."""
ALL = pytest.mark.parametrize("form", ["eagle3", *FAMILY])
LEARNS = pytest.mark.parametrize("form", ["eagle3", "mtp", "mtp beside states"])
"""Those that 30 steps teach something of their tiny model."""
SAMPLED = Distribution()
DRAFTED, LONG = 3, 24
SURE = {"eagle3": 30.0, "mtp": 6.0, "eagle3 beside states": 6.0, "mtp beside states": 6.0}
"""Times that the logits of each form's tiny model are multiplied."""
RISEN = {"eagle3": 0.2, "mtp": 0.03, "eagle3 beside states": 0.03, "mtp beside states": 0.03}
SAMPLES, TOKENS = 600, 3
CHI_SQUARE = 3.7
"""Standard deviations that a sum of squares may be off: 1 in 10,000."""


@pytest.fixture(scope="module")
def predicting(tmp_path_factory):
    """Tiny models whose checkpoints have a layer that predicts one token more, as they are asked for."""
    found = {}

    def predicting(family):
        if family not in found:
            found[family] = tmp_path_factory.mktemp("models") / family
            write_predicting(found[family], family)
        return ModelSection(path=str(found[family]), dtype="float32")

    return predicting


@pytest.fixture
def form():
    return "eagle3"


@pytest.fixture
def chosen(form, model_config, predicting):
    """The model, and its head."""
    config = predicting(FAMILY[form]) if form in FAMILY else model_config
    return config, DraftSection(form=form.split()[0])


@pytest.fixture
def model(chosen):
    """The tiny model with a head, as its trainer publishes both."""
    config, head = chosen
    found = load_model(config)
    add_draft(found, head, config)
    source = open_draft(head, config, found, 3)
    load_weights(found.draft, {name: source.read(name) for name in source.names()})
    return found


@pytest.fixture
async def answers(chosen, codec, new_collector, in_step):
    """Tokens and log-probs of samples, and the engine; `drafted` None: of an engine that knows no head."""
    engines = []

    async def answers(model, groups, distribution=SAMPLED, drafted=None, deterministic=False, **stream):
        knows = drafted is not None
        built = ENGINES.choose("transformers", {"speculative_tokens": drafted} if knows else {})
        model_config, draft = chosen[0], chosen[1] if knows else None
        config = EngineConfig(model_config, codec, 4, deterministic=deterministic, draft=draft)
        engine = built.build(config)
        engines.append(engine)
        weights = weights_of_model(model if knows else without_head(model))
        await engine.install(Policy(1, "one"), weights)
        collector = new_collector()
        await engine.submit(collector.stream(distribution, **{"max_new_tokens": LONG, **stream}), groups)
        ended = await collector.wait_ended(sum(len(group.samples) for group in groups))
        found = {key: (list(each.whole.token_ids), each.whole.log_probs) for key, each in ended.items()}
        return found, engine

    yield answers
    for engine in engines:
        await engine.close()


def without_head(model):
    """The same model, of which nobody knows that it has a head."""
    bare = load_model_like(model)
    own = {name: value for name, value in model.state_dict().items() if not name.startswith("draft.")}
    bare.load_state_dict(own)
    return bare


def load_model_like(model):
    with torch.random.fork_rng(devices=[]):
        found = type(model)(model.config)
    return found.eval()


def asked(codec, samples=2):
    return [
        Group(ordinal, codec.encode_prompt(text=text), [Sample(index, 1) for index in range(samples)])
        for ordinal, text in enumerate(["1+1=", "copy abc: abcabc", "2"])
    ]


@ALL
@pytest.mark.parametrize("distribution", [Distribution(0.0), Distribution(0.4), Distribution(1.0, 0.9, 5)])
async def test_answers_are_those_without_drafts_while_rows_come_and_go(answers, model, codec, distribution):
    """Six samples on four rows: some join late behind a kept prompt, and none is drafted for until few are left."""
    plain, _ = await answers(model, asked(codec), distribution)
    drafted, engine = await answers(model, asked(codec), distribution, DRAFTED, chunk_tokens=4)
    assert drafted.keys() == plain.keys()
    for key, (tokens, log_probs) in plain.items():
        assert drafted[key][0] == tokens
        assert drafted[key][1] == pytest.approx(log_probs, abs=1e-4)
    assert engine.figures.drafted_tokens > 100


async def test_nothing_is_drafted_beside_stop_strings_and_the_head_reads_on(
    answers, model, codec, monkeypatch
):
    read, original = [], drafting.LearnedDrafts._read
    monkeypatch.setattr(drafting, "READ_AT_ONCE", 8)
    monkeypatch.setattr(
        drafting.LearnedDrafts, "_read", lambda *given: read.append(given[3]) or original(*given)
    )
    plain, _ = await answers(model, asked(codec), stop=("zz",))
    found, engine = await answers(model, asked(codec), drafted=DRAFTED, stop=("zz",))
    assert {key: tokens for key, (tokens, _) in found.items()} == {
        key: own for key, (own, _) in plain.items()
    }
    assert not engine.figures.drafted_tokens and read and set(read) == {8}


@ALL
async def test_the_engine_s_drafts_are_those_that_the_head_learned_to_make(
    answers, model, codec, form, monkeypatch
):
    """Greedy ones, of rows that came and went, against the unrolled head over the whole row."""
    made, original = [], drafting.LearnedDrafts.draft

    def draft(self, batch, most):
        found = original(self, batch, most)
        contexts = [[*each.prompt_ids, *batch.answer(row)[0]] for row, each in enumerate(batch.trajectories)]
        made.extend((context, own) for context, own in zip(contexts, found, strict=False) if own)
        return found

    monkeypatch.setattr(drafting.LearnedDrafts, "draft", draft)
    await answers(sharpened(model, SURE[form]), asked(codec), Distribution(0.0), DRAFTED)
    assert len(made) > 20
    for context, own in made:
        ids = torch.tensor([[*context, *own]])
        with torch.no_grad(), Features(model.model, model.draft.layers) as features:
            model(ids)
            embeds = model.get_input_embeddings()(ids)
            steps = model.draft.unrolled(features.taken()[:, :-1], embeds[:, 1:], len(own))
            expected = [
                int(model.draft.logits(step[0, len(context) - 2][None], Head.of(model))[0].argmax())
                for step in steps
            ]
        assert own == expected


def learned(model, prompt, steps):
    """Trains the head on what the model itself says, as a trainer does; the policy stays."""
    head = model.draft
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(5)
    ids = torch.tensor([prompt] * 16)
    with torch.no_grad():
        while ids.shape[1] < len(prompt) + LONG:
            probs = model(ids).logits[:, -1].softmax(-1)
            ids = torch.cat([ids, torch.multinomial(probs, 1, generator=generator)], 1)
        with Features(model.model, head.layers) as features:
            wanted = model(ids).logits.softmax(-1)
        read, embeds = features.taken(), model.get_input_embeddings()(ids)
    for _ in range(steps):
        loss = torch.zeros(())
        for step, hidden in enumerate(head.unrolled(read[:, :-1], embeds[:, 1:], DRAFTED)):
            own = head.scores(hidden[:, : -1 - step].flatten(0, 1), Head.of(model)).log_softmax(-1)
            loss = loss - (wanted[:, 1 + step : -1].flatten(0, 1) * own).sum(-1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def sharpened(model, by):
    """A policy that is surer of itself, as one that has learned is: a head has something to learn."""
    with torch.no_grad():
        model.lm_head.weight.mul_(by)
    return model


@LEARNS
async def test_a_head_that_has_learned_is_right_more_often_also_beside_a_new_version(
    answers, model, codec, form
):
    sharpened(model, SURE[form])
    group = asked(codec, samples=8)[:1]

    async def share():
        plain, without = await answers(model, group)
        found, engine = await answers(model, group, drafted=DRAFTED)
        assert {key: own for key, (own, _) in found.items()} == {key: own for key, (own, _) in plain.items()}
        figures = engine.figures
        return figures.accepted_tokens / figures.drafted_tokens, figures, without.figures

    before, _, _ = await share()
    learned(model, list(group[0].prompt_ids), 30)
    after, figures, without = await share()
    assert after > before + RISEN[form]
    assert figures.decode_steps < without.decode_steps
    torch.manual_seed(1)
    with torch.no_grad():  # a step of the policy, of which the head knows nothing yet
        for name, parameter in model.named_parameters():
            if not name.startswith("draft."):
                parameter.add_(0.002 * parameter.std() * torch.randn(parameter.shape))
    newer, _, _ = await share()
    assert newer > before + RISEN[form]


@LEARNS
async def test_drafted_tokens_have_the_policy_s_distribution(answers, model, codec, form):
    """Chi-square of the last of three tokens, of which two are drafted, over many samples."""
    sharpened(model, SURE[form] / 3)
    prompt = codec.encode_prompt(text="1+1=")
    learned(model, list(prompt), 6)
    groups = [Group(0, prompt, [Sample(index, 1) for index in range(SAMPLES)])]
    found, engine = await answers(model, groups, drafted=DRAFTED, max_new_tokens=TOKENS)
    assert engine.figures.accepted_tokens > SAMPLES / 10
    ends = set(codec.eos_ids)
    reached = torch.tensor([1.0])
    contexts = torch.tensor([list(prompt)])
    with torch.no_grad():
        for step in range(TOKENS):
            probs = model(contexts).logits[:, -1].softmax(-1) * reached[:, None]
            if step == TOKENS - 1:
                break
            kept = [token for token in range(probs.shape[1]) if token not in ends]
            contexts = torch.cat(
                [contexts.repeat_interleave(len(kept), 0), torch.tensor(kept).repeat(len(contexts))[:, None]],
                1,
            )
            reached = probs[:, kept].flatten()
    expected = probs.sum(0).double().numpy() * SAMPLES
    ids = [tokens[-1] for tokens, _ in found.values() if len(tokens) == TOKENS]
    counts = np.bincount(ids, minlength=len(expected))
    often = expected >= 5
    bins = np.append(counts[often], SAMPLES - counts[often].sum())
    wanted = np.append(expected[often], SAMPLES - expected[often].sum())
    freedom = len(bins) - 1
    found_square = float(((bins - wanted) ** 2 / wanted).sum())
    assert freedom >= 5
    assert found_square < freedom + CHI_SQUARE * (2 * freedom) ** 0.5 + 8


def said(ended):
    return {key: list(each.whole.token_ids) for key, each in ended.items()}


async def test_the_next_turn_behind_what_is_kept_is_the_one_without_drafts(
    answers, model, codec, form, new_collector
):
    sharpened(model, SURE[form] / 3)
    found = [
        await answers(model, asked(codec), drafted=each, max_new_tokens=8, goes_on=True)
        for each in (None, DRAFTED)
    ]
    turn = [
        Group(
            key.prompt_ordinal,
            [*asked(codec)[key.prompt_ordinal].prompt_ids, *ids, 5, 6],
            [Sample(key.sample_index, 1)],
        )
        for key, (ids, _) in found[0][0].items()
    ]
    after = []
    for _, engine in found:
        before, collector = engine.figures.prefill_tokens, new_collector()
        await engine.submit(collector.stream(max_new_tokens=30, goes_on=True, seed=8), turn)
        after.append(said(await collector.wait_ended(6)))
        assert engine.figures.prefill_tokens - before < sum(len(group.prompt_ids) for group in turn)
    assert after[0] == after[1]


@ALL
async def test_samples_that_move_go_on_beside_a_head(answers, model, codec, new_collector, resumed):
    """Behind keys of another engine, the head's among them, whose newest tokens it has not read."""
    groups = asked(codec)[:2]
    plain, _ = await answers(model, groups, max_new_tokens=60)
    _, first = await answers(model, asked(codec)[:1], drafted=DRAFTED, max_new_tokens=1)
    _, second = await answers(model, asked(codec)[:1], drafted=DRAFTED, max_new_tokens=1)
    begun, rest = new_collector(), new_collector()
    stream = begun.stream(chunk_tokens=4, max_new_tokens=60)
    await first.submit(stream, groups)
    await begun.wait(lambda c: len(c.outputs) > 4)
    stream.moving.set()
    await first.abort(None, stream=stream)
    await begun.wait_ended(4)
    partials = {key: each for key, each in begun.ended().items() if each.stopped}
    assert partials and all(each.cache for each in partials.values())
    before = second.figures.prefill_tokens
    for group in groups:
        samples = [
            each for each in group.samples if SlotKey(group.prompt_ordinal, each.sample_index) in partials
        ]
        if samples:
            moved = resumed(replace(group, samples=samples), partials)
            await second.submit(rest.stream(max_new_tokens=60), [moved])
    finished = {**begun.ended(), **(await rest.wait_ended(len(partials)))}
    assert second.figures.prefill_tokens == before and second.figures.moved_tokens
    assert said(finished) == {key: tokens for key, (tokens, _) in plain.items()}
    assert second.figures.drafted_tokens


async def test_a_deterministic_engine_drafts_and_keeps_its_bits(answers, model, codec):
    found = [
        (await answers(model, asked(codec), drafted=each, deterministic=True))[0] for each in (None, DRAFTED)
    ]
    assert found[0] == found[1]
