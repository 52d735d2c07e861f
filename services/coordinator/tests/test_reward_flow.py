"""The way of answers through several reward stages: thresholds, whole groups, what they are worth in the end."""

from __future__ import annotations

from headrace_coordinator.domain.ledger.reward_flow import RewardFlow, stage_figures
from headrace_schema.workflow import GraphSection


def graph(*edges, replace=()):
    stages = {name for source, target, *_ in edges for name in (source, target)}
    service = {"generate": "rollout", "learn": "trainer"}
    return GraphSection.model_validate(
        {
            "stages": {
                name: {"service": service.get(name, "reward"), **({"combine": "replace"} if name in replace else {})}
                for name in sorted(stages)
            },
            "edges": [
                {"source": source, "target": target, **(more[0] if more else {})} for source, target, *more in edges
            ],
        }
    )  # fmt: skip


GATED = [("generate", "score"), ("score", "judge", {"at_least": 1.0}), ("judge", "learn")]


def test_the_second_stage_sees_what_the_first_let_through():
    flow = RewardFlow(graph(*GATED), 2)
    assert flow.enter((0, 0)) == [((0, 0), "score")] and flow.enter((0, 1)) == [((0, 1), "score")]
    assert flow.scored((0, 0), "score", 1.0) == [((0, 0), "judge")]
    assert flow.final((0, 0)) is None
    assert flow.scored((0, 1), "score", 0.5) == [] and flow.final((0, 1)) == 0.5
    assert flow.scored((0, 0), "judge", 0.25) == [] and flow.final((0, 0)) == 1.25
    assert flow.rewards((0, 0)) == {"score": 1.0, "judge": 0.25} and flow.rewards((0, 1)) == {"score": 0.5}


def test_a_replacing_stage_stands_in_the_place_of_those_before_it():
    flow = RewardFlow(graph(*GATED, replace=("judge",)), 1)
    flow.enter((3, 0))
    flow.scored((3, 0), "score", 1.0)
    flow.scored((3, 0), "judge", 0.25)
    assert flow.final((3, 0)) == 0.25
    flow.enter((4, 0))
    flow.scored((4, 0), "score", 0.5)
    assert flow.final((4, 0)) == 0.5, "it did not see this one"


def test_stages_side_by_side_are_asked_at_once_and_added():
    flow = RewardFlow(graph(("generate", "a"), ("generate", "b"), ("a", "learn"), ("b", "learn")), 1)
    assert flow.enter((0, 0)) == [((0, 0), "a"), ((0, 0), "b")]
    flow.scored((0, 0), "b", 2.0)
    assert flow.final((0, 0)) is None
    flow.scored((0, 0), "a", 1.0)
    assert flow.final((0, 0)) == 3.0


def test_an_edge_of_groups_waits_for_the_group_and_a_threshold_is_each_answers():
    gate = {"granularity": "group", "at_least": 1.0}
    flow = RewardFlow(graph(("generate", "score"), ("score", "judge", gate), ("judge", "learn")), 2)
    flow.enter((0, 0))
    assert flow.scored((0, 0), "score", 1.0) == []
    flow.enter((0, 1))
    assert flow.scored((0, 1), "score", 0.0) == [((0, 0), "judge")]
    assert flow.final((0, 1)) == 0.0 and flow.final((0, 0)) is None
    whole = RewardFlow(graph(("generate", "score", {"granularity": "group"}), ("score", "learn")), 2)
    assert whole.enter((0, 0)) == []
    assert whole.enter((0, 1)) == [((0, 0), "score"), ((0, 1), "score")]


def test_what_is_not_reached_reaches_nothing_further():
    chain = [("generate", "a"), ("a", "b", {"at_least": 1.0}), ("b", "c"), ("a", "c"), ("c", "learn")]
    flow = RewardFlow(graph(*chain), 1)
    flow.enter((0, 0))
    assert flow.scored((0, 0), "a", 0.0) == [] and flow.final((0, 0)) == 0.0


def test_an_answer_for_one_stage_alone_is_done_after_it():
    flow = RewardFlow(graph(*GATED), 1)
    assert flow.enter((0, 0), only="score") == [((0, 0), "score")]
    assert flow.scored((0, 0), "score", 5.0) == [] and flow.final((0, 0)) == 5.0


def test_figures_are_over_the_answers_that_a_stage_saw():
    found = stage_figures(graph(*GATED), [{"score": 1.0, "judge": 0.5}, {"score": 0.0}])
    assert list(found) == [("score", 2, 0.5), ("judge", 1, 0.5)]
