"""`diffusion` against plain posteriors, plain convolutions and transformers' own ResNet."""

from __future__ import annotations

import json
import math

import pytest
import torch
import torch.nn.functional as F
from headrace_modelkit.errors import ModelNotReadable
from headrace_modelkit.weights import state_tensors
from headrace_robots.convert import convert, load_published
from headrace_robots.demonstrations import Demonstration
from headrace_robots.policies import paths
from headrace_robots.policies.diffusion.denoising import DenoisingConfig, Schedule, ScheduleConfig
from headrace_robots.policies.directory import load_policy, policy_config
from headrace_robots.policies.paths import PATH, STEPS
from headrace_robots.policies.policy import Observation, imitation_loss
from headrace_robots.policies.published import Wanted
from safetensors.torch import save_file
from test_robots_act import plain_resnet

FIELDS = {
    "kind": "diffusion",
    "bounds": {"low": [-1.0, 0.0], "high": [3.0, 0.5], "clip": False},
    "state": {"low": [-2.0] * 6, "high": [2.0] * 6, "clip": False},
    "cameras": ["top", "side"],
    "n_obs_steps": 2,
    "channels": 6,
    "height": 64,
    "width": 96,
    "crop_shape": [60, 64],
    "horizon": 8,
    "chunk_length": 3,
    "use_group_norm": False,
    "use_separate_rgb_encoder_per_camera": True,
    "spatial_softmax_num_keypoints": 3,
    "down_dims": [8, 16],
    "kernel_size": 3,
    "n_groups": 4,
    "diffusion_step_embed_dim": 8,
    "denoising": {"sampler": "ddpm", "steps": 4, "last": 3},
}
NAMES = {"0": "conv1", "1": "bn1", "4": "layer1", "5": "layer2", "6": "layer3", "7": "layer4"}


def made(**chosen):
    policy = policy_config({**FIELDS, **chosen}).build(0)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        for name, parameter in policy.named_parameters():
            noise = torch.randn_like(parameter) * (0.05 if parameter.dim() < 4 else 0.0)
            parameter.add_(noise.abs() if name.endswith("running_var") else noise)
    return policy


def seen(moments=2):
    generator = torch.Generator().manual_seed(1)
    images = {
        name: torch.randint(0, 256, (2, 64, 96, 3 * moments), generator=generator, dtype=torch.uint8)
        for name in ("top", "side")
    }
    return Observation(torch.rand(2, 3 * moments, generator=generator), images)


def condition_of(policy, observation):
    """(B, D): of each moment the state, then key points of each camera."""
    parts = []
    for moment in range(2):
        parts.append(observation.state_BS[:, 3 * moment : 3 * moment + 3] / 2)
        for place, name in enumerate(("top", "side")):
            encoder = policy.diffusion.rgb_encoder[place]
            own = {
                f"{NAMES[key.split('.')[0]]}.{key.partition('.')[2]}": value
                for key, value in encoder.backbone.state_dict().items()
            }
            image = (
                observation.images[name][..., 3 * moment : 3 * moment + 3].permute(0, 3, 1, 2).float() / 255
            )
            mean, std = (
                torch.tensor(each)[:, None, None]
                for each in (policy.config.image_mean, policy.config.image_std)
            )
            cut = ((image - mean) / std)[..., 2:62, 16:80]
            maps = encoder.pool.nets(plain_resnet(own)(cut).last_hidden_state)
            points = []
            for row in maps.flatten(0, 1):
                share = row.flatten().softmax(0).view_as(row)
                across, down = (torch.linspace(-1, 1, side) for side in (row.shape[1], row.shape[0]))
                points += [(share.sum(0) * across).sum(), (share.sum(1) * down).sum()]
            parts.append(F.relu(encoder.out(torch.stack(points).view(2, -1))))
    return torch.cat(parts, 1)


def predicted(policy, point, time, condition):
    """The U-Net, by functions alone."""
    w = dict(policy.diffusion.unet.state_dict())

    def linear(x, name):
        return F.linear(x, w[f"{name}.weight"], w[f"{name}.bias"])

    def conv(x, name):
        x = F.conv1d(x, w[f"{name}.block.0.weight"], w[f"{name}.block.0.bias"], padding=1)
        return F.mish(
            F.group_norm(
                x, 8 if name == "final_conv.0" else 4, w[f"{name}.block.1.weight"], w[f"{name}.block.1.bias"]
            )
        )

    def residual(x, given, name):
        scale, bias = linear(F.mish(given), f"{name}.cond_encoder.1")[..., None].chunk(2, 1)
        beside = x
        if f"{name}.residual_conv.weight" in w:
            beside = F.conv1d(x, w[f"{name}.residual_conv.weight"], w[f"{name}.residual_conv.bias"])
        return conv(scale * conv(x, f"{name}.conv1") + bias, f"{name}.conv2") + beside

    angles = [time / 10000 ** (place / 3) for place in range(4)]
    waves = torch.tensor([*map(math.sin, angles), *map(math.cos, angles)]).expand(len(point), -1)
    embedded = linear(F.mish(linear(waves, "diffusion_step_encoder.1")), "diffusion_step_encoder.3")
    given = torch.cat([embedded, condition], 1)
    x = point.transpose(1, 2)
    first = residual(residual(x, given, "down_modules.0.0"), given, "down_modules.0.1")
    x = F.conv1d(first, w["down_modules.0.2.weight"], w["down_modules.0.2.bias"], stride=2, padding=1)
    second = residual(residual(x, given, "down_modules.1.0"), given, "down_modules.1.1")
    x = residual(residual(second, given, "mid_modules.0"), given, "mid_modules.1")
    x = residual(torch.cat([x, second], 1), given, "up_modules.0.0")
    x = residual(x, given, "up_modules.0.1")
    up = (w["up_modules.0.2.weight"], w["up_modules.0.2.bias"])
    x = conv(F.conv_transpose1d(x, *up, stride=2, padding=1), "final_conv.0")
    return F.conv1d(x, w["final_conv.1.weight"], w["final_conv.1.bias"]).transpose(1, 2)


def kept_of(count=100):
    """a_t of the cosine schedule, one after the other."""
    found, product = [], 1.0
    for step in range(count):
        wave = [math.cos(((step + end) / count + 0.008) / 1.008 * math.pi / 2) ** 2 for end in (0, 1)]
        product *= 1 - min(1 - wave[1] / wave[0], 0.999)
        found.append(product)
    return found


def test_a_path_and_its_log_probs_are_those_of_plain_posteriors():
    policy, observation = made(), seen()
    kept = kept_of()
    with torch.no_grad():
        condition = condition_of(policy, observation)
        drawn = policy.act(observation, [4, 5])
        again = policy.evaluate(observation, drawn.sampled)
        greedy = policy.act(observation, [4, 5], deterministic=True)
        path, summed = drawn.sampled[PATH], torch.zeros(2, 8, 2)
        for step, time in enumerate((75, 50, 25, 0)):
            point, following = path[:, step], path[:, step + 1]
            now, then = kept[time], kept[time - 25] if time else 1.0
            noise = predicted(policy, point, time, condition)
            clean = ((point - (1 - now) ** 0.5 * noise) / now**0.5).clamp(-1, 1)
            if step == 0:  # not drawn: ddim without noise
                noise = (point - now**0.5 * clean) / (1 - now) ** 0.5
                torch.testing.assert_close(
                    following, then**0.5 * clean + (1 - then) ** 0.5 * noise, rtol=1e-4, atol=1e-4
                )
                continue
            beta = 1 - now / then
            mean = then**0.5 * beta / (1 - now) * clean + (1 - beta) ** 0.5 * (1 - then) / (1 - now) * point
            width = max(((1 - then) / (1 - now) * beta) ** 0.5, 0.1)
            summed += torch.distributions.Normal(mean, width).log_prob(following)
    assert drawn.sampled[STEPS].tolist() == [[1, 2, 3]] * 2
    torch.testing.assert_close(drawn.log_probs_BCA, summed[:, 1:4], rtol=1e-3, atol=1e-3)
    assert torch.equal(again.log_probs_BCA, drawn.log_probs_BCA) and torch.equal(
        again.values_B, drawn.values_B
    )
    low, high = torch.tensor([-1.0, 0.0]), torch.tensor([3.0, 0.5])
    torch.testing.assert_close(drawn.executed_BCA, (path[:, -1, 1:4] + 1) / 2 * (high - low) + low)
    assert greedy.sampled[STEPS].shape == (2, 0) and not greedy.log_probs_BCA.any()
    assert (
        torch.equal(greedy.sampled[PATH][:, :2], path[:, :2])
        and (greedy.sampled[PATH][:, 2] != path[:, 2]).all()
    )


MEAN, WIDTH = 0.7, 0.3


@pytest.mark.parametrize(("sampler", "prediction"), [("ddpm", "epsilon"), ("ddim", "sample")])
def test_drawn_steps_keep_the_marginals_of_what_the_model_knows(sampler, prediction):
    """Of actions that are Gaussian, what is to be predicted is known."""
    schedule = ScheduleConfig(prediction_type=prediction, clip_sample=False)
    denoising = DenoisingConfig(steps=50, sampler=sampler, least_width=1e-3)
    own = Schedule(schedule, denoising)

    def predict(point, time_B):
        kept = own.kept_N[time_B][:, None, None]
        ahead = (point - kept.sqrt() * MEAN) / (kept * WIDTH**2 + 1 - kept)
        noise, action = (1 - kept).sqrt() * ahead, MEAN + kept.sqrt() * WIDTH**2 * ahead
        return noise if prediction == "epsilon" else action

    seeds = range(4_000)
    steps = paths.drawn_steps(denoising.candidates, len(seeds), seeds, every=True)
    sampled, _ = paths.draw(own.transition(predict), 50, steps, seeds, seeds, (1, 1))
    actions = sampled[PATH][:, -1].flatten()
    assert abs(actions.mean().item() - MEAN) < 0.02 and abs(actions.std().item() - WIDTH) < 0.04
    sampled, _ = paths.draw(own.transition(predict), 50, steps[:, :0], None, seeds, (1, 1))
    begin, end = sampled[PATH][:, 0].flatten(), sampled[PATH][:, -1].flatten()
    torch.testing.assert_close(end, MEAN + WIDTH * begin, rtol=0, atol=0.05)  # without noise: an affine flow


def test_cloning_predicts_the_noise_of_what_comes_and_learns():
    policy, observation = made(crop_is_random=False), seen()
    actions = torch.rand(2, 7, 2, generator=torch.Generator().manual_seed(3))
    unit = 2 * (actions - torch.tensor([-1.0, 0.0])) / torch.tensor([4.0, 0.5]) - 1
    kept = kept_of()
    with torch.no_grad():
        found = policy.imitate(observation, actions, [4, 5])
        assert (made().imitate(observation, actions, [4, 5]) != found).any(), "cut by the seeds"
        condition = condition_of(policy, observation)
        for row, seed in enumerate((4, 5)):
            noise = torch.randn(8, 2, generator=torch.Generator().manual_seed(seed))
            share = torch.rand(1, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64)
            time = int(share * 100)
            whole = torch.cat([unit[row, :1], unit[row]])
            point = kept[time] ** 0.5 * whole + (1 - kept[time]) ** 0.5 * noise
            wanted = (
                (predicted(policy, point[None], time, condition[row, None])[0] - noise).square().mean(-1)[1:]
            )
            torch.testing.assert_close(found[row], wanted, rtol=1e-3, atol=1e-4)
    policy = made(cameras=[])
    optimizer, losses = torch.optim.Adam(policy.parameters(), lr=3e-3), []
    for _ in range(20):
        errors = policy.imitate(observation, actions, [4, 5])
        losses.append(imitation_loss(errors, torch.ones(2, 7, dtype=torch.bool)))
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < 0.7 * losses[0]


def test_demonstrations_are_stacked_as_an_environment_stacks_them():
    image = torch.arange(3, dtype=torch.uint8)[:, None, None, None].expand(3, 4, 4, 3)
    shown = Demonstration(
        "t", torch.zeros(3, 1), torch.tensor([[0.0], [1.0], [2.0]]), {"top": image}
    ).stacked(2)
    assert shown.state_TS.tolist() == [[0, 0], [0, 1], [1, 2]]
    assert shown.images["top"][:, 0, 0].tolist() == [[0] * 6, [0] * 3 + [1] * 3, [1] * 3 + [2] * 3]


@pytest.fixture
def checkpoint(tmp_path):
    """As LeRobot published its first ones: one camera, statistics among the weights."""
    chosen = {
        "cameras": ["observation.image"],
        "state": {"low": [0.0] * 4, "high": [512.0] * 4, "clip": False},
    }
    policy = made(**chosen, use_group_norm=True, use_separate_rgb_encoder_per_camera=False, chunk_length=4)
    stated = {
        "type": "diffusion",
        "input_features": {
            "observation.image": {"type": "VISUAL", "shape": [3, 64, 96]},
            "observation.state": {"type": "STATE", "shape": [2]},
        },
        "output_features": {"action": {"type": "ACTION", "shape": [2]}},
        "normalization_mapping": {"VISUAL": "MEAN_STD", "STATE": "MIN_MAX", "ACTION": "MIN_MAX"},
        "n_obs_steps": 2,
        "n_action_steps": 4,
        "noise_scheduler_type": "DDPM",
        "num_train_timesteps": 100,
        "num_inference_steps": None,
        "use_group_norm": True,
        "use_separate_rgb_encoder_per_camera": False,
        **{
            name: FIELDS[name]
            for name in ("horizon", "crop_shape", "spatial_softmax_num_keypoints", "down_dims")
        },
        **{name: FIELDS[name] for name in ("kernel_size", "n_groups", "diffusion_step_embed_dim")},
    }
    (tmp_path / "config.json").write_text(json.dumps(stated))
    tensors = {name: value for name, value in state_tensors(policy) if name.startswith("diffusion.")}
    tensors["diffusion.rgb_encoder.pool.pos_grid"] = torch.zeros(4, 2)
    for name, value in {"min": 0.0, "max": 512.0}.items():
        tensors[f"normalize_inputs.buffer_observation_state.{name}"] = torch.full((2,), value)
        tensors[f"unnormalize_outputs.buffer_action.{name}"] = torch.full((2,), value)
    for name, value in {"mean": 0.25, "std": 0.5}.items():
        tensors[f"normalize_inputs.buffer_observation_image.{name}"] = torch.full((3, 1, 1), value)
    save_file(
        {name: value.detach().clone() for name, value in tensors.items()}, tmp_path / "model.safetensors"
    )
    return tmp_path, policy, stated


def test_a_published_checkpoint_becomes_a_policy_directory(checkpoint, tmp_path):
    directory, policy, _ = checkpoint
    convert(directory, tmp_path / "policy", Wanted({"denoising": {"steps": 5, "last": 2}}))
    found = load_policy(tmp_path / "policy")
    own, given = dict(state_tensors(found)), dict(state_tensors(policy))
    assert own.keys() == given.keys()
    assert all(torch.equal(own[name], given[name]) for name in own if name.startswith("diffusion."))
    assert found.config.denoising.candidates == range(3, 5)
    assert (found.config.cameras, found.config.pixels, found.config.seen) == (
        ("observation.image",),
        (64, 96),
        (60, 64),
    )
    assert found.config.image_mean == (0.25, 0.25, 0.25) and found.config.state_numbers == 4
    torch.testing.assert_close(found.scaling(torch.tensor([0.5, -1.0])), torch.tensor([384.0, 0.0]))
    assert load_published(directory, Wanted()).config.denoising == DenoisingConfig(steps=100, sampler="ddpm")


def test_states_of_an_environment_alone(checkpoint):
    directory, _, stated = checkpoint
    stated["input_features"]["observation.environment_state"] = {"type": "ENV", "shape": [3]}
    (directory / "config.json").write_text(json.dumps(stated))
    with pytest.raises(ModelNotReadable, match=r"config\.json: observation\.environment_state beside images"):
        load_published(directory, Wanted())
    policy = made(cameras=[], state={"low": [0.0] * 10, "high": [1.0] * 10, "clip": False}, chunk_length=4)
    features = {"observation.state": [2], "observation.environment_state": [3]}
    stated["input_features"] = {name: {"type": "STATE", "shape": shape} for name, shape in features.items()}
    tensors = {name: value for name, value in state_tensors(policy) if name.startswith("diffusion.")}
    tensors |= {
        "unnormalize_outputs.buffer_action.min": torch.zeros(2),
        "unnormalize_outputs.buffer_action.max": torch.ones(2),
    }
    for name, size in {"state": 2, "environment_state": 3}.items():
        for which, value in {"min": -1.0, "max": 1.0 + size}.items():
            tensors[f"normalize_inputs.buffer_observation_{name}.{which}"] = torch.full((size,), value)
    save_file(
        {name: value.detach().clone() for name, value in tensors.items()}, directory / "model.safetensors"
    )
    stated["normalization_mapping"]["ENV"] = "MIN_MAX"
    (directory / "config.json").write_text(json.dumps(stated))
    found = load_published(directory, Wanted())
    assert found.config.state.high == (3.0, 3.0, 4.0, 4.0, 4.0) * 2
    assert found.act(Observation(torch.rand(2, 10)), [1, 2]).executed_BCA.shape == (2, 4, 2)


@pytest.mark.parametrize(
    ("chosen", "problem"),
    [
        ({"channels": 3}, "channels 3; images of 2 moments have 6"),
        ({"horizon": 7}, "horizon 7 is no multiple of 2"),
        ({"chunk_length": 8}, "chunk_length 8 from moment 2 on; the model draws 8"),
        ({"crop_shape": [65, 64]}, r"crop_shape \(65, 64\) does not fit into \(64, 96\)"),
        ({"height": None}, "give height and width"),
        ({"denoising": {"steps": 101}}, "denoising.steps is 101; num_train_timesteps is 100"),
        ({"denoising": {"steps": 4, "last": 5}}, "last is 5, and there are 4 steps"),
        ({"vision_backbone": "resnet50"}, "vision_backbone: .*'resnet18' or 'resnet34'"),
    ],
)
def test_what_does_not_fit_is_named(chosen, problem):
    with pytest.raises(ModelNotReadable, match=problem):
        policy_config({**FIELDS, **chosen})


def test_the_published_size():
    """Of lerobot/diffusion_pusht: 262,709,026 weights that learn."""
    unit = {"low": [-1.0] * 2, "high": [1.0] * 2}
    fields = {
        "kind": "diffusion",
        "n_obs_steps": 2,
        "channels": 6,
        "height": 96,
        "width": 96,
        "crop_shape": [84, 84],
    }
    state = {"low": [-1.0] * 4, "high": [1.0] * 4}
    with torch.device("meta"):
        config = policy_config(
            {**fields, "cameras": ["image"], "bounds": unit, "state": state, "chunk_length": 8}
        )
        policy = config.build(0)
    shapes = {name: tuple(tensor.shape) for name, tensor in state_tensors(policy)}
    golden = {
        "diffusion.rgb_encoder.backbone.7.0.downsample.1.weight": (512,),
        "diffusion.rgb_encoder.pool.nets.weight": (32, 512, 1, 1),
        "diffusion.unet.diffusion_step_encoder.1.weight": (512, 128),
        "diffusion.unet.down_modules.0.0.conv1.block.0.weight": (512, 2, 5),
        "diffusion.unet.down_modules.2.1.cond_encoder.1.weight": (4096, 260),
        "diffusion.unet.up_modules.0.0.residual_conv.weight": (1024, 4096, 1),
        "diffusion.unet.up_modules.1.2.weight": (512, 512, 4),
        "diffusion.unet.final_conv.1.weight": (2, 512, 1),
    }
    assert {name: shapes[name] for name in golden} == golden
    assert (
        sum(torch.Size(shape).numel() for name, shape in shapes.items() if name.startswith("diffusion."))
        == 262_709_026
    )
