"""A bf16 model on a CPU without bf16 instructions: the engine decodes from fp32 copies of the installed version."""

from __future__ import annotations

import copy

import torch
from headrace_modelkit import products
from headrace_modelkit.loading import load_model
from headrace_modelkit.weights import load_weights
from headrace_rollout.engines.base import Policy
from headrace_rollout.engines.transformers.policy_model import PolicyModel
from headrace_rollout.engines.weight_memory import tensor_of
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
        model.install(Policy(number, str(number)), weights.views())
        plain = load_model(half)
        load_weights(plain, {view.name: tensor_of(view) for view in weights.views()})
        products.use_fp32_products(plain.base_model, torch.device("cpu"))
        with torch.inference_mode():
            tokens = torch.arange(24).reshape(2, 12)
            assert torch.equal(
                model.hidden(tokens), plain.base_model(tokens, use_cache=False).last_hidden_state
            )
    wide = [layer for layer in model._model.modules() if "wide" in vars(layer)]
    assert wide and all(layer.wide[0] is not None for layer in wide)
    model.free_memory()
    assert all(layer.wide == [None, None] for layer in wide)
