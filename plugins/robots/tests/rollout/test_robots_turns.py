"""Turns of a part of the environments, with decisions at once and decisions that come later."""

from __future__ import annotations

import asyncio

import pytest
from headrace_robots.rollout.turns import Turns


class Player:
    """What takes turns until the test says that it has ended; `number` is what it asks."""

    def __init__(self, number, *, begun=True):
        self.number, self.begun, self.error, self.left = number, begun, None, False

    def fail(self, error):
        self.error = error


class Table:
    """Turns, what was asked in each, and who acts or begins."""

    def __init__(self, *, later):
        self.asked, self.acted, self.began, self.held = [], [], [], asyncio.Event()
        self.held.set()
        self.turns = Turns(self.later if later else self.decide, self.act)

    def decide(self, players):
        self.asked.append([each.number for each in players])
        if 13 in self.asked[-1]:
            raise ValueError("no decision for 13")
        return [10 * each.number for each in players]

    async def later(self, players):
        await self.held.wait()
        return self.decide(players)

    def act(self, players, decisions, new):
        acting = zip(players, decisions or [], strict=True)
        self.acted.append([(each.number, decision) for each, decision in acting if not each.left])
        self.began += [each.number for each in new]


@pytest.fixture(params=[False, True], ids=["at once", "later"])
def table(request):
    return Table(later=request.param)


async def settle() -> None:
    for _ in range(6):
        await asyncio.sleep(0)


async def test_those_that_wait_together_are_decided_together_and_the_next_turn_waits_for_all(table):
    one, other, new = Player(1), Player(2), Player(3, begun=False)
    for each in (one, other, new):
        table.turns.join(each)
    await settle()
    assert table.acted == [[(1, 10), (2, 20)]] and table.began == [3]
    late = Player(4)
    for each in (late, one, new):
        table.turns.join(each)
    await settle()
    assert table.asked == [[1, 2]], "one is still being stepped"
    table.turns.leave(other)
    await settle()
    assert table.asked == [[1, 2], [4, 1]]


async def test_who_leaves_holds_up_no_one_and_acts_no_more():
    table = Table(later=True)
    kept, gone = Player(1), Player(2)
    table.held.clear()
    for each in (kept, gone):
        table.turns.join(each)
    await settle()
    gone.left = True
    table.turns.leave(gone)
    table.held.set()
    await settle()
    assert table.asked == [[1, 2]] and table.acted == [[(1, 10)]]
    table.turns.join(kept)
    await settle()
    assert table.asked == [[1, 2], [1]]


async def test_a_decision_that_fails_reaches_all_that_need_it_and_no_other(table):
    asked, new = [Player(1), Player(13)], Player(3, begun=False)
    for each in (*asked, new):
        table.turns.join(each)
    await settle()
    assert all("13" in str(each.error) for each in asked) and new.error is None
    assert table.acted == [[]] and table.began == [3]
