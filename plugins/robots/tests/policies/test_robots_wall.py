"""`wall` against a plain computation: one pass of transformers' own Qwen2.5-VL over prompt and actions."""

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
from headrace_robots.policies.language import instruction_encoder
from headrace_robots.policies.policy import Observation
from headrace_robots.policies.wall.seeing import WallPictures
from headrace_robots.tiny import WORDS, tiny_fields, tiny_tokenizer
from torch import nn
from transformers import Qwen2_5_VLForConditionalGeneration

STATE = WORDS + 4
PROMPTS = ((2, 5, WORDS, 6, WORDS, 7, STATE, 3), (2, WORDS, 9, WORDS, STATE))
WIDTH = 0.1
CAMERAS = ("front", "left_wrist_view")
HORIZON, SIZE = 4, (84, 112)
MEAN, STD = (0.48, 0.46, 0.41), (0.27, 0.26, 0.28)


def fields(**chosen):
    own = tiny_fields("wall", 2, state=3, chunk_length=HORIZON, cameras=CAMERAS)
    pictures = {**own["pictures"], "mean": MEAN, "std": STD}
    return {**own, "action_width": 5, "state_width": 6, "chunk_length": 3, "pictures": pictures, **chosen}


def seen(prompts=PROMPTS):
    generator = torch.Generator().manual_seed(1)
    images = {
        name: torch.randint(0, 256, (2, *SIZE, 3), generator=generator, dtype=torch.uint8) for name in CAMERAS
    }
    return Observation(torch.rand(2, 3, generator=generator) * 4 - 2, images, prompts)


def patches(image):
    """Of one picture: 14 × 14 pixels, twice, four of a token behind each other."""
    pixels = ((image.float() / 255 - torch.tensor(MEAN)) / torch.tensor(STD)).permute(2, 0, 1)
    found = []
    for row in range(0, SIZE[0], 28):
        for column in range(0, SIZE[1], 28):
            for top, left in [(0, 0), (0, 14), (14, 0), (14, 14)]:
                cut = pixels[:, row + top : row + top + 14, column + left : column + left + 14]
                found.append(torch.stack([cut, cut], 1).flatten())
    return found


class Routed(nn.Module):
    """The last positions, which are actions, go through another part."""

    def __init__(self, words, actions):
        super().__init__()
        self.words, self.actions = words, actions

    def forward(self, hidden):
        return torch.cat([self.words(hidden[:, :-HORIZON]), self.actions(hidden[:, -HORIZON:])], 1)


def whole(policy):
    vlm = Qwen2_5_VLForConditionalGeneration(policy.config.filled).eval()
    own = {
        name.replace("eye.", "model.visual.").replace("reader.", "model.language_model."): tensor
        for name, tensor in state_tensors(policy)
        if name.startswith(("eye.", "reader.")) and ".mlps." not in name
    }
    missing, unknown = vlm.load_state_dict(own, strict=False)
    assert not unknown and all(".mlp." in name or name == "lm_head.weight" for name in missing)
    for index, layer in enumerate(vlm.model.language_model.layers):
        layer.mlp = Routed(policy.reader.mlps[index], policy.expert[index])
    return vlm.model


def waves(value, size):
    rates = [10_000 ** (-place / (size // 2 - 1)) for place in range(size // 2)]
    return torch.tensor([[turn(value * rate) for turn in (math.sin, math.cos) for rate in rates]])


def velocity(policy, observation, point, time):
    """The field, one environment after the other: noise less action, as WALL-OSS's own is action less noise."""
    weights, vlm, found = dict(state_tensors(policy)), whole(policy), []
    tokens = SIZE[0] * SIZE[1] // 28**2

    def through(name, values):
        return F.linear(values, weights[f"action_head.{name}.weight"])

    for row in range(2):
        ids = [each for word in PROMPTS[row] for each in [word] * (tokens if word == WORDS else 1)]
        ids = torch.tensor([ids + [3] * HORIZON])
        words = vlm.language_model.embed_tokens(ids)
        pixels = torch.stack([each for image in observation.images.values() for each in patches(image[row])])
        grid = torch.tensor([[1, SIZE[0] // 14, SIZE[1] // 14]] * 2)
        words[ids == WORDS] = vlm.visual(pixels, grid_thw=grid).pooler_output
        state = torch.cat([observation.state_BS[row], torch.tensor([0.0, 0, 0, 1, 1, 1, 0, 0, 0])])
        words[ids == STATE] = through("propri_proj", state[None])
        known = torch.tensor([1.0, 1, 0, 0, 0]).expand(1, HORIZON, 5)
        actions = through("w1", torch.cat([point[row : row + 1], known], -1))
        when = waves(1 - time[row].item(), 48)[:, None].expand(-1, HORIZON, -1)
        words[:, -HORIZON:] = through("w3", F.silu(through("w2", torch.cat([actions, when], -1))))
        places, _ = vlm.get_rope_index(ids, (ids == WORDS).int(), image_grid_thw=grid)
        mask = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
        mask[-HORIZON:, -HORIZON:] = True
        out = vlm.language_model(
            inputs_embeds=words, position_ids=places, attention_mask={"full_attention": mask[None, None]}
        ).last_hidden_state
        found.append(-through("action_proj_back", out[:, -HORIZON:]))
    return torch.cat(found)


def test_the_field_is_that_of_a_plain_computation():
    policy, observation = shaken(policy_config(fields()).build(0), WIDTH), seen()
    point = torch.randn(2, HORIZON, 5, generator=torch.Generator().manual_seed(2))
    time = torch.tensor([1.0, 0.3])
    with torch.no_grad():
        found, _ = policy.field(observation, *policy.prefix(observation)[:2])(point, time)
        wanted = velocity(policy, observation, point, time)
    assert wanted.std() > 0.1, "a field that says nothing"
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_log_probs_are_those_of_the_steps_gaussians():
    check_log_probs_are_those_of_the_steps_gaussians(fields(), WIDTH, seen(), velocity)


def test_a_draw_does_not_depend_on_who_else_is_in_the_batch():
    check_a_draw_does_not_depend_on_who_else_is_in_the_batch(fields(), WIDTH, seen())


def test_imitation_is_the_error_of_the_velocity_of_numbers_that_a_robot_has():
    policy, observation = shaken(policy_config(fields()).build(0), WIDTH), seen()
    actions = torch.rand(2, HORIZON, 2, generator=torch.Generator().manual_seed(3)) * 2 - 1
    noise = row_noise([4, 5], (HORIZON, 5), torch.device("cpu"))
    time = policy._imitation_times([4, 5])
    padded = F.pad(actions, (0, 3))
    point = time[:, None, None] * noise + (1 - time[:, None, None]) * padded
    with torch.no_grad():
        errors = (velocity(policy, observation, point, time) - (noise - padded)).square()[..., :2].mean(-1)
        found = policy.imitate(observation, actions, [4, 5])
    torch.testing.assert_close(found, errors, rtol=1e-3, atol=1e-4)


def test_a_prompt_names_cameras_and_has_a_place_for_the_state(tmp_path):
    config, words = policy_config(fields()), tiny_tokenizer("wall")
    words.save_pretrained(tmp_path)
    picture = "<|vision_start|><|image_pad|><|vision_end|>"
    text = (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
        f"Observation: front view: {picture} left wrist view: {picture}\nInstruction: Stack the cubes.\n"
        "Predict the next action in robot action.\nProprioception: <|propri|>\n<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    encode = instruction_encoder(config, str(tmp_path))
    assert encode("Stack the cubes") == encode("Stack the cubes.") == tuple(words.encode(text))
    policy = config.build(0)
    with pytest.raises(ValueError, match=f"with 2 of {WORDS} in it, one a camera"):
        policy.act(seen(((2, STATE), (2, STATE))), [1, 2])
    with pytest.raises(ValueError, match=f"one id {STATE}, where the state goes"):
        policy.act(seen(((2, WORDS, WORDS),) * 2), [1, 2])
    tiny_tokenizer("groot").save_pretrained(tmp_path)
    with pytest.raises(ModelNotReadable, match=r"2 image tokens .* for 2 cameras, and 0 <\|propri\|>"):
        instruction_encoder(config, str(tmp_path))


@pytest.mark.parametrize(
    ("given", "found"), [((480, 640), (196, 252)), ((640, 480), (252, 196)), ((40, 40), (252, 252))]
)
def test_a_picture_is_scaled_by_its_longer_side_and_to_whole_tokens(given, found):
    image = torch.full((1, *given, 3), 255, dtype=torch.uint8)
    ready = WallPictures().ready(image, 28)
    assert ready.shape == (1, 3, *found)
    torch.testing.assert_close(
        ready[0, :, 0, 0], (1 - torch.tensor(WallPictures().mean)) / torch.tensor(WallPictures().std)
    )
