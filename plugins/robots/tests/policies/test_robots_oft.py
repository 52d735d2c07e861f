"""OFT's diffusion head and FiLM against plain computations, from files as its authors name their tensors."""

from __future__ import annotations

import json
import math
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from headrace_modelkit.errors import ModelNotReadable
from headrace_modelkit.weights import state_tensors
from headrace_robots.convert import convert, load_published
from headrace_robots.policies.directory import load_policy
from headrace_robots.policies.gaussian import row_noise
from headrace_robots.policies.openvla.vit import PUBLISHED
from headrace_robots.policies.policy import ACTIONS, Observation
from headrace_robots.policies.published import Wanted
from openvla_parts import SHAPES, TEXT, Parts
from safetensors.torch import save_file

PROMPTS = ((1, 5, 6, 7, 8), (1, 9, 10))
STEPS, TRAINED = 5, 50


@pytest.fixture(scope="module")
def parts():
    return Parts()


@pytest.fixture
def directory(parts, tmp_path, monkeypatch):
    """The weights of an OpenVLA, beside which the parts of OFT are written."""
    for name, shape in SHAPES.items():
        monkeypatch.setitem(PUBLISHED, name, shape)
    stated = {
        "timm_model_ids": list(SHAPES),
        "text_config": TEXT,
        "pad_to_multiple_of": 64,
        "n_action_bins": 256,
    }
    stated["norm_stats"] = {"one": {"action": {"q01": [-2.0, 0.0], "q99": [2.0, 1.0]}}}
    (tmp_path / "config.json").write_text(json.dumps(stated))
    save_file(parts.published(), tmp_path / "model.safetensors")
    return tmp_path


def drawn(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))) * 0.3


def network(inputs, hidden, outputs, prefix):
    found = {}
    for name, (high, wide) in {"fc1": (hidden, inputs), "fc2": (outputs, hidden)}.items():
        found |= {f"{prefix}{name}.weight": drawn(high, wide), f"{prefix}{name}.bias": drawn(high)}
    for name, size in {"layer_norm1": inputs, "layer_norm2": hidden}.items():
        found |= {f"{prefix}{name}.weight": 1 + drawn(size), f"{prefix}{name}.bias": drawn(size)}
    for block in range(2):
        own = f"{prefix}mlp_resnet_blocks.{block}.ffn."
        found |= {f"{own}0.weight": 1 + drawn(hidden), f"{own}0.bias": drawn(hidden)}
        found |= {f"{own}1.weight": drawn(hidden, hidden), f"{own}1.bias": drawn(hidden)}
    return found


def through(own, prefix, values):
    def norm(name, given):
        return F.layer_norm(
            given, given.shape[-1:], own[f"{prefix}{name}.weight"], own[f"{prefix}{name}.bias"]
        )

    def linear(name, given):
        return F.linear(given, own[f"{prefix}{name}.weight"], own[f"{prefix}{name}.bias"])

    values = linear("fc1", norm("layer_norm1", values)).relu()
    for block in range(2):
        name = f"mlp_resnet_blocks.{block}.ffn."
        values = values + linear(f"{name}1", norm(f"{name}0", values)).relu()
    return linear("fc2", norm("layer_norm2", values))


def seen():
    image = torch.randint(
        0, 256, (2, 28, 28, 3), generator=torch.Generator().manual_seed(5), dtype=torch.uint8
    )
    return Observation(None, {"image": image}, PROMPTS)


HEAD = network(64, 32, 2, "noise_predictor.mlp_resnet.")
NOISY = {
    "fc1.weight": drawn(32, 1),
    "fc1.bias": drawn(32),
    "fc2.weight": drawn(32, 32),
    "fc2.bias": drawn(32),
}


def kept():
    """What is left of an action at each of 50 training steps, by the squared cosine."""
    wave = [math.cos((step / TRAINED + 0.008) / 1.008 * math.pi / 2) ** 2 for step in range(TRAINED + 1)]
    shares, product = [], 1.0
    for before, after in pairwise(wave):
        product *= 1 - min(1 - after / before, 0.999)
        shares.append(product)
    return shares


def noise_of(parts, row, point, time):
    """What the head predicts, of one environment: OFT's sequence through transformers' Llama."""
    prefix = parts.embeds(seen().images["image"][row], PROMPTS[row])
    rates = [time * 10_000 ** (-place / 15) for place in range(16)]
    when = torch.tensor([[[*map(math.sin, rates), *map(math.cos, rates)]]])
    slots = F.gelu(F.linear(point.flatten()[:, None], NOISY["fc1.weight"], NOISY["fc1.bias"]))
    slots = F.linear(slots, NOISY["fc2.weight"], NOISY["fc2.bias"])[None]
    stop = parts.llama.model.embed_tokens(torch.tensor([[2]]))
    embeds = torch.cat([prefix[:, :5], when, prefix[:, 5:], slots, stop], 1)  # behind <s> and four patches
    free = torch.zeros(1, 1, embeds.shape[1], embeds.shape[1])
    hidden = parts.llama.model(inputs_embeds=embeds, attention_mask=free).last_hidden_state
    start = prefix.shape[1]
    return through(HEAD, "noise_predictor.mlp_resnet.", hidden[0, start : start + 6].reshape(3, 64))


def test_the_diffusion_head_follows_ddim(parts, directory):
    save_file(
        {f"module.{name}": tensor for name, tensor in HEAD.items()}, directory / "action_head.safetensors"
    )
    save_file(NOISY, directory / "noisy_action_projector.safetensors")
    chosen = {"chunk_length": 3, "denoising": {"steps": STEPS}}
    policy, shares = load_published(directory, Wanted(chosen)), kept()
    assert policy.config.head == "diffusion"
    chunk = policy.act(seen(), [3, 4], deterministic=True)
    for row in range(2):
        point = row_noise([3, 4], (3, 2), torch.device("cpu"))[row]
        for time in range(40, -1, -10):
            with torch.no_grad():
                noise = noise_of(parts, row, point, time)
            clean = (point - math.sqrt(1 - shares[time]) * noise) / math.sqrt(shares[time])
            before = shares[time - 10] if time else 1.0
            point = math.sqrt(before) * clean.clamp(-1, 1) + math.sqrt(1 - before) * noise
        torch.testing.assert_close(chunk.sampled[ACTIONS][row], point, rtol=1e-3, atol=1e-3)
    sampled = policy.act(seen(), [3, 4])
    again = policy.evaluate(seen(), sampled.sampled)
    torch.testing.assert_close(again.log_probs_BCA, sampled.log_probs_BCA, rtol=1e-4, atol=1e-3)
    assert torch.equal(again.values_B, sampled.values_B)
    losses = policy.imitate(seen(), torch.zeros(2, 3, 2), [3, 4])
    time = policy.schedule.times([3, 4])
    actions = policy.scaling.drawn(torch.zeros(2, 3, 2))
    noise = row_noise([3, 4], (3, 2), torch.device("cpu"))
    for row in range(2):
        share = shares[int(time[row])]
        point = math.sqrt(share) * actions[row] + math.sqrt(1 - share) * noise[row]
        wanted = (noise_of(parts, row, point, int(time[row])) - noise[row]).square().mean(-1)
        torch.testing.assert_close(losses[row], wanted, rtol=1e-3, atol=1e-3)


def film_file(parts):
    """The vision backbone as OFT saves it: blocks in a wrapper, adapters of rank 32 beside the queries' layers."""
    found, merged = {}, {}
    for name, tensor in parts.published().items():
        if not name.startswith("vision_backbone."):
            continue
        own = (
            name.replace(".attn.", ".block.attn.").replace(".mlp.", ".block.mlp.")
            if ".blocks." in name
            else name
        )
        own = own.replace(".norm", ".block.norm").replace(".ls", ".block.ls") if ".blocks." in own else own
        merged[name] = tensor
        if name.endswith("attn.qkv.weight"):
            layer = own.removesuffix(".weight")
            a, b = drawn(32, tensor.shape[1]), drawn(tensor.shape[0], 32)
            found |= {f"{layer}.lora_A.default.weight": a, f"{layer}.lora_B.default.weight": b}
            found[f"{layer}.base_layer.weight"] = tensor
            merged[name] = tensor + 0.5 * b @ a  # alpha is 16 at most
        elif name.endswith("attn.qkv.bias"):
            found[own.replace(".bias", ".base_layer.bias")] = tensor
        else:
            found[own] = tensor
    for part, shape in zip(("featurizer", "fused_featurizer"), SHAPES.values(), strict=True):
        for layer in range(3):
            for name in ("scale", "shift"):
                own = f"vision_backbone.{part}.blocks.{layer}.{name}"
                added = {f"{own}.weight": drawn(shape.width, 32), f"{own}.bias": drawn(shape.width)}
                found |= added
                merged |= added
    return found, merged


def filmed(own, name, image, shape, said):
    """Patches as the second block of three leaves them."""
    place = f"vision_backbone.{name}."

    def norm(part, given):
        return F.layer_norm(given, given.shape[-1:], own[f"{part}.weight"], own[f"{part}.bias"], eps=1e-6)

    def linear(part, given):
        return F.linear(given, own[f"{part}.weight"], own[f"{part}.bias"])

    hidden = F.conv2d(
        image, own[f"{place}patch_embed.proj.weight"], own[f"{place}patch_embed.proj.bias"], stride=14
    )
    hidden = hidden.flatten(2).transpose(1, 2) + own[f"{place}pos_embed"]
    first = [own[f"{place}{token}"] for token in ("cls_token", "reg_token") if f"{place}{token}" in own]
    hidden = torch.cat([*first, hidden], 1)
    for layer in range(2):
        block = f"{place}blocks.{layer}."
        heads = linear(f"{block}attn.qkv", norm(f"{block}norm1", hidden))
        heads = heads.unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        scores = heads[0] @ heads[1].transpose(-1, -2) / math.sqrt(heads.shape[-1])
        mixed = (scores.softmax(-1) @ heads[2]).transpose(1, 2).flatten(2)
        hidden = hidden + linear(f"{block}attn.proj", mixed) * own.get(f"{block}ls1.scale_factor", 1)
        hidden = hidden * (1 + linear(f"{block}scale", said)) + linear(f"{block}shift", said)
        inner = F.gelu(linear(f"{block}mlp.fc1", norm(f"{block}norm2", hidden)))
        hidden = hidden + linear(f"{block}mlp.fc2", inner) * own.get(f"{block}ls2.scale_factor", 1)
    return hidden[:, -shape.patches :]


def test_film_modulates_what_the_vision_blocks_see(parts, directory):
    found, merged = film_file(parts)
    save_file(
        {name: tensor.contiguous() for name, tensor in found.items()},
        directory / "vision_backbone.safetensors",
    )
    policy = load_published(directory, Wanted({"chunk_length": 3}))
    assert policy.config.film and policy.config.head == "tokens"
    observation = seen()
    with torch.no_grad():
        patches = policy._seen(observation)
        for row in range(2):
            said = parts.llama.model.embed_tokens(torch.tensor([*PROMPTS[row], 2])).mean(0)
            image = observation.images["image"][row : row + 1].permute(0, 3, 1, 2).float() / 255
            features = []
            for name, shape in zip(("featurizer", "fused_featurizer"), SHAPES.values(), strict=True):
                mean, std = (torch.tensor(each)[:, None, None] for each in (shape.mean, shape.std))
                features.append(filmed(merged, name, (image - mean) / std, shape, said))
            wanted = policy.projector(torch.cat(features, -1))
            torch.testing.assert_close(patches[row : row + 1], wanted, rtol=1e-3, atol=1e-3)
    chunk = policy.act(observation, [3, 4])
    again = policy.evaluate(observation, chunk.sampled)
    torch.testing.assert_close(again.log_probs_BCA, chunk.log_probs_BCA)


def test_half_a_diffusion_head_or_a_block_without_film_is_named(parts, directory):
    save_file(NOISY, directory / "noisy_action_projector.safetensors")
    with pytest.raises(
        ModelNotReadable, match=r"a diffusion head has both action_head\.safetensors, with a noise_pred"
    ):
        load_published(directory, Wanted({"chunk_length": 3}))
    (directory / "noisy_action_projector.safetensors").unlink()
    found, _ = film_file(parts)
    gone = "vision_backbone.featurizer.blocks.1.shift.bias"
    found = {name: tensor.contiguous() for name, tensor in found.items() if name != gone}
    save_file(found, directory / "vision_backbone.safetensors")
    with pytest.raises(
        ModelNotReadable, match=r"1 missing, first vision_backbone\.featurizer\.blocks\.1\.shift\.bias"
    ):
        load_published(directory, Wanted({"chunk_length": 3}))


def test_an_adapter_without_a_configuration_is_read_with_its_base_s(parts, directory, tmp_path_factory):
    adapters, layer = tmp_path_factory.mktemp("adapters"), "language_model.model.layers.0.self_attn.q_proj."
    a, b = drawn(4, 32), drawn(32, 4)
    tensors = {f"base_model.model.{layer}lora_A.weight": a, f"base_model.model.{layer}lora_B.weight": b}
    save_file(tensors, adapters / "adapter_model.safetensors")
    stated = {"peft_type": "LORA", "lora_alpha": 8, "r": 4, "base_model_name_or_path": str(directory)}
    (adapters / "adapter_config.json").write_text(json.dumps(stated))
    (directory / "tokenizer.json").write_text("{}")
    convert(adapters, adapters / "policy", Wanted())
    found = dict(state_tensors(load_policy(adapters / "policy")))
    wanted = parts.published()[f"{layer}weight"] + 2 * b @ a
    torch.testing.assert_close(found[f"{layer}weight"], wanted, rtol=1e-5, atol=1e-6)
