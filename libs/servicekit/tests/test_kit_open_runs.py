"""The table of openings: repeated, replaced, refused, closed in every phase, reported."""

import asyncio

import pytest
from headrace.common.v1 import common_pb2
from headrace_servicekit.lease.open_runs import OpeningRefused, OpenRuns


def header(run="runs/a", open_id=0, sequence=0):
    return common_pb2.CommandHeader(run=run, open_id=open_id, command_sequence=sequence)


class Host:
    """A service with one table; counts what it builds and ends. `gate` holds up building and ending."""

    def __init__(self, limit=0):
        self.changes = 0
        self.table = OpenRuns(limit, self._changed)
        self.calls = []
        self.gate = asyncio.Event()
        self.gate.set()

    def _changed(self):
        self.changes += 1

    async def open(self, run="runs/a", open_id=0, config="config", fails=False):
        async def build():
            await self.gate.wait()
            if fails:
                raise OSError("no disk")
            self.calls.append(f"build {run}")
            return f"built {run}"

        async def end():
            await self.gate.wait()
            self.calls.append(f"end {run}")

        return await self.table.open(header(run, open_id), config, build, end)

    def phases(self):
        name = common_pb2.OpenPhase.Name
        return {r.run: (r.open_id, name(r.phase).removeprefix("OPEN_PHASE_")) for r in self.table.reports()}


async def refused(work, reason):
    with pytest.raises(OpeningRefused) as caught:
        await work
    assert caught.value.reason == reason
    return caught.value.message


async def test_a_repetition_builds_once_and_another_config_is_a_conflict():
    host = Host()
    assert await host.open(open_id=4) == await host.open(open_id=4) == await host.open() == "built runs/a"
    await refused(host.open(open_id=4, config="other"), "CONFLICT")
    assert host.calls == ["build runs/a"] and host.phases() == {"runs/a": (4, "OPEN")}


async def test_repetitions_while_it_opens_share_the_result():
    host = Host()
    host.gate.clear()
    first, second = (asyncio.ensure_future(host.open(open_id=4)) for _ in range(2))
    await asyncio.sleep(0)
    await refused(host.open(open_id=4, config="other"), "CONFLICT")
    first.cancel()  # its caller has gone away; the opening goes on
    host.gate.set()
    assert await second == "built runs/a" and host.calls == ["build runs/a"]


async def test_a_higher_open_id_closes_the_opening_before_and_a_lower_one_is_stale():
    host = Host(limit=1)
    await host.open(open_id=4)
    await host.open(open_id=5, config="other")
    assert host.calls == ["build runs/a", "end runs/a", "build runs/a"]
    message = await refused(host.open(open_id=4), "OPENING_STALE")
    assert "opening 4" in message and "opening 5" in message and host.phases() == {"runs/a": (5, "OPEN")}


async def test_a_run_beyond_the_limit_is_busy_until_the_first_is_closed():
    host = Host(limit=1)
    await host.open(open_id=1)
    assert "runs/a" in await refused(host.open("runs/b", 2), "BUSY")
    await host.table.close(header(open_id=1))
    assert await host.open("runs/b", 2) == "built runs/b"
    unlimited = Host()
    await unlimited.open("runs/a", 1)
    await unlimited.open("runs/b", 2)
    assert unlimited.table.names() == ["runs/a", "runs/b"]


async def test_an_opening_waits_for_the_closing_that_makes_room():
    host = Host(limit=1)
    await host.open(open_id=1)
    host.gate.clear()
    closing = asyncio.ensure_future(host.table.close(header(open_id=1)))
    await asyncio.sleep(0)
    opening = asyncio.ensure_future(host.open("runs/b", 2))
    await asyncio.sleep(0)
    assert host.phases() == {"runs/a": (1, "CLOSING")}
    host.gate.set()
    await asyncio.gather(closing, opening)
    assert host.calls == ["build runs/a", "end runs/a", "build runs/b"]


@pytest.mark.parametrize(("open_id", "closes"), [(3, False), (4, True), (5, True), (0, True)])
async def test_close_spares_a_newer_opening(open_id, closes):
    host = Host()
    await host.open(open_id=4)
    for _ in range(2):
        await host.table.close(header(open_id=open_id))
    assert host.calls.count("end runs/a") == closes and ("runs/a" in host.table) != closes


async def test_a_delayed_open_of_a_closed_opening_is_stale():
    host = Host()
    await host.table.close(header(open_id=4))
    await refused(host.open(open_id=4), "OPENING_STALE")
    assert await host.open(open_id=5) == "built runs/a"


async def test_close_cancels_what_is_being_opened_and_cleans_up():
    host = Host()
    host.gate.clear()
    opening = asyncio.ensure_future(host.open(open_id=4))
    await asyncio.sleep(0)
    assert host.phases() == {"runs/a": (4, "OPENING")}
    closing = asyncio.ensure_future(host.table.close(header(open_id=4)))
    await refused(opening, "OPENING_STALE")
    host.gate.set()
    await closing
    assert host.calls == ["end runs/a"] and not host.table.names()


async def test_a_closing_outlives_its_caller():
    host = Host()
    await host.open()
    host.gate.clear()
    closing = asyncio.ensure_future(host.table.close(header()))
    await asyncio.sleep(0)
    closing.cancel()
    host.gate.set()
    await host.table.close(header())
    assert host.calls == ["build runs/a", "end runs/a"] and not host.table.names()


async def test_what_fails_to_open_is_not_open_and_may_be_tried_again():
    host = Host(limit=1)
    with pytest.raises(OSError, match="no disk"):
        await host.open(open_id=4, fails=True)
    assert not host.table.names() and await host.open(open_id=4) == "built runs/a"


async def test_what_fails_to_close_stays_reported_and_is_closed_again():
    failures = [OSError("stuck")]

    async def build():
        return None

    async def end():
        if failures:
            raise failures.pop()

    table = OpenRuns()
    await table.open(header(open_id=4), None, build, end)
    with pytest.raises(OSError, match="stuck"):
        await table.close(header(open_id=4))
    assert table.reports()[0].phase == common_pb2.OPEN_PHASE_OPEN
    await table.close(header(open_id=4))
    assert not table.names()


async def test_commands_belong_to_the_opening():
    host = Host()
    with pytest.raises(OpeningRefused, match="no opening"):
        host.table.check(header(open_id=4))
    host.table.check(header())
    await host.open(open_id=4)
    host.table.check(header(open_id=4))
    for other in (3, 5):
        with pytest.raises(OpeningRefused, match="opening 4") as caught:
            host.table.check(header(open_id=other))
        assert caught.value.reason == "OPENING_STALE"
    host.gate.clear()
    closing = asyncio.ensure_future(host.table.close(header()))
    await asyncio.sleep(0)
    with pytest.raises(OpeningRefused, match="being closed"):
        host.table.check(header())
    host.gate.set()
    await closing


async def test_the_last_command_is_the_highest_that_was_applied_to_the_opening():
    host = Host()
    await host.open(open_id=4)
    for open_id, sequence in ((4, 7), (4, 6), (3, 9), (0, 8)):
        host.table.applied(header(open_id=open_id, sequence=sequence))
    assert host.table.reports()[0].last_command == 8
    await host.open(open_id=5)
    assert host.table.reports()[0].last_command == 0


async def test_streams_hear_of_the_closing_and_every_change_is_told():
    host = Host()
    await host.open()
    assert host.changes == 2
    ended = []
    with host.table.until_closed("runs/a", lambda: ended.append("first")):
        with host.table.until_closed("runs/a", lambda: ended.append("left")):
            pass
        await host.table.close(header())
    assert ended == ["first"] and host.changes == 4
