"""`openvla` and `openvla_oft` against transformers' own DINOv2, SigLIP and Llama, put together here by other code.

Golden: names of the 7B checkpoints from openvla/openvla at 97b39e5 (modeling_prismatic.py), timm 0.9.10's
vision_transformer.py by name, and what readers of the published weights state: 982 tensors, 7,541,237,184 values
(model.safetensors.index.json, total_size 15,082,474,368 in bf16, revision 47a0ec7f of openvla/openvla-7b).
"""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from headrace_modelkit.errors import ModelNotReadable
from headrace_modelkit.weights import load_weights, state_tensors, weight_layout
from headrace_robots.convert import convert, load_published, main
from headrace_robots.policies.directory import load_policy, save_policy
from headrace_robots.policies.openvla.model import OpenVlaConfig
from headrace_robots.policies.openvla.tokens import ActionTokens
from headrace_robots.policies.openvla.vit import PUBLISHED
from headrace_robots.policies.policy import ACTIONS, Observation, RobotPolicy
from headrace_robots.policies.published import Wanted
from headrace_robots.policies.scaling import ActionBounds
from openvla_parts import SHAPES, TEXT, Parts
from safetensors.torch import save_file

STATED = {
    "model_type": "openvla",
    "timm_model_ids": list(SHAPES),
    "text_config": TEXT,
    "pad_to_multiple_of": 64,
    "n_action_bins": 256,
    "norm_stats": {
        "bridge_orig": {"action": {"q01": [-2.0, 0.0], "q99": [2.0, 1.0], "mask": [True, False]}},
        "other": {"action": {"q01": [0.0, 0.0], "q99": [1.0, 1.0]}},
    },
}
PROMPTS = ((1, 5, 6, 7, 8), (1, 9, 10))


@pytest.fixture(scope="module")
def parts():
    return Parts()


@pytest.fixture
def checkpoint(parts, tmp_path, monkeypatch):
    """A directory in the published form, in two files."""
    for name, shape in SHAPES.items():
        monkeypatch.setitem(PUBLISHED, name, shape)
    (tmp_path / "config.json").write_text(json.dumps(STATED))
    tensors = parts.published()
    names = sorted(tensors)
    index = {}
    for number, part in enumerate((names[:50], names[50:]), 1):
        file = f"model-0000{number}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, tmp_path / file)
        index |= dict.fromkeys(part, file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return tmp_path


def seen(count=2):
    generator = torch.Generator().manual_seed(5)
    image = torch.randint(0, 256, (count, 28, 28, 3), generator=generator, dtype=torch.uint8)
    state = torch.rand(count, 3, generator=generator) * 2 - 1
    return Observation(state, {"image": image, "wrist": image.flip(1)}, PROMPTS[:count])


def read(checkpoint, **chosen):
    return load_published(checkpoint, Wanted(chosen, unnorm_key="bridge_orig"))


def log_probs(logits):
    """Over the 256 ids below the padding, as numbers of bins."""
    return logits[..., 300 - 256 : 300].log_softmax(-1)


def test_the_7b_has_the_published_tensors_and_sizes():
    with torch.device("meta"):
        policy = OpenVlaConfig(
            kind="openvla",
            featurizers=tuple(PUBLISHED.values()),
            text={"vocab_size": 32064},
            action_vocabulary=32000,
            bounds=ActionBounds.unit(7),
            cameras=("image",),
        ).build(seed=0)
    layout = {
        name: shape
        for name, _, shape in weight_layout(policy, torch.bfloat16)
        if not name.startswith("value_head")
    }
    assert len(layout) == 982
    assert sum(torch.Size(shape).numel() for shape in layout.values()) == 7_541_237_184
    golden = {
        "vision_backbone.featurizer.cls_token": (1, 1, 1024),
        "vision_backbone.featurizer.reg_token": (1, 4, 1024),
        "vision_backbone.featurizer.pos_embed": (1, 256, 1024),
        "vision_backbone.featurizer.blocks.23.ls2.scale_factor": (1024,),
        "vision_backbone.featurizer.blocks.0.attn.qkv.weight": (3072, 1024),
        "vision_backbone.fused_featurizer.pos_embed": (1, 256, 1152),
        "vision_backbone.fused_featurizer.blocks.26.mlp.fc1.weight": (4304, 1152),
        "vision_backbone.fused_featurizer.attn_pool.kv.weight": (2304, 1152),
        "projector.fc1.weight": (8704, 2176),
        "projector.fc3.bias": (4096,),
        "language_model.model.layers.31.mlp.down_proj.weight": (4096, 11008),
        "language_model.lm_head.weight": (32064, 4096),
    }
    assert {name: layout[name] for name in golden} == golden


def test_openvla_is_its_parts_token_by_token(parts, checkpoint):
    policy, observation = read(checkpoint), seen()
    chunk = policy.act(Observation(None, {"image": observation.images["image"]}, PROMPTS), [3, 4])
    ids_BA = chunk.sampled[ACTIONS][:, 0]
    for row in range(2):
        words = parts.llama.model.embed_tokens(ids_BA[row : row + 1, :1])
        embeds = torch.cat([parts.embeds(observation.images["image"][row], PROMPTS[row]), words], 1)
        with torch.no_grad():
            logits = parts.llama(inputs_embeds=embeds).logits[0, -2:]
        wanted = log_probs(logits).gather(-1, (ids_BA[row] - 44)[:, None])[:, 0]
        torch.testing.assert_close(chunk.log_probs_BCA[row, 0], wanted, rtol=1e-4, atol=1e-5)
    again = policy.evaluate(observation, chunk.sampled)
    torch.testing.assert_close(again.log_probs_BCA, chunk.log_probs_BCA, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(again.values_B, chunk.values_B)
    again.log_probs_BCA.sum().backward()
    assert policy.vision_backbone.featurizer.patch_embed.proj.weight.grad.abs().sum() > 0


def test_oft_reads_all_numbers_at_once_and_attends_both_ways(parts, checkpoint):
    policy, observation = read(checkpoint, kind="openvla_oft", chunk_length=3, cameras=("image",)), seen()
    chunk = policy.act(observation, [3, 4])
    again = policy.evaluate(observation, chunk.sampled)
    assert torch.equal(again.log_probs_BCA, chunk.log_probs_BCA)  # the ratio is exactly 1
    for row in range(2):
        prefix = parts.embeds(observation.images["image"][row], PROMPTS[row])
        stop = parts.llama.model.embed_tokens(torch.tensor([[2]]))
        embeds = torch.cat([prefix, torch.zeros(1, 6, 32), stop], 1)
        with torch.no_grad():
            # Without a mask of their own these layers would be causal: all zeros lets every position see every other.
            free = torch.zeros(1, 1, embeds.shape[1], embeds.shape[1])
            logits = parts.llama(inputs_embeds=embeds, attention_mask=free).logits[0]
        start = prefix.shape[1] - 1
        bins = chunk.sampled[ACTIONS][row].flatten() - 44
        wanted = log_probs(logits[start : start + 6]).gather(-1, bins[:, None])[:, 0]
        torch.testing.assert_close(chunk.log_probs_BCA[row].flatten(), wanted, rtol=1e-4, atol=1e-5)


def test_oft_with_the_l1_head_reads_cameras_and_the_state(parts, checkpoint):
    head = {
        "model.layer_norm1.weight": torch.ones(64),
        "model.layer_norm1.bias": torch.zeros(64),
        "model.fc1.weight": torch.randn(32, 64) * 0.1,
        "model.fc1.bias": torch.zeros(32),
        "model.layer_norm2.weight": torch.ones(32),
        "model.layer_norm2.bias": torch.zeros(32),
        "model.fc2.weight": torch.randn(2, 32) * 0.1,
        "model.fc2.bias": torch.zeros(2),
    }
    for block in range(2):
        head |= {
            f"model.mlp_resnet_blocks.{block}.ffn.0.{kind}": torch.ones(32) for kind in ("weight", "bias")
        }
        head[f"model.mlp_resnet_blocks.{block}.ffn.1.weight"] = torch.randn(32, 32) * 0.1
        head[f"model.mlp_resnet_blocks.{block}.ffn.1.bias"] = torch.zeros(32)
    save_file(head, checkpoint / "action_head.safetensors")
    proprio = {
        "fc1.weight": torch.randn(32, 3),
        "fc1.bias": torch.zeros(32),
        "fc2.weight": torch.randn(32, 32),
        "fc2.bias": torch.zeros(32),
    }
    save_file(proprio, checkpoint / "proprio_projector.safetensors")
    policy = read(
        checkpoint,
        kind="openvla_oft",
        chunk_length=3,
        cameras=("image", "wrist"),
        head="l1",
        proprio=ActionBounds.unit(3),
    )
    observation = seen()
    chunk = policy.act(observation, [3, 4])
    again = policy.evaluate(observation, chunk.sampled)
    assert torch.equal(again.log_probs_BCA, chunk.log_probs_BCA) and chunk.executed_BCA.shape == (2, 3, 2)
    greedy = policy.act(observation, [3, 4], deterministic=True)
    moved = policy.act(
        Observation(observation.state_BS + 0.3, observation.images, PROMPTS), [3, 4], deterministic=True
    )
    assert not torch.allclose(greedy.sampled[ACTIONS], moved.sampled[ACTIONS])
    hidden = policy.slots(observation).view(2, 3, 64)
    own = F.layer_norm(hidden, (64,))
    own = F.relu(F.linear(own, head["model.fc1.weight"]))
    for block in range(2):
        name = f"model.mlp_resnet_blocks.{block}.ffn.1.weight"
        own = own + F.relu(F.linear(F.layer_norm(own, (32,)) + 1, head[name]))
    own = F.linear(F.layer_norm(own, (32,)), head["model.fc2.weight"])
    torch.testing.assert_close(greedy.sampled[ACTIONS], own, rtol=1e-4, atol=1e-5)
    losses_BH = policy.imitate(observation, greedy.executed_BCA, [0, 0])
    clipped = own - policy.scaling.drawn(greedy.executed_BCA)
    torch.testing.assert_close(losses_BH, clipped.abs().mean(-1), rtol=1e-4, atol=1e-5)


@pytest.fixture
def oft(checkpoint):
    """Writes a part of OFT beside the weights, as safetensors whose names torch's wrapper has begun, or as a pickle."""
    head = {
        f"model.{name}.weight": torch.ones(size) for name, size in (("layer_norm1", 64), ("layer_norm2", 32))
    }
    head |= {
        f"model.{name}.bias": torch.zeros(size) for name, size in (("layer_norm1", 64), ("layer_norm2", 32))
    }
    head |= {"model.fc1.weight": torch.ones(32, 64), "model.fc1.bias": torch.zeros(32)}
    head |= {"model.fc2.weight": torch.ones(2, 32), "model.fc2.bias": torch.zeros(2)}
    for block in range(2):
        name = f"model.mlp_resnet_blocks.{block}.ffn"
        head |= {f"{name}.0.{kind}": torch.ones(32) for kind in ("weight", "bias")}
        head |= {f"{name}.1.weight": torch.ones(32, 32), f"{name}.1.bias": torch.zeros(32)}
    projector = {"fc1.weight": torch.ones(32, 3), "fc1.bias": torch.zeros(32)}
    projector |= {"fc2.weight": torch.ones(32, 32), "fc2.bias": torch.zeros(32)}
    tensors = {"action_head": head, "proprio_projector": projector}

    def write(part, *, pickled=False):
        if pickled:
            (checkpoint / f"{part}--150000_checkpoint.pt").write_bytes(b"a pickle")
            return
        wrapped = {f"module.{name}": tensor for name, tensor in tensors[part].items()}
        save_file(wrapped, checkpoint / f"{part}.safetensors")

    return write


def converted(checkpoint, *more):
    (checkpoint / "tokenizer.json").write_text("{}")
    target = checkpoint.parent / "policy"
    return main([str(checkpoint), str(target), "--unnorm-key", "bridge_orig", *more]), target


@pytest.mark.parametrize(
    "part", ["action_head", "proprio_projector", "vision_backbone", "noisy_action_projector"]
)
@pytest.mark.parametrize(
    "more", [(), ("--kind", "openvla"), ("--kind", "openvla_oft", "--chunk-length", "3")]
)
def test_no_part_of_oft_is_left_out_in_silence(checkpoint, oft, capsys, part, more):
    oft(part, pickled=True)
    code, target = converted(checkpoint, *more)
    assert code == 1 and not target.exists()
    assert part in capsys.readouterr().err


def test_oft_is_converted_with_its_head_and_its_projector(checkpoint, oft, capsys):
    oft("action_head")
    assert converted(checkpoint)[0] == 1 and "give --chunk-length" in capsys.readouterr().err
    for wrong in (("--kind", "openvla"), ("--head", "tokens")):
        assert converted(checkpoint, "--chunk-length", "3", *wrong)[0] == 1
        assert "action_head.safetensors" in capsys.readouterr().err
    code, target = converted(checkpoint, "--chunk-length", "3")
    config = load_policy(target).config
    assert (code, config.kind, config.head, config.proprio) == (0, "openvla_oft", "l1", None)
    oft("proprio_projector")
    assert converted(checkpoint, "--chunk-length", "3")[0] == 1
    assert "have no quantiles of it" in capsys.readouterr().err
    numbers = {"q01": [-1.0, -2.0, 0.0], "q99": [1.0, 2.0, 1.0]}
    stated = json.loads((checkpoint / "config.json").read_text())["norm_stats"]["bridge_orig"]
    statistics = {"bridge_orig": {**stated, "proprio": numbers}}
    (checkpoint / "dataset_statistics.json").write_text(json.dumps(statistics))
    code, target = converted(checkpoint, "--chunk-length", "3")
    policy = load_policy(target)
    assert code == 0 and policy.config.proprio.low == (-1.0, -2.0, 0.0) and policy.config.state_numbers == 3
    assert policy.proprio_projector.fc1.weight.eq(1).all() and policy.action_head.model.fc1.weight.eq(1).all()


def test_statistics_un_normalise_by_data_set(checkpoint):
    policy = read(checkpoint)
    torch.testing.assert_close(policy.scaling(torch.tensor([0.5, 0.5])), torch.tensor([1.0, 0.5]))
    with pytest.raises(ModelNotReadable, match="names no data set of this checkpoint: bridge_orig, other"):
        load_published(checkpoint, Wanted())


def test_a_checkpoint_with_a_weight_missing_or_too_many_is_refused(parts, checkpoint):
    (checkpoint / "model.safetensors.index.json").unlink()
    tensors = parts.published()
    gone = tensors.pop("projector.fc3.bias")
    save_file(tensors, checkpoint / "model.safetensors")
    with pytest.raises(ModelNotReadable, match=r"1 missing, first projector\.fc3\.bias"):
        read(checkpoint)
    save_file(
        {**tensors, "projector.fc3.bias": gone, "moe.gate": gone.clone()}, checkpoint / "model.safetensors"
    )
    with pytest.raises(ModelNotReadable, match=r"1 unknown, first moe\.gate"):
        read(checkpoint)
    PUBLISHED.pop("tiny_dinov2")
    with pytest.raises(ModelNotReadable, match="tiny_dinov2 is no known vision encoder"):
        read(checkpoint)


def test_bins_are_openvlas():
    """numpy.digitize and bin centres, as in ActionTokenizer and predict_action."""
    tokens = ActionTokens(32000, 256)
    numbers = torch.tensor([-1.0, -0.999, 0.0, 0.5, 1.0, 7.0])
    assert tokens.encode(numbers).tolist() == [31999, 31999, 31872, 31808, 31744, 31744]
    width = 2 / 255
    decoded = tokens.decode(torch.tensor([31999, 31872, 31745, 31744]))
    torch.testing.assert_close(decoded, torch.tensor([-1 + width / 2, 0.0, 1 - width / 2, 1 - width / 2]))
    grid = torch.linspace(-1, 1, 1001)
    assert (tokens.decode(tokens.encode(grid)) - grid).abs().max() <= width / 2 + 1e-6
    with pytest.raises(ValueError, match="31744 to 31999"):
        tokens.decode(torch.tensor([32000]))


def test_drawn_tokens_follow_their_probabilities():
    tokens = ActionTokens(300, 256)
    logits = torch.full((1, 1, 364), -9.0)
    logits[..., 50], logits[..., 60], logits[..., 310] = 3.0, 2.0, 50.0  # 310 is no action
    found = tokens.log_probs(logits, 2.0)
    ids = tokens.draw(found.expand(4000, 1, 256), range(4000), slice(0, 1))[:, 0]
    share = (ids == 50).double().mean().item()
    assert abs(share - found[0, 0, 50 - 44].exp().item()) < 0.03
    assert tokens.draw(found, None, slice(0, 1)).item() == 50


@pytest.mark.parametrize(("kind", "length"), [("openvla", 1), ("openvla_oft", 2)])
def test_imitation_is_the_cross_entropy_of_the_actions_tokens(checkpoint, kind, length):
    policy, observation = read(checkpoint, kind=kind, chunk_length=length), seen()
    actions_BHA = torch.tensor([[1.0, 0.2], [-1.5, -0.4]])[:, None].expand(2, length, 2)
    losses_BH = policy.imitate(observation, actions_BHA, [0, 0])
    ids = policy.tokens.encode(torch.tensor([[0.5, 0.2], [-0.75, -0.4]]))
    wanted = -policy.evaluate(observation, {ACTIONS: ids[:, None].expand(2, length, 2)}).log_probs_BCA
    torch.testing.assert_close(losses_BH, wanted.mean(-1))
    losses_BH.mean().backward()
    assert policy.language_model.lm_head.weight.grad.abs().sum() > 0


def test_a_version_of_a_vla_moves_as_a_language_models_does(checkpoint):
    policy, observation = read(checkpoint, kind="openvla_oft", chunk_length=2), seen()
    other = policy.config.build(seed=9)
    load_weights(other, dict(state_tensors(policy)))
    save_policy(policy, checkpoint / "saved")
    wanted = policy.act(observation, [1, 2])
    for some in (other, load_policy(checkpoint / "saved")):
        assert isinstance(some, RobotPolicy)
        assert torch.equal(some.act(observation, [1, 2]).sampled[ACTIONS], wanted.sampled[ACTIONS])


def test_plain_openvla_refuses_what_it_has_not(checkpoint):
    with pytest.raises(ModelNotReadable, match="set kind: openvla_oft"):
        read(checkpoint, chunk_length=8)
    with pytest.raises(ValueError, match="ids of a prompt for each environment"):
        read(checkpoint).act(Observation(None, seen().images), [1, 2])


def test_a_published_checkpoint_becomes_a_policy_directory(parts, checkpoint, tmp_path, capsys):
    target = tmp_path / "policy"
    with pytest.raises(ModelNotReadable, match="holds no tokenizer"):
        convert(checkpoint, target, Wanted(unnorm_key="bridge_orig"))
    (checkpoint / "tokenizer.json").write_text("{}")
    arguments = [str(checkpoint), str(target), "--unnorm-key", "bridge_orig"]
    assert main([*arguments, "--kind", "openvla", "--temperature", "0.6"]) == 0
    policy, wanted = load_policy(target), read(checkpoint)
    assert policy.config.temperature == 0.6 and (target / "tokenizer.json").read_text() == "{}"
    for (name, tensor), (_, other) in zip(state_tensors(policy), state_tensors(wanted), strict=True):
        assert torch.equal(tensor, other), name
    PUBLISHED.pop("tiny_dinov2")
    assert main(arguments) == 1
    assert "tiny_dinov2 is no known vision encoder" in capsys.readouterr().err


def test_a_cropped_policy_does_not_see_a_picture_s_edge(checkpoint):
    whole = torch.full((1, 28, 28, 3), 128, dtype=torch.uint8)
    edged = whole.clone()
    edged[:, :2] = edged[:, :, :2] = 255  # half the area begins at 27 * (1 - sqrt(0.5)) / 2, pixel 3.95
    for crop in (1.0, 0.5):
        policy = read(checkpoint, crop=crop)
        plain, other = (
            policy._seen(Observation(None, {"image": image}, PROMPTS[:1])) for image in (whole, edged)
        )
        assert torch.equal(plain, other) == (crop < 1)
