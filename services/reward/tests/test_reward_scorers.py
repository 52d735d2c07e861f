"""Each built-in scorer by itself: what it says, and which options it refuses."""

from __future__ import annotations

import pytest
from headrace_reward import scorers
from headrace_reward.scorers.base import Answer, ScorerError
from headrace_reward.scorers.contract import check_scorer
from headrace_reward.scorers.numbers import last_number
from headrace_servicekit.registry import Plugin


def score(name, completion, reference="", *, metadata=None, token_count=0, **options):
    return (
        scorers.choose(name, options)
        .build()
        .score(Answer("", completion, reference, metadata or {}, token_count))
    )


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("the answer is 12.", "12"),
        ("9 - 3 = 6", "6"),
        ("9-3", "3"),
        ("x = -3", "-3"),
        ("(-3)", "-3"),
        ("it is \u22125", "-5"),
        ("1,234,567.5 metres", "1234567.5"),
        ("values 1, 2", "2"),
        (".5", ".5"),
        ("2024-05-06", "06"),
        ("no number", None),
        ("", None),
        ("\u0663", None),
    ],
)
def test_last_number_as_written(text, number):
    assert last_number(text) == number


def test_last_number_compares_values_not_texts():
    assert score("last_number", "so it is 6.0", "6") == 1
    assert score("last_number", "first 6, then 7", "6") == 0
    assert score("last_number", "nothing", "6") == 0
    assert score("last_number", "10,000", "#### 10000") == 1


def test_capture_compares_the_last_choice_of_the_answer():
    pattern = r"[Aa]nswer:\s*\(?([A-D])\b"
    assert score("capture", "Answer: A? No. Answer: (B)", "B", pattern=pattern) == 1
    assert score("capture", "Answer: B, then Answer: A", "B", pattern=pattern) == 0
    assert score("capture", "I choose B", "B", pattern=pattern) == 0
    assert score("capture", "answer: b", "B", pattern=pattern, ignore_case=True) == 1
    with pytest.raises(ScorerError, match="2 groups"):
        score("capture", "B", "B", pattern="(A)|(B)")


def test_last_number_cannot_judge_without_a_reference():
    with pytest.raises(ValueError, match="holds no number"):
        score("last_number", "6", "six")


def test_exact_ignores_blanks_and_case_only_when_asked():
    assert score("exact", "  Paris\n", "Paris") == 1
    assert score("exact", "paris", "Paris") == 0
    assert score("exact", "paris", "Paris", ignore_case=True) == 1


def test_regex_modes():
    assert score("regex", "it is 42!", pattern="[0-9]+") == 1
    assert score("regex", "it is 42!", pattern="[0-9]+", mode="fullmatch") == 0
    assert score("regex", "42", pattern="[0-9]+", mode="fullmatch") == 1


def test_format_says_starts_with_a_digit():
    assert score("format", " 7 apples", starts_with="[0-9]") == 1
    assert score("format", " 7 apples", starts_with="[0-9]", strip=False) == 0
    assert score("format", "apples 7", starts_with="[0-9]") == 0
    assert score("format", "7 apples.", starts_with="[0-9]|one", ends_with=r"\.|!") == 1
    assert score("format", "7 apples", starts_with="[0-9]", ends_with=r"\.|!") == 0


@pytest.mark.parametrize(("tokens", "expected"), [(0, 1), (4, 1), (6, 2 / 3), (10, 0), (50, 0)])
def test_length_falls_from_target_to_limit(tokens, expected):
    assert score("length", "", token_count=tokens, target=4, limit=10) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("completion", "reference", "expected"),
    [
        (r"so \boxed{\frac{1}{2}}", "0.5", 1),
        ("$x^2 + 2x + 1$", "$(x+1)^2$", 1),
        (r"the result is $\frac{3}{4}$", r"\frac{3}{4}", 1),
        ("it is 3", "4", 0),
        ("", "4", 0),
    ],
)
def test_math_verify_compares_values(completion, reference, expected):
    assert score("math_verify", completion, reference) == expected


def test_reasoning_gym_asks_the_dataset_of_the_item():
    item = {"source_dataset": "chain_sum", "expression": "4 - 1"}
    assert score("reasoning_gym", "3", "3", metadata=item) == 1
    assert score("reasoning_gym", "4 - 1 = 3", "3", metadata=item) < 1
    assert score("reasoning_gym", "4 - 1 = 3", "3", metadata=item, extract="last_number") == 1
    assert score("reasoning_gym", "4 - 1 =\n3\n", "3", metadata=item, extract="last_line") == 1
    assert score("reasoning_gym", "4 - 1 =\u20283", "3", metadata=item, extract="last_line") < 1  # (S3 B17)
    assert score("reasoning_gym", "", "3", metadata=item, extract="last_number") == 0


def test_reasoning_gym_takes_items_as_they_come_from_the_library():
    import reasoning_gym

    # A dataset whose judge looks into the item's metadata, not at the answer text.
    entry = reasoning_gym.create_dataset("countdown", size=1, seed=3)[0]
    solution = entry["metadata"]["expression"]
    assert score("reasoning_gym", solution, entry["answer"], metadata=entry) == 1
    assert (
        score("reasoning_gym", solution, entry["answer"], metadata={"item": entry, "dataset": "countdown"})
        == 1
    )
    assert score("reasoning_gym", "1 + 1", entry["answer"], metadata=entry) < 1


@pytest.mark.parametrize(
    ("name", "options", "field", "message"),
    [
        ("exact", {"ignore_cas": True}, "options.ignore_cas", "did you mean 'ignore_case'"),
        ("regex", {}, "options.pattern", "missing"),
        ("regex", {"pattern": "("}, "options.pattern", "not a regular expression"),
        ("regex", {"pattern": "a", "mode": "serch"}, "options.mode", "search"),
        ("format", {}, "options", "at least one of"),
        ("length", {"target": 5, "limit": 5}, "options", "must be above target"),
        ("reasoning_gym", {"dataset": "chain_sun"}, "options.dataset", "did you mean 'chain_sum'"),
    ],
)
def test_bad_options_name_the_key_and_the_fix(name, options, field, message):
    with pytest.raises(ScorerError, match=message.replace("(", r"\(")) as raised:
        score(name, "", **options)
    assert raised.value.field == field


def test_unknown_scorer_names_the_nearest():
    with pytest.raises(ScorerError, match="did you mean 'last_number'"):
        scorers.choose("last_numbr", {})


@pytest.mark.parametrize(
    ("name", "options"),
    [("exact", {}), ("last_number", {}), ("regex", {"pattern": "4"}), ("length", {"target": 2, "limit": 4})],
)
def test_built_in_scorers_hold_the_contract(name, options):
    check_scorer(name, options, Answer("2 + 2 =", "4", "4"))


def test_the_contract_finds_a_scorer_that_does_not_repeat_itself(monkeypatch):
    turns = iter(range(9))

    class Moody:
        def score(self, answer):
            return next(turns)

    plugin = Plugin(lambda options: Moody(), description="moody")
    monkeypatch.setattr("headrace_reward.scorers.text.Exact", plugin)
    with pytest.raises(AssertionError, match="two scores: 0 and 1"):
        check_scorer("exact", {}, Answer("", "4", "4"))


def test_episode_reads_what_a_rollout_says_of_it():
    told = '{"return": -12.5, "success": true, "steps": 50}'
    assert score("episode", told) == -12.5
    assert score("episode", told, scale=0.1) == pytest.approx(-1.25)
    assert score("episode", told, of="success") == 1
    assert score("episode", told, of="steps") == 50
    assert score("episode", told, of="success_at_end") == score("episode", told, of="outcome") == 1
    late = told.replace("}", ', "success_at_end": false}')
    assert score("episode", late, of="success_at_end") == 0
    assert score("episode", told.replace("true", "null"), of="outcome") == -12.5
    check_scorer("episode", {}, Answer("", told))


def test_an_episode_of_which_nobody_says_whether_it_succeeded_has_no_score():
    told = '{"return": 3.0, "success": null, "steps": 50}'
    assert score("episode", told) == 3
    with pytest.raises(ValueError, match=r"the environment never said its success .*info\['success'\]"):
        score("episode", told, of="success")


def test_episode_reads_what_an_environment_gave_for_a_conversation():
    """Whatever its last turn is: JSON, or nothing at all."""
    episode = {"return": 1.5, "success": True, "steps": 2, "rewards": [0.5, 1.0]}
    for said in ("It is 6.", "", '{"return": 9}'):
        answer = Answer("2 * 3?", said, "6", episode=episode)
        found = [
            scorers.choose("episode", {"of": of}).build().score(answer)
            for of in ("return", "success", "steps")
        ]
        assert found == [{"score": 1.5, "turns": [0.5, 1.0]}, 1.0, 2.0]


@pytest.mark.parametrize("told", ["42", "[]", '{"steps": 3}', '{"return": NaN}', "reached"])
def test_episode_judges_nothing_else(told):
    with pytest.raises(ValueError, match="return"):
        score("episode", told)
