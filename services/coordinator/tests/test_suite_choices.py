"""What counts as one choice of a majority vote."""

from __future__ import annotations

import pytest
from headrace_coordinator.projections.transcripts import Answer
from headrace_coordinator.run.evaluation.suite_figures import values
from headrace_coordinator.suites import open_suite
from headrace_coordinator.suites.extracting import last_box, plain_math
from headrace_schema.evaluating import EvaluationSpec
from headrace_schema.sections.scoring import RewardSection


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("1/2", "0.5"),
        ("\\frac{1}{2}", "\\dfrac{2}{4}"),
        ("-\\frac{3}{4}", "-.75"),
        ("1,234", "1{,}234"),
        ("336^\\circ", "336"),
        ("x=7", "7.0"),
        ("\\left(3,\\frac{\\pi}{2}\\right)", "(3, \\dfrac{\\pi}{2})"),
        ("$12.$", "12"),
    ],
)
def test_spellings_of_one_expression_are_one_choice(one, other):
    assert plain_math(last_box(f"so \\boxed{{{one}}}")) == plain_math(other)


@pytest.mark.parametrize(
    ("one", "other"), [("1/2", "1/3"), ("12", "1,2"), ("-5", "5"), ("1/0", "0"), ("x", "y")]
)
def test_different_expressions_stay_apart(one, other):
    assert plain_math(one) != plain_math(other)


def asked(suite="math500", **more):
    return EvaluationSpec.model_validate(
        {
            "model": {"path": "m"},
            "suite": {"name": suite},
            "samples": 5,
            "sampling": {"temperature": 1.0},
            **more,
        }
    )


def answers(*found):
    return {
        (0, sample): Answer(reward, {}, choice, 1, cut=False) for sample, (choice, reward) in enumerate(found)
    }


def test_right_answers_are_one_choice_where_the_scorer_says_that_they_are_equal():
    """Two spellings of the right one outvote twice the same wrong one, as three votes of five."""
    suite = open_suite("math500", {})
    found = answers(("2\\sqrt{2}", 1.0), ("\\sqrt{8}", 1.0), ("8^{1/2}", 1.0), ("3", 0.0), ("3", 0.0))
    assert values("maj@5", asked(), suite, found, 1) == {0: 1.0}
    own = asked(reward=RewardSection.model_validate({"scorers": [{"name": "exact"}]}).model_dump())
    assert values("maj@5", own, suite, found, 1) == {0: 0.0}, "another scorer may pass answers that differ"
    puzzle = open_suite("reasoning_gym", {"dataset": "chain_sum"})
    assert values("maj@5", asked(), puzzle, found, 1) == {0: 0.0}, "several answers may be right"
