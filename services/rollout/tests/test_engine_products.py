"""A bf16 model on a CPU without bf16 instructions: the engine decodes from fp32 copies of the installed version."""

from __future__ import annotations

import copy
import weakref

import pytest
import torch
from headrace_modelkit import products
from headrace_modelkit.loading import load_model
from headrace_modelkit.logprobs import token_log_probs
from headrace_modelkit.weights import load_weights
from headrace_rollout.engines.base import Policy
from headrace_rollout.engines.merging import tensor_of
from headrace_rollout.engines.samples import Distribution
from headrace_rollout.engines.transformers import joining
from headrace_rollout.engines.transformers.policy_model import PolicyModel
from model_weights import weights_of_model


def test_a_cpu_without_bf16_products_decodes_from_the_copies_of_the_installed_version(
    model_config, reference, monkeypatch
):
    monkeypatch.setattr(products, "has_bf16_products", lambda: False)
    half = model_config.model_copy(update={"dtype": "bfloat16"})
    model = PolicyModel(half, torch.device("cpu"))
    version = copy.deepcopy(reference)
    for number in (1, 2):
        with torch.no_grad():
            for weight in version.parameters():
                weight.mul_(1.5)
        weights = weights_of_model(version, torch.bfloat16)
        model.install(Policy(number, str(number)), weights.parts())
        plain = load_model(half)
        load_weights(plain, {view.name: tensor_of(view) for view in weights.parts()})
        products.use_fp32_products(plain.base_model, torch.device("cpu"))
        with torch.inference_mode():
            tokens = torch.arange(24).reshape(2, 12)
            assert torch.equal(
                model.hidden(tokens), plain.base_model(tokens, use_cache=False).last_hidden_state
            )
        assert model.missing_bytes == model.head.weight_VD.numel() * 4  # the layers' copies are there
    model.free_memory()
    assert model.missing_bytes == 0


async def test_answers_of_packed_weights_are_the_installed_versions_and_a_release_frees_them(
    engine, new_collector, groups, reference, weights, monkeypatch
):
    monkeypatch.setattr(products, "FEWEST_PACKED", 1)
    other = copy.deepcopy(reference)
    with torch.no_grad():
        for weight in other.parameters():
            weight.mul_(1.25)
    for number, version in ((2, other), (3, reference)):
        await engine.install(Policy(number, str(number)), weights_of_model(version))
        missing = engine._model.missing_bytes
        assert missing > 4 * reference.get_output_embeddings().weight.numel()
        collector = new_collector()
        await engine.submit(collector.stream(policy_number=number), groups)
        for output in (await collector.wait_ended(15)).values():
            ids = [*output.prompt_ids, *output.whole.token_ids]
            start = len(output.prompt_ids)
            with torch.no_grad():
                logits = version(torch.tensor([ids[:-1]])).logits[0, start - 1 :]
            expected = token_log_probs(logits, torch.tensor(ids[start:]), 1.0).tolist()
            assert output.whole.log_probs == pytest.approx(expected, abs=1e-4)
        assert engine._model.missing_bytes == 0
        scored, _ = await engine.score([(ids, start)], Distribution())
        assert scored[0] == pytest.approx(expected, abs=1e-4)
    packed = weakref.ref(engine._model._packed_head._ready)
    await engine.release()
    assert packed() is None and engine._model.missing_bytes == 0


async def test_what_packing_will_take_is_no_room_for_keys_and_values(
    engine, collector, groups, reference, monkeypatch
):
    monkeypatch.setattr(products, "FEWEST_PACKED", 1)
    monkeypatch.setattr(joining, "available_bytes", lambda device: 10_000_000)
    await engine.install(Policy(2, "two"), weights_of_model(reference))
    missing = engine._model.missing_bytes
    await engine.submit(collector.stream(policy_number=2, max_new_tokens=1), groups)
    await collector.wait_ended(15)
    # The pass that tells a token's size has packed the layers by then.
    head = 4 * reference.get_output_embeddings().weight.numel()
    assert 0 < head < missing
    assert engine._model.cache.budget_bytes == int((10_000_000 - head) * joining.FREE_SHARE["cpu"])
