"""Actions of categories, alone and beside Gaussian numbers: against torch's distributions, and by what is drawn."""

from __future__ import annotations

import pytest
import torch
from headrace_modelkit.errors import ModelNotReadable
from headrace_robots.policies.actor_critic import CnnConfig, MlpConfig
from headrace_robots.policies.directory import load_policy, policy_config, save_policy
from headrace_robots.policies.policy import ACTIONS, Observation
from headrace_robots.policies.scaling import ActionBounds

CHOICE = MlpConfig(bounds=ActionBounds(low=(2.0,), high=(4.0,)), categories=(3,), state_size=3)
MIXED = MlpConfig(
    bounds=ActionBounds(low=(0.0, -2.0, 5.0, None), high=(1.0, 4.0, 9.0, None)),
    categories=(2, 0, 5, 0),
    state_size=3,
    chunk_length=2,
    log_std=-1.0,
)
CONFIGS = {"choice": CHOICE, "mixed": MIXED}


def states(count: int) -> Observation:
    return Observation(torch.randn(count, 3, generator=torch.Generator().manual_seed(0)))


@pytest.fixture(params=CONFIGS)
def policy(request):
    made = CONFIGS[request.param].build(seed=1)
    with torch.no_grad():
        made.actor[-1].weight.mul_(100)  # no uniform distributions
    return made


def parts(policy, outputs_BCO):
    """The distribution of each number of an action, by torch."""
    numbers = [place for place, count in enumerate(policy.config.categories) if not count]
    found, begin = {}, len(numbers)
    for index, place in enumerate(numbers):
        width = policy.head.log_std[:, index].exp()
        found[place] = torch.distributions.Normal(outputs_BCO[..., index], width)
    for place, count in enumerate(policy.config.categories):
        if count:
            found[place] = torch.distributions.Categorical(logits=outputs_BCO[..., begin : begin + count])
            begin += count
    assert begin == outputs_BCO.shape[-1]
    return [found[place] for place in sorted(found)]


def test_log_probs_and_entropies_are_those_of_torchs_distributions(policy):
    seen = states(6)
    chunk = policy.act(seen, range(6))
    again = policy.evaluate(seen, chunk.sampled)
    assert torch.equal(again.log_probs_BCA, chunk.log_probs_BCA)
    wanted = parts(policy, policy(seen)[0])
    drawn = chunk.sampled[ACTIONS].unbind(-1)
    scored = torch.stack([each.log_prob(value) for each, value in zip(wanted, drawn, strict=True)], -1)
    torch.testing.assert_close(chunk.log_probs_BCA, scored)
    torch.testing.assert_close(again.entropy_BCA, torch.stack([each.entropy() for each in wanted], -1))
    (again.log_probs_BCA.sum() + again.entropy_BCA.sum() + again.values_B.sum()).backward()
    assert all(bool(each.grad.isfinite().all()) for each in policy.parameters())


def test_what_is_drawn_has_the_frequencies_that_are_scored(policy):
    seen = states(1).take([0] * 4000)
    chunk = policy.act(seen, range(4000))
    wanted = parts(policy, policy(seen.take([0]))[0])
    for place, count in enumerate(policy.config.categories):
        if count:
            shares = torch.bincount(chunk.sampled[ACTIONS][:, 0, place].long(), minlength=count) / 4000
            torch.testing.assert_close(shares, wanted[place].probs[0, 0], atol=0.03, rtol=0)


def test_an_environment_is_given_categories_from_their_first_on():
    chunk = CHOICE.build(seed=0).act(states(50), range(50))
    assert chunk.executed_BCA.dtype == torch.int64
    assert set(chunk.executed_BCA.unique().tolist()) == {2, 3, 4}
    assert torch.equal(chunk.executed_BCA - 2, chunk.sampled[ACTIONS].long())
    mixed = MIXED.build(seed=0).act(states(50), range(50)).executed_BCA
    assert mixed.dtype == torch.float32
    assert set(mixed[..., 2].unique().tolist()) == {5, 6, 7, 8, 9}
    assert mixed[..., 1].min() >= -2 and mixed[..., 1].max() <= 4 and (mixed[..., 1] % 1).any()


def test_greedy_takes_the_likeliest_and_a_draw_depends_on_its_seed_alone(policy):
    seen = states(5)
    greedy = policy.act(seen, range(5), deterministic=True)
    for each, value in zip(parts(policy, policy(seen)[0]), greedy.sampled[ACTIONS].unbind(-1), strict=True):
        torch.testing.assert_close(each.mode.float(), value)
    together = policy.act(seen, [7, 8, 9, 10, 11]).sampled[ACTIONS]
    torch.testing.assert_close(together[2:3], policy.act(seen.take([2]), [9]).sampled[ACTIONS])


def test_a_trainer_counts_its_weights_without_memory(policy):
    with torch.device("meta"):
        counted = policy.config.build(0)
    assert [each.shape for each in counted.parameters()] == [each.shape for each in policy.parameters()]


def test_imitation_makes_the_demonstrated_action_the_likeliest(policy):
    seen = states(8)
    shown = policy.act(seen, range(100, 108)).executed_BCA.float()
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    for _ in range(300):
        optimizer.zero_grad()
        policy.imitate(seen, shown, range(8)).mean().backward()
        optimizer.step()
    made = policy.act(seen, range(8), deterministic=True).executed_BCA.float()
    chosen = [place for place, count in enumerate(policy.config.categories) if count]
    assert torch.equal(made[..., chosen], shown[..., chosen])
    torch.testing.assert_close(made, shown, atol=0.3, rtol=0)


def test_a_directory_holds_it_all(policy, tmp_path):
    save_policy(policy, tmp_path / "p")
    again, seen = load_policy(tmp_path / "p"), states(3)
    assert again.config == policy.config
    assert torch.equal(again.act(seen, range(3)).executed_BCA, policy.act(seen, range(3)).executed_BCA)


@pytest.mark.parametrize(
    ("categories", "words"), [((3, 3), "give one each"), ((4,), "which are no 4 whole numbers")]
)
def test_categories_that_are_not_the_bounds_are_named(categories, words):
    with pytest.raises(ModelNotReadable, match=words):
        policy_config({**CHOICE.model_dump(), "categories": categories})


@pytest.mark.parametrize(("side", "channels"), [(7, 3), (20, 4), (84, 1)])
def test_a_cnn_reads_pictures_of_any_size_and_channels(side, channels):
    config = CnnConfig(
        bounds=ActionBounds(low=(0.0,), high=(6.0,)),
        categories=(7,),
        cameras=("image",),
        height=side,
        width=side + 1,
        channels=channels,
    )
    policy = config.build(seed=0)
    image = torch.randint(0, 256, (3, side, side + 1, channels), dtype=torch.uint8)
    assert policy.act(Observation(images={"image": image}), range(3)).executed_BCA.shape == (3, 1, 1)
    with pytest.raises(ValueError, match=f"reads \\(B, H, W, {channels}\\)"):
        policy.act(Observation(images={"image": torch.cat([image, image], -1)}), range(3))
