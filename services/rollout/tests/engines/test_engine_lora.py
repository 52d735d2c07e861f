"""Adapters of several policies beside one model, in one engine: `rollout.enable_lora`.

Each row's log-probs are those of its own adapter's merged weights, whatever runs beside it.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from headrace_modelkit.lora import merged_weight
from headrace_modelkit.tokenizer import load_tokenizer
from headrace_rollout.engines.base import Engine, Policy, Weights
from headrace_rollout.engines.merging import adapted
from headrace_rollout.engines.samples import Distribution, SlotKey
from headrace_schema.sections.generating import ModelSection
from model_weights import weights_of_model, weights_of_tensors
from rig import (
    CONTEXT,
    ENGINES_HERE,
    START_S,
    Collector,
    Rig,
    build,
    expected_log_probs,
    group,
    make_model,
    write_model,
)
from transformers import PreTrainedModel

pytestmark = pytest.mark.timeout(START_S + 60)
RANKS, SCALES = {"": 4, "guesser": 2}, {"": 2.0, "guesser": 0.5}
PROMPT = [3 + index % 20 for index in range(40)]
OFF = 1e-4
"""Of a log-prob: as far as the contract of other engines' weights allows."""


def pairs_of(base: Weights, policy: str, seed: int) -> dict[str, torch.Tensor]:
    """Adapters of every projection of a policy, that move log-probs by about 1."""
    random, rank, before = torch.Generator().manual_seed(seed), RANKS[policy], f"{policy}/" if policy else ""
    found = {}
    for entry in base.entries:
        if entry.name.endswith("proj.weight"):
            outputs, inputs = entry.shape
            found[f"{before}{entry.name}.lora_A"] = torch.randn(rank, inputs, generator=random)
            found[f"{before}{entry.name}.lora_B"] = torch.randn(outputs, rank, generator=random) * 0.1
    return found


def version(base: Weights, seed: int, own: int | None = None) -> Weights:
    """One of both policies; `own`: the seed of the own policy's adapters, where it is another."""
    pairs = pairs_of(base, "", seed if own is None else own) | pairs_of(base, "guesser", seed + 1)
    return adapted(replace(base, digest="of the base"), weights_of_tensors(pairs), SCALES)


def merged(model: PreTrainedModel, whole: Weights, policy: str) -> PreTrainedModel:
    found, adapter = copy.deepcopy(model), whole.beside[policy]
    views = {view.name: view for view in adapter.weights.parts()}
    for name in (each.removesuffix(".lora_A") for each in views if each.endswith("lora_A")):
        parts = [views[f"{name}.{part}"] for part in ("lora_A", "lora_B")]
        a, b = (
            torch.frombuffer(bytearray(each.data), dtype=torch.float32).view(each.shape) for each in parts
        )
        weight = found.get_parameter(name)
        weight.data = merged_weight(weight.data, a, b, adapter.scale)
    return found


@pytest.fixture(scope="module", params=[name for name in ENGINES_HERE if name != "sglang"])
def shared(request, tmp_path_factory) -> Iterator[Rig]:
    directory = tmp_path_factory.mktemp("adapted-model")
    model = write_model(directory, 1)
    section = ModelSection(path=str(directory), dtype="float32", max_context=CONTEXT)
    engine = build(request.param, section, load_tokenizer(section), adapters=RANKS)
    yield Rig(request.param, section, engine, model, make_model(2))
    asyncio.run(engine.close())


async def installed(rig: Rig, seed: int, own: int | None = None, **options: bool) -> Weights:
    rig.number += 1
    whole = version(weights_of_model(rig.model_a), seed, own)
    await rig.engine.install(Policy(rig.number, f"of seeds {seed}, {own}"), whole, **options)
    return whole


async def answers(rig: Rig, **options) -> dict[str, tuple[list[int], list[float]]]:
    """What both policies say to the same prompt in the same slot, at once."""
    found = {policy: Collector() for policy in RANKS}
    for policy, collector in found.items():
        stream = rig.stream(collector, adapter=policy, **options)
        await rig.engine.submit(stream, [group(0, PROMPT, samples=3)])
    ended = {policy: await collector.wait_ended(3) for policy, collector in found.items()}
    wholes = {policy: each[SlotKey(0, 1)].whole for policy, each in ended.items()}
    return {policy: (list(each.token_ids), list(each.log_probs)) for policy, each in wholes.items()}


@pytest.fixture
def loaded(shared, monkeypatch) -> list[set[str]]:
    """Whose adapters each install has put into an engine that runs in processes of its own."""
    found: list[set[str]] = []
    if shared.hosted:
        load = shared.engine._backend.load_adapters

        async def noted(adapters):
            found.append(set(adapters))
            return await load(adapters)

        monkeypatch.setattr(shared.engine._backend, "load_adapters", noted)
    return found


async def test_each_policys_rows_are_of_its_own_adapter_beside_those_of_others(shared, loaded):
    for seed, own in (
        (5, 5),
        (7, 7),
        (19, 7),
    ):  # the second version swaps adapters alone, the third one of them
        whole = await installed(shared, seed, own)
        for policy, (ids, log_probs) in (await answers(shared)).items():
            model = merged(shared.model_a, whole, policy)
            expected = expected_log_probs(model, PROMPT, ids, Distribution())
            assert log_probs == pytest.approx(expected, abs=OFF), policy
            other = merged(shared.model_a, whole, "" if policy else "guesser")
            apart = expected_log_probs(other, PROMPT, ids, Distribution())
            assert max(abs(a - b) for a, b in zip(apart, log_probs, strict=True)) > 0.1
    assert not shared.hosted or loaded == [{"", "guesser"}, {"", "guesser"}, {"guesser"}]
    scored, number = await shared.engine.score([(PROMPT, 20)], Distribution())
    own = expected_log_probs(merged(shared.model_a, whole, ""), PROMPT[:20], PROMPT[20:], Distribution())
    assert scored[0] == pytest.approx(own, abs=OFF) and number == shared.number


async def test_turns_of_two_policies_in_one_slot_keep_contexts_of_their_own(shared):
    """Policies take turns: each begins with what the other said, whose keys and values are of the other's adapter."""
    whole, context = await installed(shared, 9), list(PROMPT)
    for policy in (*RANKS, *RANKS):
        collector = Collector()
        stream = shared.stream(collector, adapter=policy, goes_on=True, max_new_tokens=4)
        await shared.engine.submit(stream, [group(0, context)])
        said = (await collector.wait_ended(1))[SlotKey(0, 0)].whole
        ids = list(said.token_ids)
        expected = expected_log_probs(merged(shared.model_a, whole, policy), context, ids, Distribution())
        assert list(said.log_probs) == pytest.approx(expected, abs=OFF), policy
        context += [*ids, 3]


async def test_a_swap_in_flight_goes_on_with_each_policys_new_adapter(shared):
    before = await installed(shared, 11)
    found, number = {policy: Collector() for policy in RANKS}, shared.number
    for policy, collector in found.items():
        stream = shared.stream(collector, adapter=policy, max_new_tokens=300, chunk_tokens=1)
        await shared.engine.submit(stream, [group(0, PROMPT, samples=8)])
    for collector in found.values():
        await collector.wait(lambda c: c.outputs)
    after = await installed(shared, 13, in_flight=True)
    for policy, collector in found.items():
        ended = [each.whole for each in (await collector.wait_ended(8)).values()]
        whole = max(ended, key=lambda each: (len(each.spans), len(each.token_ids)))
        ids, spans = list(whole.token_ids), list(whole.spans)
        assert [each for each, _ in spans] == [number, number + 1], policy
        count = spans[0][1]
        for adapters, part in ((before, slice(count)), (after, slice(count, None))):
            expected = expected_log_probs(
                merged(shared.model_a, adapters, policy), PROMPT, ids, Distribution()
            )
            assert list(whole.log_probs)[part] == pytest.approx(expected[part], abs=OFF), policy


async def test_a_version_of_other_adapters_is_refused_and_the_one_before_serves_on(shared):
    whole = await installed(shared, 15)
    policy, base = shared.engine.policy, weights_of_model(shared.model_a)
    for wrong in (base, replace(whole, beside={"": whole.beside[""]})):
        with pytest.raises(ValueError, match=r"rollout\.enable_lora: .*\(.*guesser.*and the version has"):
            await shared.engine.install(Policy(policy.number + 1, "others"), wrong)
    assert shared.engine.policy == policy
    ids, log_probs = (await answers(shared))["guesser"]
    expected = expected_log_probs(merged(shared.model_a, whole, "guesser"), PROMPT, ids, Distribution())
    assert log_probs == pytest.approx(expected, abs=OFF)


async def test_memory_that_was_given_back_takes_base_and_adapters_again(shared):
    await installed(shared, 17)
    engine: Engine = shared.engine
    await engine.pause()
    await engine.release()
    await engine.place((torch.device("cpu"),), 1)
    whole = await installed(shared, 17)
    for policy, (ids, log_probs) in (await answers(shared)).items():
        expected = expected_log_probs(merged(shared.model_a, whole, policy), PROMPT, ids, Distribution())
        assert log_probs == pytest.approx(expected, abs=OFF), policy
