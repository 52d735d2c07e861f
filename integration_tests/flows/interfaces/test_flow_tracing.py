"""Traces of a real fleet: one a step, with its stages, its calls and the lives of its trajectories."""

from collections import defaultdict

import pytest
from harness.processes import free_port
from harness.services.collector import Collector, attributes
from harness.waiting import wait_for

STEPS = 3


@pytest.mark.nightly  # quick: test_kit_tracing.py
def test_each_step_is_a_trace_across_all_services(own_fleet, spec_of):
    steps = [f"step {number}" for number in range(1, STEPS + 1)]
    with Collector() as collector:
        with own_fleet(HEADRACE_OTLP_ENDPOINT=collector.endpoint) as fleet:
            run = fleet.succeed(fleet.submit(spec_of(steps=STEPS)))
        # Each process has sent its last spans when it has ended.
    traces = defaultdict(list)
    for service, span in collector.spans:
        traces[span.trace_id].append((service, span))
    found = {}
    for spans in traces.values():
        (root,) = [span for _, span in spans if not span.parent_span_id]
        if root.name.startswith("step "):
            assert root.name not in found, "one trace a step"
            found[root.name] = root, [each for each in spans if each[1] is not root]
    assert sorted(found) == steps
    for root, spans in found.values():
        assert attributes(root)["headrace.run"] == run.id
        stages = {span.name for service, span in spans if service == "headrace-coordinator"}
        assert {"generate", "score", "learn", "trajectory"} <= stages
        calls = {(service, span.name.rpartition("/")[2]) for service, span in spans if "/" in span.name}
        assert {
            ("headrace-rollout", "Generate"),
            ("headrace-trainer", "Learn"),
            ("headrace-trainer", "CommitStep"),
        } <= calls
        assert {span.parent_span_id for _, span in spans} == {root.span_id}
        lives = [span for _, span in spans if span.name == "trajectory"]
        assert lives and len({attributes(life)["headrace.slot"] for life in lives}) == len(lives)
        for life in lives:
            times = [event.time_unix_nano for event in life.events]
            assert [event.name for event in life.events] == ["finished", "settled", "learned"]
            assert [life.start_time_unix_nano, *times] == sorted([life.start_time_unix_nano, *times])
    calls = {(service, span.name.rpartition("/")[2]) for service, span in collector.spans}
    assert ("headrace-reward", "Score") in calls, "in the trace of the evaluation, whose stream goes on"
    posts = [span for _, span in collector.spans if span.name == "POST /v1/runs"]
    assert posts and any(span.parent_span_id == posts[0].span_id for _, span in collector.spans), (
        "the calls of a submission are in its trace"
    )


@pytest.mark.nightly
def test_a_collector_that_is_away_costs_no_step_and_is_told_of_once(own_fleet, spec_of):
    with own_fleet(HEADRACE_OTLP_ENDPOINT=f"http://127.0.0.1:{free_port()}") as fleet:
        fleet.succeed(fleet.submit(spec_of(steps=2)))
        log = fleet.data_dir / "logs" / "coordinator.log"
        wait_for(lambda: "traces are not delivered" in log.read_text(), "the coordinator to tell of it")
        assert log.read_text().count("traces are not delivered") == 1
