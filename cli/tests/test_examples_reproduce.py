"""The recipes of published tables are whole specs, valid without a fleet in every part that names a plug-in."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from headrace.client.specs import load_spec
from headrace_cli.connection import Target
from headrace_cli.dry_run import BY_RULES, check
from headrace_cli.planning import explain_file, waits_for_batch
from headrace_coordinator.data.sources import open_source
from headrace_reward.scorers import choose
from headrace_robots.trainer.algorithms import build_episode_algorithm
from headrace_schema.rules.asked import COMPARING_TWO, IMITATING, JUDGING
from headrace_schema.spec import RunSpec
from headrace_schema.yaml_text import read_yaml
from headrace_trainer.algorithms import ALGORITHMS, build_algorithm
from headrace_trainer.algorithms._base import Barrier

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
EVERY = sorted((EXAMPLES / "reproduce").glob("*.yaml"))
ROBOTS = [file for file in EVERY if "workflow: embodied" in file.read_text(encoding="utf-8")]
RECIPES = [file for file in EVERY if file not in ROBOTS]
PROFILE = EXAMPLES / "plans" / "profile_reasoning_7b_h100.yaml"
MOE_PROFILE = EXAMPLES / "plans" / "profile_moe_30b_h100.yaml"
ROBOT_PROFILE = EXAMPLES / "plans" / "profile_embodied_7b_h100.yaml"
ROW = {
    "prompt": "<｜User｜>\nWhat is half of 1? <｜Assistant｜><think>\n",
    "task": "math",
    "solutions": ["\\boxed{0.5}"],
}


def test_there_are_recipes():
    assert {"qwen-1.5b-grpo", "qwen-7b-grpo", "qwen3-30b-a3b-grpo", "qwen-7b-ppo"} <= {
        file.stem for file in RECIPES
    }
    assert {"maniskill-openvla-ppo", "libero-130-openvla-oft-grpo", "libero-spatial-pi0-ppo"} <= {
        file.stem for file in ROBOTS
    }


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_a_recipe_is_valid_and_names_its_source(file, tmp_path):
    text = file.read_text(encoding="utf-8")
    document = read_yaml(text)
    assert check(document, Target("", None, known=False))["checked"] == BY_RULES
    spec = RunSpec.model_validate(document)
    build_algorithm(spec.algorithm)
    for scorer in spec.reward.scorers:
        choose(scorer.name, scorer.options)
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps(ROW) + "\n", encoding="utf-8")
    (item,) = open_source(spec.data.source, {**spec.data.options, "path": str(rows)}).items()
    assert (item.question, item.answer) == (ROW["prompt"], "\\boxed{0.5}")
    assert spec.sampling.max_new_tokens < (spec.model.max_context or 0) == spec.trainer.micro_batch_tokens
    _says_that_it_was_not_run(file)


@pytest.mark.parametrize("file", ROBOTS, ids=lambda file: file.stem)
def test_a_recipe_for_robots_is_valid_and_names_its_source(file):
    document = read_yaml(file.read_text(encoding="utf-8"))
    assert check(document, Target("", None, known=False))["checked"] == BY_RULES
    spec = RunSpec.model_validate(document)
    build_episode_algorithm(spec.algorithm)
    for scorer in spec.reward.scorers:
        choose(scorer.name, scorer.options)
    items = list(open_source(spec.data.source, {**spec.data.options, "starts": 2}).items())
    assert spec.environment and len(items) == 2 * len(spec.environment.tasks)
    _says_that_it_was_not_run(file)


def _says_that_it_was_not_run(file):
    text = file.read_text(encoding="utf-8")
    head = text[: text.index("\nname:")]
    assert (
        "NOT RUN HERE" in head and "github.com/RLinf/RLinf at " in head and f"reproduce/{file.name}" in head
    )


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_every_recipe_plans_at_its_own_size(file):
    """By the profile of the 7B model, the only one that there is: the form is what counts here."""
    spec = RunSpec.model_validate(read_yaml(file.read_text(encoding="utf-8")))
    devices = max(spec.trainer.ranks, spec.rollout.instances)
    plan = explain_file(file, [], devices, None, PROFILE)
    assert plan["items"] == spec.slots_per_step and plan["devices"] == {"gpu": devices}
    assert f"--devices {devices} " in file.read_text(encoding="utf-8")


@pytest.mark.parametrize("file", [*ROBOTS, EXAMPLES / "embodied" / "reach.yaml"], ids=lambda file: file.stem)
@pytest.mark.parametrize("devices", [8, 64, 1024])
def test_a_recipe_for_robots_plans_policy_and_simulator_turn_by_turn(file, devices):
    spec = RunSpec.model_validate(read_yaml(file.read_text(encoding="utf-8")))
    plan = explain_file(file, [], devices, None, ROBOT_PROFILE)
    assert plan["items"] == spec.slots_per_step and plan["workflow"] == "embodied"
    assert any("cycle generate ⇄ simulate" in line for line in plan["tree_text"])
    assert {bar["stage"] for bar in plan["timeline"]} == {"generate", "simulate", "learn"}
    assert "chunks" not in " ".join(plan["tree_text"]), "several passes wait for the batch"


def test_fewer_environments_than_episodes_take_another_round():
    """512 episodes in 60 environments: each round pays for its turns."""
    file = EXAMPLES / "reproduce" / "libero-spatial-pi0-ppo.yaml"
    few, all_at_once = (
        explain_file(file, [f"environment.count={count}"], 64, None, ROBOT_PROFILE)["step_s"]
        for count in (60, 512)
    )
    assert few > 2 * all_at_once


def test_the_mixture_of_experts_plans_as_its_published_runs_took():
    """1,008 s collocated and 791 s side by side were published for 32 GPUs."""
    plan = explain_file(EXAMPLES / "reproduce" / "qwen3-30b-a3b-grpo.yaml", [], 32, None, MOE_PROFILE)
    times = {other["mode"]: other["step_s"] for other in plan["alternatives"]}
    assert times["collocated, resident"] == pytest.approx(1008, rel=0.03)
    assert plan["step_s"] <= times["collocated, resident"]


@pytest.mark.parametrize(
    "name", sorted({*ALGORITHMS.names()} - {*IMITATING, *COMPARING_TWO, *JUDGING, "session"})
)
def test_a_plan_waits_for_the_batch_where_the_algorithm_does(name):
    teacher = {"trainer.reference": {"path": "teacher"}} if name == "distill" else {}
    changes = {"algorithm.name": name, **teacher}
    spec = RunSpec.model_validate(load_spec(EXAMPLES / "algorithms" / "base.yaml", changes))
    assert waits_for_batch(spec) is (build_algorithm(spec.algorithm).barrier is Barrier.BATCH)


def test_an_infer_pass_that_is_profiled_apart_is_a_stage():
    plan = explain_file(EXAMPLES / "reproduce" / "qwen-7b-grpo.yaml", [], 128, None, PROFILE)
    assert "infer" in {bar["stage"] for bar in plan["timeline"]}
    plain = explain_file(EXAMPLES / "smollm2.yaml", [], 8, None, PROFILE)
    assert "infer" not in {bar["stage"] for bar in plain["timeline"]}


def test_the_recipe_at_7b_plans_at_its_own_size():
    plan = explain_file(EXAMPLES / "reproduce" / "qwen-7b-grpo.yaml", [], 128, None, PROFILE)
    assert plan["items"] == 512 * 32 and plan["devices"] == {"gpu": 128} and plan["step_s"] > 0
