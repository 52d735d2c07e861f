"""Turns of a part of the environments, with decisions at once and decisions that come later."""

from __future__ import annotations

import asyncio

import pytest
from headrace_robots.rollout.turns import Turns


class Echo:
    """An environment whose outcome is what was decided, once the test says so."""

    def __init__(self) -> None:
        self.under_way: list[tuple[int, asyncio.Future[int]]] = []

    def begin(self, decision: int, answered: asyncio.Future[int]) -> None:
        if decision < 0:
            raise RuntimeError("it is gone")
        self.under_way.append((decision, answered))

    async def settled(self, outcome: int) -> int:
        return outcome

    def answer(self) -> None:
        for decision, answered in self.under_way:
            answered.set_result(decision)
        self.under_way = []


@pytest.fixture(params=["at once", "later"])
def turns(request):
    """Turns that count their rows, and what they were asked."""
    asked: list[list[int]] = []

    def at_once(rows):
        asked.append(list(rows))
        if 13 in rows:
            raise ValueError("no decision for 13")
        return [10 * row for row in rows]

    async def later(rows):
        await asyncio.sleep(0)
        return at_once(rows)

    return Turns(at_once if request.param == "at once" else later), asked


async def settle() -> None:
    for _ in range(6):
        await asyncio.sleep(0)


async def test_rows_that_wait_together_are_decided_together_and_the_next_turn_waits_for_all(turns):
    turn, asked = turns
    one, other = Echo(), Echo()
    first = [asyncio.create_task(turn.take(row, env)) for row, env in ((1, one), (2, other))]
    await settle()
    late = asyncio.create_task(turn.take(3, Echo()))
    await settle()
    assert asked == [[1, 2]]
    one.answer()
    await settle()
    assert asked == [[1, 2]] and first[0].done() and not first[1].done()
    other.answer()
    await settle()
    assert [task.result() for task in first] == [(10, 10), (20, 20)]
    assert asked == [[1, 2], [3]]
    late.cancel()


async def test_who_is_stopped_in_a_turn_holds_up_no_one(turns):
    turn, asked = turns
    kept, stopped = Echo(), Echo()
    tasks = [asyncio.create_task(turn.take(row, env)) for row, env in ((1, kept), (2, stopped))]
    await settle()
    tasks[1].cancel()
    kept.answer()
    await settle()
    assert tasks[0].result() == (10, 10)
    waiting, gone = asyncio.create_task(turn.take(4, kept)), asyncio.create_task(turn.take(5, stopped))
    await asyncio.sleep(0)
    gone.cancel()
    await settle()
    kept.answer()
    await settle()
    assert waiting.result() == (40, 40) and asked[1][0] == 4


async def test_a_decision_that_fails_reaches_all_and_one_that_cannot_be_begun_its_own_alone(turns):
    turn, _ = turns
    failed = [asyncio.create_task(turn.take(row, Echo())) for row in (1, 13)]
    found = await asyncio.gather(*failed, return_exceptions=True)
    assert all("13" in str(error) for error in found)
    fine = Echo()
    tasks = [asyncio.create_task(turn.take(row, env)) for row, env in ((1, fine), (-1, Echo()))]
    await settle()
    with pytest.raises(RuntimeError, match="gone"):
        await tasks[1]
    fine.answer()
    await settle()
    assert tasks[0].result() == (10, 10)
