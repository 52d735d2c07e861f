"""Evaluations of robot policies: what is recorded, the table of tasks and variants, and the files of videos."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from headrace_coordinator.api.submission.evaluations import replayed
from headrace_coordinator.data.dataset import Dataset
from headrace_coordinator.data.items import DataItem
from headrace_coordinator.domain.episode_figures import settle_successes, told_of
from headrace_coordinator.projections.trajectories import SettledTrajectory
from headrace_coordinator.projections.transcripts import Answer, answer_of
from headrace_coordinator.projections.videos import (
    FOLDER,
    Recording,
    Video,
    episode_name,
    keep_within,
    list_videos,
    write_recordings,
)
from headrace_coordinator.run.evaluation.suite_figures import result_of
from headrace_coordinator.suites import open_suite
from headrace_schema.evaluating import EvaluationSpec
from headrace_schema.problems import Impossible, explain
from headrace_schema.sections.embodied import EnvironmentSection
from headrace_schema.spec import RunSpec
from pydantic import ValidationError

ENVIRONMENT = {
    "tasks": ["push", "push@dark", "reach"],
    "variants": {"dark": {"vision": {"lighting": 0.1}}},
    "options": {"size": 64, "variant": {"execution": {"gravity": [0.9, 1.1]}}},
    "instructions": {"push": "push it"},
}


def evaluated(**options):
    """(suite, its items)."""
    suite = open_suite("episodes", {"environment": ENVIRONMENT, "starts": 4, **options})
    return suite, Dataset.open(suite.data(), seed=0).asked()


def answers(items, right):
    """An answer to each item, worth 1 where `right` says so of (task, variant)."""
    return {(index, 0): Answer(float(right(item)), {}, "", 1, cut=False) for index, item in enumerate(items)}


def test_a_variant_is_the_task_with_other_options():
    section = EnvironmentSection.model_validate(ENVIRONMENT)
    assert section.variant_of("push@dark") == ("push", "dark")
    assert section.variant_of("robots@home.py:make_env") == ("robots@home.py:make_env", "")
    assert section.options_of("push@dark") == {"size": 64, "variant": {"vision": {"lighting": 0.1}}}
    assert section.options_of("push") == ENVIRONMENT["options"]
    assert (section.instruction_of("push@dark"), section.instruction_of("reach")) == ("push it", "")


def test_each_task_and_variant_has_a_figure_with_its_interval():
    suite, items = evaluated()
    asked = EvaluationSpec.model_validate({"model": {"path": "m"}, "suite": {"name": "episodes"}})
    found = result_of(asked, suite, answers(items, lambda item: item.metadata["task"] != "push@dark"), items)
    assert [(each.task, each.variant, each.items, each.score) for each in found.tasks] == [
        ("push", "", 4, 1.0),
        ("push", "dark", 4, 0.0),
        ("reach", "", 4, 1.0),
    ]
    assert [each.low is not None and each.low < 1 for each in found.tasks] == [True] * 3
    assert found.modes[0].score == pytest.approx(2 / 3)


def replay_of(start, evaluation=None, **options):
    data = {"options": {"starts": 40, "first_seed": 100, **options}}
    spec = {
        "workflow": "embodied",
        "model": {"policy": {"kind": "mlp"}},
        "environment": ENVIRONMENT,
        "data": data,
    }
    spec["algorithm"] = {"name": "ppo", "group_size": 1}
    spec["evaluation"] = {"greedy": False}
    resolved = RunSpec.model_validate(spec).model_dump(mode="json")
    suite = None if evaluation is None else SimpleNamespace(spec=evaluation)
    return replayed(SimpleNamespace(id="push-1", spec=resolved, suite=suite), start)


@pytest.mark.parametrize("of_states", [False, True])
def test_a_start_state_is_replayed_from_its_words_or_its_video(of_states):
    options = {"init_states": 30} if of_states else {}
    place = "initial state 7" if of_states else "seed 107"
    start = DataItem(f"push@dark, {place}", "", {"task": "push@dark"})
    for named in (start.question, Video.of(3, 0, start, success=False, step=2).name):
        asked = replay_of(named, **options)
        suite = open_suite("episodes", asked.suite.options)
        (item,) = Dataset.open(suite.data(), seed=0).asked()
        assert item.question == start.question and item.metadata["seed"] == 107
        assert item.metadata.get("init_state") == (7 if of_states else None)
        assert suite.recorded([item]) == {0} and suite.environment.tasks == ["push@dark"]
        assert asked.checkpoint.run == "push-1" and asked.checkpoint.step is None
        assert asked.sampling.temperature == 1.0


def test_seeds_begin_where_the_runs_do_unless_it_says_otherwise():
    asked = replay_of("reach, seed 7", first_seed=0)
    assert open_suite("episodes", asked.suite.options).first_seed == 0
    spec = {"workflow": "embodied", "model": {"policy": {"kind": "mlp"}}, "environment": ENVIRONMENT}
    spec["algorithm"] = {"name": "ppo", "group_size": 1}
    resolved = RunSpec.model_validate(spec).model_dump(mode="json")
    found = replayed(SimpleNamespace(id="push-1", spec=resolved, suite=None), "reach, seed 7")
    (item,) = Dataset.open(open_suite("episodes", found.suite.options).data(), seed=0).asked()
    assert item.question == "reach, seed 7"


def test_of_an_evaluation_the_newest_version_of_its_policy_plays_as_it_did():
    checkpoint = {"run": "push-0", "step": 20, "policy": ""}
    asked = {"model": None, "checkpoint": checkpoint, "seed": 3, "sampling": {"temperature": 0.0}}
    found = replay_of("reach, seed 139", asked)
    assert (found.checkpoint.run, found.checkpoint.step, found.seed) == ("push-0", None, 3)


@pytest.mark.parametrize(
    "start", ["", "push", "push, seed 99", "push, seed 140", "pull, seed 101", "push, seed -3"]
)
def test_what_is_no_start_state_is_named(start):
    with pytest.raises(Impossible) as refused:
        replay_of(start)
    assert refused.value.problems[0].key == "start" and "place of a prompt" in refused.value.problems[0].fix


def told(total: float, success: bool | None, at_end: bool | None = None) -> str:
    return json.dumps({"return": total, "success": success, "steps": 3, "success_at_end": at_end})


def judged(*texts: str):
    """The result of episodes of which the scorer `episode` has said the outcome."""
    suite, items = evaluated()
    asked = EvaluationSpec.model_validate({"model": {"path": "m"}, "suite": {"name": "episodes"}})
    found = {}
    for index in range(len(items)):
        episode = told_of(texts[index % len(texts)])
        worth = episode.total_reward if episode.success is None else float(episode.success)
        found[index, 0] = Answer(worth, {}, "", 3, cut=False, episode=episode)
    return result_of(asked, suite, found, items)


def test_episodes_of_an_environment_that_never_says_success_are_judged_by_their_return():
    result = judged(told(480.0, None), told(500.0, None))
    assert (result.measure, result.modes[0].score) == ("return", 490.0)
    assert "never says success" in result.note
    assert result.episodes == {"return": 490.0, "steps": 3.0}


def test_success_once_and_at_the_end_are_kept_apart():
    result = judged(told(1.0, True, False), told(2.0, True, True))
    assert (result.measure, result.modes[0].score, result.note) == ("success", 1.0, "")
    assert (result.episodes["success"], result.episodes["success_at_end"]) == (1.0, 0.5)


def test_an_episode_that_does_not_say_its_success_has_failed_where_others_say_it():
    result = judged(told(900.0, None), told(800.0, True))
    assert (result.measure, result.modes[0].score, result.note) == ("success", 0.5, "")
    texts = [told(900.0, None), told(800.0, True)]
    assert [told_of(text).success for text in settle_successes(texts)] == [False, True]
    assert settle_successes(texts[:1]) == texts[:1]


LOST = '{"return": 0.0, "success": false, "steps": 0, "error": "lost"}'


@pytest.mark.parametrize("text", ["", "42", '{"return": 1', LOST])
def test_other_texts_and_lost_episodes_tell_nothing(text):
    assert told_of(text) is None


def test_a_variant_begins_where_its_task_does():
    _, items = evaluated()
    seeds = {
        task: {item.metadata["seed"] for item in items if item.metadata["task"] == task}
        for task in ENVIRONMENT["tasks"]
    }
    assert seeds["push"] == seeds["push@dark"] and len(seeds["push"]) == 4


def test_the_first_episodes_of_each_task_are_recorded():
    suite, items = evaluated(videos=2)
    recorded = [items[index].metadata["task"] for index in sorted(suite.recorded(items))]
    assert sorted(recorded) == sorted(ENVIRONMENT["tasks"] * 2)
    assert evaluated()[0].recorded(items) == frozenset()


@pytest.mark.parametrize(
    ("more", "key"),
    [
        ({"tasks": ["push", "reach"]}, "environment.variants.dark"),
        ({"instructions": {"pull": "pull it"}}, "environment.instructions"),
    ],
)
def test_what_no_task_has_is_named(more, key):
    spec = {
        "workflow": "embodied",
        "steps": 1,
        "model": {"policy": {"kind": "mlp"}},
        "environment": {**ENVIRONMENT, **more},
        "algorithm": {"name": "ppo", "group_size": 1},
    }
    with pytest.raises(ValidationError) as caught:
        RunSpec.model_validate(spec)
    assert [each.key for each in explain(caught.value, RunSpec)] == [key]


def test_videos_are_listed_by_item_with_what_they_show(tmp_path):
    assert list_videos(tmp_path) == []
    _, items = evaluated()
    made = [
        Recording(Video.of(index, 0, items[index], success=index == 1), b"x" * index, b"episode %d" % index)
        for index in (7, 1)
    ]
    write_recordings(tmp_path, made)
    write_recordings(tmp_path, made)
    (tmp_path / FOLDER / ".0003-0-push-success.mp4.partial").write_bytes(b"half")
    (tmp_path / FOLDER / "notes.txt").write_text("a user's own")
    found = list_videos(tmp_path)
    assert [(each.item, each.success, each.size_bytes) for each in found] == [(1, True, 1), (7, False, 7)]
    assert all((tmp_path / FOLDER / each.name).is_file() for each in found)
    episodes = [(tmp_path / FOLDER / episode_name(each.name)).read_bytes() for each in found]
    assert episodes == [b"episode 1", b"episode 7"]


def test_videos_of_training_are_listed_by_step_and_the_oldest_make_room(tmp_path):
    _, items = evaluated()
    made = [
        Recording(Video.of(1000 * step, 1, items[1], success=False, step=step), b"x" * 600, b"e" * 400)
        for step in (11, 1, 21)
    ]
    write_recordings(tmp_path, made)
    assert [(each.step, each.item, each.sample) for each in list_videos(tmp_path)] == [
        (1, 1000, 1),
        (11, 11000, 1),
        (21, 21000, 1),
    ]
    keep_within(tmp_path, 2500)
    assert [each.step for each in list_videos(tmp_path)] == [11, 21]
    assert len([*(tmp_path / FOLDER).iterdir()]) == 4, "an episode goes with its video"
    keep_within(tmp_path, 1)
    assert [each.step for each in list_videos(tmp_path)] == [21], "the newest stays"


@pytest.mark.parametrize(
    ("reason", "cut"), [("STOP", False), ("LENGTH", True), ("TERMINATED", False), ("TRUNCATED", True)]
)
def test_an_episode_that_its_limit_of_steps_ended_counts_as_cut(reason, cut):
    line = SettledTrajectory(1, 1, 0, 0, 1, "", "", "", 1.0, {}, reason, 50)
    assert answer_of(line, str).cut is cut
