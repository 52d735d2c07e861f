"""The timeline: who held which device when, bounded on disk and in an answer."""

import asyncio

import msgspec
from headrace_coordinator.domain import events as ev
from headrace_coordinator.domain import run_states
from headrace_coordinator.domain.intervals import joined
from headrace_coordinator.domain.ledger.slots import SlotLedger
from headrace_coordinator.domain.ledger.versions import Lineage
from headrace_coordinator.domain.runs import RunState
from headrace_coordinator.fleet.fleet import Fleet
from headrace_coordinator.fleet.lease_manager import ENDED_KEPT
from headrace_coordinator.fleet.sessions import FleetSettings
from headrace_coordinator.projections import timeline as under_test
from headrace_coordinator.projections.projection import RunProjection
from headrace_coordinator.projections.timeline import Hold, Part, Span, TimelineFile, read_timeline
from headrace_coordinator.run.step.timer import SPANS_KEPT, StepTimer
from headrace_coordinator.store.event_log import EventLog
from headrace_coordinator.store.memory_store import MemoryStore
from headrace_schema.resources.overviews import HoldView


def part(step, *holds, work=1):
    """A step of ten seconds."""
    spans = [Span("generate", ["h/gpu:0"], 10.0 * step + n / 100, 10.0 * step + 6) for n in range(work)]
    return Part(
        kind="step", step=step, start=10.0 * step, end=10.0 * step + 10, work=spans, holds=list(holds)
    )


def hold(epoch, start, end):
    return Hold(epoch, "rollout-0", "generate", ["h/gpu:0"], start, end, "released")


def test_spans_name_stage_and_devices_and_join_what_overlaps():
    timer = StepTimer(lambda: 9.0)
    timer.add("generate", (0.0, 2.0), ["h/cpu:0", "h/cpu:1"])
    timer.add("learn", (2.0, 3.0), ["h/cpu:1"])
    timer.add("learn", (2.5, 4.0), ["h/cpu:1"])
    timer.add("score", (1.0, 2.5))
    assert timer.spans() == [
        ("generate", ["h/cpu:0", "h/cpu:1"], 0.0, 2.0),
        ("score", [], 1.0, 2.5),
        ("learn", ["h/cpu:1"], 2.0, 4.0),
    ]
    assert timer.devices() == {"h/cpu:0": {"generate": 2.0}, "h/cpu:1": {"generate": 2.0, "learn": 2.0}}


def test_many_spans_close_their_smallest_gaps():
    assert joined([(0, 1), (5, 6), (6.5, 7), (1, 2)], 2) == [(0, 2), (5, 7)]
    timer = StepTimer(lambda: 1e6)
    for n in range(1000):
        timer.add("learn", (float(n), n + 0.5), ["h/cpu:0"])
    assert len(timer.spans()) == SPANS_KEPT
    assert timer.spans()[-1][3] == 999.5


def test_steps_are_counted_and_not_what_comes_between_them(tmp_path):
    projection = RunProjection(tmp_path)
    kinds = ("prepare", "step", "evaluation", "step", "evaluation", "leave")
    for place, kind in enumerate(kinds):
        projection.timeline(msgspec.structs.replace(part(place), kind=kind))
    projection.close()
    newest = read_timeline(tmp_path, 1)
    assert [each.kind for each in newest.parts] == ["step", "evaluation", "leave"] and newest.older
    earlier = read_timeline(tmp_path, 1, before=newest.parts[0].start)
    assert [each.kind for each in earlier.parts] == ["step", "evaluation"] and earlier.older
    assert [each.kind for each in read_timeline(tmp_path, 3).parts] == list(kinds)


def test_the_newest_steps_are_read_with_the_holds_that_overlap_them(tmp_path):
    projection = RunProjection(tmp_path)
    for line in (part(1, hold(1, 1.0, 19.0)), part(2), part(3, hold(2, 19.0, 35.0)), part(4)):
        projection.timeline(line)
    projection.close()
    live = HoldView(epoch=3, instance="t", stage="learn", devices=["h/gpu:0"], start=36.0, end=None, cause="")
    found = read_timeline(tmp_path, 2, live=[live])
    assert [each.step for each in found.parts] == [3, 4]
    assert [(each.epoch, each.end) for each in found.holds] == [(2, 35.0), (3, None)]
    assert [(each.step, each.stage, each.devices) for each in found.work] == [
        (3, "generate", ["h/gpu:0"]),
        (4, "generate", ["h/gpu:0"]),
    ]
    assert found.older
    before = read_timeline(tmp_path, 2, before=found.parts[0].start, live=[live])
    assert [each.step for each in before.parts] == [1, 2]
    assert [each.epoch for each in before.holds] == [1, 2], "a hold that goes on over the page's end is shown"
    assert not before.older


def test_waits_for_tails_are_counted_by_step_and_the_bound_that_ends_them_is_named(tmp_path):
    def waited(step, *waits, stage="wait for tail"):
        spans = [Span(stage, ["h/gpu:1"], 10.0 * step + start, 10.0 * step + end) for start, end in waits]
        return Part(kind="step", step=step, start=10.0 * step, end=10.0 * step + 10, work=spans)

    file = TimelineFile(tmp_path)
    for each in (
        waited(1, (0.0, 3.0), (2.0, 5.0)),  # Two devices of the trainer wait at the same time.
        waited(2, (0.0, 8.0), stage="wait for data"),
        waited(3, (1.0, 4.0)),
    ):
        file.append(each)
    found = read_timeline(tmp_path, 20, max_staleness=1).tail
    assert found is not None
    assert (found.steps, found.waited, found.longest_s, found.enough) == (3, 2, 5.0, 2)
    assert read_timeline(tmp_path, 20).tail is None
    assert read_timeline(tmp_path / "none", 20, max_staleness=1).tail is None


def test_without_a_file_the_live_holds_are_shown(tmp_path):
    live = HoldView(epoch=3, instance="t", stage="learn", devices=["h/gpu:0"], start=36.0, end=None, cause="")
    found = read_timeline(tmp_path, 2, live=[live])
    assert (found.parts, found.work, [each.epoch for each in found.holds]) == ([], [], [3])


def test_the_file_is_bounded_and_a_torn_line_is_left_out(tmp_path):
    file = TimelineFile(tmp_path, file_bytes=2000)
    for step in range(1, 101):
        file.append(part(step))
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 5000
    newest = tmp_path / under_test.NAME
    newest.write_bytes(newest.read_bytes()[:-9])
    TimelineFile(tmp_path, file_bytes=10_000).append(part(101))
    assert [each.step for each in read_timeline(tmp_path, 2).parts] == [99, 101]


def test_an_answer_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(under_test, "MOST_SPANS", 100)
    file = TimelineFile(tmp_path)
    for step in range(1, 9):
        file.append(part(step, work=30))
    found = read_timeline(tmp_path, 200)
    assert [each.step for each in found.parts] == [6, 7, 8]
    assert found.older


def test_each_device_has_one_label_at_any_time(tmp_path):
    """Two rollouts and a trainer of their own devices: one rollout has less to decode, and a reward comes late."""
    line = Part(
        kind="step",
        step=1,
        start=0.0,
        end=10.0,
        work=[
            Span("sync", [], 0.0, 0.5),
            Span("generate", ["h/gpu:0"], 0.5, 6.0),
            Span("generate", ["h/gpu:1"], 0.5, 6.0),
            Span("score", [], 3.0, 6.0),
            Span("learn", ["h/gpu:2"], 6.0, 9.0),
        ],
        rests=[Span("", ["h/gpu:0"], 3.0, 6.0), Span("", ["h/gpu:1"], 5.0, 6.0)],
        holds=[
            Hold(1, "rollout-0", "generate", ["h/gpu:0"], 0.0, 9.0, "released"),
            Hold(2, "rollout-1", "generate", ["h/gpu:1"], 0.0, 10.0, "released"),
            Hold(3, "trainer-0", "learn", ["h/gpu:2"], 0.0, 10.0, "released"),
        ],
    )
    TimelineFile(tmp_path).append(line)
    found = read_timeline(tmp_path, 1, labels=True).labels
    spent = {}
    for span in found:
        for device in span.devices:
            spent.setdefault(device[-1], []).append((span.start, span.end, span.stage, span.label))
    assert spent["0"] == [
        (0.0, 0.5, "sync", "sync"),
        (0.5, 3.0, "generate", "decode"),
        (3.0, 5.0, "generate", "wait for tail"),
        (5.0, 6.0, "score", "wait for reward"),
        (6.0, 9.0, "generate", "wait for data"),
        (9.0, 10.0, "-", "wait for lease"),
    ]
    assert [row[2:] for row in spent["2"]] == [
        ("sync", "sync"),
        ("learn", "wait for data"),
        ("learn", "train"),
        ("learn", "wait for data"),
    ]
    assert sum(end - start for rows in spent.values() for start, end, *_ in rows) == 30.0
    assert [(span.stage, span.label, span.start, span.end) for span in found if not span.devices] == [
        ("score", "work", 3.0, 6.0)
    ]
    assert {span.instance for span in found if span.label == "train"} == {"trainer-0"}
    assert read_timeline(tmp_path, 1).labels == []


def test_prefill_is_taken_out_of_decode_where_it_is_measured(tmp_path):
    work = [
        Span("generate", ["h/gpu:0"], 0.0, 8.0),
        Span("prefill", ["h/gpu:0"], 0.0, 2.0),
        Span("prefill", ["h/gpu:0"], 5.0, 5.5),
    ]
    TimelineFile(tmp_path).append(Part(kind="step", step=1, start=0.0, end=8.0, work=work))
    found = read_timeline(tmp_path, 1, labels=True).labels
    assert [(span.start, span.end, span.stage, span.label) for span in found] == [
        (0.0, 2.0, "prefill", "prefill"),
        (2.0, 5.0, "generate", "decode"),
        (5.0, 5.5, "prefill", "prefill"),
        (5.5, 8.0, "generate", "decode"),
    ]


def test_a_device_that_changes_hands_is_labelled_switch(tmp_path):
    """Collocated: what no device is timed on counts for all of them, and a checkpoint is work."""
    both = ["h/cpu:0", "h/cpu:1"]
    work = [
        Span("generate", both, 0.0, 4.0),
        Span("switch", [], 4.0, 5.0),
        Span("learn", both, 5.0, 8.0),
        Span("checkpoint", [], 8.0, 9.0),
    ]
    holds = [
        Hold(1, "r", "generate", both, 0.0, 4.5, "released"),
        Hold(2, "t", "learn", both, 4.5, 9.0, "released"),
    ]
    TimelineFile(tmp_path).append(Part(kind="step", step=1, start=0.0, end=9.0, work=work, holds=holds))
    found = read_timeline(tmp_path, 1, labels=True).labels
    assert [(span.label, span.instance, span.devices) for span in found] == [
        ("decode", "r", both),
        ("switch", "r", both),
        ("switch", "t", both),
        ("train", "t", both),
        ("work", "t", both),
    ]


def test_a_rollout_that_waits_for_scores_generates_nothing():
    timer = StepTimer(lambda: 9.0)
    timer.add("generate", (0.0, 6.0), ["h/cpu:0"])
    timer.add("generate", (0.0, 6.0), ["h/cpu:1"])
    timer.add("score", (1.0, 6.0))
    timer.rested((2.0, 3.0), ["h/cpu:0"])
    timer.rested((5.0, 6.0), ["h/cpu:0"])
    timer.rested((1.0, 6.0), ["h/cpu:1"])
    assert timer.stages() == {"generate": 4.0, "score": 5.0, "protocol": 0.0}
    assert timer.devices() == {"h/cpu:0": {"generate": 4.0}, "h/cpu:1": {"generate": 1.0}}
    assert timer.worked("generate") == 2.5
    assert max(end for stage, _, _, end in timer.spans() if stage == "generate") == 5.0
    assert timer.rests() == [
        ("", ["h/cpu:1"], 1.0, 6.0),
        ("", ["h/cpu:0"], 2.0, 3.0),
        ("", ["h/cpu:0"], 5.0, 6.0),
    ]
    timer.restart()
    assert timer.rests() == []


def test_a_device_that_waits_for_a_scorer_is_charged_to_the_score_stage(tmp_path):
    """Though its rollout holds the lease to generate, and its stream of work is open."""
    line = Part(
        kind="step",
        step=1,
        start=0.0,
        end=8.0,
        work=[Span("generate", ["h/gpu:0"], 0.0, 1.0), Span("score", [], 1.0, 8.0)],
        rests=[Span("", ["h/gpu:0"], 1.0, 8.0)],
        holds=[Hold(1, "rollout-0", "generate", ["h/gpu:0"], 0.0, 8.0, "released")],
    )
    TimelineFile(tmp_path).append(line)
    found = [each for each in read_timeline(tmp_path, 1, labels=True).labels if each.devices]
    assert [(each.start, each.end, each.stage, each.label) for each in found] == [
        (0.0, 1.0, "generate", "decode"),
        (1.0, 8.0, "score", "wait for reward"),
    ]


def run_of(name, state):
    return RunState(
        id=name,
        spec={"rollout": {"engine": "transformers"}},
        directory="",
        state=state,
        created_at=0.0,
        ledger=SlotLedger(1, 1),
        lineage=Lineage(),
    )


async def test_ended_leases_wait_for_the_timeline_of_a_run_that_goes_on(monkeypatch):
    event_log = EventLog(MemoryStore(), lambda: 50.0, lambda: 0.0)
    await event_log.open("test", None)
    fleet = Fleet(event_log, lambda kind, address, incarnation: None, FleetSettings())
    event_log.state.runs |= {
        "r": run_of("r", run_states.RUNNING),
        "over": run_of("over", run_states.SUCCEEDED),
    }
    manager = fleet.lease_manager
    for epoch in range(1, ENDED_KEPT + 4):
        run = "over" if epoch == 1 else "r"
        event_log.post(
            ev.LeaseGranted(at=7, epoch=epoch, incarnation="a", run=run, stage="learn", devices=["h/cpu:0"])
        )
        manager.released("a", epoch)
    await asyncio.sleep(0)
    ended = manager.take_ended("r")
    assert len(ended) == ENDED_KEPT
    lease, end, cause = ended[-1]
    assert (lease.epoch, lease.since, lease.devices, end, cause) == (
        ENDED_KEPT + 3,
        7,
        ["h/cpu:0"],
        50.0,
        "released",
    )
    assert manager.take_ended("r") == []
    assert manager.take_ended("over") == []
