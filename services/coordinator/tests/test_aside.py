"""Work beside the event loop: what is stuck, in Python or in the kernel, keeps its place for a turn and no longer."""

from __future__ import annotations

import asyncio
import ctypes
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from headrace_coordinator.aside import Aside, TooSlow, _Work

TURN_S = 0.5
HELD_S = 60.0


def computes() -> None:
    while True:
        sum(range(100))


def catches_all() -> None:
    """Code that takes every error for one of its own."""
    while True:
        try:
            time.sleep(0.001)
        except Exception:  # noqa: BLE001
            continue


@pytest.fixture
def reads_a_pipe() -> Iterator[Callable[[], object]]:
    """Stands in the kernel, where nothing ends it."""
    reader, writer = os.pipe()
    yield lambda: os.read(reader, 1)
    os.close(writer)


@pytest.fixture(params=["computes", "catches all", "a pipe"])
def stuck(request, reads_a_pipe) -> Callable[[], object]:
    return {"computes": computes, "catches all": catches_all, "a pipe": reads_a_pipe}[request.param]


async def test_what_is_stuck_ends_at_its_deadline(stuck):
    with pytest.raises(TooSlow, match=r"^reading has taken more than 0\.1 s$"):
        await Aside("reading", 1, 0.1).run(stuck)


async def test_a_place_is_free_once_its_work_has_had_its_time(stuck):
    """Each stuck check kept its place for ever: after as many as there are places nobody could submit."""
    aside = Aside("reading", 2, 0.1)
    for _ in range(3):
        told = await asyncio.gather(*(aside.run(stuck) for _ in range(2)), return_exceptions=True)
        assert all(isinstance(each, TooSlow) for each in told)
    assert await aside.run(lambda: "done") == "done"


async def test_fifty_that_are_stuck_delay_the_next_by_a_turn(stuck):
    """Of a deadline of a minute: without turns the good one would wait for those before it."""
    aside = Aside("reading", 4, HELD_S, turn_s=TURN_S)
    held = [asyncio.create_task(aside.run(stuck)) for _ in range(50)]
    await asyncio.sleep(0)
    assert await aside.run(lambda: "done") == "done"
    assert sum(task.done() for task in held) <= 4, "it has not waited for all of them"
    for task in held:
        task.cancel()
    told = await asyncio.gather(*held, return_exceptions=True)
    assert all("and others wait" in str(each) for each in told if isinstance(each, TooSlow))


async def test_who_has_run_for_a_turn_goes_on_while_nobody_waits():
    aside = Aside("reading", 1, HELD_S, turn_s=0.0)
    assert await aside.run(lambda: time.sleep(0.1) or "done") == "done"


async def test_python_code_is_ended_with_its_place():
    """Else fifty of them would share the interpreter's lock with the event loop."""
    before = threading.active_count()
    aside = Aside("reading", 4, 0.05)
    for _ in range(3):
        await asyncio.gather(
            *(aside.run(each) for each in [computes, catches_all] * 2), return_exceptions=True
        )
    async with asyncio.timeout(30):
        while threading.active_count() > before:  # noqa: ASYNC110 - no event tells of a thread's end
            await asyncio.sleep(0.01)


async def test_who_leaves_frees_his_place(stuck):
    aside = Aside("reading", 1, HELD_S)
    for count in (1, 3):
        tasks = [asyncio.create_task(aside.run(stuck)) for _ in range(count)]
        await asyncio.sleep(0.02)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert await aside.run(lambda: "done") == "done"


async def test_at_most_so_many_run_at_once_and_all_are_answered():
    now, most = 0, 0
    lock = threading.Lock()

    def work() -> int:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        time.sleep(0.002)
        with lock:
            now -= 1
        return now

    aside = Aside("reading", 3, HELD_S)
    await asyncio.gather(*(aside.run(work) for _ in range(40)))
    assert most <= 3


async def test_errors_are_those_of_the_work():
    with pytest.raises(KeyError, match="a"):
        await Aside("reading", 1, HELD_S).run(lambda: {}["a"])


def test_a_process_ends_while_a_thread_is_stuck():
    code = (
        "import asyncio, os\nfrom headrace_coordinator.aside import Aside, TooSlow, _Work\n"
        "async def main():\n  try: await Aside('x', 1, 0.1).run(lambda: os.read(os.pipe()[0], 1))\n"
        "  except TooSlow: print('told')\nasyncio.run(main())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "told\n" and not done.stderr


@pytest.mark.parametrize("ended", [0, 1])
def test_work_that_has_ended_by_itself_is_not_ended_again(monkeypatch, ended):
    """Nor twice: what is raised in a thread that is on its way out is printed by the interpreter."""
    told = []
    monkeypatch.setattr(ctypes.pythonapi, "PyThreadState_SetAsyncExc", lambda *given: told.append(given))
    going = threading.Event()

    async def live():
        work = _Work(lambda: going.wait(20.0), "short")
        work.done.add_done_callback(lambda done: done.cancelled() or done.exception())
        while not work._inside:  # noqa: ASYNC110 - its thread has no loop
            await asyncio.sleep(0.001)
        for _ in range(ended):
            work.end()
        going.set()
        while not work._given.done():  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        work._thread = threading.current_thread()  # as if it had not left yet
        work.end()

    asyncio.run(live())
    assert len(told) == ended
