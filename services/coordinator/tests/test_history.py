"""Histories in files over a real store: nothing missing or doubled over trims, restarts, kills and damage; pages."""

import asyncio
import sqlite3

import pytest
from headrace_coordinator.domain import events as ev
from headrace_coordinator.domain.state import snapshot
from headrace_coordinator.run.checkpointing import ledger_of, missing_steps, read_ledger
from headrace_coordinator.store import history as history_module
from headrace_coordinator.store.history import History
from headrace_coordinator.store.redis_store import RedisStore
from headrace_coordinator.store.run_files import RunFiles
from headrace_schema.changing import RunLabels
from history_parts import Opened, committed, ended, restored, submitted, train


@pytest.fixture
async def opened(server, tmp_path):
    made = []

    async def start():
        made.append(await Opened.on(server, tmp_path))
        return made[-1]

    yield start
    for each in made:
        await each.kill()


async def test_a_stream_has_every_event_once_after_snapshots_and_restarts(opened, server, tmp_path):
    one = await opened()
    one.event_log.post(submitted(), restored(1))
    await train(one.event_log, 50)
    await one.snapshot()
    assert await RedisStore(server.url)._redis.xlen("headrace:log") < 10
    assert len(list(one.event_log.history._tails["r"])) == 0
    await train(one.event_log, 10, 50)
    await one.kill()
    two = await opened()
    await train(two.event_log, 10, 60)
    two.event_log.post(*ended())
    await two.event_log.flush()
    ids = await two.events()
    await two.event_log.history.write()
    with RunFiles.opened(tmp_path / "runs/r/history") as files:
        kinds = [type(event) for _, event in files.after(-1, 10**6, 10**9)]
    assert ids == sorted(set(ids)) and len(ids) == 1 + 1 + 70 + 1 + 2
    assert kinds.count(ev.StepCommitted) == 70
    assert await two.events(after=ids[40]) == ids[41:]
    assert two.event_log.state.runs["r"].totals.tally.trained == 280


async def test_a_follower_gets_what_comes_while_files_are_written(opened, monkeypatch):
    monkeypatch.setattr(history_module, "LINGER_S", 0.0)
    one = await opened()
    one.event_log.post(submitted(), restored(1))
    following = [asyncio.create_task(one.events()) for _ in range(3)]
    for step in range(300):
        one.event_log.post(committed(step))
        if step % 7 == 0:
            await one.event_log.flush()
    one.event_log.post(*ended())
    found = await asyncio.wait_for(asyncio.gather(*following), 30)
    assert found[0] == sorted(set(found[0])) and len(found[0]) == 304
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("damage", ["unwritten", "torn", "garbage"])
async def test_what_a_crash_left_of_the_files_is_made_whole_from_the_store(opened, tmp_path, damage):
    one = await opened()
    one.event_log.post(submitted(), restored(1))
    await train(one.event_log, 20)
    await one.snapshot()
    await train(one.event_log, 20, 20)
    await one.event_log.history.write()
    await one.kill()
    directory = tmp_path / "runs/r/history"
    path = directory / "events.sqlite3"
    data = path.read_bytes()
    match damage:
        case "unwritten":
            with sqlite3.connect(path) as database:
                (number,) = database.execute(
                    "SELECT number FROM events WHERE CAST(data AS TEXT) LIKE '%before the snapshot%'"
                ).fetchone()
                database.execute("DELETE FROM events WHERE number > ?", (number,))
        case "torn":
            path.write_bytes(data[:-5000])
        case "garbage":
            path.write_bytes(data[:-3000] + b"\xa5" * 3000)
    two = await opened()
    await train(two.event_log, 5, 40)
    two.event_log.post(*ended())
    await two.event_log.flush()
    assert len(await two.events()) == 1 + 1 + 1 + 45 + 2
    shown, more = await two.coordinator.past.certificates("r", 100)
    latest, place = await two.coordinator.past.certificates("r", 2, 2**63 - 1, newest=True)
    assert latest == shown[:-3:-1] and place is not None
    rest, _ = await two.coordinator.past.certificates("r", 100, place, newest=True)
    assert rest == shown[-3::-1]
    assert [view.step for view in shown] == list(range(1, 46)) and more is None


async def test_a_kill_between_segment_and_trim_repeats_nothing(opened, monkeypatch):
    one = await opened()
    one.event_log.post(submitted(), restored(1))
    await train(one.event_log, 30)

    async def never(*_):
        await asyncio.Event().wait()

    monkeypatch.setattr(one.event_log._store, "save_snapshot", never)
    one.event_log._since_snapshot = 10**9
    one.event_log.post(ev.Noted(at=0, run="r", text="x"))
    await one.event_log.flush()
    async with asyncio.timeout(10):
        while one.event_log.history.backlog:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await one.kill()
    two = await opened()
    two.event_log.post(*ended())
    await two.event_log.flush()
    assert len(await two.events()) == 1 + 1 + 30 + 1 + 2


async def test_pages_equal_the_whole_list_at_every_offset_over_rewinds(opened):
    one = await opened()
    one.event_log.post(submitted(), restored(1))
    await train(one.event_log, 12)
    for step, ordinal in ((0, 0), (4, 4), (8, 8)):
        view = {
            "kind": "heldout",
            "step": ordinal,
            "version": step + 1,
            "score": 0.5,
            "parts": {},
            "answers": 1,
        }
        one.event_log.post(ev.Evaluated(at=0, run="r", view=view | {"examples": []}))
    kept = await one.event_log.history.kept("r", 6)
    assert kept.counts[:2] == (24, 0) and kept.last_step["step"] == 6
    one.event_log.post(restored(100, 7, 6, 6, kept), committed(6, 101, 100), committed(7, 102, 101))
    one.event_log.post(ev.StepSkipped(at=0, run="r", step=8, dropped={"X": [(16, 0, 0, 2, 2)]}))
    kept = await one.event_log.history.kept("r", 3)
    one.event_log.post(restored(200, 4, 3, 3, kept), committed(3, 201, 200), committed(4, 202, 201))
    await one.event_log.flush()
    run = one.event_log.state.runs["r"]
    assert (run.totals.tally.trained, run.totals.tally.duplicates, run.totals.tally.missing) == (20, 0, 0)
    whole = {}
    for name in ("steps", "certificates", "evaluations"):
        whole[name], more = await getattr(one.coordinator.past, name)("r", 1000)
        assert more is None
    assert [view.version for view in whole["steps"]] == [2, 3, 4, 201, 202]
    assert [view.step for view in whole["evaluations"]] == [0]
    live = {view.version.number for view in whole["certificates"] if view.live}
    assert len(whole["certificates"]) == 16 and live == {2, 3, 4, 201, 202}
    for name, views in whole.items():
        for size in (1, 2, 3, 7):
            found, after = [], -1
            while after is not None:
                page, after = await getattr(one.coordinator.past, name)("r", size, after)
                found += page
            assert repr(found) == repr(views), (name, size)


async def test_curves_and_summaries_show_the_live_lineage_thinned_out(opened):
    one = await opened()
    one.event_log.post(submitted(), restored(1))
    await train(one.event_log, 12)
    whole = await one.coordinator.past.curves("r", 100)
    assert whole.steps == list(range(1, 13)) and whole.total == 12 and whole.rewinds == []
    assert whole.series["train/reward"] == [0.5] * 12 and whole.series["trainer/loss"] == [None] * 12
    few = await one.coordinator.past.curves("r", 4)
    assert len(few.steps) == 4 and few.steps[-1] == 12 and few.steps == sorted(set(few.steps))
    newest = await anext(one.coordinator.past.events("r", whole.event - 1))
    assert (newest.id, newest.type, newest.data["view"]["step"]) == (whole.event, "step_committed", 12)
    (shown,), more, total = await one.coordinator.reads.summaries(10, "", frozenset(), "R")
    assert (shown.step, shown.reward_mean, shown.rewards, more, total) == (12, 0.5, [0.5] * 12, None, 1)
    asked = ["steps", "scores.heldout", "no.such"]
    (shown,), _, _ = await one.coordinator.reads.summaries(10, "", frozenset(), "", asked)
    assert shown.values["steps"] == shown.steps and "no.such" not in shown.values
    for states, search in (({"PAUSED"}, ""), (set(), "other")):
        assert await one.coordinator.reads.summaries(10, "", frozenset(states), search) == ([], None, 0)
    kept = await one.event_log.history.kept("r", 3)
    one.event_log.post(restored(100, 4, 3, 3, kept, recovery=True), committed(3, 101, 100))
    await one.event_log.flush()
    rewound = await one.coordinator.past.curves("r", 100)
    assert rewound.steps == [1, 2, 3, 4] and [each.step for each in rewound.rewinds] == [3]
    (shown,), _, _ = await one.coordinator.reads.summaries(10, "", frozenset(), "")
    assert len(shown.rewards) == 4
    one.event_log.post(restored(110, 101, 4, 4, kept))
    await one.event_log.flush()
    yielded = await one.coordinator.past.curves("r", 100)
    assert yielded.rewinds == rewound.rewinds, "a run that yielded and goes on has not recovered"


async def test_labels_survive_a_restart_and_a_tag_is_found(opened):
    one = await opened()
    one.event_log.post(submitted(), restored(1))
    label = one.coordinator.run_changes.label
    await label("r", RunLabels(tags=["paper", "paper"], note="old"), "k1")
    assert (await label("r", RunLabels(note="new"), "k2")).tags == ["paper"]
    await one.kill()
    reads = (await opened()).coordinator.reads
    (shown,), _, _ = await reads.summaries(10, "", frozenset(), "PAPER")
    assert (shown.id, shown.tags, shown.note) == ("r", ["paper"], "new")
    assert await reads.summaries(10, "", frozenset(), "draft") == ([], None, 0)


async def test_the_newest_events_come_first_in_pages_and_without_slots(opened):
    one = await opened()
    one.event_log.post(submitted(), restored(1))
    await train(one.event_log, 400)
    one.event_log.post(*ended())
    await one.event_log.flush()
    whole, before = [], 2**63 - 1
    while before is not None:
        page, before = await one.coordinator.past.newest_events("r", 37, before)
        whole += page
    assert [event.id for event in whole] == (await one.events())[::-1]
    assert [event.type for event in whole[:3]] == ["run_state_changed", "run_state_changed", "step_committed"]
    assert whole[2].data["certificate"]["trained"] == 4


async def test_a_run_that_has_ended_leaves_memory_and_reads_the_same(opened, tmp_path):
    one = await opened()
    one.event_log.post(submitted(), restored(1))
    await train(one.event_log, 10)
    one.event_log.post(ev.CheckpointSaved(at=0, run="r", name="c", number=11), *ended())
    await one.event_log.flush()
    before, ids = one.coordinator.reads.run("r"), await one.events()
    before = before.model_copy(update={"run_directory": str(tmp_path / "runs/r")})
    await one.coordinator.archive.once()
    each = one
    for again in (False, True):
        if again:
            await one.kill()
            each = await opened()
        assert "r" not in each.event_log.state.runs and each.event_log.history.backlog == 0
        assert repr(each.coordinator.reads.run("r")) == repr(before) and await each.events() == ids
        assert len((await each.coordinator.past.certificates("r", 100))[0]) == 10
        (checkpoint,) = await each.coordinator.past.checkpoints("r")
        assert (checkpoint.name, checkpoint.version.ordinal) == ("c", 10)
        shown, _more = each.coordinator.reads.runs(10)
        assert [view.id for view in shown] == ["r"] and each.coordinator.reads.run_states() == {
            "CANCELLED": 1
        }


async def test_a_disk_that_refuses_is_shown_and_loses_nothing(opened, monkeypatch):
    one = await opened()
    one.event_log.post(submitted(), restored(1))
    await train(one.event_log, 5)
    append = RunFiles.append

    def full(self, items):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(RunFiles, "append", full)
    monkeypatch.setattr(history_module, "RETRY_S", 0.02)
    await train(one.event_log, 5, 5)
    async with asyncio.timeout(10):
        while not one.event_log.history.trouble:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert "No space left" in " ".join(one.coordinator.reads.run("r").waiting_for)
    monkeypatch.setattr(RunFiles, "append", append)
    one.event_log.post(*ended())
    await one.event_log.flush()
    assert len(await one.events()) == 1 + 1 + 10 + 2


async def test_a_checkpoints_ledger_holds_the_steps_since_the_oldest_kept_one(opened):
    one = await opened()
    one.event_log.post(submitted(), restored(1))
    await train(one.event_log, 40)
    for number in (11, 31):
        one.event_log.post(ev.CheckpointSaved(at=0, run="r", name=f"c{number}", number=number))
    await one.event_log.flush()
    ledger = read_ledger(await ledger_of(one.event_log, "r"))
    numbers = [step.certificate.number for step in missing_steps(ledger, range(36))]
    assert numbers == [36, 37, 38, 39, 40, 41]
    assert next(step.certificate.number for step in missing_steps(ledger, range(0))) == 11


async def test_memory_does_not_rise_with_steps(opened):
    one = await opened()
    one.event_log.post(submitted(), restored(1))
    for part in range(20):
        await train(one.event_log, 100, 100 * part)
        await one.event_log.history.write()
        assert one.event_log.history.backlog < 50
    assert len(snapshot(one.event_log.state)) < 10_000


async def test_a_snapshot_is_saved_while_something_is_always_pending(opened, server):
    one = await opened()
    one.event_log.post(submitted(), restored(1))
    append = one.event_log._store.append

    async def slow(*arguments):
        one.event_log.post(ev.NumberBurnt(at=0, run="r", number=1))
        await append(*arguments)

    one.event_log._store.append = slow
    one.event_log._since_snapshot = 10**9
    one.event_log.post(ev.NumberBurnt(at=0, run="r", number=1))
    async with asyncio.timeout(20):
        while not (await RedisStore(server.url).load()).snapshot:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def test_what_is_written_while_its_reader_is_cancelled_is_there_once(tmp_path):
    written, go = asyncio.Event(), asyncio.Event()

    async def thread(work, *arguments):
        result = work(*arguments)
        written.set()
        await go.wait()
        return result

    history = History(tmp_path, thread)
    event = ev.Noted(at=0, run="r", text="once")
    history.extend([("r", 1, event, ev.encode(event))])
    reader = asyncio.create_task(history.read("r", len))
    await written.wait()
    reader.cancel()
    await asyncio.gather(reader, return_exceptions=True)
    go.set()
    await history.write()
    assert await history.page("r", 0) == [(1, event)] and not history.backlog
