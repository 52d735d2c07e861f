"""The HTTP API of a real fleet: idempotent writes, streams that go on where they broke, files of a run."""

from __future__ import annotations

import json

import httpx
import pytest
from headrace.client import HeadraceError


@pytest.fixture
def http(fleet):
    with httpx.Client(base_url=fleet.url, headers=fleet.headers, timeout=60, trust_env=False) as client:
        yield client


def test_a_repeated_submission_is_the_same_run(fleet, http, spec_of):
    spec, headers = spec_of(name="once", steps=1), {"Idempotency-Key": "submission-1"}
    first, again = (http.post("/v1/runs", json=spec, headers=headers) for _ in range(2))
    assert (first.status_code, again.status_code) == (201, 201)
    assert first.json()["id"] == again.json()["id"]
    assert first.headers["Idempotency-Key"] == "submission-1"
    other = http.post("/v1/runs", json=spec_of(name="other", steps=1), headers=headers)
    assert (other.status_code, other.json()["reason"]) == (409, "CONFLICT")
    run = fleet.succeed(first.json()["id"])
    after = http.post("/v1/runs", json=spec, headers=headers)
    assert (after.json()["id"], after.json()["state"]) == (run.id, "SUCCEEDED")
    assert [item.id for item in fleet.client.list() if item.id.startswith("once-")] == [run.id]


def events_of(http, path, **headers):
    """(id, type) of a stream's events, and that each line of data says the same."""
    found = []
    with http.stream("GET", path, headers=headers) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        fields = {}
        for line in response.iter_lines():
            if not line and "data" in fields:
                data = json.loads(fields["data"])
                assert (data["id"], data["type"]) == (int(fields["id"]), fields["event"])
                found.append((data["id"], data["type"]))
                fields = {}
            name, _, value = line.partition(": ")
            fields[name] = value
    return found


def test_a_stream_goes_on_after_the_last_event_that_was_seen(fleet, http, spec_of):
    run = fleet.submit(spec_of(steps=2))
    live = events_of(http, f"/v1/runs/{run.id}/events")
    ids, types = zip(*live, strict=True)
    assert list(ids) == sorted(set(ids))
    assert types[0] == "run_submitted" and types[-1] == "run_state_changed"
    assert types.count("step_committed") == 2 and types.count("evaluated") == 2
    assert fleet.client.get(run.id).state == "SUCCEEDED"
    middle = len(live) // 2
    resumed = {"Last-Event-ID": str(ids[middle])}
    assert events_of(http, f"/v1/runs/{run.id}/events", **resumed) == live[middle + 1 :]
    assert events_of(http, f"/v1/runs/{run.id}/events?after={ids[-2]}") == live[-1:]


def test_lists_come_in_pages(fleet, http, spec_of):
    run = fleet.succeed(fleet.submit(spec_of(steps=3)))
    for path, key in (
        ("metrics", "steps"),
        ("certificates", "certificates"),
        ("trajectories", "trajectories"),
    ):
        whole = http.get(f"/v1/runs/{run.id}/{path}?page_size=1000").json()[key]
        paged, token = [], ""
        while True:
            page = http.get(f"/v1/runs/{run.id}/{path}", params={"page_size": 2, "page_token": token}).json()
            assert len(page[key]) <= 2
            paged, token = paged + page[key], page["next_page_token"]
            if not token:
                break
        assert len(whole) >= 3 and paged == whole


def test_what_is_not_there_is_named(fleet, spec_of):
    run = fleet.submit(spec_of(steps=1))
    with pytest.raises(HeadraceError) as refused:
        fleet.client.get(run.id[:-1])
    assert refused.value.status == 404 and run.id in refused.value.message
    fleet.succeed(run)
