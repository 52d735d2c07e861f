"""`groot` against a plain computation: transformers' own Qwen3-VL, and the action head by its weights' names."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from flow_checks import (
    check_a_draw_does_not_depend_on_who_else_is_in_the_batch,
    check_log_probs_are_those_of_the_steps_gaussians,
    shaken,
)
from headrace_modelkit.errors import ModelNotReadable
from headrace_modelkit.weights import state_tensors
from headrace_robots.policies.directory import policy_config
from headrace_robots.policies.gaussian import row_noise
from headrace_robots.policies.groot.seeing import Pictures, area_scaled
from headrace_robots.policies.language import instruction_encoder
from headrace_robots.policies.policy import Observation
from headrace_robots.tiny import WORDS, tiny_fields, tiny_tokenizer
from transformers import Qwen3VLForConditionalGeneration

PROMPTS = ((2, 5, WORDS, 6, WORDS, 7), (2, WORDS, 9, WORDS))
WIDTH = 0.2
CAMERAS = ("front", "wrist")


def fields(**chosen):
    own = tiny_fields("groot", 2, state=3, chunk_length=4, cameras=CAMERAS)
    return {**own, "action_width": 5, "state_width": 6, "chunk_length": 3, **chosen}


def seen(prompts=PROMPTS, state=2.0):
    generator = torch.Generator().manual_seed(1)
    images = {
        name: torch.randint(0, 256, (2, 56, 56, 3), generator=generator, dtype=torch.uint8)
        for name in CAMERAS
    }
    return Observation(torch.rand(2, 3, generator=generator) * 2 * state - state, images, prompts)


def patches(image):
    """Of one (56, 56, 3) picture: 14 × 14 pixels, twice, four of a token behind each other."""
    pixels, found = image.float().permute(2, 0, 1) / 127.5 - 1, []
    for block in [(0, 0), (0, 2), (2, 0), (2, 2)]:
        for row, column in [(0, 0), (0, 1), (1, 0), (1, 1)]:
            top, left = (block[0] + row) * 14, (block[1] + column) * 14
            cut = pixels[:, top : top + 14, left : left + 14]
            found.append(torch.stack([cut, cut], 1).flatten())
    return found


def read(policy, observation, row):
    """(what transformers' Qwen3-VL has behind its last layer, which positions are of images), of one environment."""
    vlm = Qwen3VLForConditionalGeneration(policy.config.filled).eval()
    own = {
        name.replace("eye.", "model.visual.").replace("reader.", "model.language_model."): tensor
        for name, tensor in state_tensors(policy)
        if name.startswith(("eye.", "reader."))
    }
    missing, unknown = vlm.load_state_dict(own, strict=False)
    assert not unknown and set(missing) == {"lm_head.weight", "model.language_model.norm.weight"}
    held = []
    vlm.model.language_model.layers[-1].register_forward_hook(lambda *given: held.append(given[-1]))
    ids = torch.tensor([[each for word in PROMPTS[row] for each in [word] * (4 if word == WORDS else 1)]])
    pixels = torch.stack([each for image in observation.images.values() for each in patches(image[row])])
    vlm(
        input_ids=ids,
        pixel_values=pixels,
        image_grid_thw=torch.tensor([[1, 4, 4]] * 2),
        mm_token_type_ids=(ids == WORDS).int(),
    )
    return held[0], ids == WORDS


def attended(weights, name, hidden, given, mask=None):
    heads = [
        F.linear(values, weights[f"{name}to_{part}.weight"], weights[f"{name}to_{part}.bias"])
        .unflatten(-1, (2, -1))
        .transpose(1, 2)
        for part, values in (("q", hidden), ("k", given), ("v", given))
    ]
    scores = heads[0] @ heads[1].transpose(-1, -2) / math.sqrt(heads[0].shape[-1])
    if mask is not None:
        scores = scores.masked_fill(~mask[:, None, None], -torch.inf)
    mixed = (scores.softmax(-1) @ heads[2]).transpose(1, 2).flatten(2)
    return F.linear(mixed, weights[f"{name}to_out.0.weight"], weights[f"{name}to_out.0.bias"])


def fed(weights, name, hidden):
    inner = F.linear(hidden, weights[f"{name}net.0.proj.weight"], weights[f"{name}net.0.proj.bias"])
    return F.linear(
        F.gelu(inner, approximate="tanh"), weights[f"{name}net.2.weight"], weights[f"{name}net.2.bias"]
    )


def linear(weights, name, values):
    return F.linear(values, weights[f"{name}.weight"], weights[f"{name}.bias"])


def normed(weights, name, values):
    return F.layer_norm(values, values.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"])


def waves(value, size, *, ending):
    rates = [10_000 ** (-place / (size // 2 - ending)) for place in range(size // 2)]
    sines, cosines = ([turn(value * rate) for rate in rates] for turn in (math.sin, math.cos))
    return torch.tensor([cosines + sines] if ending else [sines + cosines])


def velocity(policy, observation, point, time):
    """The field, one environment after the other: noise less action, as GR00T's own is action less noise."""
    weights, found = dict(state_tensors(policy)), []
    for row in range(2):
        features, images = read(policy, observation, row)
        features = normed(weights, "normed", features)
        inner = normed(weights, "mixers.0.norm1", features)
        features = features + attended(weights, "mixers.0.attn1.", inner, inner)
        features = features + fed(weights, "mixers.0.ff.", normed(weights, "mixers.0.norm3", features))
        bucket = math.floor((1 - time[row].item()) * 1000 + 1e-3)
        state = F.pad(observation.state_BS[row : row + 1].clamp(-1, 1), (0, 3))
        state = linear(weights, "state_encoder.layer2", linear(weights, "state_encoder.layer1", state).relu())
        actions = linear(weights, "action_encoder.W1", point[row : row + 1])
        both = torch.cat([actions, waves(bucket, 32, ending=0)[:, None].expand(-1, 4, -1)], -1)
        actions = linear(weights, "action_encoder.W3", F.silu(linear(weights, "action_encoder.W2", both)))
        hidden = torch.cat([state[:, None], actions + weights["position_embedding.weight"][:4]], 1)
        when = linear(weights, "dit.time.linear_1", waves(bucket, 256, ending=1))
        when = F.silu(linear(weights, "dit.time.linear_2", F.silu(when)))
        for index in range(4):
            name = f"dit.blocks.{index}."
            scale, shift = linear(weights, f"{name}norm1.linear", when)[:, None].chunk(2, -1)
            inner = F.layer_norm(hidden, hidden.shape[-1:]) * (1 + scale) + shift
            mask = {0: ~images, 2: images}.get(index)
            given = inner if mask is None else features
            hidden = hidden + attended(weights, f"{name}attn1.", inner, given, mask)
            hidden = hidden + fed(weights, f"{name}ff.", F.layer_norm(hidden, hidden.shape[-1:]))
        shift, scale = linear(weights, "dit.proj_out_1", when)[:, None].chunk(2, -1)
        hidden = F.layer_norm(hidden, hidden.shape[-1:], eps=1e-6) * (1 + scale) + shift
        hidden = linear(weights, "dit.proj_out_2", hidden)
        decoded = linear(weights, "action_decoder.layer1", hidden).relu()
        found.append(-linear(weights, "action_decoder.layer2", decoded)[:, 1:])
    return torch.cat(found)


def test_the_field_is_that_of_a_plain_computation():
    policy, observation = shaken(policy_config(fields()).build(0), WIDTH), seen()
    point, time = torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(2)), torch.tensor([1.0, 0.3])
    with torch.no_grad():
        found, _ = policy.field(observation, *policy.prefix(observation)[:2])(point, time)
        wanted = velocity(policy, observation, point, time)
    assert wanted.std() > 0.1, "a field that says nothing"
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_log_probs_are_those_of_the_steps_gaussians():
    check_log_probs_are_those_of_the_steps_gaussians(fields(), WIDTH, seen(), velocity)


def test_a_draw_does_not_depend_on_who_else_is_in_the_batch():
    check_a_draw_does_not_depend_on_who_else_is_in_the_batch(fields(), WIDTH, seen())


def test_imitation_is_of_the_actions_that_are_taught():
    policy, observation = shaken(policy_config(fields(taught=3)).build(0), WIDTH), seen()
    actions = torch.rand(2, 3, 2, generator=torch.Generator().manual_seed(3)) * 2 - 1
    noise = row_noise([4, 5], (4, 5), torch.device("cpu"))
    time = policy._imitation_times([4, 5])
    whole = F.pad(actions, (0, 3, 0, 1))
    point = time[:, None, None] * noise + (1 - time[:, None, None]) * whole
    with torch.no_grad():
        errors = (velocity(policy, observation, point, time) - (noise - whole)).square()[:, :3, :2].mean(-1)
        found = policy.imitate(observation, actions, [4, 5])
    assert policy.horizon == 3
    torch.testing.assert_close(found, errors, rtol=1e-3, atol=1e-4)


def test_a_prompt_has_a_picture_for_each_camera_and_plain_words(tmp_path):
    config, words = policy_config(fields()), tiny_tokenizer("groot")
    words.save_pretrained(tmp_path)
    ids = instruction_encoder(config, str(tmp_path))("Stack, the_cubes!")
    picture = "<|vision_start|><|image_pad|><|vision_end|>"
    assert ids == tuple(words.encode(f"user: {picture}{picture}stack the_cubes"))
    with pytest.raises(ValueError, match=f"with 2 of {WORDS} in it, one a camera"):
        policy_config(fields()).build(0).act(seen(((2, 5), (2, 5))), [1, 2])
    words.chat_template = "{{ messages[0]['content'][0]['type'] }}"
    words.save_pretrained(tmp_path)
    with pytest.raises(ModelNotReadable, match=r"writes 0 image tokens .* for 2 cameras"):
        instruction_encoder(config, str(tmp_path))


def area_source():
    rows, columns = torch.arange(12), torch.arange(20)
    return ((rows[:, None] * 37 + columns[None] * 53) * 7 % 256).to(torch.uint8)


@pytest.mark.parametrize("size", [(6, 10), (5, 7), (12, 20)])
def test_a_picture_shrinks_to_the_means_of_areas(size):
    source = area_source()
    wanted = torch.zeros(size)
    for row in range(size[0]):
        for column in range(size[1]):
            top, bottom = row * 12 / size[0], (row + 1) * 12 / size[0]
            left, right = column * 20 / size[1], (column + 1) * 20 / size[1]
            for one in range(12):
                for other in range(20):
                    high = max(0.0, min(bottom, one + 1) - max(top, one))
                    wide = max(0.0, min(right, other + 1) - max(left, other))
                    wanted[row, column] += source[one, other] * high * wide
            wanted[row, column] /= (bottom - top) * (right - left)
    assert (area_scaled(source[None, None], size)[0, 0].float() - wanted).abs().max() <= 0.51


def test_the_middle_is_cut_out_and_the_tower_gets_whole_tokens():
    own = Pictures(height=32, width=32, crop=0.5, least=1)
    image = torch.zeros(1, 64, 64, 3, dtype=torch.uint8)
    image[:, 16:48, 16:48] = 255
    assert own.ready(image, 32).min() > 0.7, "the black around it is not read"
    tall = torch.zeros(1, 40, 20, 3, dtype=torch.uint8)
    assert Pictures(height=32, width=32, by_area=True, least=1).ready(tall, 16).shape == (1, 3, 64, 32)
    assert Pictures(height=32, width=32, square=True, by_area=True, least=1).ready(tall, 16).shape[2:] == (
        32,
        32,
    )
    assert Pictures(height=32, width=32, least=64 * 64).ready(tall, 16).shape[2:] == (64, 64)
