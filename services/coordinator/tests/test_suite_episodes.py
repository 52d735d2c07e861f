"""Evaluations of robot policies: what is recorded, the table of tasks and variants, and the files of videos."""

from __future__ import annotations

import pytest
from headrace_coordinator.data.dataset import Dataset
from headrace_coordinator.projections.trajectories import SettledTrajectory
from headrace_coordinator.projections.transcripts import Answer, answer_of
from headrace_coordinator.projections.videos import (
    FOLDER,
    Recording,
    Video,
    episode_name,
    list_videos,
    write_recordings,
)
from headrace_coordinator.run.evaluation.suite_figures import result_of
from headrace_coordinator.suites import open_suite
from headrace_schema.evaluating import EvaluationSpec
from headrace_schema.problems import explain
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


@pytest.mark.parametrize(
    ("reason", "cut"), [("STOP", False), ("LENGTH", True), ("TERMINATED", False), ("TRUNCATED", True)]
)
def test_an_episode_that_its_limit_of_steps_ended_counts_as_cut(reason, cut):
    line = SettledTrajectory(1, 1, 0, 0, 1, "", "", "", 1.0, {}, reason, 50)
    assert answer_of(line, str).cut is cut
