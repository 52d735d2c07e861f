"""Adapters beside frozen weights that are codes: gradients, publication, checkpoints, ranks and the plan."""

from __future__ import annotations

import re

import pytest
import torch
from headrace_modelkit.loading import load_model
from headrace_modelkit.lora import LoraLinear, adapted_layers, add_adapters, merged_weight
from headrace_modelkit.quantized import QuantizedWeight, product, quantized_bytes
from headrace_schema.openings import TrainerConfig
from headrace_schema.sections.generating import ModelSection
from headrace_trainer.algorithms import build_algorithm
from headrace_trainer.backends.fsdp.checks import check_run, compiles
from headrace_trainer.backends.plugins import FsdpOptions
from headrace_trainer.errors import Refusal
from test_trainer_memory import GPU, ROOMY, planned

pytestmark = pytest.mark.timeout(300)
FORMS = {"nf4": 0.12, "int8": 0.01, "fp8": 0.04}
"""How far decoded weights are from those that were coded, by their norms."""


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [(24, 40), (7, 9)])
def test_a_weight_is_near_what_was_coded_and_its_products_are_those_of_the_decoded_one(
    form, shape, monkeypatch
):
    torch.manual_seed(0)
    given = torch.randn(shape)
    own = QuantizedWeight(given, form)
    own.take(given)
    decoded = own.whole()
    assert (decoded - given).norm() / given.norm() < FORMS[form]
    assert quantized_bytes(given.numel(), form) == sum(tensor.nbytes for tensor in own.buffers())
    again = QuantizedWeight(given, form)
    again.take(decoded)
    assert again.whole().allclose(decoded, atol=1e-6), "a published base codes to itself"
    monkeypatch.setattr("headrace_modelkit.quantized.PART", 128)
    parts = QuantizedWeight(given, form)
    parts.take(given)
    assert parts.whole().equal(decoded)
    x = torch.randn(3, 5, shape[1], requires_grad=True)
    bias, upstream = torch.randn(shape[0]), torch.randn(3, 5, shape[0])
    found = product(x, own, bias)
    (gradient,) = torch.autograd.grad(found, x, upstream)
    torch.testing.assert_close(found, torch.nn.functional.linear(x, decoded, bias))
    torch.testing.assert_close(gradient, upstream @ decoded)


def decoded_model(backend):
    """A plain model with the backend's decoded base and adapters."""
    model = load_model(ModelSection.model_validate(backend._config.model.model_dump()))
    add_adapters(model, backend._config.trainer.lora, backend._config.seed)
    layers = dict(adapted_layers(backend._sharded.model))
    adapters = dict(backend._sharded.adapters())
    with torch.no_grad():
        for name, layer in adapted_layers(model):
            assert isinstance(layer, LoraLinear)
            layer.weight.copy_(layers[name].quantized.whole())
            layer.lora_A.copy_(adapters[f"{name}.lora_A"])
            layer.lora_B.copy_(adapters[f"{name}.lora_B"])
    return model


@pytest.mark.parametrize("form", FORMS)
def test_adapters_get_the_gradient_beside_the_decoded_base_and_are_merged_into_it(
    make_backend, sequences, accumulate, form
):
    backend = make_backend(trainer={"lora": {"rank": 4, "quantization": form}})
    for layer in (layer for _, layer in adapted_layers(backend._sharded.model)):
        assert layer.weight.numel() == 0, "nothing is kept beside the codes"
        layer.lora_B.data.normal_()
    backend._sharded.release()
    model, groups = decoded_model(backend), [sequences(seed) for seed in range(3)]
    accumulate(backend, groups, 64)
    found = backend.reduced_gradient(13.0)
    for sequence in [each for group in groups for each in group]:
        log_probs = model(torch.tensor([sequence.tokens])).logits[0].log_softmax(-1)
        taken = torch.stack([log_probs[p - 1, sequence.tokens[p]] for p in sequence.trained])
        (-sequence.advantages[0] * taken.sum() / 13.0).backward()
    own = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert found.keys() == own.keys()
    for name, gradient in own.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-5, rtol=1e-5)
    published, base = dict(backend.weights(published=True)), dict(backend.base_weights(published=True))
    plain = dict(model.named_parameters())
    assert [(name, tuple(value.shape)) for name, value in published.items()] == [
        (name, shape) for name, _, shape in backend.weight_layout()
    ]
    assert {kind for _, kind, _ in backend.weight_layout()} == {"float32"}
    for name, layer in adapted_layers(model):
        merged = merged_weight(
            layer.weight.detach(), layer.lora_A.detach(), layer.lora_B.detach(), layer.scale
        )
        assert published[f"{name}.weight"].equal(merged) and base[f"{name}.weight"].equal(
            plain[f"{name}.weight"]
        )


@pytest.mark.parametrize("form", FORMS)
def test_the_memory_plan_is_what_the_backend_has(make_backend, make_config, form):
    trainer = {"lora": {"rank": 4, "quantization": form}}
    backend = make_backend(trainer=trainer)
    plan = backend.memory_plan(ROOMY).host
    coded = [own for each in backend._sharded.quantized.values() for own in each.buffers()]
    assert plan["quantized weights"] == sum(tensor.nbytes for tensor in coded) > 0
    sharded = backend._sharded
    rest = [*(p for p in sharded.parameters.values() if not p.requires_grad), *sharded.buffers.values()]
    assert plan["frozen weights"] == sum(tensor.nbytes for tensor in rest)
    whole = planned(make_config(trainer={"ranks": 1, "lora": {"rank": 4}})).host
    assert plan["checkpoint copy"] == whole["checkpoint copy"], "which has the merged weights"
    offered = planned(make_config(trainer=trainer), rooms=GPU, shard="weights")
    assert not any("offload: parameters" in each.layout for each in offered.tried)


@pytest.mark.parametrize(
    ("config", "options", "words"),
    [
        ({"deterministic": True}, {}, "deterministic"),
        ({}, {"compile": True}, "trainer.backend_options.compile"),
        ({}, {"offload": "parameters"}, "trainer.backend_options.offload: parameters"),
    ],
)
def test_what_codes_do_not_go_with_is_refused_as_the_run_opens(make_config, config, options, words):
    found = TrainerConfig.model_validate(make_config(trainer={"lora": {"quantization": "nf4"}}, **config))
    with pytest.raises(Refusal, match=rf"trainer\.lora\.quantization: does not go with {re.escape(words)}"):
        check_run(FsdpOptions(**options), found, build_algorithm(found.algorithm))
    assert not compiles(FsdpOptions(), found, torch.device("cuda"))
