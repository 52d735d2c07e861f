"""Families of models in the built-in engine: it samples from the class's own distribution, or refuses the model."""

import pytest
import torch
from headrace_modelkit.errors import ModelNotReadable
from headrace_modelkit.families.known import KNOWN
from headrace_modelkit.presets.families import FAMILIES, write_family
from headrace_modelkit.tokenizer import load_tokenizer
from headrace_rollout.engines import ENGINES
from headrace_rollout.engines.base import EngineConfig, Policy, Refused
from headrace_rollout.engines.samples import Distribution, Group, Sample
from headrace_rollout.engines.transformers import drafting
from headrace_schema.sections.generating import ModelSection
from model_weights import weights_of_model

QUICK = (
    "hyperclovax",
    "deepseek_v3",
    "gemma3_text",
    "llama4_text",
    "qwen3_5_text",
    "nemotron_h",
    "lfm2",
    "falcon_h1",
)
CONTEXT = 60
REFUSED = [family for family, known in KNOWN.items() if known.generates]
WITH_STATES = [
    family
    for family, known in KNOWN.items()
    if known.why_apart in ("layers with a state of their own", "convolutions") and not known.generates
]


def engine_of(path, **options):
    section = ModelSection(path=str(path), dtype="float32", max_context=CONTEXT)
    return ENGINES.choose("transformers", options).build(
        EngineConfig(model=section, codec=load_tokenizer(section), max_concurrency=3)
    )


def families(names):
    return [pytest.param(name, marks=() if name in QUICK else (pytest.mark.nightly,)) for name in names]


def drawn(count, seed):
    return torch.randint(3, 32, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def off(model, output):
    """How far sampled log-probs are from those of the class."""
    ids, first = [*output.prompt_ids, *output.whole.token_ids], len(output.prompt_ids)
    with torch.no_grad():
        rows = model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
    expected = [float(rows[at - 1, ids[at]]) for at in range(first, len(ids))]
    return max(abs(own - other) for own, other in zip(output.whole.log_probs, expected, strict=True))


@pytest.mark.parametrize("family", families(name for name in FAMILIES if name not in REFUSED))
async def test_its_log_probs_are_those_of_transformers(family, tmp_path, collector, new_collector):
    """Of scored answers; of sampled ones, which join and leave rows one by one; of their next turns."""
    model = write_family(tmp_path / family, family)
    engine = engine_of(tmp_path / family)
    await engine.install(Policy(1, "one"), weights_of_model(model))
    ids = drawn(20, 1)
    [found], _ = await engine.score([(ids, 4)], Distribution())
    with torch.no_grad():
        rows = model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
    assert found == pytest.approx([float(rows[at - 1, ids[at]]) for at in range(4, 20)], abs=1e-5)

    groups = [
        Group(index, drawn(length, index), [Sample(member, 2 * index + member) for member in range(2)])
        for index, length in enumerate((11, 4, 17, 11))
    ]
    await engine.submit(collector.stream(max_new_tokens=12, goes_on=True), groups)
    said = await collector.wait_ended(8)
    assert max(off(model, output) for output in said.values()) < 1e-4

    before, following = engine.figures.prefill_tokens, new_collector()
    turn = [
        Group(
            key.prompt_ordinal,
            [*output.prompt_ids, *output.whole.token_ids, *drawn(1 + key.sample_index, 9)],
            [Sample(key.sample_index, 50 + at)],
        )
        for at, (key, output) in enumerate(said.items())
    ]
    await engine.submit(following.stream(max_new_tokens=6, goes_on=True), turn)
    again = await following.wait_ended(8)
    assert max(off(model, output) for output in again.values()) < 1e-4
    new = sum(
        len(group.prompt_ids) if not KNOWN[family].continues else 2 + group.samples[0].sample_index
        for group in turn
    )
    assert engine.figures.prefill_tokens - before == new
    await engine.close()


@pytest.mark.parametrize("family", families(WITH_STATES))
async def test_wrong_guesses_leave_nothing_in_states(family, tmp_path, new_collector, monkeypatch):
    """Guesses of up to three tokens, of which the first, second, third or none is wrong, while rows come and go."""
    model = write_family(tmp_path / family, family)
    groups = [
        Group(index, drawn(length, index), [Sample(member, 2 * index + member) for member in range(2)])
        for index, length in enumerate((11, 4, 17))
    ]
    found, engines, wholes = [], [], []

    def guess(history, most):
        at = len(history._tokens)
        whole = next((each for each in wholes if each[:at] == history._tokens), [])
        right = whole[at:][:most]
        if len(right) > at % 4:
            right[at % 4] = 3 + (right[at % 4] + 1) % 29
        return right

    monkeypatch.setattr(drafting.History, "draft", guess)
    for tokens in (0, 3):
        engine, collector = engine_of(tmp_path / family, speculative_tokens=tokens), new_collector()
        await engine.install(Policy(1, "one"), weights_of_model(model))
        await engine.submit(collector.stream(max_new_tokens=20), groups)
        said = await collector.wait_ended(6)
        assert max(off(model, output) for output in said.values()) < 1e-4
        found.append({key: list(output.whole.token_ids) for key, output in said.items()})
        wholes += [[*output.prompt_ids, *output.whole.token_ids] for output in said.values()]
        engines.append(engine)
        await engine.close()
    assert found[0] == found[1]
    plain, guessed = (engine.figures for engine in engines)
    assert 0 < guessed.accepted_tokens < guessed.drafted_tokens
    assert guessed.decode_steps < plain.decode_steps


@pytest.mark.parametrize("family", ["qwen3_5_text", "gemma3_text"])
async def test_an_answer_that_moves_takes_its_states_along(family, in_step, tmp_path, new_collector):
    model = write_family(tmp_path / family, family)
    engine, other = engine_of(tmp_path / family), engine_of(tmp_path / family)
    for each in (engine, other):
        await each.install(Policy(1, "one"), weights_of_model(model))
    first, second = new_collector(), new_collector()
    group = Group(0, drawn(11, 3), [Sample(0, 5)])
    stream = first.stream(max_new_tokens=40, chunk_tokens=2)
    await engine.submit(stream, [group])
    await first.wait(lambda c: len(c.outputs) > 4)
    stream.moving.set()
    await engine.abort(None, stream=stream)
    [(_, partial)] = (await first.wait_ended(1)).items()
    assert partial.stopped and partial.cache
    sample = Sample(0, 6, partial.whole, cache=partial.cache)
    await other.submit(second.stream(max_new_tokens=40), [Group(0, group.prompt_ids, [sample])])
    [output] = (await second.wait_ended(1)).values()
    assert other.figures.moved_tokens and not other.figures.prefill_tokens
    assert off(model, output) < 1e-4
    for each in (engine, other):
        await each.close()


async def test_a_pass_that_failed_leaves_no_states_to_the_next_prompts(tmp_path, new_collector, monkeypatch):
    model = write_family(tmp_path / "model", "qwen3_5_text")
    engine = engine_of(tmp_path / "model")
    await engine.install(Policy(1, "one"), weights_of_model(model))
    norm, passes = engine._model._model.model.norm, []
    plain = norm.forward

    def failing(hidden):
        passes.append(hidden)
        if len(passes) == 4:
            raise RuntimeError("no room")
        return plain(hidden)

    monkeypatch.setattr(norm, "forward", failing)
    first, second = new_collector(), new_collector()
    group = Group(0, drawn(9, 1), [Sample(member, 1) for member in range(3)])
    await engine.submit(first.stream(max_new_tokens=12), [group])
    with pytest.raises(AssertionError, match="no room"):
        await first.wait_ended(3)
    groups = [Group(index, drawn(length, index), [Sample(0, 2)]) for index, length in enumerate((5, 12, 8))]
    await engine.submit(second.stream(max_new_tokens=12), groups)
    said = await second.wait_ended(3)
    assert max(off(model, output) for output in said.values()) < 1e-4
    await engine.close()


@pytest.mark.parametrize("family", REFUSED)
def test_what_the_cache_cannot_hold_is_refused_by_name(family, tmp_path):
    write_family(tmp_path / family, family)
    with pytest.raises(
        ModelNotReadable,
        match=r"model.path: .*(an indexer chooses|outside of transformers' cache).*choose another",
    ):
        engine_of(tmp_path / family)


@pytest.mark.parametrize(
    ("family", "keys"), [("qwen3", {"logit_scale": 0.25}), ("llama", {"logits_scaling": 3.0})]
)
async def test_a_head_that_is_not_the_classes_own_is_refused_by_name(family, keys, tmp_path):
    model = write_family(tmp_path / family, family, **keys)
    engine = engine_of(tmp_path / family)
    with pytest.raises(Refused, match=r"model.path: .* would be computed wrong by rollout.engine") as caught:
        await engine.install(Policy(1, "one"), weights_of_model(model))
    assert caught.value.reason == "INVALID" and family in str(caught.value) and engine.policy is None
    await engine.close()
