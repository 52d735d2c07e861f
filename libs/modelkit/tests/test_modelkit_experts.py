"""Models with experts: a version names their weights as the checkpoint does, and every bit comes back."""

from __future__ import annotations

import pytest
import torch
from headrace_modelkit.experts import compute_experts, take_routers
from headrace_modelkit.families.mixtures import expert_shape
from headrace_modelkit.loading import load_model, save_model
from headrace_modelkit.presets.families import tiny_config
from headrace_modelkit.presets.tiny import character_tokenizer, main, tiny_model, tiny_moe
from headrace_modelkit.weights import (
    CheckpointNames,
    copy_out,
    load_weights,
    share_weights,
    state_tensors,
    weight_layout,
)
from headrace_schema.sections.generating import ModelSection
from safetensors.torch import load_file
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import MixtralConfig, MixtralForCausalLM


def mixtral(seed: int) -> MixtralForCausalLM:
    torch.manual_seed(seed)
    shape = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 48, "num_local_experts": 4}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    return MixtralForCausalLM(MixtralConfig(**shape, **heads, tie_word_embeddings=True)).eval()


MODELS = {"qwen3-moe": tiny_moe, "mixtral": mixtral, "dense": tiny_model}


def body_of(model, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    found = {}
    for name, kind, shape in weight_layout(model, dtype):
        raw = bytearray(torch.Size(shape).numel() * kind.itemsize)
        copy_out(model, name, memoryview(raw), dtype)
        found[name] = torch.frombuffer(raw, dtype=kind).view(shape)
    return found


@pytest.mark.parametrize("name", MODELS)
def test_a_version_has_the_names_shapes_and_bits_of_the_saved_checkpoint(name, tmp_path):
    model = MODELS[name](1)
    save_model(model, character_tokenizer(), tmp_path / "model")
    saved = load_file(tmp_path / "model" / "model.safetensors")
    published = body_of(model, torch.float32)
    assert published.keys() == saved.keys()
    assert all(torch.equal(published[key], value) for key, value in saved.items())
    read = load_model(ModelSection(path=str(tmp_path / "model"), dtype="float32"))
    assert weight_layout(read, torch.float32) == weight_layout(model, torch.float32), "however it was made"
    with torch.device("meta"):
        empty = load_model(ModelSection(path=str(tmp_path / "model")), weights=False)
    assert weight_layout(empty, torch.bfloat16) == weight_layout(model, torch.bfloat16)


@pytest.mark.parametrize("take", [load_weights, share_weights])
@pytest.mark.parametrize("name", MODELS)
def test_every_bit_of_a_version_comes_back(name, take):
    model, other = MODELS[name](1), MODELS[name](2)
    take(other, body_of(model, torch.float32))
    assert all(
        torch.equal(a, b) for (_, a), (_, b) in zip(state_tensors(model), state_tensors(other), strict=True)
    )


def test_a_version_with_a_missing_or_misshapen_expert_changes_nothing():
    model, other = tiny_moe(1), tiny_moe(2)
    before = {name: tensor.clone() for name, tensor in state_tensors(other)}
    whole = body_of(model, torch.float32)
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    bent = whole | {name: whole[name].T}
    lacking = {key: value for key, value in whole.items() if key != name}
    for given in (bent, lacking):
        with pytest.raises(ValueError, match=r"layers\.1\.mlp\.experts\.3\.up_proj"):
            load_weights(other, given)
    assert all(torch.equal(before[key], value) for key, value in state_tensors(other))


def test_parts_are_views_so_that_what_is_written_is_the_models():
    model = tiny_moe()
    names = CheckpointNames.of(model)
    own = dict(state_tensors(model))
    fused = own["model.layers.0.mlp.experts.gate_up_proj"].data
    parts = dict(names.split("model.layers.0.mlp.experts.gate_up_proj", fused))
    parts["model.layers.0.mlp.experts.5.up_proj.weight"].fill_(7.0)
    assert (fused[5, 48:] == 7).all() and not (fused[5, :48] == 7).any()


def test_the_command_makes_a_mixture_of_experts(tmp_path, capsys):
    main([str(tmp_path / "moe"), "--experts"])
    model = load_model(ModelSection(path=str(tmp_path / "moe"), dtype="float32"))
    assert model.config.num_experts == 8 and model.config.num_experts_per_tok == 2


def each_alone(experts, hidden_ND, index_NK, weights_NK):
    """Each token's experts one after another, weighted behind their products, as transformers' own loop has them."""
    found = []
    for hidden_D, index_K, weights_K in zip(hidden_ND, index_NK.tolist(), weights_NK, strict=True):
        parts = []
        for expert, weight in zip(index_K, weights_K, strict=True):
            gate_I, up_I = (experts.gate_up_proj[expert] @ hidden_D).chunk(2)
            parts.append(weight * (experts.down_proj[expert] @ (experts.act_fn(gate_I) * up_I)))
        found.append(torch.stack(parts).sum(0))
    return torch.stack(found)


def test_experts_and_their_gradients_are_those_of_each_token_alone():
    torch.manual_seed(0)
    experts = tiny_moe(1).model.layers[0].mlp.experts
    hidden_ND = torch.randn(13, experts.gate_up_proj.shape[-1], requires_grad=True)
    weights_NK = torch.rand(13, 2, requires_grad=True)
    index_NK = torch.stack([torch.randperm(8)[:2] for _ in range(13)])
    index_NK[:, 0][index_NK[:, 0] == 5] = 6  # an expert that nearly nobody wants
    learned = [hidden_ND, weights_NK, experts.gate_up_proj, experts.down_proj]
    computed = []
    for function in (compute_experts, each_alone):
        found_ND = function(experts, hidden_ND, index_NK, weights_NK)
        computed.append([found_ND, *torch.autograd.grad(found_ND.square().sum(), learned)])
    for own, wanted in zip(*computed, strict=True):
        torch.testing.assert_close(own, wanted, rtol=1e-4, atol=1e-6)


def test_a_forward_that_is_made_again_is_recorded_once():
    model = tiny_moe(1)
    routing = take_routers(model)
    assert routing is not None and not routing.acts
    routing.recorded = []
    assert routing.acts
    tokens = torch.arange(6)[None]
    model(tokens, use_cache=False)
    before = routing.noted()
    first = [each.clone() for each in routing.recorded]
    model(tokens, use_cache=False)
    routing.forget(before)
    assert len(routing.recorded) == len(first) == model.config.num_hidden_layers
    routing.recorded = None
    assert not routing.acts


def test_experts_are_found_where_a_memory_plan_has_imaginary_tensors_too():
    """Gemma 4 makes buffers of real numbers as it is made."""
    config = tiny_config("gemma4_text+experts", initializer_range=0.25)  # not asked for before
    with FakeTensorMode():
        found = expert_shape(config)
    assert found is not None and (found.layers, found.experts, found.chosen) == (2, 4, 2)
