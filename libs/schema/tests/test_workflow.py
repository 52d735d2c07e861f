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
        ({"generate": {"service": "rollout"}, "b": {"service": "rollout"}}, "reply", "stage b answers generate"),
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


TALK = {"generate": {"service": "rollout"}, "answer": {"service": "rollout"}, **STAGES}
TURNS = [
    {"source": "generate", "target": "answer", "granularity": "turn"},
    {"source": "answer", "target": "generate", "granularity": "turn"},
]


def test_two_rollout_stages_answer_each_other():
    run = RunSpec.model_validate(spec([*TURNS, *EDGES], TALK, reply={"path": "some/other", "turns": 3}))
    assert run.graph.reply_stage == "answer" and run.reply.turns == 3
    assert RunSpec.model_validate(run.model_dump(mode="json")) == run
    assert RunSpec.model_validate(spec([*TURNS, *EDGES], TALK, reply={})).reply.path == ""
    assert RunSpec.model_validate(spec()).graph.reply_stage == ""


@pytest.mark.parametrize(
    ("given", "key", "words"),
    [
        (spec([*TURNS, *EDGES], TALK), "reply", "nothing says with which policy; add reply: {path: MODEL}"),
        (spec(reply={}), "reply", "no second rollout stage"),
        ({**BASE, "workflow": "reasoning", "reply": {}}, "reply", "no second rollout stage"),
        (
            spec([edge("generate", "answer"), TURNS[1], *EDGES], TALK, reply={}),
            "workflow.edges[0].granularity",
            "use turn",
        ),
        (
            spec([TURNS[0], *EDGES], TALK, reply={}),
            "workflow.stages.answer",
            "{source: answer, target: generate}",
        ),
        (
            spec([TURNS[1], *EDGES], TALK, reply={}),
            "workflow.stages.answer",
            "{source: generate, target: answer}",
        ),
        (
            spec([*TURNS, edge("answer", "score"), *EDGES[1:]], TALK, reply={}),
            "workflow.edges[2]",
            "leaves through generate",
        ),
        (
            spec([*TURNS, *EDGES], {**TALK, "third": {"service": "rollout"}}, reply={}),
            "workflow.stages.generate",
            "at most one that answers it; here are generate, answer, third",
        ),
        (spec([*TURNS, *EDGES], TALK, reply={"stop": [""]}), "reply.stop", "remove it"),
        (spec([*TURNS, *EDGES], TALK, reply={}, deterministic=True), "deterministic", "deterministic: false"),
        (
            spec([*TURNS, *EDGES], TALK, reply={}, rollout={"chunk_tokens": 2}),
            "rollout.chunk_tokens",
            "chunk_tokens: 0",
        ),
    ],
)
def test_what_cannot_be_a_second_policy_names_the_key(given, key, words):
    found = {item.key: f"{item.problem}; {item.fix}" for item in explain_value(RunSpec, given)}
    assert words in found.get(key, ""), found


def test_helpers_do_not_go_on_with_exchanges():
    rollouts = {"instances": 2, "helpers": 1}
    both = spec([*TURNS, *EDGES], TALK, reply={}, trainer={"helpers": 1}, rollout=rollouts)
    found = {item.key: item.problem for item in explain_value(RunSpec, both)}
    assert "does not go on at another one" in found["trainer.helpers"]
    assert "does not go on at another one" in found["rollout.helpers"]


def replied(placement, **reply):
    return spec([*TURNS, *EDGES], TALK, reply=reply, placement=placement)


@pytest.mark.parametrize(
    ("placement", "mode"),
    [
        ({"rollout": "0", "reply": "1", "trainer": "2"}, "disaggregated"),
        ({"rollout": "0", "reply": "1", "trainer": "1"}, "collocated"),
        ({"rollout,trainer": "0", "reply": "1"}, "collocated"),
        ({"rollout": "0-1", "reply": 2, "trainer": "all"}, "collocated"),
        ({"mode": "hybrid", "rollout": "0", "reply": "1", "trainer": "2"}, "hybrid"),
    ],
)
def test_devices_for_replies_say_the_mode_too(placement, mode):
    run = RunSpec.model_validate(replied(placement))
    assert run.placement.mode == mode and run.placement.reply
    assert RunSpec.model_validate(run.model_dump(mode="json")) == run


@pytest.mark.parametrize(
    ("placement", "reply", "key", "words"),
    [
        ({"reply": "1"}, {}, "placement.rollout", "is not guessed; name devices"),
        ({"reply": "1", "rollout": "0"}, {}, "placement.trainer", "is not guessed; name devices"),
        ({"rollout,trainer,reply": "0"}, {}, "placement.reply", "0 generates too"),
        ({"rollout,trainer": "0", "reply": "all"}, {}, "placement.reply", "all generates too"),
        ({"rollout,trainer": "0", "reply": "1", "share": True}, {}, "placement.share", "or placement.reply"),
        (
            {"mode": "disaggregated", "rollout": "0", "reply": "1", "trainer": "1"},
            {},
            "placement.reply",
            "1 learns too",
        ),
        (
            {"mode": "collocated", "rollout": "0", "reply": "1", "trainer": "2"},
            {},
            "placement.trainer",
            "neither generate nor reply",
        ),
        ({"rollout,trainer": "0", "reply": "1"}, {"instances": 2}, "placement.reply", "reply.instances: 1"),
        ({"rollout,trainer": "0", "reply": ["1", "1"]}, {}, "placement.reply", "named twice"),
        (
            {"mode": "auto", "rollout,trainer": "0", "reply": "1"},
            {},
            "placement.rollout",
            "placement.mode: auto",
        ),
        ({}, {"instances": 2}, "reply.instances", "name devices in placement.reply"),
    ],
)
def test_devices_for_replies_that_cannot_be_name_the_key(placement, reply, key, words):
    given = replied(placement, **reply)
    found = {item.key: f"{item.problem}; {item.fix}" for item in explain_value(RunSpec, given)}
    assert words in found.get(key, ""), found


def test_a_run_without_a_second_policy_has_no_devices_for_replies():
    given = spec(placement={"rollout,trainer": "0", "reply": "1"})
    found = {item.key: item.fix for item in explain_value(RunSpec, given)}
    assert "remove it, or add the section reply" in found["placement.reply"]
