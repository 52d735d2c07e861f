"""`act` against a plain computation with torch's own attention and transformers' own ResNet."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from headrace_modelkit.errors import ModelNotReadable
from headrace_modelkit.weights import state_tensors
from headrace_robots.convert import convert, load_published
from headrace_robots.policies.act.transformer import plane_waves
from headrace_robots.policies.directory import load_policy, policy_config
from headrace_robots.policies.policy import Observation, imitation_loss
from headrace_robots.policies.published import Wanted
from safetensors.torch import save_file
from transformers import ResNetConfig, ResNetModel

FIELDS = {
    "kind": "act",
    "bounds": {"low": [-1.0, 0.0], "high": [3.0, 0.5], "clip": False},
    "state": {"low": [-2.0] * 3, "high": [2.0] * 3, "clip": False},
    "cameras": ["top", "side"],
    "height": 64,
    "width": 96,
    "horizon": 5,
    "chunk_length": 3,
    "dim_model": 16,
    "n_heads": 2,
    "dim_feedforward": 24,
    "n_encoder_layers": 2,
    "n_decoder_layers": 2,
    "latent_dim": 4,
    "n_vae_encoder_layers": 1,
    "log_std": -1.0,
}


def made(**chosen):
    policy = policy_config({**FIELDS, **chosen}).build(0)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        for name, parameter in policy.named_parameters():
            noise = torch.randn_like(parameter) * (0.05 if parameter.dim() < 4 else 0.0)
            parameter.add_(noise.abs() if name.endswith("running_var") else noise)
    return policy


def seen():
    generator = torch.Generator().manual_seed(1)
    images = {
        name: torch.randint(0, 256, (2, 64, 96, 3), generator=generator, dtype=torch.uint8)
        for name in ("top", "side")
    }
    return Observation(torch.rand(2, 3, generator=generator), images)


def plain_resnet(own):
    """transformers' ResNet-18 with weights by torchvision's names."""
    body = ResNetModel(
        ResNetConfig(
            embedding_size=64, hidden_sizes=[64, 128, 256, 512], depths=[2, 2, 2, 2], layer_type="basic"
        )
    ).eval()
    found = {}
    for name, tensor in own.items():
        parts = name.split(".")
        if parts[0] in ("conv1", "bn1"):
            place = "embedder.embedder"
            kind = parts[0]
        elif parts[2] == "downsample":
            place, kind = (
                f"encoder.stages.{int(parts[0][5:]) - 1}.layers.{parts[1]}.shortcut",
                "cb"[int(parts[3])],
            )
        else:
            number = int(parts[2][-1]) - 1
            place = f"encoder.stages.{int(parts[0][5:]) - 1}.layers.{parts[1]}.layer.{number}"
            kind = parts[2]
        layer = "convolution" if kind.startswith("c") else "normalization"
        found[f"{place}.{layer}.{parts[-1]}"] = tensor
    missing, unknown = body.load_state_dict(found, strict=False)
    assert not unknown and all(name.endswith("num_batches_tracked") for name in missing)
    return body


def attention(module):
    plain = torch.nn.MultiheadAttention(16, 2, batch_first=True)
    plain.load_state_dict(module.state_dict())
    return lambda q, k, v: plain(q, k, v, need_weights=False)[0]


def encoded(layers, hidden, places):
    for layer in layers:
        hidden = layer.norm1(hidden + attention(layer.self_attn)(hidden + places, hidden + places, hidden))
        hidden = layer.norm2(hidden + layer.linear2(F.relu(layer.linear1(hidden))))
    return hidden


def chunk_of(policy, observation, latent):
    """(B, H, A) in normalised numbers, as ACT computes it."""
    model, config = policy.model, policy.config
    tokens = [model.encoder_latent_input_proj(latent)[:, None]]
    tokens.append(model.encoder_robot_state_input_proj(observation.state_BS / 2)[:, None])
    places = [model.encoder_1d_feature_pos_embed.weight]
    body = plain_resnet(model.backbone.state_dict())
    for name in config.cameras:
        image = observation.images[name].permute(0, 3, 1, 2).float() / 255
        mean, std = (torch.tensor(each)[:, None, None] for each in (config.image_mean, config.image_std))
        features = body((image - mean) / std).last_hidden_state
        tokens.append(model.encoder_img_feat_input_proj(features).flatten(2).transpose(1, 2))
        places.append(plane_waves(*features.shape[-2:], 16))
    where = torch.cat(places)
    memory = encoded(model.encoder.layers, torch.cat(tokens, 1), where)
    own = model.decoder_pos_embed.weight.expand(2, -1, -1)
    hidden = torch.zeros(2, 5, 16)
    for layer in model.decoder.layers:
        hidden = layer.norm1(hidden + attention(layer.self_attn)(hidden + own, hidden + own, hidden))
        hidden = layer.norm2(hidden + attention(layer.multihead_attn)(hidden + own, memory + where, memory))
        hidden = layer.norm3(hidden + layer.linear2(F.relu(layer.linear1(hidden))))
    return model.action_head(model.decoder.norm(hidden))


def test_the_chunk_and_its_log_probs_are_those_of_a_plain_computation():
    policy, observation = made(), seen()
    with torch.no_grad():
        mean = chunk_of(policy, observation, torch.zeros(2, 4))[:, :3]
        greedy = policy.act(observation, [4, 5], deterministic=True)
        drawn = policy.act(observation, [4, 5])
        again = policy.evaluate(observation, drawn.sampled)
    torch.testing.assert_close(greedy.sampled["actions"], mean, rtol=1e-4, atol=1e-5)
    low, high = torch.tensor([-1.0, 0.0]), torch.tensor([3.0, 0.5])
    torch.testing.assert_close(greedy.executed_BCA, (mean + 1) / 2 * (high - low) + low, rtol=1e-4, atol=1e-5)
    normal = torch.distributions.Normal(mean, policy.log_std.exp().detach())
    wanted = normal.log_prob(drawn.sampled["actions"])
    torch.testing.assert_close(drawn.log_probs_BCA, wanted, rtol=1e-4, atol=1e-4)
    assert torch.equal(again.log_probs_BCA, drawn.log_probs_BCA)
    torch.testing.assert_close(again.entropy_BCA, normal.entropy(), rtol=1e-5, atol=1e-5)


def test_cloning_is_an_absolute_error_and_the_latents_divergence():
    policy, observation = made(kl_weight=3.0), seen()
    model, actions = policy.model, torch.rand(2, 5, 2, generator=torch.Generator().manual_seed(3))
    unit = 2 * (actions - torch.tensor([-1.0, 0.0])) / torch.tensor([4.0, 0.5]) - 1
    with torch.no_grad():
        cls = model.vae_encoder_cls_embed.weight.expand(2, 1, -1)
        state = model.vae_encoder_robot_state_input_proj(observation.state_BS / 2)[:, None]
        tokens = torch.cat([cls, state, model.vae_encoder_action_input_proj(unit)], 1)
        table = np.array([[place / 10000 ** (2 * (d // 2) / 16) for d in range(16)] for place in range(7)])
        table[:, 0::2], table[:, 1::2] = np.sin(table[:, 0::2]), np.cos(table[:, 1::2])
        told = encoded(model.vae_encoder.layers, tokens, torch.from_numpy(table).float())[:, 0]
        mean, log_variance = model.vae_encoder_latent_output_proj(told).chunk(2, -1)
        posterior = torch.distributions.Normal(mean, (log_variance / 2).exp())
        divergence = torch.distributions.kl_divergence(posterior, torch.distributions.Normal(0.0, 1.0)).sum(
            -1
        )
        noise = torch.stack([torch.randn(4, generator=torch.Generator().manual_seed(s)) for s in (4, 5)])
        latent = mean + posterior.scale * noise
        errors = (chunk_of(policy, observation, latent) - unit).abs().mean(-1)
        found = policy.imitate(observation, actions, [4, 5])
    torch.testing.assert_close(found, errors + 3 * divergence[:, None], rtol=1e-4, atol=1e-5)


def test_cloning_learns_and_the_batch_norms_stay():
    policy, observation = made(kl_weight=0.1), seen()
    before = {name: value.clone() for name, value in policy.named_parameters() if ".bn" in name}
    actions = torch.rand(2, 5, 2, generator=torch.Generator().manual_seed(3))
    valid = torch.ones(2, 5, dtype=torch.bool)
    for name, parameter in policy.named_parameters():
        if "backbone" in name and parameter.dim() == 4:  # never trained, no norm holds its features
            parameter.requires_grad_(False)
    optimizer = torch.optim.Adam([each for each in policy.parameters() if each.requires_grad], lr=3e-3)
    losses = []
    for _ in range(16):
        losses.append(imitation_loss(policy.imitate(observation, actions, [4, 5]), valid))
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < 0.85 * losses[0]
    assert before and all(
        torch.equal(dict(policy.named_parameters())[name], value) for name, value in before.items()
    )


@pytest.fixture
def checkpoint(tmp_path):
    """As LeRobot published its first ones: statistics among the weights."""
    policy = made()
    stated = {
        "type": "act",
        "input_features": {
            "observation.images.top": {"type": "VISUAL", "shape": [3, 64, 96]},
            "observation.images.side": {"type": "VISUAL", "shape": [3, 64, 96]},
            "observation.state": {"type": "STATE", "shape": [3]},
        },
        "output_features": {"action": {"type": "ACTION", "shape": [2]}},
        "normalization_mapping": {"VISUAL": "MEAN_STD", "STATE": "MEAN_STD", "ACTION": "MEAN_STD"},
        "chunk_size": 5,
        "n_action_steps": 3,
        "temporal_ensemble_coeff": None,
        **{name: FIELDS[name] for name in FIELDS if name.startswith(("dim_", "n_", "latent"))},
    }
    (tmp_path / "config.json").write_text(json.dumps(stated))
    tensors = {name: value for name, value in state_tensors(policy) if name.startswith("model.")}
    tensors |= {"model.vae_encoder_pos_enc": torch.zeros(1, 7, 16)}
    tensors |= {
        "normalize_inputs.buffer_observation_state.mean": torch.tensor([1.0, 2.0, 3.0]),
        "normalize_inputs.buffer_observation_state.std": torch.ones(3),
        "unnormalize_outputs.buffer_action.mean": torch.tensor([5.0, 0.0]),
        "unnormalize_outputs.buffer_action.std": torch.tensor([2.0, 1.0]),
    }
    for camera in ("top", "side"):
        for name, value in {"mean": 0.25, "std": 0.5}.items():
            tensors[f"normalize_inputs.buffer_observation_images_{camera}.{name}"] = torch.full(
                (3, 1, 1), value
            )
    save_file(
        {name: value.detach().clone() for name, value in tensors.items()}, tmp_path / "model.safetensors"
    )
    return tmp_path, policy, stated


def test_a_published_checkpoint_becomes_a_policy_directory(checkpoint, tmp_path):
    directory, policy, _ = checkpoint
    convert(directory, tmp_path / "policy", Wanted({"log_std": -3.0}))
    found = load_policy(tmp_path / "policy")
    assert found.config.image_mean == (0.25, 0.25, 0.25) and found.config.image_std == (0.5, 0.5, 0.5)
    assert (found.config.cameras, found.config.height, found.config.width) == (("top", "side"), 64, 96)
    for name, tensor in state_tensors(policy):
        if name.startswith("model."):
            assert torch.equal(dict(state_tensors(found))[name], tensor), name
    torch.testing.assert_close(found.scaling(torch.tensor([3.0, -2.0])), torch.tensor([11.0, -2.0]))
    torch.testing.assert_close(
        found.state_scaling.drawn(torch.tensor([2.0, 2.0, 0.0])), torch.tensor([1.0, 0.0, -3.0])
    )
    assert found.log_std.unique().tolist() == [-3.0] and not (tmp_path / "policy" / "tokenizer.json").exists()


def test_what_is_not_supported_is_named(checkpoint):
    directory, _, stated = checkpoint
    (directory / "config.json").write_text(json.dumps({**stated, "temporal_ensemble_coeff": 0.01}))
    with pytest.raises(ModelNotReadable, match=r"temporal_ensemble_coeff 0\.01 is not supported"):
        load_published(directory, Wanted())
    (directory / "config.json").write_text(json.dumps({**stated, "vision_backbone": "resnet50"}))
    with pytest.raises(ModelNotReadable, match=r"vision_backbone: .*'resnet18' or 'resnet34'"):
        load_published(directory, Wanted())
    with pytest.raises(ValueError, match=r"'top' gives \(32, 96\) pixels, not \(64, 96\)"):
        small = {name: image[:, :32] for name, image in seen().images.items()}
        made().act(Observation(seen().state_BS, small), [1, 2])


def test_the_published_size():
    """Of lerobot/act_aloha_sim_transfer_cube_human: 14 numbers, one camera of 480 x 640."""
    own = {"kind": "act", "height": 480, "width": 640, "cameras": ["top"], "chunk_length": 100}
    unit = {"low": [-1.0] * 14, "high": [1.0] * 14}
    with torch.device("meta"):
        policy = policy_config({**own, "bounds": unit, "state": unit}).build(0)
    shapes = {name: tuple(tensor.shape) for name, tensor in state_tensors(policy)}
    golden = {
        "model.backbone.layer4.0.downsample.0.weight": (512, 256, 1, 1),
        "model.backbone.layer1.1.bn2.running_var": (64,),
        "model.encoder.layers.3.self_attn.in_proj_weight": (1536, 512),
        "model.decoder.layers.0.multihead_attn.out_proj.bias": (512,),
        "model.decoder.norm.weight": (512,),
        "model.encoder_img_feat_input_proj.weight": (512, 512, 1, 1),
        "model.vae_encoder_latent_output_proj.weight": (64, 512),
        "model.decoder_pos_embed.weight": (100, 512),
        "model.action_head.weight": (14, 512),
    }
    assert {name: shapes[name] for name in golden} == golden
    total = sum(torch.Size(shape).numel() for name, shape in shapes.items() if name.startswith("model."))
    assert 51e6 < total < 53e6, "published as 52M"
    assert policy.chunk_tokens == 1 + 1 + 15 * 20 + 100
