"""`pi0` against transformers' own sampling, `pi05` against a plain Gemma where its norms are constant."""

from __future__ import annotations

import math

import pytest
import torch
from headrace_modelkit.presets.tiny import character_tokenizer
from headrace_modelkit.weights import load_weights, state_tensors
from headrace_robots.policies.directory import load_policy, save_policy
from headrace_robots.policies.flows import flow
from headrace_robots.policies.flows.flow import FlowConfig
from headrace_robots.policies.flows.policy import imitation_times
from headrace_robots.policies.gaussian import row_noise
from headrace_robots.policies.images import fit
from headrace_robots.policies.paths import PATH, STEPS
from headrace_robots.policies.pi.expert import AdaptiveGemma
from headrace_robots.policies.pi.model import PiConfig
from headrace_robots.policies.pi.words import StateWords, pi05_prompt
from headrace_robots.policies.policy import ACTIONS, Observation, RobotPolicy, imitation_loss
from headrace_robots.policies.scaling import ActionBounds
from pydantic import ValidationError
from transformers import GemmaConfig, GemmaModel

GEMMA = {
    "model_type": "gemma",
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "vocab_size": 64,
}
SIZES = {
    "vlm_config": {
        "model_type": "paligemma",
        "text_config": {**GEMMA, "hidden_size": 16, "intermediate_size": 24},
        "vision_config": {
            "model_type": "siglip_vision_model",
            "hidden_size": 12,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 14,
            "vision_use_head": False,
        },
        "projection_dim": 16,
        "image_token_id": 63,
    },
    "dit_config": {**GEMMA, "hidden_size": 16, "intermediate_size": 24},
    "chunk_size": 4,
    "max_state_dim": 5,
    "max_action_dim": 6,
}
PROMPTS = ((2, 5, 6, 7), (2, 9))
LETTERS = "0123456789-;:, TaskStieAcon"
TOKENIZER = character_tokenizer("".join(sorted(set(LETTERS))) + "\n")
WORDS = StateWords.of(TOKENIZER)


def config(kind="pi0", **chosen):
    return PiConfig(
        **{
            "kind": kind,
            "model": SIZES,
            "bounds": ActionBounds.unit(2),
            "state": ActionBounds.unit(3),
            "words": WORDS if kind == "pi05" else None,
            "cameras": ("front", "wrist"),
            "chunk_length": 3,
            "flow": FlowConfig(steps=4, drawn="all"),
            **chosen,
        }
    )


def seen():
    generator = torch.Generator().manual_seed(1)
    images = {
        name: torch.randint(0, 256, (2, 28, 28, 3), generator=generator, dtype=torch.uint8)
        for name in ("front", "wrist")
    }
    return Observation(torch.rand(2, 3, generator=generator) * 2 - 1, images, PROMPTS)


def shaken(policy):
    """Weights that are large enough to matter; fresh ones hardly differ from none."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        for parameter in policy.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return policy


@pytest.mark.parametrize("kind", ["pi0", "pi05"])
@pytest.mark.parametrize("noise", ["sde", "learned", "cps"])
@pytest.mark.parametrize("drawn", ["one", "all"])
def test_a_chunk_is_scored_as_it_was_drawn(kind, noise, drawn):
    policy = shaken(config(kind, flow=FlowConfig(steps=3, noise=noise, drawn=drawn)).build(seed=0))
    chunk = policy.act(seen(), [4, 5])
    assert chunk.executed_BCA.shape == (2, 3, 2) and chunk.executed_BCA.abs().max() <= 1
    with torch.no_grad():
        again = policy.evaluate(seen(), chunk.sampled)
    if drawn == "all":
        assert torch.equal(again.log_probs_BCA, chunk.log_probs_BCA)  # the ratio is exactly 1
    torch.testing.assert_close(again.log_probs_BCA, chunk.log_probs_BCA, rtol=0, atol=1e-3)
    assert torch.equal(again.values_B, chunk.values_B)
    # With gradients torch takes other attention kernels, which round otherwise.
    again = policy.evaluate(seen(), chunk.sampled)
    torch.testing.assert_close(again.log_probs_BCA, chunk.log_probs_BCA, rtol=0, atol=1e-3)
    (again.log_probs_BCA.sum() + again.values_B.sum()).backward()
    silent = {name for name, parameter in policy.named_parameters() if parameter.grad is None}
    assert not {name for name in silent if "embed_tokens" not in name and "lm_head" not in name}, silent


def test_pi0_follows_the_path_of_transformers_own_sampling():
    policy = shaken(config().build(seed=0))
    observation = seen()
    chunk = policy.act(observation, [4, 5], deterministic=True)
    ids, mask, pixels = transformers_inputs(observation)
    wanted = policy.model.sample_actions(
        state=torch.nn.functional.pad(observation.state_BS, (0, 2)),
        input_ids=ids,
        pixel_values=pixels,
        pixel_attention_mask=torch.ones(2, 2, dtype=torch.bool),
        attention_mask=mask,
        noise=chunk.sampled[PATH][:, 0],
        num_steps=4,
    )
    torch.testing.assert_close(chunk.sampled[ACTIONS], wanted[:, :3, :2], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["pi0", "pi05"])
def test_dropout_of_a_checkpoint_is_off(kind):
    """Its configuration may name a rate; generation and training compute one function of the weights."""
    vlm, expert = SIZES["vlm_config"], SIZES["dit_config"]
    rate = {"attention_dropout": 0.9}
    dropping = {
        "vlm_config": {**vlm, "text_config": {**vlm["text_config"], **rate}},
        "dit_config": expert | rate,
    }
    policies = [shaken(config(kind, model=SIZES | more).build(seed=0)) for more in ({}, dropping)]
    whole, dropped = (policy.act(seen(), [4, 5]) for policy in policies)
    assert torch.equal(whole.sampled[ACTIONS], dropped.sampled[ACTIONS])
    scored = [policy.evaluate(seen(), whole.sampled).log_probs_BCA for policy in policies]
    assert torch.equal(*scored)


def test_imitation_of_pi0_is_transformers_own_loss():
    policy, observation = shaken(config().build(seed=0)), seen()
    actions_BHA = torch.rand(2, 4, 2) * 2 - 1
    losses_BH = policy.imitate(observation, actions_BHA, [4, 5])
    ids, mask, pixels = transformers_inputs(observation)
    wanted = policy.model(
        state=torch.nn.functional.pad(observation.state_BS, (0, 2)),
        noise=row_noise([4, 5], (4, 6), torch.device("cpu")),
        timestep=imitation_times([4, 5]),
        input_ids=ids,
        pixel_values=pixels,
        pixel_attention_mask=torch.ones(2, 2, dtype=torch.bool),
        attention_mask=mask,
        actions=torch.nn.functional.pad(actions_BHA, (0, 4)),
    ).loss
    torch.testing.assert_close(losses_BH.mean(), wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["pi0", "pi05"])
def test_imitation_lowers_its_loss(kind):
    policy, observation = shaken(config(kind).build(seed=0)), seen()
    torch.manual_seed(3)
    actions_BHA, valid_BH = torch.rand(2, 4, 2) * 2 - 1, torch.ones(2, 4, dtype=torch.bool)
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
    losses = []
    for _ in range(12):
        losses.append(imitation_loss(policy.imitate(observation, actions_BHA, [4, 5]), valid_BH))
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < 0.7 * losses[0]


def test_times_of_imitation_are_of_the_configured_distribution():
    times = imitation_times(range(4000)).double()
    grid = torch.linspace(0.05, 0.95, 10, dtype=torch.float64)
    shares = (times[:, None] <= grid * 0.999 + 0.001).double().mean(0)
    assert (shares - grid**1.5).abs().max() < 0.03


def transformers_inputs(observation):
    """Ids with places for the images' tokens, their mask, and pixels from -1 to 1."""
    ids = torch.zeros(2, 8 + 4, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(PROMPTS):
        ids[row, :8], mask[row, : 8 + len(prompt)] = 63, 1
        ids[row, 8 : 8 + len(prompt)] = torch.tensor(prompt)
    images = [image.permute(0, 3, 1, 2).float() / 127.5 - 1 for image in observation.images.values()]
    return ids, mask, torch.stack(images, 1)


def test_adaptive_norms_that_do_not_depend_on_the_time_are_gemmas():
    """With scale = weight, shift 0 and gate 1 the expert is a GemmaModel whose positions see each other."""
    sizes = GemmaConfig(**{**GEMMA, "hidden_size": 16, "intermediate_size": 24})
    sizes.use_bidirectional_attention = True
    torch.manual_seed(0)
    plain, expert = shaken(GemmaModel(sizes)).eval(), AdaptiveGemma(sizes).eval()
    own = dict(plain.state_dict())
    for name, tensor in expert.state_dict().items():
        if name in own:
            tensor.copy_(own[name])
        elif name.endswith("dense.bias"):
            weight = own[name.replace("dense.bias", "weight")]
            tensor.copy_(torch.cat([weight, torch.zeros(16), torch.ones(16)]))
    hidden = torch.randn(2, 5, 16)
    with torch.no_grad():
        free = torch.zeros(2, 1, 5, 5)
        wanted = plain(inputs_embeds=hidden, attention_mask=free).last_hidden_state
        found = expert(hidden, torch.randn(2, 16), None, torch.zeros(2, 0, dtype=torch.bool))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def turned(heads, places):
    """Rotary angles of wavelength 10,000 on (B, T, heads, size)."""
    half = heads.shape[-1] // 2
    angles = (places[..., None] / 10_000 ** (torch.arange(half) / half))[:, :, None]
    one, other = heads[..., :half], heads[..., half:]
    return torch.cat(
        [one * angles.cos() - other * angles.sin(), other * angles.cos() + one * angles.sin()], -1
    )


def plain_pi05(policy, observation, point, time):
    """The velocity in one pass over prefix and actions, as openpi trains it: both stacks attend together."""
    language, expert = policy.vlm.language_model, policy.expert
    prefix, there = policy._embeds(observation, torch.device("cpu"))
    waves = (
        time.double()[:, None] * 2 * math.pi / (4e-3 * 1000 ** torch.linspace(0, 1, 8, dtype=torch.float64))
    )
    condition = torch.cat([waves.sin(), waves.cos()], -1).float()
    for layer in (policy.time_mlp_in, policy.time_mlp_out):
        condition = torch.nn.functional.silu(layer(condition))
    actions, length = policy.action_in_proj(point), prefix.shape[1]
    there = torch.nn.functional.pad(there, (0, point.shape[1]), value=True)
    own = torch.arange(there.shape[1]) >= length
    mask = there[:, None] & there[:, :, None] & ~(own[None] & ~own[:, None])[None]
    mask |= torch.eye(there.shape[1], dtype=torch.bool)
    places = there.cumsum(-1) - 1

    def unit(hidden):
        return hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + 1e-6)

    def adapted(norm, hidden):
        scale, shift, gate = norm.dense(condition)[:, None].chunk(3, -1)
        return unit(hidden) * (1 + scale) + shift, gate

    def fed(layer, hidden):
        gate = torch.nn.functional.gelu(layer.mlp.gate_proj(hidden), approximate="tanh")
        return layer.mlp.down_proj(gate * layer.mlp.up_proj(hidden))

    for reader, layer in zip(language.layers, expert.layers, strict=True):
        normed, gate = adapted(layer.input_layernorm, actions)
        inputs = unit(prefix) * (1 + reader.input_layernorm.weight), normed
        queries, keys, values = (
            torch.cat(
                [
                    getattr(each.self_attn, name)(given)
                    for each, given in zip((reader, layer), inputs, strict=True)
                ],
                1,
            ).unflatten(-1, (-1, 8))
            for name in ("q_proj", "k_proj", "v_proj")
        )
        scores = (
            torch.einsum("bthd,bnd->bhtn", turned(queries, places), turned(keys, places)[:, :, 0]) / 8**0.5
        )
        shares = scores.masked_fill(~mask[:, None], -torch.inf).softmax(-1)
        mixed = torch.einsum("bhtn,bnd->bthd", shares, values[:, :, 0]).flatten(2)
        prefix = prefix + reader.self_attn.o_proj(mixed[:, :length])
        prefix = prefix + fed(reader, unit(prefix) * (1 + reader.post_attention_layernorm.weight))
        actions = actions + gate * layer.self_attn.o_proj(mixed[:, length:])
        normed, gate = adapted(layer.post_attention_layernorm, actions)
        actions = actions + gate * fed(layer, normed)
    features = adapted(expert.norm, actions)[0]
    return policy.action_out_proj(features), features


@pytest.mark.parametrize("noise", ["sde", "learned", "cps"])
def test_log_probs_of_pi05_are_those_of_a_plain_pass(noise):
    """The field by one joint pass, the transitions by RLinf's weights of action and noise (`sample_mean_var_val`)."""
    policy = shaken(
        config("pi05", flow=FlowConfig(steps=3, noise=noise, drawn="all", level=0.4)).build(seed=0)
    )
    observation, delta, level = seen(), 1 / 3, 0.4
    chunk = policy.act(observation, [4, 5])
    path, summed = chunk.sampled[PATH], torch.zeros(2, 4, 6)
    assert chunk.sampled[STEPS].shape[1] == (2 if noise == "cps" else 3), "the last step of CPS has no noise"
    with torch.no_grad():
        for step in range(chunk.sampled[STEPS].shape[1]):
            time, point = 1 - step * delta, path[:, step]
            speed, features = plain_pi05(policy, observation, point, torch.full((2,), time))
            action, start, kept = point - speed * time, point + speed * (1 - time), time - delta
            if noise == "sde":
                sigma = level * math.sqrt(time / (1 - min(time, 1 - delta)))
                mean = action * (1 - kept) + start * (kept - sigma**2 * delta / (2 * time))
                width = torch.tensor(sigma * math.sqrt(delta))
            elif noise == "cps":
                mean = action * (1 - kept) + start * kept * math.cos(math.pi * level / 2)
                width = torch.tensor(kept * math.sin(math.pi * level / 2))
            else:
                least, most = (2 * math.log(each) for each in policy.config.flow.width)
                share = (torch.tanh(policy.noise_head.layers(features)) + 1) / 2
                mean = action * (1 - kept) + start * kept
                width = torch.exp(0.5 * (least + (most - least) * share))
            summed += torch.distributions.Normal(mean, width).log_prob(path[:, step + 1])
    torch.testing.assert_close(chunk.log_probs_BCA, summed[:, :3, :2], rtol=1e-3, atol=2e-3)


def test_a_noise_head_in_fp32_reads_features_in_bf16():
    head = flow.NoiseHead(4, 2, FlowConfig(noise="learned"))
    assert head(torch.ones(1, 3, 4, dtype=torch.bfloat16)).dtype == torch.float32


def test_the_last_step_is_never_drawn_where_it_is_ignored():
    policy = config("pi05", flow=FlowConfig(steps=2, ignore_last=True)).build(seed=0)
    many = seen().take([0] * 12)
    assert policy.act(many, range(12)).sampled[STEPS].unique().tolist() == [0]


def test_pi05_feels_the_time_and_pads_nothing_in():
    policy = shaken(config("pi05").build(seed=0))
    observation = seen()
    with torch.no_grad():
        point = torch.randn(2, 4, 6)
        early, late = (
            policy.field(observation, *policy.prefix(observation)[:2])(point, torch.full((2,), time))[0]
            for time in (1.0, 0.5)
        )
        alone = observation.take([1])
        short = policy.field(alone, *policy.prefix(alone)[:2])(point[1:], torch.full((1,), 0.5))[0]
    assert not torch.allclose(early, late)
    torch.testing.assert_close(short, late[1:], rtol=1e-4, atol=1e-5)


def test_the_state_is_in_the_prompt_of_pi05():
    assert pi05_prompt(" pick_up the\ncube ", torch.tensor([-1.0, 0.0, 0.999, -3.0, 3.0])) == (
        "Task: pick up the cube, State: 0 128 255 -1 255;\nAction: "
    )


def test_pi05_reads_the_text_that_openpi_writes():
    """The prompt of an episode and the words of a state, put together by the policy, are the ids of the whole text."""
    policy = config("pi05").build(seed=0)
    ids = policy.config.prompt_ids(TOKENIZER, "stack_it")
    state = torch.tensor([[-1.0, 0.0, 0.999], [-3.0, 3.0, 0.25]])
    found, kept = policy._prompt(Observation(state, prompts=(ids, ids)), torch.device("cpu"))
    for row, own in enumerate(state):
        whole = TOKENIZER.encode(pi05_prompt("stack_it", own), add_special_tokens=True)
        assert found[row][kept[row]].tolist() == whole
    assert found.shape[1] == len(ids) + policy.words.count(3)


def test_a_tokenizer_whose_parts_are_not_the_whole_or_that_is_another_is_refused():
    class Merging:
        def encode(self, text, add_special_tokens):
            return [text] if "1;" in text else list(text)

    with pytest.raises(ValueError, match="do not begin with those of"):
        StateWords.of(Merging())
    other = character_tokenizer("".join(sorted(set(LETTERS), reverse=True)) + "\n")
    with pytest.raises(ValueError, match="another tokenizer made"):
        config("pi05").check_tokenizer(other)
    config("pi05").check_tokenizer(TOKENIZER)


def test_images_keep_their_shape_in_a_black_square():
    found = fit(torch.ones(1, 3, 20, 40), (28, 28))
    assert found.shape == (1, 3, 28, 28)
    end = fit(torch.ones(1, 3, 20, 40), (28, 28), at="end")
    assert end[0, 0, 14:].min() > 0.999 and end[0, 0, :14].max() == 0
    assert found[0, 0, 7:21].min() > 0.999 and found[0, 0, :7].max() == 0 and found[0, 0, 21:].max() == 0


@pytest.mark.parametrize("kind", ["pi0", "pi05"])
def test_a_version_of_a_flow_policy_moves_as_a_language_models_does(kind, tmp_path):
    policy = shaken(config(kind, flow=FlowConfig(steps=2, noise="learned")).build(seed=0))
    other = policy.config.build(seed=3)
    load_weights(other, dict(state_tensors(policy)))
    save_policy(policy, tmp_path / "saved")
    wanted = policy.act(seen(), [1, 2])
    for some in (other, load_policy(tmp_path / "saved")):
        assert isinstance(some, RobotPolicy)
        assert torch.equal(some.act(seen(), [1, 2]).sampled[ACTIONS], wanted.sampled[ACTIONS])


def test_configurations_that_do_not_fit_are_refused():
    with pytest.raises(ValidationError, match="the model draws 4 actions of 6"):
        config(chunk_length=5)
    with pytest.raises(ValidationError, match="pi05 reads the state in its prompt: give words"):
        config("pi05", words=None)
    with pytest.raises(ValidationError, match="at most 5"):
        config(state=ActionBounds.unit(6))
    with pytest.raises(ValidationError, match="its last step is not drawn"):
        FlowConfig(steps=1, noise="cps")
    with pytest.raises(ValidationError, match="a share below 1"):
        FlowConfig(noise="cps", level=1.0)
