"""What `elastic.py` computes itself: profiles of measured steps, and bounds of what a policy can gain."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from itertools import pairwise, product
from types import SimpleNamespace

import pytest
from _elastic_bound import generating, ideal, learning, least
from _elastic_here import answers
from _elastic_model import Measured, Model, decoding
from _rewards import MIXED, by_length
from _tail_model import LONGEST, QUANTILES, shares, write_tail_prompts
from headrace_planner import (
    DeviceKind,
    Edge,
    Granularity,
    Leaf,
    Lengths,
    Profile,
    Share,
    Sync,
    Workflow,
    Workload,
)
from headrace_planner.cluster import simulate_elastic
from headrace_planner.cluster.sampling import draw
from headrace_planner.elastic.outlook import MoveCosts

ROUND_S, ANSWER_S, LEARN_S, SWITCH_S = 0.03, 0.0008, 0.0016, 0.3


def step(seed, groups=24, apart=False):
    """A step of two cores that keeps to the law."""
    rng = random.Random(seed)
    tokens = tuple(min(260, 1 + int(rng.expovariate(1 / 50))) for _ in range(4 * groups))
    if apart:
        generate = max(tokens) * ROUND_S + sum(tokens) * ANSWER_S
        return Measured(20.0, {"generate": generate, "learn": sum(tokens) * LEARN_S}, tokens)
    generate = max(tokens) * ROUND_S + sum(tokens) / 2 * ANSWER_S
    stages = {"generate": generate, "learn": sum(tokens) * LEARN_S / 2, "switch": SWITCH_S}
    return Measured(sum(stages.values()) + 0.2, stages, tokens)


def test_the_pace_of_decoding_is_found_in_steps_of_two_sizes_and_on_one_core_or_two():
    steps = [*(step(seed) for seed in range(4)), *(step(seed, groups=6) for seed in range(4, 7))]
    assert decoding([(each, 2) for each in steps]) == pytest.approx((ROUND_S, ANSWER_S))
    assert decoding([(step(1), 2), (step(1, apart=True), 1)]) == pytest.approx((ROUND_S, ANSWER_S))
    alike = [(Measured(1.0, {"generate": 2.0}, (10, 10)), 2)] * 2
    assert decoding(alike) in [(pytest.approx(0.2), 0.0), (0.0, pytest.approx(0.2))]


def test_simulated_steps_in_turns_take_what_they_took_and_moves_shorten_them():
    turns = [step(seed) for seed in range(3)]
    model = Model(turns, [step(9, groups=6)], [step(1, apart=True)], 4)
    measured = sum(each.wall_s for each in turns) / 3
    assert model.step_s("collocated", turns) == pytest.approx(measured, rel=0.05)
    assert model.step_s("elastic", turns) < model.step_s("collocated", turns)


def test_groups_with_nothing_to_learn_leave_the_mean_pace():
    turns = [step(seed) for seed in range(3)]
    half = [replace(each, learned=(True,) * 48 + (False,) * 48) for each in turns]
    assert half[0].weights == [*half[0].tokens[:48], *[0] * 48]
    model = Model(half, [step(9, groups=6)], [step(1, apart=True)], 4)
    measured = sum(each.wall_s for each in half) / 3
    assert model.step_s("collocated", half) == pytest.approx(measured, rel=0.05)
    assert half[0].groups(4)[1] == half[0].tokens[4:8]


def test_answers_of_a_group_with_equal_rewards_are_not_learned_from():
    groups = [
        [SimpleNamespace(tokens=tokens, reward=reward) for tokens, reward in rows]
        for rows in ([(3, 0.0), (4, 0.0)], [(5, 0.1), (6, 0.0)])
    ]
    assert answers(groups) == ((3, 4, 5, 6), (False, False, True, True))


@pytest.mark.parametrize("bands", [1, 7, 48])
def test_bands_of_lengths_add_up_to_the_published_quantiles_and_follow_each_other(bands):
    found = [shares(band, bands) for band in range(bands)]
    assert all(sum(each) == pytest.approx(1) and min(each) >= 0 for each in found)
    whole = [sum(each) / bands for each in zip(*found, strict=True)]
    for share, length in QUANTILES.items():
        assert sum(whole[:length]) == pytest.approx(share)
    means = [sum(share * tokens for tokens, share in enumerate(each, 1)) for each in found]
    assert means == sorted(means)


def test_one_prompt_in_three_is_learned_from_whatever_their_lengths(tmp_path):
    write_tail_prompts(tmp_path / "prompts", 48, 48, 3)
    rows = [json.loads(line) for line in (tmp_path / "prompts").read_text(encoding="utf-8").splitlines()]
    learned = [at for at, row in enumerate(rows) if row["answer"] == MIXED]
    assert len({row["question"][-1] for row in rows}) == 48
    assert learned == list(range(1, 48, 3))
    row = rows[learned[0]]
    assert by_length(row["question"], "ab", row["answer"], {}) != by_length(
        row["question"], "abc", row["answer"], {}
    )
    assert by_length("", "ab", "alike", {}) == by_length("", "abc" * LONGEST, "alike", {})


def bounded(devices, items, learn_s=2.9):
    """A workload and its drawn lengths."""
    lengths = Lengths.from_quantiles({0.5: 60, 0.9: 111, 0.95: 127, 1: 260})
    profiles = {
        "generate": Profile("generate", fixed_s=31, item_s=3.6, lengths=lengths),
        "learn": Profile("learn", item_s=learn_s),
    }
    workflow = Workflow(
        "grpo", ("generate", "learn"), (Edge("generate", "learn", Granularity.GROUP),),
        (("learn", "generate"),), group_size=min(16, items),
    )  # fmt: skip
    work = Workload(workflow, profiles, {"gpu": DeviceKind(devices)}, items, Sync(0, 0))
    return work, draw(work, 1, 0)


def test_no_elastic_step_is_faster_than_the_bound_and_none_of_the_bounds_than_decoding():
    work, drawn = bounded(16, 512)
    whole = generating(work, drawn)
    assert whole == pytest.approx(max(drawn.lengths["generate"]) * 31 + 3.6 * 2 * sum(drawn.weights) / 32)
    bounds = ideal(work, drawn, 2.9), least(work, drawn, 2.9)
    assert whole <= bounds[0] <= bounds[1]
    tree = Share((Leaf("generate", "gpu", 16), Leaf("learn", "gpu", 16)))
    for team in (1, 4):
        costs = replace(MoveCosts(), notice_s=0.0, helper_item_s=2.9, min_hold_s=1.0)
        assert simulate_elastic(work, tree, costs, 1, 1, team).step_s >= bounds[1]


@pytest.mark.parametrize("learn_s", [0.5, 8.0, 30.0])
def test_the_bound_is_just_below_the_best_of_all_schedules_of_whole_devices(learn_s):
    devices, (work, drawn) = 3, bounded(3, 7, learn_s)
    lengths = sorted(drawn.lengths["generate"])
    steps = [(b - a, len(lengths) - at) for at, (a, b) in enumerate(pairwise([0.0, *lengths]))]

    def seconds(schedule):
        spent = [delta * (31 + 3.6 * alive / k) for (delta, alive), k in zip(steps, schedule, strict=True)]
        idle = sum(each * (1 - k / devices) for each, k in zip(spent, schedule, strict=True))
        return sum(spent) + max(0.0, learning(work, drawn, 0.0) - idle)

    best = min(map(seconds, product(range(1, devices + 1), repeat=len(steps))))
    assert 0.95 * best < least(work, drawn, 0.0) <= best * (1 + 1e-9)
