"""What scorers get beside text: tokens of an answer, and the other answers to its prompt."""

from __future__ import annotations

import pytest
from headrace.common.v1 import common_pb2 as common
from headrace_coordinator.data.items import DataItem
from headrace_coordinator.run.step.scoring.scoring import score_item
from headrace_schema.problems import explain
from headrace_schema.spec import RunSpec
from headrace_simulation.fleet.rollout import Rollout
from pydantic import ValidationError
from scene import Scene, ends, scored_items

GROUPS = {
    "stages": {
        "generate": {"service": "rollout"},
        "score": {"service": "reward"},
        "learn": {"service": "trainer"},
    },
    "edges": [
        {"source": "generate", "target": "score", "granularity": "group"},
        {"source": "score", "target": "learn"},
    ],
}


async def nothing(_):
    return None


def test_a_score_has_ids_and_texts_where_the_rollout_sent_them():
    told = common.Trajectory(completion_text="2", raw_prompt_text="<s>1+1", raw_completion_text="2</s>")
    branch = told.branches.add()
    branch.segments.add().tokens.token_ids.extend([1, 5])
    branch.segments.add(policy_number=3).tokens.token_ids.extend([7])
    branch.segments.add(policy_number=4).tokens.token_ids.extend([2])
    asked = score_item(DataItem("1+1", "2"), told, 2, evaluation=False)
    assert (list(asked.prompt_ids), list(asked.completion_ids)) == ([1, 5], [7, 2])
    assert (asked.raw_prompt, asked.raw_completion) == ("<s>1+1", "2</s>")
    assert not told.raw_prompt_text and not told.raw_completion_text, "the trainer does not read them"


@pytest.mark.parametrize("workflow", ["reasoning", GROUPS])
def test_each_answer_comes_with_its_whole_group(monkeypatch, workflow):
    make, seen = Rollout._make, scored_items(monkeypatch)

    async def named(self, opening, group, sample, done):
        class Named:
            def put_nowait(_, made):
                made.completion_text = f"{group.prompt_ordinal}/{sample.sample_index}"
                done.put_nowait(made)

        return await make(self, opening, group, sample, Named())

    monkeypatch.setattr(Rollout, "_make", named)
    scene = Scene(nothing, steps=2, evaluation={"every": 1})
    fields = scene.specs[0].model_dump(mode="json") | {"workflow": workflow}
    fields["reward"]["give"] = ["group"]
    scene.specs = [RunSpec.model_validate(fields)]
    ends(scene)
    size = scene.specs[0].algorithm.group_size
    trained = [item for item in seen if not item.evaluation]
    assert len(trained) >= 2 * 2 * size
    for item in seen:
        own = item.sample.prompt_ordinal
        samples = range(1 if item.evaluation else size)
        assert list(item.group) == [f"{own}/{sample}" for sample in samples]


def test_groups_are_refused_where_no_stage_waits_for_them():
    fields = Scene(nothing, steps=2).specs[0].model_dump(mode="json")
    edges = [{**edge, "granularity": "trajectory"} for edge in GROUPS["edges"][:1]] + GROUPS["edges"][1:]
    fields["workflow"] = GROUPS | {"edges": edges}
    with pytest.raises(ValidationError) as caught:
        RunSpec.model_validate(fields | {"reward": {**fields["reward"], "give": ["group"]}})
    (found,) = explain(caught.value, RunSpec)
    assert (found.key, found.problem) == ("reward.give", "no reward stage waits for whole groups")
