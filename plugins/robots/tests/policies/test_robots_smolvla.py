"""`smolvla` against a plain computation: all of a prefix and its actions in one pass, as LeRobot trains it.

The plain one walks both stacks of layers together, without a cache, with its own rotary angles, attention and masks;
transformers' SmolVLM gives it the images' embeddings alone.
"""

from __future__ import annotations

import json
import math
import shutil

import pytest
import torch
import torch.nn.functional as F
from headrace_modelkit.errors import ModelNotReadable
from headrace_modelkit.presets.tiny import character_tokenizer
from headrace_modelkit.weights import state_tensors
from headrace_robots.convert import convert, deploy, load_published, main
from headrace_robots.policies.directory import load_policy, policy_config, save_policy
from headrace_robots.policies.gaussian import row_noise
from headrace_robots.policies.policy import ACTIONS, Observation
from headrace_robots.policies.published import Wanted
from headrace_robots.tiny import CHARACTERS, tiny_fields
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

PROMPTS = ((2, 5, 6, 7), (2, 9))


def fields(**chosen):
    own = tiny_fields("smolvla", 2, state=3, chunk_length=4, cameras=("front", "wrist"))
    return {**own, "action_width": 5, "state_width": 6, "chunk_length": 3, **chosen}


def shaken(policy):
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        for parameter in policy.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return policy


def seen():
    generator = torch.Generator().manual_seed(1)
    images = {
        name: torch.randint(0, 256, (2, 40, 56, 3), generator=generator, dtype=torch.uint8)
        for name in ("front", "wrist")
    }
    return Observation(torch.rand(2, 3, generator=generator) * 2 - 1, images, PROMPTS)


def turned(heads, places):
    """Rotary angles of wavelength 10,000 on (B, T, heads, size)."""
    half = heads.shape[-1] // 2
    angles = (places[..., None] / 10_000 ** (torch.arange(half) / half))[:, :, None]
    one, other = heads[..., :half], heads[..., half:]
    return torch.cat(
        [one * angles.cos() - other * angles.sin(), other * angles.cos() + one * angles.sin()], -1
    )


def attended(queries, keys, values, mask):
    """(B, T, heads × size) of (B, T, heads, size) queries, with fewer heads of keys."""
    times = queries.shape[2] // keys.shape[2]
    keys, values = (each.repeat_interleave(times, 2) for each in (keys, values))
    scores = torch.einsum("bthd,bnhd->bhtn", queries, keys) / math.sqrt(queries.shape[-1])
    shares = scores.masked_fill(~mask[:, None], -torch.inf).softmax(-1)
    return torch.einsum("bhtn,bnhd->bthd", shares, values).flatten(2)


def velocity(policy, observation, point, time):
    """The field in one pass over prefix and actions."""
    text, expert, count = policy.vlm.text_model, policy.expert, len(point)
    size = text.config.head_dim
    root = text.config.hidden_size**0.5
    parts, kept = [], []
    for image in observation.images.values():
        whole = image.permute(0, 3, 1, 2).float() / 255
        small = F.interpolate(whole, (40, 56), mode="bilinear", align_corners=False)  # 40 x 56 fits 56 x 56
        square = F.pad(small, (0, 0, 16, 0)) * 2 - 1
        features = policy.vlm.get_image_features(square[:, None]).pooler_output
        parts.append(torch.stack(list(features)) * root)
        kept.append(torch.ones(parts[-1].shape[:2], dtype=torch.bool))
    words, places = torch.zeros(2, 4, dtype=torch.long), torch.zeros(2, 4, dtype=torch.bool)
    for row, prompt in enumerate(PROMPTS):
        words[row, : len(prompt)], places[row, : len(prompt)] = torch.tensor(prompt), True
    parts += [
        text.embed_tokens(words) * root,
        policy.state_proj(F.pad(observation.state_BS, (0, 3)))[:, None],
    ]
    kept += [places, torch.ones(2, 1, dtype=torch.bool)]
    prefix, there = torch.cat(parts, 1), torch.cat(kept, 1)
    length, horizon = prefix.shape[1], point.shape[1]
    periods = 4e-3 * 1000 ** torch.linspace(0, 1, policy.config.sizes.expert // 2, dtype=torch.float64)
    angles = time.double()[:, None] * 2 * math.pi / periods
    waves = torch.cat([angles.sin(), angles.cos()], -1).float()[:, None].expand(-1, horizon, -1)
    both = torch.cat([policy.action_in_proj(point), waves], -1)
    actions = policy.action_time_mlp_out(F.silu(policy.action_time_mlp_in(both)))
    blocks = torch.cat(
        [torch.zeros(length - 1), torch.arange(1, horizon + 2)]
    )  # state, then each action, sees before
    there_all = F.pad(there, (0, horizon), value=True)
    mask = (blocks[None] <= blocks[:, None])[None] & there_all[:, None] & there_all[:, :, None]
    mask |= torch.eye(length + horizon, dtype=torch.bool)  # rows that are not there would divide 0 by 0
    order = there_all.cumsum(-1) - 1
    for index, (reader, layer) in enumerate(zip(text.layers, expert.layers, strict=True)):
        normed, own = reader.input_layernorm(prefix), layer.input_layernorm(actions)
        heads = [
            project(normed).unflatten(-1, (-1, size))
            for project in (reader.self_attn.q_proj, reader.self_attn.k_proj, reader.self_attn.v_proj)
        ]
        queries, keys, values = (
            turned(heads[0], order[:, :length]),
            turned(heads[1], order[:, :length]),
            heads[2],
        )
        read = attended(queries, keys, values, mask[:, :length, :length])
        asks = layer.self_attn.q_proj(own).unflatten(-1, (-1, size))
        if index % 2 == 0:
            own_keys = turned(layer.self_attn.k_proj(own).unflatten(-1, (-1, size)), order[:, length:])
            own_values = layer.self_attn.v_proj(own).unflatten(-1, (-1, size))
            keys, values = torch.cat([keys, own_keys], 1), torch.cat([values, own_values], 1)
            done = attended(turned(asks, order[:, length:]), keys, values, mask[:, length:])
        else:
            keys = layer.self_attn.k_proj(keys.flatten(2)).unflatten(-1, (-1, size))
            values = layer.self_attn.v_proj(values.flatten(2)).unflatten(-1, (-1, size))
            steps = torch.arange(horizon)[None].expand(count, -1)
            done = attended(turned(asks, steps), keys, values, there[:, None].expand(-1, horizon, -1))
        prefix = prefix + reader.self_attn.o_proj(read)
        prefix = prefix + reader.mlp(reader.post_attention_layernorm(prefix))
        actions = actions + layer.self_attn.o_proj(done)
        actions = actions + layer.mlp(layer.post_attention_layernorm(actions))
    return policy.action_out_proj(expert.norm(actions))


def test_the_field_is_that_of_one_plain_pass():
    policy, observation = shaken(policy_config(fields()).build(0)), seen()
    point, time = torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(2)), torch.tensor([1.0, 0.3])
    with torch.no_grad():
        found, _ = policy.field(observation, *policy.prefix(observation)[:2])(point, time)
        wanted = velocity(policy, observation, point, time)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_log_probs_are_those_of_the_steps_gaussians():
    """Flow-SDE by its formulas over the plain field, on the path that was drawn."""
    policy = shaken(policy_config(fields(flow={"steps": 3, "drawn": "all", "level": 0.5})).build(0))
    observation, level, delta = seen(), 0.5, 1 / 3
    chunk = policy.act(observation, [4, 5])
    path, summed = chunk.sampled["path"], torch.zeros(2, 4, 5)
    with torch.no_grad():
        for step in range(3):
            time, point = 1 - step * delta, path[:, step]
            speed = velocity(policy, observation, point, torch.full((2,), time))
            sigma2 = level**2 * time / max(1 - time, delta)
            noise, action = point + (1 - time) * speed, point - time * speed
            kept = time - delta
            mean = action * (1 - kept) + noise * (kept - sigma2 * delta / (2 * time))
            normal = torch.distributions.Normal(mean, math.sqrt(sigma2 * delta))
            summed += normal.log_prob(path[:, step + 1])
        again = policy.evaluate(observation, chunk.sampled)
    torch.testing.assert_close(chunk.log_probs_BCA, summed[:, :3, :2], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(again.log_probs_BCA, summed[:, :3, :2], rtol=1e-3, atol=1e-3)


def test_imitation_is_the_squared_error_of_executed_numbers():
    policy, observation = shaken(policy_config(fields()).build(0)), seen()
    actions = torch.rand(2, 4, 2, generator=torch.Generator().manual_seed(3)) * 2 - 1
    noise = row_noise([4, 5], (4, 5), torch.device("cpu"))
    time = policy._imitation_times([4, 5])
    whole = F.pad(actions, (0, 3))
    point = time[:, None, None] * noise + (1 - time[:, None, None]) * whole
    with torch.no_grad():
        errors = (velocity(policy, observation, point, time) - (noise - whole)).square()[..., :2].mean(-1)
        found = policy.imitate(observation, actions, [4, 5])
    torch.testing.assert_close(found, errors, rtol=1e-3, atol=1e-5)


def published(policy):
    """Its weights as LeRobot names them, and what such a file has beside them."""
    found = {
        "model.vlm_with_expert.vlm.lm_head.weight": torch.zeros(
            policy.vlm.text_model.embed_tokens.weight.shape
        )
    }
    for name, tensor in state_tensors(policy):
        if name.startswith("vlm."):
            found[f"model.vlm_with_expert.vlm.model.{name.removeprefix('vlm.')}"] = tensor
        elif name.startswith("expert."):
            found[f"model.vlm_with_expert.lm_expert.{name.removeprefix('expert.')}"] = tensor
        elif not name.startswith(("value_head.", "noise_head.")):
            found[f"model.{name}"] = tensor
    return {name: tensor.detach().clone() for name, tensor in found.items()}


STATED = {
    "type": "smolvla",
    "input_features": {
        "observation.state": {"type": "STATE", "shape": [3]},
        "observation.images.front": {"type": "VISUAL", "shape": [3, 256, 256]},
        "observation.images.wrist": {"type": "VISUAL", "shape": [3, 256, 256]},
        "observation.images.empty_camera_0": {"type": "VISUAL", "shape": [3, 480, 640]},
    },
    "output_features": {"action": {"type": "ACTION", "shape": [2]}},
    "normalization_mapping": {"VISUAL": "IDENTITY", "STATE": "MEAN_STD", "ACTION": "MEAN_STD"},
    "chunk_size": 4,
    "n_action_steps": 3,
    "max_state_dim": 6,
    "max_action_dim": 5,
    "num_steps": 3,
    "vlm_model_name": "HuggingFaceTB/SmolVLM2-500M-Video-Instruct",
    "attention_mode": "cross_attn",
}


@pytest.fixture
def checkpoint(tmp_path):
    """A directory as LeRobot publishes it, and (beside it) its language model's, which has more layers."""
    policy = shaken(policy_config(fields()).build(0))
    vlm = fields()["vlm"]
    base = tmp_path / "base"
    character_tokenizer(CHARACTERS).save_pretrained(base)
    text = {**vlm["text_config"], "num_hidden_layers": 8}
    (base / "config.json").write_text(json.dumps({**vlm, "text_config": text}))
    own = tmp_path / "published"
    own.mkdir()
    (own / "config.json").write_text(json.dumps(STATED))
    save_file(published(policy), own / "model.safetensors")
    step = {"registry_name": "normalizer_processor", "state_file": "policy_preprocessor_step_5.safetensors"}
    (own / "policy_preprocessor.json").write_text(json.dumps({"steps": [{"registry_name": "rename"}, step]}))
    statistics = {
        "observation.state.mean": torch.tensor([1.0, 2.0, 3.0]),
        "observation.state.std": torch.tensor([2.0, 0.5, 0.0]),
        "action.mean": torch.tensor([10.0, -1.0]),
        "action.std": torch.tensor([4.0, 0.25]),
    }
    save_file(statistics, own / "policy_preprocessor_step_5.safetensors")
    return own, base, policy


def test_a_published_checkpoint_becomes_a_policy_directory(checkpoint, tmp_path):
    own, base, policy = checkpoint
    convert(own, tmp_path / "policy", Wanted(base=base))
    found = load_policy(tmp_path / "policy")
    assert found.config.cameras == ("front", "wrist"), "an empty camera is none"
    for name, tensor in state_tensors(policy):
        if not name.startswith(("value_head.", "noise_head.")):
            assert torch.equal(dict(state_tensors(found))[name], tensor), name
    drawn = torch.tensor([[3.0, -2.0]])
    torch.testing.assert_close(found.scaling(drawn), torch.tensor([[22.0, -1.5]]))  # beyond the deviation too
    raw = Observation(torch.tensor([[5.0, 2.0, 3.0]]))
    normalised = found._state(raw, torch.device("cpu"), 6)
    torch.testing.assert_close(normalised, torch.tensor([[2.0, 0.0, 0.0, 0.0, 0.0, 0.0]]))
    assert (tmp_path / "policy" / "tokenizer.json").is_file()


def test_trained_weights_go_back_into_a_checkpoint(checkpoint, tmp_path):
    own, base, _ = checkpoint
    convert(own, tmp_path / "policy", Wanted(base=base))
    trained = shaken(load_policy(tmp_path / "policy"))
    save_policy(trained, tmp_path / "trained", tokenizer=base)
    deploy(own, tmp_path / "trained", tmp_path / "deployed", Wanted(base=base))
    again = dict(state_tensors(load_published(tmp_path / "deployed", Wanted(base=base))))
    for name, tensor in state_tensors(trained):
        if not name.startswith(("value_head.", "noise_head.")):
            assert torch.equal(again[name], tensor), name
    before, after = (load_file(each / "model.safetensors") for each in (own, tmp_path / "deployed"))
    assert before.keys() == after.keys()
    head = "model.vlm_with_expert.vlm.lm_head.weight"
    assert torch.equal(before[head], after[head]), "what the policy does not use stays"
    assert (tmp_path / "deployed/config.json").read_bytes() == (own / "config.json").read_bytes()
    with pytest.raises(ModelNotReadable, match="is there already"):
        deploy(own, tmp_path / "trained", tmp_path / "deployed", Wanted(base=base))
    save_policy(policy_config(fields(action_width=4)).build(0), tmp_path / "other", tokenizer=base)
    with pytest.raises(ModelNotReadable, match="was not made of this checkpoint: they differ in action_"):
        deploy(own, tmp_path / "other", tmp_path / "none", Wanted(base=base))
    assert not (tmp_path / "none").exists()


def test_a_checkpoint_is_named_as_the_hub_names_it(checkpoint, tmp_path, monkeypatch, capsys):
    """From the hub's cache, as it is where there is no network."""
    own, base, _ = checkpoint
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for name, folder in {"lerobot--smolvla_base": own, "HuggingFaceTB--SmolVLM2": base}.items():
        kept = tmp_path / "hub" / f"models--{name}"
        (kept / "refs").mkdir(parents=True)
        (kept / "refs/main").write_text("a" * 40)
        shutil.copytree(folder, kept / "snapshots" / ("a" * 40))
    target = tmp_path / "policy"
    assert main(["lerobot/smolvla_base", str(target), "--base", "HuggingFaceTB/SmolVLM2"]) == 0
    assert load_policy(target).config.cameras == ("front", "wrist")
    assert main(["lerobot/smolvla_bose", str(target)]) == 1
    assert "lerobot/smolvla_bose is no directory, and the hub does not give it" in capsys.readouterr().err


def test_what_a_checkpoint_lacks_is_named(checkpoint, tmp_path):
    own, base, policy = checkpoint
    with pytest.raises(ModelNotReadable, match=r"SmolVLM2-500M-Video-Instruct'.* by --base"):
        load_published(own, Wanted())
    tensors = published(policy)
    gone = tensors.pop("model.vlm_with_expert.lm_expert.layers.1.self_attn.k_proj.weight")
    save_file(tensors, own / "model.safetensors")
    with pytest.raises(ModelNotReadable, match=r"1 missing, first expert\.layers\.1\.self_attn\.k_proj"):
        load_published(own, Wanted(base=base))
    save_file(
        tensors | {"model.vlm_with_expert.lm_expert.layers.1.self_attn.k_proj.weight": gone[1:].clone()},
        own / "model.safetensors",
    )
    with pytest.raises(ModelNotReadable, match=r"k_proj\.weight has shape \(31, 32\)"):
        load_published(own, Wanted(base=base))
    (own / "config.json").write_text(json.dumps({**STATED, "attention_mode": "self_attn"}))
    with pytest.raises(
        ModelNotReadable, match=r"attention_mode 'self_attn' is not supported, only 'cross_attn'"
    ):
        load_published(own, Wanted(base=base))


def test_the_500m_has_the_published_sizes():
    """Of lerobot/smolvla_base, by the sizes of SmolVLM2-500M and what LeRobot's code makes of them."""
    text = {
        "model_type": "llama", "hidden_size": 960, "intermediate_size": 2560, "num_hidden_layers": 16,
        "num_attention_heads": 15, "num_key_value_heads": 5, "head_dim": 64, "vocab_size": 49280,
    }  # fmt: skip
    eye = {
        "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
        "image_size": 512, "patch_size": 16,
    }  # fmt: skip
    vlm = {"text_config": text, "vision_config": eye, "scale_factor": 4}
    own = {**fields(), "vlm": vlm, "horizon": 50, "action_width": 32, "state_width": 32, "flow": {}}
    with torch.device("meta"):
        policy = policy_config(own).build(0)
    shapes = {name: tuple(tensor.shape) for name, tensor in state_tensors(policy)}
    golden = {
        "vlm.connector.modality_projection.proj.weight": (960, 12288),
        "vlm.vision_model.embeddings.position_embedding.weight": (1024, 768),
        "vlm.text_model.layers.15.self_attn.k_proj.weight": (320, 960),
        "expert.layers.0.self_attn.k_proj.weight": (320, 720),
        "expert.layers.1.self_attn.k_proj.weight": (320, 320),
        "expert.layers.15.mlp.gate_proj.weight": (2048, 720),
        "expert.layers.2.self_attn.q_proj.weight": (960, 720),
        "state_proj.weight": (960, 32),
        "action_time_mlp_in.weight": (720, 1440),
        "action_out_proj.weight": (32, 720),
    }
    assert {name: shapes[name] for name in golden} == golden
    assert policy.chunk_tokens == 2 * 64 + 1 + 50, "64 positions for an image"
    unused = math.prod(shapes["vlm.text_model.embed_tokens.weight"])  # the head over words is in the file
    assert round((sum(math.prod(shape) for shape in shapes.values()) + unused) / 1e6) == 450


def test_it_is_saved_and_read_as_every_policy(tmp_path):
    policy, observation = shaken(policy_config(fields()).build(0)), seen()
    save_policy(policy, tmp_path / "saved")
    wanted = policy.act(observation, [1, 2])
    again = load_policy(tmp_path / "saved").act(observation, [1, 2])
    assert torch.equal(again.sampled[ACTIONS], wanted.sampled[ACTIONS])
    alone = policy.act(observation.take([1]), [2])
    torch.testing.assert_close(alone.sampled[ACTIONS], wanted.sampled[ACTIONS][1:], rtol=1e-4, atol=1e-5)
