"""Workflows of a user's own: what they mean, and what is said of those that cannot run."""

from __future__ import annotations

import copy

import pytest
from headrace_schema.problems import explain_value
from headrace_schema.spec import RunSpec

BASE = {
    "model": {"path": "some/model"},
    "data": {"source": "copy_digits"},
    "reward": {"scorers": [{"name": "exact"}], "stages": {"judge": [{"name": "length"}]}},
}
STAGES = {
    "generate": {"service": "rollout"},
    "score": {"service": "reward"},
    "judge": {"service": "reward"},
    "learn": {"service": "trainer"},
}
EDGES = [
    {"source": "generate", "target": "score"},
    {"source": "score", "target": "judge", "at_least": 1.0},
    {"source": "judge", "target": "learn"},
]


def spec(edges=EDGES, stages=STAGES, **more):
    return copy.deepcopy({**BASE, "workflow": {"stages": stages, "edges": edges}, **more})


def test_a_graph_and_the_name_of_the_built_in_one_mean_graphs():
    run = RunSpec.model_validate(spec())
    assert run.graph.reward_stages == ["score", "judge"] and run.main_stage == "score"
    assert [run.graph.granularity(edge) for edge in run.graph.edges] == ["trajectory", "trajectory", "group"]
    assert RunSpec.model_validate(run.model_dump(mode="json")) == run
    plain = RunSpec.model_validate({**BASE, "reward": {"scorers": [{"name": "exact"}]}})
    assert plain.workflow == "reasoning"
    assert [(e.source, e.target) for e in plain.graph.edges] == [("generate", "score"), ("score", "learn")]


def edge(source, target, **more):
    return {"source": source, "target": target, **more}


@pytest.mark.parametrize(
    ("edges", "key", "words"),
    [
        ([*EDGES[:2], edge("juge", "learn")], "workflow.edges[2].source", "no stage 'juge' produces it"),
        ([*EDGES[:1], edge("score", "lern"), EDGES[2]], "workflow.edges[1].target", "no stage 'lern' receives it"),
        (EDGES[1:], "workflow.stages.score", "no stage produces what it reads; add {source: judge, target: score}"),
        ([*EDGES[:1], edge("score", "learn")], "workflow.stages.judge", "no stage produces what it reads"),
        ([*EDGES[:2], edge("score", "learn")], "workflow.stages.judge", "no stage reads what it makes; add {"),
        ([*EDGES, edge("generate", "learn")], "workflow.edges[3]", "put a reward stage between"),
        ([*EDGES, edge("learn", "generate")], "workflow.edges[3]", "by themselves; remove the edge"),
        ([*EDGES, edge("judge", "generate")], "workflow.edges[3]", "reads the run's prompts"),
        ([*EDGES, EDGES[0]], "workflow.edges[3]", "declared twice"),
        ([*EDGES, edge("judge", "score")], "workflow.stages.judge", "lies on a cycle (score → judge, judge → score)"),
        (
            [*EDGES, edge("judge", "score"), edge("judge", "judge")],
            "workflow.stages.judge",
            "lies on cycles that overlap (score → judge, judge → score, judge → judge)",
        ),
        ([*EDGES[:2], edge("judge", "learn", granularity="trajectory")], "workflow.edges[2].granularity", "group or"),
        ([edge("generate", "score", granularity="batch"), *EDGES[1:]], "workflow.edges[0].granularity", "or group"),
        ([edge("generate", "score", at_least=1), *EDGES[1:]], "workflow.edges[0].at_least", "gives no reward"),
        ([*EDGES[:2], edge("judge", "learn", at_least=1)], "workflow.edges[2].at_least", "no answer leaves one"),
        ([*EDGES[:2], edge("judge", "learn", granularity="groups")], "workflow.edges[2].granularity", "mean group?"),
    ],
)  # fmt: skip
def test_a_wrong_edge_is_named_with_the_fix(edges, key, words):
    found = explain_value(RunSpec, spec(edges))
    assert key in [each.key for each in found], found
    assert any(words in f"{each.problem}; {each.fix}" for each in found if each.key == key), found


@pytest.mark.parametrize(
    ("stages", "key", "words"),
    [
        ({"score": {"servise": "reward"}}, "workflow.stages.score.servise", "did you mean service?"),
        ({"score": {"service": "judge"}}, "workflow.stages.score.service", "use one of: reward, rollout"),
        ({"a": {"service": "simulator"}}, "workflow.stages.a.service", "use rollout, reward or trainer"),
        ({"b": {"service": "rollout"}}, "workflow.stages.b", "are roles of workflow: agentic"),
        ({"score": {"service": "reward", "combine": "replace"}}, "workflow.stages.score.combine", "receives from none"),
        ({"sync": {"service": "reward"}}, "workflow.stages.sync", "another part of a step"),
        ({"other": {"service": "reward"}}, "reward.stages.other", "score and other have no scorers of their own"),
        ({"learn": {"service": "reward"}}, "workflow.stages", "add learn: {service: trainer}"),
    ],
)  # fmt: skip
def test_a_wrong_stage_is_named_with_the_fix(stages, key, words):
    found = explain_value(RunSpec, spec(stages={**STAGES, **stages}))
    assert any(each.key == key and words in f"{each.problem}; {each.fix}" for each in found), found


@pytest.mark.parametrize(
    ("reward", "key", "words"),
    [
        ({"stages": {"juge": [{"name": "exact"}]}}, "reward.stages.juge", "did you mean judge?"),
        ({"stages": {}}, "reward.stages.judge", "add reward.stages.judge with its scorers"),
        ({"stages": {name: [{"name": "exact"}] for name in ("score", "judge")}}, "reward.stages", "are nobody's"),
        ({"stages": {"judge": [{"name": "exact", "weight": 0}]}}, "reward.stages.judge", "every weight is 0"),
        ({"stages": {"judge": []}}, "reward.stages.judge", "at least"),
    ],
)  # fmt: skip
def test_scorers_and_stages_belong_together(reward, key, words):
    found = explain_value(RunSpec, spec(reward={**BASE["reward"], **reward}))
    assert any(each.key == key and words in f"{each.problem}; {each.fix}" for each in found), found


def test_a_workflow_that_is_neither_says_what_there_is():
    for wrong in ("resoning", 5):
        (found,) = explain_value(
            RunSpec, {**BASE, "reward": {"scorers": [{"name": "exact"}]}, "workflow": wrong}
        )
        assert found.key == "workflow" and "reasoning" in found.fix, found
