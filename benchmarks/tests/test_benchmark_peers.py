"""The arithmetic of the comparisons with TRL and of prefix sharing, on made-up times."""

from pathlib import Path

import lora
import prefix
import pytest
from end_to_end_vs_trl import TARGET_STEPS, WORKLOADS, Turn, Workload, bound, make_spec, read_turn, summarise
from headrace_schema.spec import RunSpec


def turn(seconds, rewards=None):
    ends = [sum(seconds[: index + 1]) for index in range(len(seconds))]
    return Turn(ends, rewards or [0.0] * len(ends), 32)


def test_a_step_lasts_from_one_end_to_the_next_and_the_first_is_left_out():
    assert turn([9.0, 2.0, 3.0]).step_seconds() == [2.0, 3.0]


def test_a_reward_is_reached_when_the_mean_of_enough_steps_is():
    rewards = [0.0] * 5 + [1.0] * 20
    found = turn([1.0] * 25, rewards).seconds_to(0.9)
    assert found == 5 + 0.9 * TARGET_STEPS
    assert turn([1.0] * 25, [0.5] * 25).seconds_to(0.9) is None
    assert turn([1.0] * (TARGET_STEPS - 1), [1.0] * (TARGET_STEPS - 1)).seconds_to(0.9) is None


def test_the_ratio_is_of_the_medians_over_all_turns():
    pairs = [(turn([5.0, 1.0, 2.0]), turn([50.0, 4.0, 4.0])), (turn([5.0, 2.0, 9.0]), turn([7.0, 6.0, 6.0]))]
    figures = summarise(Workload("some", 3, 2, {}), pairs)
    assert figures == {
        "some_samples_vs_trl": pytest.approx(2.5),
        "some_samples_per_s": pytest.approx(32 / 2.0),
        "some_trl_samples_per_s": pytest.approx(32 / 5.0),
    }


def test_a_target_that_one_turn_misses_has_no_time():
    good, bad = turn([1.0] * 20, [1.0] * 20), turn([1.0] * 20)
    figures = summarise(Workload("some", 20, 2, {}, target=0.9), [(good, good), (bad, good)])
    assert figures["some_seconds_to_reward"] is None
    assert figures["some_trl_seconds_to_reward"] == TARGET_STEPS


def test_the_peers_lines_are_told_from_what_trl_prints():
    lines = [
        '{"started": 10.0}',
        "{'train_runtime': '2.1'}",
        '{"at": 12.5, "samples": 8, "reward": 0.25}',
        '{"at": 13.0, "samples": 8, "reward": 0.5}',
    ]
    assert read_turn(lines) == Turn([2.5, 3.0], [0.25, 0.5], 8)


def test_both_sides_do_without_evaluation_and_checkpoints():
    spec = make_spec(Workload("tiny", 7, 1, {}, mode="disaggregated"), 7, None, Path("/models/tiny"))
    assert spec["steps"] == 7 and spec["placement"] == {"mode": "disaggregated"}
    assert "evaluation" not in spec and spec["data"]["heldout"] == 0 and not spec["export"]
    assert spec["checkpoint"] == {"enabled": False}


def test_the_long_workload_is_the_preset_with_short_prompts_and_long_answers():
    (long,) = (workload for workload in WORKLOADS if workload.title == "long")
    spec = RunSpec.model_validate(make_spec(long, 2, None, Path("/models/smollm2")))
    assert spec.model.path == "/models/smollm2" and spec.sampling.max_new_tokens == 128
    assert not spec.data.prompt.chat and len(spec.data.prompt.template) < 80
    assert (
        spec.slots_per_step == 32
        and spec.optimizer.lr == pytest.approx(2e-5)
        and long.peer["micro_batch"] == 8
    )
    turns = [(turn([1.0, 2.0]), turn([1.0, 4.0]))]
    assert summarise(long, turns)["long_samples_vs_trl"] == pytest.approx(2.0)


def test_a_step_is_bound_by_its_longest_stage():
    said = bound({"generate": 2.0, "learn": 7.0, "score": 0.1}, 10.0, 1234.4)
    assert said == "a step of 10.00 s with 1234 sampled tokens; learn is at work for 70% of it"


def test_prefix_speedup_is_of_the_medians():
    assert prefix.speedup({True: [1.0, 9.0, 2.0], False: [6.0, 5.0, 8.0]}) == 3.0


def test_lora_ratios_are_adapters_over_all_weights():
    version = {"adapter_bytes": 1, "merged_bytes": 4, "adapter_stage_s": 0.1, "merged_stage_s": 0.2}
    found = {
        "whole": {"step_s": 4.0, "peak_gb": 2.0},
        "lora": {"step_s": 3.0, "peak_gb": 0.5},
        "version": version,
    }
    assert lora.ratios(found) == {
        "step_ratio": 0.75,
        "memory_ratio": 0.25,
        "version_bytes_ratio": 0.25,
        "version_stage_ratio": 0.5,
    }
