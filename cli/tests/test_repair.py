"""`headrace repair` on the files of a real store: what is damaged is found to the byte, and what is good goes on."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from headrace_cli.launcher.data_dir import DataDir
from headrace_cli.launcher.repair import adopt, discard, examine, files, find
from headrace_cli.launcher.state import FleetLock
from headrace_cli.launcher.store import store_command, store_url, wait_for_store
from headrace_coordinator.domain import events as ev
from headrace_coordinator.store.event_log import EventLog
from headrace_coordinator.store.history import History
from headrace_coordinator.store.redis_store import RedisStore
from redis.asyncio import Redis

SPEC = {"algorithm": {"group_size": 2, "prompts_per_step": 2}, "steps": 5}
EVENTS = 60


@asynccontextmanager
async def opened(data_dir: DataDir):
    """The event log of a data directory, on its own store; the store ends in order."""
    socket = data_dir.root / "store.sock"
    command = store_command(data_dir.store, socket)
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.DEVNULL)
    try:
        await wait_for_store(socket)
        log = EventLog(RedisStore(store_url(socket)), time.time, history=History(data_dir.root / "runs"))
        await log.open("test", data_dir.root / "store_id")
        task = asyncio.create_task(log.run())
        yield log
        await log.flush()
        log.mark()
        task.cancel()
        await log._store.close()
    finally:
        process.terminate()
        await process.wait()


async def save_snapshot(log: EventLog) -> int:
    log._since_snapshot = 10**9
    await log.commit(ev.Noted(at=1.0, run="r", text="before the snapshot"))
    for _ in range(500):
        if not log._snapshot and log._since_snapshot < 10**8:
            return log.durable_sequence
        await asyncio.sleep(0.01)
    raise AssertionError("no snapshot was saved")


def filled(root: Path, rewritten: bool = False) -> tuple[DataDir, list[int]]:
    """A store of a run's events, with snapshots after a third and two thirds; numbers of the events."""
    data_dir = DataDir.at(root)
    root.mkdir()
    return data_dir, asyncio.run(fill(data_dir, rewritten))


async def fill(data_dir: DataDir, rewritten: bool) -> list[int]:
    numbers: list[int] = []
    async with opened(data_dir) as log:
        await log.commit(ev.RunSubmitted(at=1.0, run="r", spec=SPEC, directory="d", evaluation=None))
        for number in range(EVENTS):
            await log.commit(ev.NumberBurnt(at=1.0, run="r", number=number))
            numbers.append(log.durable_sequence)
            if number in (EVENTS // 3, 2 * EVENTS // 3):
                await save_snapshot(log)
        if rewritten:
            redis = Redis.from_url(store_url(data_dir.root / "store.sock"))
            await redis.bgrewriteaof()
            while (await redis.info("persistence"))["aof_rewrite_in_progress"]:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await redis.aclose()
    return numbers


def garble(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def goes_on(data_dir: DataDir, last: int) -> None:
    """The store as it is now is sound, ends at event `last`, says that it lost its end, and takes events."""
    again = examine(data_dir)
    discard(data_dir)
    assert (again.damages, again.last) == ([], last)

    async def once_more() -> str:
        async with opened(data_dir) as log:
            await log.commit(ev.Noted(at=1.0, run="r", text="on"))
            return log.loss

    assert f"the store's log ends at {last} " in asyncio.run(once_more())
    assert not (data_dir.store / "examined").exists()


@pytest.mark.parametrize("part", ["length", "snapshot", pytest.param("event", marks=pytest.mark.nightly)])
def test_garbage_is_found_to_the_byte_and_what_is_before_it_goes_on(tmp_path, part):
    data_dir, numbers = filled(tmp_path / "data")
    (increment,) = files(data_dir.store)[1]
    if part == "snapshot":
        command = find(increment, b"HSET", b"headrace:snapshot")
        hit, last, snapshot = command.words[5], numbers[2 * EVENTS // 3] + 1, numbers[EVENTS // 3] + 1
    else:
        command = find(increment, b"XADD", b"headrace:log", f"{numbers[50]}-0".encode())
        hit, last, snapshot = command.words[4], numbers[49], numbers[2 * EVENTS // 3] + 1
    whole = increment.read_bytes()
    place = whole.index(hit, command.unit)
    garble(increment, command.unit if part == "length" else place + len(hit) // 2, b"\xff\x00\xfe")
    damaged = increment.read_bytes()
    found = examine(data_dir)
    assert [(each.file, each.offset, each.cut_short) for each in found.damages] == [
        (increment, command.unit, False)
    ]
    assert (found.last, found.snapshot, found.runs) == (last, snapshot, {"r": "QUEUED"})
    sentence = found.sentence(data_dir)
    assert f"{increment}, byte {command.unit}: " in sentence and "`headrace repair --data-dir" in sentence
    assert increment.read_bytes() == damaged, "looking changes nothing"
    kept = adopt(data_dir)
    assert (kept / increment.name).read_bytes() == damaged
    goes_on(data_dir, last)


@pytest.mark.parametrize("share", [0.3, pytest.param(0.6, marks=pytest.mark.nightly)])
def test_a_file_that_was_cut_ends_with_its_last_whole_command(tmp_path, share):
    data_dir, numbers = filled(tmp_path / "data")
    (increment,) = files(data_dir.store)[1]
    size = int(increment.stat().st_size * share)
    os.truncate(increment, size)
    found = examine(data_dir)
    assert found.starts and 0 < found.last < numbers[-1]
    assert all(size - 4096 < each.offset <= size for each in found.damages)
    adopt(data_dir)
    goes_on(data_dir, found.last)


def test_a_damaged_base_leaves_an_empty_log_of_the_same_store(tmp_path):
    data_dir, _ = filled(tmp_path / "data", rewritten=True)
    ((base,), _) = files(data_dir.store)
    garble(base, base.stat().st_size // 2, b"\xff\x00\xfe")
    found = examine(data_dir)
    assert found.damages[0].file == base and found.damages[0].offset > 0 and not found.starts
    assert (found.last, found.runs) == (0, {})
    adopt(data_dir)
    goes_on(data_dir, 0)


def test_the_command_shows_and_changes_nothing_unless_it_is_told_to(tmp_path):
    data_dir, numbers = filled(tmp_path / "data")
    (increment,) = files(data_dir.store)[1]
    command = find(increment, b"XADD", b"headrace:log", f"{numbers[50]}-0".encode())
    garble(increment, command.unit, b"\xff\x00\xfe")

    def repair(*options: str) -> subprocess.CompletedProcess[str]:
        words = [sys.executable, "-m", "headrace_cli", "repair", "--data-dir", str(data_dir.root), *options]
        return subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)

    lock = FleetLock(data_dir.lock_file)
    assert lock.acquire()
    running = repair("--yes")
    assert running.returncode == 2 and "a fleet runs on it" in running.stderr
    lock.release()
    shown = repair()
    assert shown.returncode == 1 and f"{increment}, byte {command.unit}" in shown.stdout, shown
    assert increment.read_bytes()[command.unit : command.unit + 3] == b"\xff\x00\xfe"
    done = repair("--yes")
    assert done.returncode == 0 and "are kept in" in done.stdout, done
    goes_on(data_dir, numbers[49])
