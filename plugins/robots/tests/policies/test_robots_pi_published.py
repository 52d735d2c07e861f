"""π0 and π0.5 as LeRobot and openpi publish them: names, shapes, statistics, and what becomes of them.

The names are written out here, from lerobot's PI05Policy and PI0Policy and openpi's PI0Pytorch. Sizes are small.
"""

from __future__ import annotations

import json
import math

import pytest
import torch
from headrace_modelkit.errors import ModelNotReadable
from headrace_modelkit.presets.tiny import character_tokenizer
from headrace_modelkit.weights import state_tensors
from headrace_robots.convert import convert, load_published, main
from headrace_robots.policies.directory import load_policy, policy_config
from headrace_robots.policies.pi import published as reader
from headrace_robots.policies.policy import Observation
from headrace_robots.policies.published import Wanted
from headrace_robots.tiny import CHARACTERS, WORDS
from safetensors.torch import save_file

WIDTH, EXPERT, EYE, NUMBERS = 16, 12, 8, 6
HEADS, HEAD, MLP = 2, 8, 20
VARIANTS = {
    "gemma_300m": {"hidden_size": EXPERT, "intermediate_size": MLP},
    "gemma_2b": {"hidden_size": WIDTH, "intermediate_size": MLP},
}
LAYERS = {
    "model_type": "gemma",
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 1,
    "head_dim": HEAD,
    "vocab_size": WORDS + 1,
}
SIGLIP = {
    "model_type": "siglip_vision_model",
    "hidden_size": EYE,
    "intermediate_size": MLP,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "patch_size": 14,
    "vision_use_head": False,
}
PALIGEMMA, GEMMA = "paligemma_with_expert.paligemma.", "paligemma_with_expert.gemma_expert."
TOWER = f"{PALIGEMMA}model.vision_tower.vision_model."
LANGUAGE = f"{PALIGEMMA}model.language_model."


def linear(name, out, given, *, bias=True):
    return {f"{name}.weight": (out, given)} | ({f"{name}.bias": (out,)} if bias else {})


def gemma(before, hidden, *, adaptive):
    found = {}
    for layer in (f"{before}layers.{index}." for index in range(2)):
        for name, out in {"q": HEADS * HEAD, "k": HEAD, "v": HEAD}.items():
            found |= linear(f"{layer}self_attn.{name}_proj", out, hidden, bias=False)
        found |= linear(f"{layer}self_attn.o_proj", hidden, HEADS * HEAD, bias=False)
        found |= linear(f"{layer}mlp.gate_proj", MLP, hidden, bias=False)
        found |= linear(f"{layer}mlp.up_proj", MLP, hidden, bias=False)
        found |= linear(f"{layer}mlp.down_proj", hidden, MLP, bias=False)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            found |= norm_of(f"{layer}{norm}", hidden, adaptive=adaptive)
    return found | norm_of(f"{before}norm", hidden, adaptive=adaptive)


def norm_of(name, hidden, *, adaptive):
    return linear(f"{name}.dense", 3 * hidden, hidden) if adaptive else {f"{name}.weight": (hidden,)}


def shapes(kind):
    """Every tensor of a checkpoint of openpi, whose head over words is the words' embedding too."""
    found = {
        f"{TOWER}embeddings.patch_embedding.weight": (EYE, 3, 14, 14),
        f"{TOWER}embeddings.patch_embedding.bias": (EYE,),
        f"{TOWER}embeddings.position_embedding.weight": (4, EYE),
        f"{TOWER}post_layernorm.weight": (EYE,),
        f"{TOWER}post_layernorm.bias": (EYE,),
        **linear(f"{PALIGEMMA}model.multi_modal_projector.linear", WIDTH, EYE),
        f"{PALIGEMMA}lm_head.weight": (WORDS + 1, WIDTH),
        f"{GEMMA}lm_head.weight": (WORDS + 1, EXPERT),
        **gemma(LANGUAGE, WIDTH, adaptive=False),
        **gemma(f"{GEMMA}model.", EXPERT, adaptive=kind == "pi05"),
        **linear("action_in_proj", EXPERT, NUMBERS),
        **linear("action_out_proj", NUMBERS, EXPERT),
    }
    layer = f"{TOWER}encoder.layers.0."
    for name in ("k_proj", "v_proj", "q_proj", "out_proj"):
        found |= linear(f"{layer}self_attn.{name}", EYE, EYE)
    found |= linear(f"{layer}mlp.fc1", MLP, EYE) | linear(f"{layer}mlp.fc2", EYE, MLP)
    for name in ("layer_norm1", "layer_norm2"):
        found |= {f"{layer}{name}.weight": (EYE,), f"{layer}{name}.bias": (EYE,)}
    if kind == "pi05":
        return found | linear("time_mlp_in", EXPERT, EXPERT) | linear("time_mlp_out", EXPERT, EXPERT)
    mlps = linear("action_time_mlp_in", EXPERT, 2 * EXPERT) | linear("action_time_mlp_out", EXPERT, EXPERT)
    return found | mlps | linear("state_proj", EXPERT, NUMBERS)


def weights(kind):
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(shape, generator=generator) * 0.1 for name, shape in shapes(kind).items()}


STATISTICS = {
    "observation.state": {"mean": [1.0, 2.0], "std": [2.0, 0.5], "q01": [-1.0, 0.0], "q99": [3.0, 0.0]},
    "action": {"mean": [10.0, -1.0], "std": [4.0, 0.25], "q01": [0.0, -2.0], "q99": [8.0, 2.0]},
}
ALL = {**STATISTICS, "observation.images.base": {"mean": [[[0.5]], [[0.5]], [[0.5]]]}}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(reader, "GEMMA", VARIANTS)
    monkeypatch.setattr(reader, "LAYERS", LAYERS)
    monkeypatch.setattr(reader, "SIGLIP", SIGLIP)


@pytest.fixture
def lerobot(tmp_path):
    """Writes a checkpoint as LeRobot does, and the tokenizer's directory beside it."""

    def write(kind="pi05", **stated):
        directory, base = tmp_path / kind, tmp_path / "base"
        directory.mkdir(exist_ok=True)
        character_tokenizer(CHARACTERS).save_pretrained(base)
        mode = "QUANTILES" if kind == "pi05" else "MEAN_STD"
        images = {
            f"observation.images.{name}": {"type": "VISUAL", "shape": [3, 224, 224]}
            for name in ("base", "wrist")
        }
        config = {
            "type": kind,
            "input_features": {**images, "observation.state": {"type": "STATE", "shape": [2]}},
            "output_features": {"action": {"type": "ACTION", "shape": [2]}},
            "normalization_mapping": {"VISUAL": "IDENTITY", "STATE": mode, "ACTION": mode},
            "chunk_size": 4,
            "n_action_steps": 3,
            "paligemma_variant": "gemma_2b",
            "action_expert_variant": "gemma_300m",
            "num_inference_steps": 5,
            **stated,
        }
        (directory / "config.json").write_text(json.dumps(config))
        save_file(
            {f"model.{name}": tensor for name, tensor in weights(kind).items()},
            directory / "model.safetensors",
        )
        step = {
            "registry_name": "normalizer_processor",
            "state_file": "policy_preprocessor_step_2.safetensors",
        }
        (directory / "policy_preprocessor.json").write_text(json.dumps({"steps": [step]}))
        flat = {
            f"{key}.{name}": torch.tensor(values)
            for key, each in ALL.items()
            for name, values in each.items()
        }
        save_file(flat, directory / "policy_preprocessor_step_2.safetensors")
        return directory, base

    return write


@pytest.mark.parametrize("kind", ["pi0", "pi05"])
def test_a_checkpoint_of_lerobot_becomes_a_policy_directory(lerobot, kind, tmp_path):
    directory, base = lerobot(kind)
    target = tmp_path / "policy"
    assert (
        main(
            [
                str(directory),
                str(target),
                "--base",
                str(base),
                "--flow",
                '{"noise": "learned"}',
                "--clip",
                "-1",
                "1",
            ]
        )
        == 0
    )
    policy, given = load_policy(target), weights(kind)
    own = dict(state_tensors(policy))
    names = {
        "pi05": {
            "vlm.vision_tower.encoder.layers.0.mlp.fc1.weight": f"{TOWER}encoder.layers.0.mlp.fc1.weight",
            "vlm.language_model.embed_tokens.weight": f"{PALIGEMMA}lm_head.weight",
            "vlm.language_model.layers.1.mlp.up_proj.weight": f"{LANGUAGE}layers.1.mlp.up_proj.weight",
            "expert.layers.1.input_layernorm.dense.bias": f"{GEMMA}model.layers.1.input_layernorm.dense.bias",
            "expert.norm.dense.weight": f"{GEMMA}model.norm.dense.weight",
            "time_mlp_in.weight": "time_mlp_in.weight",
            "action_out_proj.weight": "action_out_proj.weight",
        },
        "pi0": {
            "model.model.vlm.multi_modal_projector.linear.bias": f"{PALIGEMMA}model.multi_modal_projector.linear.bias",
            "model.model.vlm.language_model.embed_tokens.weight": f"{PALIGEMMA}lm_head.weight",
            "model.model.dit.layers.0.self_attn.o_proj.weight": f"{GEMMA}model.layers.0.self_attn.o_proj.weight",
            "model.model.dit.norm.weight": f"{GEMMA}model.norm.weight",
            "model.embed_action_time.state_proj.weight": "state_proj.weight",
            "model.embed_action_time.action_in_proj.weight": "action_in_proj.weight",
            "model.action_out_proj.bias": "action_out_proj.bias",
        },
    }[kind]
    for name, theirs in names.items():
        assert torch.equal(own[name], given[theirs]), name
    config = policy.config
    assert (config.kind, config.cameras, config.chunk_length) == (kind, ("base", "wrist"), 3)
    assert (config.flow.steps, config.flow.noise) == (10, "learned"), "what is chosen replaces what is stated"
    assert (target / "tokenizer.json").is_file()
    assert policy.scaling(torch.tensor([90.0, -90.0])).tolist() == [1.0, -1.0], (
        "where the environment takes it"
    )


def test_quantiles_and_deviations_normalise_as_lerobot_does(lerobot):
    raw = torch.tensor([[2.0, 0.0], [7.0, 1.0]])
    for kind in ("pi0", "pi05"):
        directory, base = lerobot(kind)
        policy = load_published(directory, Wanted(base=base))
        state = policy._state(Observation(raw), torch.device("cpu"), 2)
        drawn = torch.tensor([[[0.5, -0.5], [3.0, 0.0]]])
        if kind == "pi0":
            wanted = (raw - torch.tensor([1.0, 2.0])) / torch.tensor([2.0, 0.5])
            actions = drawn * torch.tensor([4.0, 0.25]) + torch.tensor([10.0, -1.0])
        else:
            low, width = torch.tensor([-1.0, 0.0]), torch.tensor([4.0, 1e-8])
            wanted = 2 * (raw - low) / width - 1  # a number that never changed is -1 where it has not changed
            actions = (drawn + 1) / 2 * torch.tensor([8.0, 4.0]) + torch.tensor([0.0, -2.0])
        torch.testing.assert_close(state, wanted, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(policy.scaling(drawn), actions, msg="also beyond the quantiles")


@pytest.mark.parametrize("kind", ["pi0", "pi05"])
def test_a_checkpoint_of_openpi_is_read_with_its_statistics(tmp_path, kind):
    character_tokenizer(CHARACTERS).save_pretrained(tmp_path / "base")
    config = {
        "action_dim": NUMBERS,
        "action_horizon": 4,
        "paligemma_variant": "gemma_2b",
        "precision": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(
        {name: tensor.bfloat16() for name, tensor in weights(kind).items()}, tmp_path / "model.safetensors"
    )
    wanted = Wanted({"cameras": ("base_0_rgb", "left_wrist_0_rgb"), "chunk_length": 2}, tmp_path / "base")
    if kind == "pi05":
        with pytest.raises(ModelNotReadable, match=r"no assets/…/norm_stats\.json with 'action'"):
            load_published(tmp_path, wanted)
    norms = {"state": STATISTICS["observation.state"], "actions": STATISTICS["action"]}
    for name in ("libero", "droid"):
        folder = tmp_path / "assets" / "physical-intelligence" / name
        folder.mkdir(parents=True)
        (folder / "norm_stats.json").write_text(json.dumps({"norm_stats": norms}))
    with pytest.raises(ModelNotReadable, match="names no data set of this checkpoint: droid, libero"):
        load_published(tmp_path, wanted)
    policy = load_published(tmp_path, Wanted(wanted.chosen, wanted.base, unnorm_key="libero"))
    assert policy.config.kind == kind and policy.config.cameras == ("base_0_rgb", "left_wrist_0_rgb")
    drawn = torch.tensor([[[0.5, -0.5]]])
    if kind == "pi0":
        actions = drawn * torch.tensor([4.0, 0.25]) + torch.tensor([10.0, -1.0])
    else:
        actions = (drawn + 1) / 2 * torch.tensor([8.0, 4.0]) + torch.tensor([0.0, -2.0])
    torch.testing.assert_close(policy.scaling(drawn), actions, rtol=1e-5, atol=1e-5)


def test_an_empty_camera_is_one_that_is_left_out(lerobot):
    """Its positions are attended to by none and counted by none: the plain pass masks them, this one has none."""
    directory, base = lerobot("pi05")
    both = load_published(directory, Wanted(base=base))
    one = load_published(directory, Wanted({"cameras": ("base",)}, base))
    generator = torch.Generator().manual_seed(1)
    image = torch.randint(0, 256, (2, 28, 28, 3), generator=generator, dtype=torch.uint8)
    prompts = ((5, 6, 7), (5, 9))
    seen = Observation(torch.zeros(2, 2), {"base": image, "wrist": torch.zeros_like(image)}, prompts)
    embeds, mask = both._embeds(seen, torch.device("cpu"))
    mask[:, 4:8] = False  # the second camera's four patches
    with torch.no_grad():
        position = (mask.cumsum(-1) - 1).clamp(min=0)
        hidden = both.vlm(
            inputs_embeds=embeds,
            attention_mask=mask.long(),
            position_ids=position,
            token_type_ids=torch.zeros_like(mask, dtype=torch.long),
        ).last_hidden_state
        alone, its = one._embeds(seen, torch.device("cpu"))
        other = one.vlm(
            inputs_embeds=alone,
            attention_mask=its.long(),
            position_ids=(its.cumsum(-1) - 1).clamp(min=0),
            token_type_ids=torch.zeros_like(its, dtype=torch.long),
        ).last_hidden_state
    for row in range(2):
        torch.testing.assert_close(hidden[row][mask[row]], other[row][its[row]], rtol=1e-4, atol=1e-5)


def test_a_statistics_file_counts_before_the_checkpoints_own(lerobot, tmp_path):
    directory, base = lerobot("pi05")
    file = tmp_path / "stats.json"
    file.write_text(json.dumps({**ALL, "action": {"q01": [0.0, 0.0, 0.0], "q99": [1.0, 2.0, 4.0]}}))
    policy = load_published(directory, Wanted(base=base, statistics=file))
    assert policy.config.bounds.high == (1.0, 2.0, 4.0)
    file.write_text(json.dumps({"action": {"mean": [0.0]}}))
    with pytest.raises(ModelNotReadable, match="'action' have no q01, which QUANTILES needs"):
        load_published(directory, Wanted(base=base, statistics=file))


def test_what_is_not_supported_or_missing_is_named(lerobot, tmp_path):
    directory, base = lerobot("pi05")
    with pytest.raises(ModelNotReadable, match="holds no tokenizer"):
        convert(directory, tmp_path / "policy", Wanted())
    tensors = {f"model.{name}": tensor for name, tensor in weights("pi05").items()}
    tensors.pop(f"model.{GEMMA}model.norm.dense.weight")
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(ModelNotReadable, match=r"1 missing, first expert\.norm\.dense\.weight"):
        load_published(directory, Wanted(base=base))
    lerobot("pi05", use_relative_actions=True)
    with pytest.raises(ModelNotReadable, match="use_relative_actions is not supported"):
        load_published(directory, Wanted(base=base))
    lerobot("pi05", paligemma_variant="gemma_7b")
    with pytest.raises(ModelNotReadable, match="'gemma_7b' is none of gemma_300m, gemma_2b"):
        load_published(directory, Wanted(base=base))
    (directory / "config.json").write_text(json.dumps({"type": "xvla"}))
    with pytest.raises(
        ModelNotReadable, match="of no family that is read: openvla, pi, smolvla, groot, wall, act"
    ):
        load_published(directory, Wanted(base=base))


def test_the_whole_pi05_has_the_published_shapes(monkeypatch):
    """At its own size, on no memory: names and shapes that a checkpoint of 3.6 billion numbers is read with."""
    monkeypatch.undo()
    ids = {"numbers": [[1]] * 257, "ending": [1]}
    bounds = {"low": [-1.0] * 7, "high": [1.0] * 7}
    given = {"action_in_proj.weight": (1024, 32), f"{TOWER}embeddings.position_embedding.weight": (256, 1152)}
    tensors = {name: torch.empty(shape, device="meta") for name, shape in given.items()}
    model = reader.published_sizes({"type": "pi05", "chunk_size": 50}, tensors)
    with torch.device("meta"):
        policy = policy_config(
            {
                "kind": "pi05",
                "model": model,
                "bounds": bounds,
                "state": bounds,
                "words": ids,
                "cameras": ["a"],
            }
        ).build(0)
    found = {name: tuple(tensor.shape) for name, tensor in state_tensors(policy)}
    golden = {
        "vlm.vision_tower.embeddings.position_embedding.weight": (256, 1152),
        "vlm.vision_tower.encoder.layers.26.mlp.fc1.weight": (4304, 1152),
        "vlm.multi_modal_projector.linear.weight": (2048, 1152),
        "vlm.language_model.embed_tokens.weight": (257152, 2048),
        "vlm.language_model.layers.17.self_attn.k_proj.weight": (256, 2048),
        "expert.layers.17.input_layernorm.dense.weight": (3072, 1024),
        "expert.layers.0.mlp.down_proj.weight": (1024, 4096),
        "time_mlp_out.weight": (1024, 1024),
        "action_in_proj.weight": (1024, 32),
    }
    assert {name: found[name] for name in golden} == golden
    assert 3.3e9 < sum(math.prod(shape) for shape in found.values()) < 3.4e9
