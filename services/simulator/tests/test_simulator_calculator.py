"""The environment of examples/agents/calculator.yaml: one call, then the answer is judged."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "agents"


@pytest.fixture
def sums(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import calculator

    yield calculator
    sys.modules.pop("calculator")


def test_the_calculator_answers_one_call_and_the_answer_is_judged(sums):
    game = sums.Sums()
    (asked,) = game.reset(7, {})
    call = asked["content"].rstrip("=")
    total = str(sum(map(int, call.split("+"))))
    said, reward, done, _ = game.step({"content": f"{call}?"})
    assert (said, reward, done) == ([{"role": "tool", "content": f"{total}="}], 0.0, False)
    assert game.step({"content": total})[1:] == (1.0, True, {"success": True})
    game.reset(7, {})
    game.step({"content": f"{call}?"})
    assert game.step({"content": f"{call}?"})[1:3] == (0.0, True), "a second call is a wrong answer"


def test_a_cold_start_shows_calls_answers_and_what_follows_a_call(sums):
    rows = list(sums.examples())
    calls = [row for row in rows if row["answer"].endswith("?")]
    assert len(rows) == 3 * len(calls)
    assert all(sums.CALL.fullmatch(row["answer"]) for row in calls)
    for row in rows:
        if row not in calls:
            first, _, second = row["question"].partition("=")[0].partition("+")
            assert int(first) + int(second) == int(row["answer"])
