"""What is said of a run that learns nothing, from the figures of its steps alone."""

from __future__ import annotations

import pytest
from headrace_coordinator.run.step.warnings import STEPS, Warnings
from headrace_schema.resources.views import StepView
from headrace_schema.spec import RunSpec

HEALTHY = {
    "groups_all_equal": 3.0,
    "grad_norm": 0.4,
    "learning_rate": 1e-5,
    "answer_length_mean": 31.0,
    "entropy": 0.8,
    "reference_kl": 0.1,
}


def spec(**sections):
    return RunSpec.model_validate(
        {
            "model": {"path": "/model"},
            "data": {"source": "copy_digits"},
            "reward": {"scorers": [{"name": "exact"}]},
            "algorithm": {"group_size": 8, "prompts_per_step": 4},
            "sampling": {"max_new_tokens": 64},
            **sections,
        }
    )


def step(number, reward=0.5, **figures):
    return StepView(
        step=number,
        version=number,
        wall_s=1.0,
        reward_mean=reward,
        tokens=1,
        tokens_per_s=1.0,
        stage_s={},
        devices={},
        trained=32,
        dropped=0,
        max_staleness=0,
        figures={**HEALTHY, **figures},
    )


def last(warnings, *steps):
    found = None
    for number, each in enumerate(steps):
        found = warnings.of(each)
        assert (found is None) == (number + 1 < STEPS)
    return found


def test_engines_that_are_started_again_are_told_of_after_the_second_time():
    warnings = Warnings(spec())
    assert not warnings.of(step(0, engine_restarts=1.0))
    found = warnings.of(step(1, engine_restarts=1.0, engine_asleep_bytes=14 * 2**30))
    assert found is not None and "started again 2 times in the last 2 steps" in found["engines"]
    assert "up to 14.0 GiB" in found["engines"] and "placement.mode: disaggregated" in found["engines"]
    later = [warnings.of(step(number)) for number in range(2, 8)]
    assert later[2] is not None and "engines" in later[2], "both are among the last five"
    assert later[-1] == {}, "it ends with them"


@pytest.mark.parametrize(
    ("name", "figures", "words"),
    [
        ("rewards", {"groups_all_equal": 4.0}, "every reward is 0.5 in the last 5 steps"),
        ("gradient", {"grad_norm": 0.0}, "no token carries loss"),
        ("learning_rate", {"learning_rate": 0.0}, "optimizer.schedule has ended"),
        ("learning_rate", {"learning_rate": 1e-10}, "weights are rounded by more"),
        ("length", {"answer_length_mean": 63.5}, "nearly all are cut"),
        ("reference", {"reference_kl": 9.0}, "9.0 nats a token away"),
        ("leaps", {"approx_kl": 0.9}, "moved the policy by 0.9 nats a token"),
    ],
)
def test_each_is_found_after_five_steps_and_over_with_the_next_good_one(name, figures, words):
    warnings = Warnings(spec())
    found = last(warnings, *(step(number, **figures) for number in range(STEPS)))
    assert list(found) == [name] and words in found[name]
    assert warnings.of(step(STEPS)) == {}


def test_a_healthy_run_has_none():
    warnings = Warnings(spec())
    assert [warnings.of(step(number)) for number in range(9)][STEPS - 1 :] == [{}] * 5


def test_entropy_that_falls_warns_unless_rewards_rise():
    for reward, expected in ((0.5, ["entropy"]), (0.9, [])):
        warnings = Warnings(spec())
        last(warnings, *(step(number) for number in range(STEPS)))
        for number in range(STEPS, 2 * STEPS):
            found = warnings.of(step(number, reward, entropy=0.001))
        assert list(found) == expected


def test_the_entropy_of_continuous_actions_may_be_negative():
    for entropy in (-1.5, -4.0):
        warnings = Warnings(spec())
        assert last(warnings, *(step(number, entropy=entropy) for number in range(2 * STEPS))) == {}


def test_short_answers_and_groups_of_one_say_nothing():
    tiny = Warnings(spec(sampling={"max_new_tokens": 4}))
    assert last(tiny, *(step(number, answer_length_mean=4.0) for number in range(STEPS))) == {}
    alone = spec(algorithm={"name": "reinforce", "group_size": 1, "prompts_per_step": 32})
    assert last(Warnings(alone), *(step(n, groups_all_equal=32.0) for n in range(STEPS))) == {}


def test_one_reward_of_all_prompts_is_found_without_groups():
    alone = spec(algorithm={"name": "reinforce", "group_size": 1, "prompts_per_step": 32})
    for spread, expected in ((0.0, ["rewards"]), (0.1, [])):
        steps = (step(n, groups_all_equal=32.0, reward_std=spread) for n in range(STEPS))
        assert list(last(Warnings(alone), *steps)) == expected
    rising = (step(n, n / 10, groups_all_equal=32.0, reward_std=0.0) for n in range(STEPS))
    assert last(Warnings(alone), *rising) == {}


def test_a_group_that_differs_in_one_step_is_enough():
    steps = [step(number, groups_all_equal=4.0 if number else 3.0) for number in range(STEPS)]
    assert last(Warnings(spec()), *steps) == {}
    different = [step(number, number / 10, groups_all_equal=4.0) for number in range(STEPS)]
    assert "no group has two different rewards" in last(Warnings(spec()), *different)["rewards"]


def test_a_bound_of_the_users_own_warns_from_its_first_step_on_and_until_it_holds_no_more():
    alerts = [
        {"figure": "trainer/grad_norm", "above": 10},
        {"figure": "train/reward", "below": 0.2, "steps": 2},
    ]
    warnings = Warnings(spec(tracking={"alerts": alerts}))
    assert warnings.of(step(1)) == {}
    assert warnings.of(step(2, grad_norm=12.5)) == {
        "alert 0": "trainer/grad_norm is 12.5, above 10 (tracking.alerts[0])"
    }
    assert warnings.of(step(3, reward=0.1)) == {}, "once is not twice in a row"
    (text,) = warnings.of(step(4, reward=0.15)).values()
    assert text == "train/reward is 0.15, below 0.2 for 2 steps (tracking.alerts[1])"
    assert warnings.of(step(5)) == {}


@pytest.mark.parametrize(
    ("alert", "said"),
    [({"figure": "train/reward"}, "set above or below"), ({"figure": "reward", "above": 1}, "figure")],
)
def test_an_alert_needs_a_known_figure_and_a_bound(alert, said):
    with pytest.raises(ValueError, match=said):
        spec(tracking={"alerts": [alert]})
