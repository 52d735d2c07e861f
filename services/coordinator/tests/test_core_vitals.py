"""The lasting tasks and the health of a coordinator; and of a real process, its exit code."""

import asyncio
import time

import pytest
from headrace_coordinator.store.event_log import Kernel
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
async def kernel():
    kernel = Kernel(MemoryStore(), time.time)
    await kernel.open("test", None)
    return kernel


@pytest.mark.parametrize(
    ("work", "words"), [(ends, "without an error"), (breaks, "ZeroDivisionError: a bug")]
)
async def test_a_lasting_task_that_ends_ends_everything_and_says_why(kernel, work, words):
    cancelled = asyncio.Event()

    async def body():
        try:
            await forever()
        finally:
            cancelled.set()

    with pytest.raises(TaskEnded, match=f"the sweep task ended.*{words}"):
        await asyncio.wait_for(Vitals(kernel).run({"kernel": forever, "sweep": work}, body), 10)
    assert cancelled.is_set()


async def test_the_end_of_the_body_ends_the_tasks_and_its_error_stays_what_it_is(kernel):
    vitals = Vitals(kernel)
    await asyncio.wait_for(vitals.run({"kernel": forever}, ends), 10)
    assert vitals.view().tasks == {"kernel": False, "loop lag": False}
    with pytest.raises(ZeroDivisionError):
        await asyncio.wait_for(Vitals(kernel).run({"kernel": forever}, breaks), 10)


async def test_health_names_the_store_and_a_late_loop(kernel):
    vitals, seen = Vitals(kernel), []

    async def body():
        await asyncio.sleep(0.6)
        seen.append(vitals.view())
        kernel.store_trouble = "it refuses: OOM"
        seen.append(vitals.view())
        kernel.store_trouble = ""
        vitals._lags_ms.append(9000.0)
        seen.append(vitals.view())

    await asyncio.wait_for(vitals.run({"kernel": forever}, body), 20)
    well, refused, late = seen
    assert (well.status, well.reason, well.coordinator_epoch) == ("ok", "", 1)
    assert well.tasks == {"kernel": True, "loop lag": True} and well.store_writable
    assert refused.status == "unhealthy" and "it refuses: OOM" in refused.reason
    assert late.status == "unhealthy" and "9000 ms late" in late.reason
