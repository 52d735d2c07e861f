"""`mlp` and `cnn`: three faces of an action, draws by seed, weights with the normaliser inside, directories."""

from __future__ import annotations

import json
import math

import pytest
import torch
from headrace_modelkit.errors import ModelNotReadable
from headrace_modelkit.weights import copy_out, load_weights, state_tensors, weight_layout
from headrace_robots.policies.actor_critic import CnnConfig, MlpConfig
from headrace_robots.policies.directory import load_policy, save_policy
from headrace_robots.policies.normalizer import Normalizer, NormalizerConfig
from headrace_robots.policies.policy import ACTIONS, Observation, RobotPolicy, at_level
from headrace_robots.policies.scaling import ActionBounds, ActionScaling
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

BOUNDS = ActionBounds(low=(-2.0, None), high=(4.0, None))
MLP = MlpConfig(bounds=BOUNDS, state_size=3, chunk_length=4)
CNN = CnnConfig(bounds=BOUNDS, cameras=("front", "wrist"), height=40, width=48, state_size=3, chunk_length=4)


def observation(count=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    images = {
        name: torch.randint(0, 256, (count, 40, 48, 3), generator=generator, dtype=torch.uint8)
        for name in ("front", "wrist")
    }
    return Observation(torch.randn(count, 3, generator=generator) * 3, images)


@pytest.fixture(params=[MLP, CNN], ids=["mlp", "cnn"])
def policy(request):
    return request.param.build(seed=1)


def test_a_policy_scores_its_own_actions_as_it_drew_them(policy):
    seen = observation()
    chunk = policy.act(seen, range(5))
    again = policy.evaluate(seen, chunk.sampled)
    assert chunk.sampled[ACTIONS].shape == (5, 4, 2) and chunk.valid_BC.all()
    assert torch.equal(again.log_probs_BCA, chunk.log_probs_BCA)  # the ratio is exactly 1
    assert torch.equal(again.values_B, chunk.values_B)
    normal = torch.distributions.Normal(policy(seen)[0], policy.head.log_std.exp())
    torch.testing.assert_close(chunk.log_probs_BCA, normal.log_prob(chunk.sampled[ACTIONS]))
    torch.testing.assert_close(again.entropy_BCA, normal.entropy())
    (again.log_probs_BCA.sum() + again.values_B.sum()).backward()
    assert all(parameter.grad is not None for parameter in policy.parameters())


def test_a_draw_depends_on_its_own_seed_alone(policy):
    seen = observation()
    together = policy.act(seen, [7, 8, 9, 10, 11]).sampled[ACTIONS]
    alone = policy.act(seen.take([2]), [9]).sampled[ACTIONS]
    torch.testing.assert_close(together[2:3], alone)
    other = policy.act(seen.take([2]), [10]).sampled[ACTIONS]
    assert not torch.allclose(alone, other)
    state = torch.get_rng_state()
    greedy = policy.act(seen, [0] * 5, deterministic=True).sampled[ACTIONS]
    assert torch.equal(greedy, policy(seen)[0]) and torch.equal(state, torch.get_rng_state())


def test_a_clone_finds_what_is_small_in_bright_pictures():
    """Without centred pictures, or without the norm of features, the tanh goes to its ends and nothing is learned."""
    config = CnnConfig(
        bounds=ActionBounds.unit(2), cameras=("front",), height=36, width=36, features=64, hidden=(32,)
    )
    generator = torch.Generator().manual_seed(0)
    place_N2 = torch.randint(0, 30, (48, 2), generator=generator)
    image = torch.full((48, 36, 36, 3), 200, dtype=torch.uint8)
    for each, (row, column) in zip(image, place_N2.tolist(), strict=True):
        each[row : row + 6, column : column + 6] = 100
    seen, wanted = Observation(images={"front": image}), (place_N2 / 14.5 - 1)[:, None]
    policy = config.build(seed=0)
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    for _ in range(30):
        optimizer.zero_grad()
        loss = policy.imitate(seen, wanted, range(48)).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
        optimizer.step()
    assert loss < 0.25 * wanted.square().mean()


def test_the_executed_action_is_clipped_and_scaled_and_the_drawn_one_is_scored():
    scaling = ActionScaling(BOUNDS)
    drawn = torch.tensor([[-3.0, 9.0], [-1.0, -9.0], [0.0, 0.0], [1.0, 1.0], [2.0, 2.0]])
    wanted = torch.tensor([[-2.0, 9.0], [-2.0, -9.0], [1.0, 0.0], [4.0, 1.0], [4.0, 2.0]])
    torch.testing.assert_close(scaling(drawn), wanted)
    torch.testing.assert_close(scaling.drawn(wanted[1:4]), drawn[1:4])
    chunk = MLP.build(seed=1).act(observation(), range(5))
    torch.testing.assert_close(chunk.executed_BCA, scaling(chunk.sampled[ACTIONS]))


def test_statistics_of_a_data_set_leave_masked_numbers_alone():
    bounds = ActionBounds.of_statistics([0.0, 0.0], [10.0, 1.0], [True, False])
    torch.testing.assert_close(ActionScaling(bounds)(torch.tensor([0.5, 0.5])), torch.tensor([7.5, 0.5]))
    with pytest.raises(ValidationError, match=r"bounds 0 are 1\.0 and 0\.0"):
        ActionBounds(low=(1.0,), high=(0.0,))


def test_levels_count_executed_actions_alone():
    chunk = MLP.build(seed=1).act(observation(), range(5)).cut([4, 3, 2, 1, 0])
    token, token_mask = at_level(chunk.log_probs_BCA, chunk.valid_BC, "token")
    action, action_mask = at_level(chunk.log_probs_BCA, chunk.valid_BC, "action")
    whole, whole_mask = at_level(chunk.log_probs_BCA, chunk.valid_BC, "chunk")
    assert token_mask.sum((1, 2)).tolist() == [8, 6, 4, 2, 0] and action_mask.sum(1).tolist() == [
        4,
        3,
        2,
        1,
        0,
    ]
    assert whole.shape == (5, 1) and whole_mask[:, 0].tolist() == [True] * 4 + [False]
    torch.testing.assert_close(token.sum(-1), action)
    torch.testing.assert_close(action.sum(-1), whole[:, 0])
    torch.testing.assert_close(whole[2, 0], chunk.log_probs_BCA[2, :2].sum())


def test_a_version_holds_the_normaliser_and_moves_as_a_language_models_does(policy):
    seen = observation(50)
    before = policy.act(seen, range(50))
    policy.normalizer.update(seen.state_BS)
    with torch.no_grad():
        policy.head.log_std.add_(0.25)
    wanted = policy.act(seen, range(50))
    assert not torch.equal(before.log_probs_BCA, wanted.log_probs_BCA)
    body = {}
    for name, kind, shape in weight_layout(policy, torch.float32):
        raw = bytearray(max(1, math.prod(shape)) * kind.itemsize)
        copy_out(policy, name, memoryview(raw), torch.float32)
        body[name] = torch.frombuffer(raw, dtype=kind).view(shape)
    assert {"normalizer.mean", "normalizer.variance", "normalizer.count", "normalizer.updates"} < body.keys()
    assert not any(name.startswith("scaling") for name in body)
    other = policy.config.build(seed=2)
    load_weights(other, body)
    found = other.act(seen, range(50))
    assert torch.equal(found.executed_BCA, wanted.executed_BCA)
    assert torch.equal(found.log_probs_BCA, wanted.log_probs_BCA)
    del body["normalizer.mean"]
    with pytest.raises(ValueError, match=r"1 missing, first normalizer\.mean"):
        load_weights(other, body)


def test_reading_does_not_change_the_normaliser(policy):
    before = {name: tensor.clone() for name, tensor in state_tensors(policy)}
    policy.train()
    chunk = policy.act(observation(), range(5))
    policy.evaluate(observation(), chunk.sampled)
    assert all(torch.equal(before[name], tensor) for name, tensor in state_tensors(policy))


@given(sizes=st.lists(st.integers(0, 9), min_size=1, max_size=6), seed=st.integers(0, 2**31))
@settings(max_examples=25, deadline=None, derandomize=True)
def test_statistics_do_not_depend_on_how_observations_are_batched(sizes, seed):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(sum(sizes), 2, generator=generator, dtype=torch.float64) * 7 + 100
    normalizer = Normalizer((2,), NormalizerConfig(frozen_after=None))
    for part in values.split(sizes):
        normalizer.update(part)
    assert int(normalizer.count) == sum(sizes)
    if sum(sizes):
        torch.testing.assert_close(normalizer.mean, values.mean(0))
        torch.testing.assert_close(normalizer.variance, values.var(0, correction=0), rtol=1e-9, atol=1e-9)


def test_a_normaliser_clips_freezes_and_refuses_what_would_spoil_it():
    normalizer = Normalizer((1,), NormalizerConfig(clip=2.0, frozen_after=2))
    normalizer.update(torch.tensor([[0.0], [2.0]]))
    torch.testing.assert_close(
        normalizer(torch.tensor([[1.0], [2.0], [99.0]])), torch.tensor([[0.0], [1.0], [2.0]])
    )
    with pytest.raises(ValueError, match="not finite"):
        normalizer.update(torch.tensor([[math.nan]]))
    with pytest.raises(ValueError, match="shape"):
        normalizer.update(torch.zeros(3, 2))
    normalizer.update(torch.tensor([[5.0]]))
    assert normalizer.frozen
    mean = normalizer.mean.clone()
    normalizer.update(torch.tensor([[500.0]]))
    assert torch.equal(normalizer.mean, mean) and int(normalizer.updates) == 2
    divider = Normalizer((), NormalizerConfig(centre=False))
    divider.update(torch.tensor([2.0, 6.0]))
    torch.testing.assert_close(divider(torch.tensor(6.0)), torch.tensor(3.0))


def test_weights_of_a_kind_begin_as_the_recipe_says():
    policy = MLP.build(seed=3)
    first = policy.actor[0].weight
    torch.testing.assert_close(first.T @ first, 2 * torch.eye(3), rtol=1e-4, atol=1e-4)
    last = policy.actor[-1].weight
    torch.testing.assert_close(last @ last.T, 1e-4 * torch.eye(8), rtol=1e-4, atol=1e-6)
    assert (policy.head.log_std == -0.5).all()
    again = MLP.build(seed=3)
    assert all(
        torch.equal(a, b) for (_, a), (_, b) in zip(state_tensors(policy), state_tensors(again), strict=True)
    )


def test_observations_that_do_not_fit_are_named(policy):
    seen = observation()
    with pytest.raises(ValueError, match="4 seeds for 5 environments"):
        policy.act(seen, range(4))
    with pytest.raises(ValueError, match=r"state has shape \(5, 2\), the policy reads \(B, 3\)"):
        policy.act(Observation(seen.state_BS[:, :2], seen.images), range(5))


def test_cameras_that_do_not_fit_are_named():
    policy, seen = CNN.build(seed=0), observation()
    with pytest.raises(ValueError, match=r"no camera 'wrist', only \['front'\]"):
        policy.act(Observation(seen.state_BS, {"front": seen.images["front"]}), range(5))
    with pytest.raises(ValueError, match=r"camera 'front' gives \(20, 48\) pixels"):
        policy.act(Observation(seen.state_BS, {k: v[:, :20] for k, v in seen.images.items()}), range(5))
    with pytest.raises(ValueError, match="uint8"):
        policy.act(Observation(seen.state_BS, {k: v.float() for k, v in seen.images.items()}), range(5))


def test_a_directory_gives_the_same_policy_back(policy, tmp_path):
    policy.normalizer.update(observation(20).state_BS)
    save_policy(policy, tmp_path / "policy")
    again = load_policy(tmp_path / "policy")
    assert type(again) is type(policy) and again.config == policy.config and not again.training
    assert isinstance(again, RobotPolicy)
    seen = observation()
    assert torch.equal(again.act(seen, range(5)).executed_BCA, policy.act(seen, range(5)).executed_BCA)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"kind": "mpl"}, "'mpl' is no robot policy.*did you mean mlp"),
        ({"state_sise": 3}, "state_sise: Extra inputs"),
        ({"cameras": ["front"]}, "cameras: Tuple should have at most 0 items"),
        ({"state_size": 4}, r"actor\.0\.weight has shape \(64, 3\), not \(64, 4\)"),
    ],
)
def test_a_directory_that_does_not_fit_is_one_sentence(tmp_path, change, sentence):
    save_policy(MLP.build(seed=0), tmp_path / "policy")
    file = tmp_path / "policy" / "policy.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(ModelNotReadable, match=sentence):
        load_policy(tmp_path / "policy")
    with pytest.raises(ModelNotReadable, match="cannot read a robot policy"):
        load_policy(tmp_path / "elsewhere")


@pytest.mark.parametrize(("low", "high"), [(-0.1, 0.1), (-0.4, 0.4), (0.3, 0.7), (-1.1, 2.3), (0.2, 0.2)])
def test_executed_actions_are_inside_the_bounds_to_the_last_bit(low, high):
    scaling = ActionScaling(ActionBounds(low=(low,), high=(high,)))
    executed = scaling(torch.linspace(-1.5, 1.5, 4001)[:, None]).double()
    if low < high:  # equal bounds that fp32 cannot hold have no inside
        assert low <= executed.min() and executed.max() <= high
    torch.testing.assert_close(executed.min(), torch.tensor(low, dtype=torch.float64), atol=1e-6, rtol=0)
    torch.testing.assert_close(executed.max(), torch.tensor(high, dtype=torch.float64), atol=1e-6, rtol=0)
