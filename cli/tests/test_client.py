"""The Python client against a scripted coordinator: what it sends, makes of answers, and survives."""

from __future__ import annotations

import doctest
import json
import threading
import time

import headrace.client.errors
import headrace.client.specs
import headrace.client.transport
import pytest
from headrace.client import Client, HeadraceError, Run
from headrace.client.specs import CHECK_S, checking_s


@pytest.fixture
def client(coordinator):
    with Client(coordinator.url, "secret", patience_s=0) as made:
        yield made


@pytest.mark.parametrize("module", ["errors", "specs", "transport"])
def test_docstring_examples_hold(module):
    result = doctest.testmod(getattr(headrace.client, module))
    assert result.attempted and not result.failed


def test_submit_sends_spec_token_and_key(client, coordinator, scripted_run):
    scripted_run()
    run = client.submit({"name": "mine", "optimizer": {"lr": 1}}, {"optimizer.lr": 2}, idempotency_key="k-1")
    (got,) = coordinator.requests("POST /v1/runs")
    assert run.id == "r-1" and run.spec == {"name": "mine", "optimizer": {"lr": 2}} == got.body
    assert got.headers["authorization"] == "Bearer secret"
    assert got.headers["idempotency-key"] == "k-1"


def test_resources_are_lenient():
    run = Run.from_json({"id": "r", "policy": None, "counts": {"trained": 2, "brand_new": 1}, "brand_new": 5})
    assert (run.counts.trained, run.policy, run.raw["brand_new"]) == (2, None, 5)
    assert (run.counts.dropped, run.waiting_for, run.ended) == (0, [], False)


def test_figures_that_nobody_measured_are_none(client, coordinator):
    coordinator.routes["GET /v1/runs/r-1/metrics"] = (200, {"steps": [{"step": 1, "reward_mean": None}]})
    assert client.metrics("r-1")[0].reward_mean is None


def test_lists_follow_pages(client, coordinator):
    def page(got):
        if "page_token" not in got.query:
            return 200, {"runs": [{"id": "b"}], "next_page_token": "t"}
        assert got.query["page_token"] == ["t"]
        return 200, {"runs": [{"id": "a"}], "next_page_token": ""}

    coordinator.routes["GET /v1/runs"] = page
    assert [run.id for run in client.list()] == ["b", "a"]


def test_refusals_carry_reason_and_keys(client, coordinator):
    problem = {"key": "steps", "problem": "must be above 0", "fix": "the nearest valid value is 1"}
    coordinator.routes["POST /v1/runs"] = (422, {"reason": "INVALID", "message": "no", "problems": [problem]})
    with pytest.raises(HeadraceError) as caught:
        client.submit({"steps": 0})
    assert caught.value.reason == "INVALID" and caught.value.is_user_error
    assert [(p.key, p.fix) for p in caught.value.problems] == [("steps", "the nearest valid value is 1")]


def test_other_bodies_become_errors_too(client, coordinator):
    coordinator.routes["GET /v1/runs/r"] = (502, ["a proxy"])
    with pytest.raises(HeadraceError) as caught:
        client.get("r")
    assert caught.value.reason == "HTTP_502" and not caught.value.is_user_error


def test_unreachable_is_an_error_at_once_without_patience(free_port):
    client = Client(f"http://127.0.0.1:{free_port}", patience_s=0)
    with pytest.raises(HeadraceError, match=f"no coordinator answers at http://127.0.0.1:{free_port}"):
        client.list()
    assert client.healthy() is False


def test_broken_write_is_repeated_with_its_key(coordinator, scripted_run):
    run = scripted_run()
    keys = []

    def breaks_once(got):
        keys.append(got.headers["idempotency-key"])
        if len(keys) == 1:
            raise ConnectionAbortedError("the answer is lost")
        return run.submit(got)

    coordinator.routes["POST /v1/runs"] = breaks_once
    with Client(coordinator.url, patience_s=10) as client:
        assert client.submit({"name": "once"}).id == "r-1"
    assert len(keys) == 2 and keys[0] == keys[1]


def test_a_call_that_is_not_possible_yet_is_repeated_with_its_key(coordinator, scripted_run):
    run, keys = scripted_run(), []

    def busy_once(got):
        keys.append(got.headers["idempotency-key"])
        if len(keys) == 1:
            return 503, {"reason": "UNAVAILABLE", "message": "its instances register"}, {"Retry-After": "0"}
        return run.submit(got)

    coordinator.routes["POST /v1/runs"] = busy_once
    with Client(coordinator.url, patience_s=0) as client:
        assert client.submit({"name": "once"}).id == "r-1"
    assert len(keys) == 2 and keys[0] == keys[1]


@pytest.mark.parametrize("after", [{}, {"Retry-After": "3600"}], ids=["never", "too_late"])
def test_a_call_that_will_not_be_possible_soon_is_an_error_at_once(coordinator, after):
    coordinator.routes["POST /v1/runs"] = (
        503,
        {"reason": "UNAVAILABLE", "message": "the store is away"},
        after,
    )
    with Client(coordinator.url, patience_s=0) as client, pytest.raises(HeadraceError, match="store is away"):
        client.submit({"name": "once"})
    assert len(coordinator.requests("POST /v1/runs")) == 1


def test_a_coordinator_that_is_slow_is_not_called_absent(coordinator):
    coordinator.routes["POST /v1/runs"] = lambda got: time.sleep(0.6)
    with (
        Client(coordinator.url, timeout_s=0.2, patience_s=0) as client,
        pytest.raises(
            HeadraceError, match=r"does not answer POST /v1/runs/r:pause.*idempotency key"
        ) as caught,
    ):
        coordinator.routes["POST /v1/runs/r:pause"] = lambda got: time.sleep(0.6)
        client.pause("r")
    assert caught.value.reason == "DEADLINE_EXCEEDED"
    while not (seen := coordinator.requests("POST /v1/runs/r:pause")):
        time.sleep(0.01)  # the server's thread may be behind
    (got,) = seen
    assert got.headers["idempotency-key"] in caught.value.message


def test_a_submission_waits_while_scorers_are_loaded(coordinator, scripted_run):
    run = scripted_run()

    def slow(got):
        time.sleep(0.6)
        return run.submit(got)

    coordinator.routes["POST /v1/runs"] = slow
    with Client(coordinator.url, timeout_s=0.2, patience_s=0) as client:
        assert client.submit({"name": "once"}).id == "r-1"
    assert len(coordinator.requests("POST /v1/runs")) == 1
    scorers = {"scorers": [{"name": "exact"}] * 2, "load_timeout_s": 300, "timeout_s": 10}
    assert checking_s({"reward": scorers}) == 2 * 310 + CHECK_S


def sse(*ids: int) -> str:
    lines = ["retry: 1000\n\n: alive\n\n"]
    for number in ids:
        event = {"id": number, "type": "step", "time": 1.0, "run": "runs/r", "data": {"n": number}, "new": 1}
        lines.append(f"id: {number}\nevent: step\ndata: {json.dumps(event)}\n\n")
    return "".join(lines)


def test_events_go_on_where_the_stream_broke(client, coordinator):
    asked = []

    def stream(got):
        asked.append(got.headers["last-event-id"])
        return 200, {1: sse(1, 2) + "id: 3\ndata: {", 2: sse(2, 3)}.get(len(asked), sse(4))

    coordinator.routes["GET /v1/runs/r/events"] = stream
    coordinator.routes["GET /v1/runs/r"] = lambda got: (
        200,
        {"id": "r", "state": "RUNNING" if len(asked) < 2 else "SUCCEEDED"},
    )
    assert [event.id for event in client.events("r")] == [1, 2, 3, 4]
    assert asked == ["0", "2", "3"]


def test_events_outlive_a_coordinator_that_is_away(coordinator):
    coordinator.routes["GET /v1/runs/r"] = (200, {"id": "r", "state": "SUCCEEDED"})
    calls = []

    def stream(got):
        calls.append(1)
        if len(calls) < 3:
            raise ConnectionAbortedError
        return 200, sse(1)

    coordinator.routes["GET /v1/runs/r/events"] = stream
    with Client(coordinator.url, patience_s=20) as client:
        assert [event.id for event in client.events("r")] == [1]


def test_wait_says_what_is_waited_for(client, coordinator):
    view = {"name": "runs/r", "id": "r", "state": "RUNNING", "step": 3, "waiting_for": ["a lease on cpu:0"]}
    coordinator.routes["GET /v1/runs/r"] = (200, view)
    with pytest.raises(HeadraceError, match=r"runs/r is RUNNING .* at step 3: a lease on cpu:0") as caught:
        client.wait("r", timeout=0.1)
    assert caught.value.reason == "DEADLINE_EXCEEDED"


def test_wait_returns_the_end(client, coordinator):
    coordinator.routes["GET /v1/runs/r"] = (200, {"id": "r", "state": "RUNNING"})

    def end() -> None:
        time.sleep(0.3)
        coordinator.routes["GET /v1/runs/r"] = (200, {"id": "r", "state": "FAILED"})

    threading.Thread(target=end).start()
    assert client.wait("runs/r", timeout=10).state == "FAILED"


def test_steering_and_scaling(client, coordinator):
    for verb in ("pause", "resume", "cancel"):
        coordinator.routes[f"POST /v1/runs/r:{verb}"] = (200, {"id": "r", "state": verb.upper()})
    coordinator.routes["POST /v1/services/rollout:scale"] = lambda got: (200, {"kind": "rollout", **got.body})
    assert client.pause("r", now=True).state == "PAUSE"
    assert coordinator.requests("POST /v1/runs/r:pause")[0].query == {"now": ["true"]}
    assert (client.resume("r").state, client.cancel("r").state) == ("RESUME", "CANCEL")
    coordinator.routes["POST /v1/runs/r:set"] = lambda got: (
        200,
        {"id": "r", "wanted_ranks": got.body["trainer"]["ranks"]},
    )
    assert client.set("r", {"trainer.ranks": 2}).wanted_ranks == 2
    assert client.set("r", ["trainer.ranks=3"]).wanted_ranks == 3
    assert client.scale("rollout", 3) == 3
    drained = {"instance": "rollout-0", "incarnation": "i1"}
    coordinator.routes["POST /v1/instances/rollout-0:drain"] = (200, drained)
    assert client.drain("rollout-0") == "i1"


def test_trajectories_by_step_and_limit(client, coordinator):
    found = [{"step": 2, "prompt_ordinal": n, "completion": "8"} for n in range(5)]
    coordinator.routes["GET /v1/runs/r/trajectories"] = (200, {"trajectories": found})
    assert [item.prompt_ordinal for item in client.trajectories("r", step=2, limit=3)] == [0, 1, 2]
    assert coordinator.requests("GET /v1/runs/r/trajectories")[0].query["step"] == ["2"]
