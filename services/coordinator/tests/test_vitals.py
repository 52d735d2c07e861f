"""The lasting tasks and the health of a coordinator; and of a real process, its exit code."""

import asyncio
import time

import pytest
from headrace_coordinator.store.event_log import EventLog
from headrace_coordinator.store.memory_store import MemoryStore
from headrace_coordinator.vitals import TaskEnded, Vitals


async def forever():
    await asyncio.Event().wait()


async def ends():
    await asyncio.sleep(0.01)


async def breaks():
    await asyncio.sleep(0.01)
    raise ZeroDivisionError("a bug")


@pytest.fixture
async def event_log():
    event_log = EventLog(MemoryStore(), time.time)
    await event_log.open("test", None)
    return event_log


@pytest.mark.parametrize(
    ("work", "words"), [(ends, "without an error"), (breaks, "ZeroDivisionError: a bug")]
)
async def test_a_lasting_task_that_ends_ends_everything_and_says_why(event_log, work, words):
    cancelled = asyncio.Event()

    async def body():
        try:
            await forever()
        finally:
            cancelled.set()

    with pytest.raises(TaskEnded, match=f"the sweep task ended.*{words}"):
        await asyncio.wait_for(Vitals(event_log).run({"event_log": forever, "sweep": work}, body), 10)
    assert cancelled.is_set()


async def test_the_end_of_the_body_ends_the_tasks_and_its_error_stays_what_it_is(event_log):
    vitals = Vitals(event_log)
    await asyncio.wait_for(vitals.run({"event_log": forever}, ends), 10)
    assert vitals.view().tasks == {"event_log": False, "loop lag": False}
    with pytest.raises(ZeroDivisionError):
        await asyncio.wait_for(Vitals(event_log).run({"event_log": forever}, breaks), 10)


async def test_health_names_the_store_and_a_late_loop(event_log):
    vitals, seen = Vitals(event_log), []

    async def body():
        await asyncio.sleep(0.6)
        seen.append(vitals.view())
        event_log.store_trouble = "it refuses: OOM"
        seen.append(vitals.view())
        event_log.store_trouble = ""
        vitals._lags_ms.append(9000.0)
        seen.append(vitals.view())

    await asyncio.wait_for(vitals.run({"event_log": forever}, body), 20)
    well, refused, late = seen
    assert (well.status, well.reason, well.coordinator_epoch) == ("ok", "", 1)
    assert well.tasks == {"event_log": True, "loop lag": True} and well.store_writable
    assert refused.status == "unhealthy" and "it refuses: OOM" in refused.reason
    assert late.status == "unhealthy" and "9000 ms late" in late.reason
