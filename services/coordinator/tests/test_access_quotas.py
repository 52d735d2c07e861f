"""Quotas, fair share and priorities of users and teams, and what is used."""

import admission_parts as parts
import pytest
from access_parts import submitted
from headrace_coordinator.domain import events as ev
from headrace_coordinator.domain import quotas
from headrace_coordinator.domain.devices.scheduling import plan_admission
from headrace_coordinator.domain.state import State, restore, snapshot

DAY, HOUR = 86400.0, 3600.0


def submit(state: State, run: str, owner: str, team: str = "", at: float = 0.0, **scheduling):
    spec = parts.spec(**scheduling)
    state.apply(ev.RunSubmitted(at=at, run=run, spec=spec, directory=f"/{run}", owner=owner, team=team))
    return state.runs[run]


def hosts(count: int) -> State:
    """A fleet of so many hosts, each with what a run needs and devices of its own."""
    state = parts.fleet(rollouts=0, trainers=0)
    for number in range(count):
        for kind in ("rollout", "trainer"):
            member = parts.instance(kind, number, host=f"host{number}")
            state.instances[member.incarnation] = member
    return state


def release(state: State, run: str, at: float) -> None:
    """A run gives back what it holds, and queues again."""
    state.apply(ev.RunReleased(at=at, run=run))
    state.apply(ev.RunStateChanged(at=at, run=run, state="QUEUED", reason=""))


def limit(state: State, subject: str, **limits: float) -> None:
    state.apply(ev.QuotaSet(at=0, subject=subject, limits=limits))


def order(state: State, now: float) -> list[str]:
    return [*plan_admission(state, now).waiting]


# --- fair share


def test_teams_come_before_users_and_users_before_runs():
    """A team that has used less goes first, however many runs and users the other one has."""
    state = parts.fleet()
    submit(state, "busy", "ann", "nlp")
    parts.admit_all(state, 1.0)
    for number in range(3):
        submit(state, f"nlp-{number}", f"user{number}", "nlp", at=2.0)
    submit(state, "vla-0", "cho", "vla", at=3.0)
    assert order(state, 50.0)[0] == "vla-0", "its team has used least, though it came last"
    release(state, "busy", 1000.0)
    parts.admit_all(state, 1000.0)
    assert state.runs["vla-0"].grant is not None and state.runs["busy"].grant is None


def test_one_user_s_many_runs_have_no_more_than_another_s_one():
    state = parts.fleet()
    submit(state, "a-0", "ann", "nlp")
    submit(state, "b-0", "ben", "nlp", at=0.5)
    submit(state, "a-1", "ann", "nlp", at=0.2)
    parts.admit_all(state, 1.0)
    assert state.runs["a-0"].grant is not None
    assert order(state, 30.0) == ["b-0", "a-1"], "ann has used the devices"


def test_who_has_no_team_is_one_by_himself():
    state = parts.fleet()
    submit(state, "busy", "ann")
    parts.admit_all(state, 1.0)
    submit(state, "a-1", "ann", at=1.5)
    submit(state, "c-0", "cho", at=2.0)
    assert order(state, 30.0) == ["c-0", "a-1"]


def test_time_away_gives_no_claim():
    """A team that comes back starts at the least of the others, and not at what it had used long ago."""
    state = parts.fleet()
    submit(state, "busy", "ann", "nlp")
    parts.admit_all(state, 0.0)
    submit(state, "late", "cho", "vla", at=1000.0)
    assert state.shares["team:vla"] == quotas.live_shares(state, 1000.0)["team:nlp"] > 0
    assert restore(snapshot(state)).shares == state.shares


def test_a_fleet_of_one_person_is_ordered_by_run_as_before():
    state = parts.fleet()
    submit(state, "first", "ann")
    parts.admit_all(state, 1.0)
    submit(state, "low", "ann", at=2.0)
    submit(state, "high", "ann", at=3.0, priority=5)
    assert order(state, 10.0) == ["high", "low"]


# --- quotas of devices and device-hours


def test_a_run_beyond_its_devices_waits_and_nobody_makes_room():
    state = hosts(3)
    submit(state, "a-0", "ann")
    parts.admit_all(state, 1.0)
    held = len(state.runs["a-0"].grant.devices)
    limit(state, "user:ann", devices=held)
    submit(state, "a-1", "ann", at=2.0)
    submit(state, "c-0", "cho", at=3.0)
    plan = parts.admit_all(state, 1e6)
    assert f"user:ann holds {held} of its quota of {held} devices" in plan.waiting["a-1"]
    assert "starts when a-0 releases" in plan.waiting["a-1"]
    assert plan.yields == {}, "nobody yields to a run that may not start"
    assert state.runs["c-0"].grant is not None, "a later run of another starts"
    limit(state, "user:ann", devices=0)
    assert "cannot start with it" in plan_admission(state, 1e6).waiting["a-1"]


def test_a_team_s_devices_are_counted_together():
    state = hosts(2)
    submit(state, "a-0", "ann", "nlp")
    parts.admit_all(state, 1.0)
    limit(state, "team:nlp", devices=len(state.runs["a-0"].grant.devices))
    submit(state, "b-0", "ben", "nlp", at=2.0)
    assert "team:nlp holds" in plan_admission(state, 3.0).waiting["b-0"]


def test_device_hours_are_counted_by_day_and_free_again():
    state = parts.fleet()
    submit(state, "a-0", "ann", "nlp", at=0.0)
    parts.admit_all(state, 0.0)
    devices = len(state.runs["a-0"].grant.devices)
    assert quotas.hours(state, "user:ann", 36 * HOUR) == pytest.approx(36 * devices)
    release(state, "a-0", 36 * HOUR)
    assert state.usage["user:ann"] == {0: DAY * devices, 1: DAY / 2 * devices}
    assert state.usage["team:nlp"] == state.usage["user:ann"]
    assert restore(snapshot(state)).usage == state.usage
    limit(state, "user:ann", device_hours=36 * devices)
    waits = plan_admission(state, 2 * DAY).waiting["a-0"]
    assert "quota of" in waits and "device_hours" in waits and "free again on 1970-01-31" in waits
    assert plan_admission(state, 29.9 * DAY).grants == []
    assert [grant.run for grant in plan_admission(state, 30 * DAY).grants] == ["a-0"]


def test_a_run_whose_device_hours_are_used_up_yields():
    state = parts.fleet()
    submit(state, "a-0", "ann")
    parts.admit_all(state, 0.0)
    limit(state, "user:*", device_hours=1)
    assert "has used" not in plan_admission(state, 1.0).yields.get("a-0", "")
    assert "has used" in plan_admission(state, 2 * HOUR).yields["a-0"]
    limit(state, "user:ann", device_hours=1000)
    assert plan_admission(state, 2 * HOUR).yields == {}, "a quota of one's own counts in place of everybody's"


# --- what requests meet


async def test_runs_beyond_the_quota_are_refused_and_say_what_frees_it(people, spec_json):
    await people["admin"].post("/v1/quotas", json={"subject": "user:ann", "runs": 1})
    run = await submitted(people["ann"], spec_json)
    refused = await people["ann"].post("/v1/runs", json=spec_json)
    assert refused.status_code == 429 and refused.json()["reason"] == "QUOTA"
    message = refused.json()["message"]
    assert "user:ann has a quota of 1 runs" in message and f"when one of them ends: {run}" in message
    await submitted(people["ben"], spec_json)
    await people["ann"].post(f"/v1/runs/{run}:cancel")
    await submitted(people["ann"], spec_json)


async def test_a_team_s_runs_are_counted_together(people, spec_json):
    await people["admin"].post("/v1/quotas", json={"subject": "team:*", "runs": 1})
    await submitted(people["ann"], spec_json)
    assert "team:nlp" in (await people["ben"].post("/v1/runs", json=spec_json)).json()["message"]
    await submitted(people["cho"], spec_json)


async def test_priorities_are_bounded_by_scope_and_quota(people, spec_json):
    spec = spec_json | {"scheduling": {"priority": 5}}
    refused = await people["ann"].post("/v1/runs", json=spec)
    assert refused.status_code == 403 and "scheduling.priority is 5" in refused.json()["message"]
    await people["admin"].post("/v1/quotas", json={"subject": "user:ann", "priority": 5})
    await submitted(people["ann"], spec)
    await submitted(people["admin"], spec_json | {"scheduling": {"priority": 50}})


async def test_disk_is_asked_at_submission(served, people, spec_json):
    run = await submitted(people["ann"], spec_json)
    (served.runs / run).mkdir(parents=True, exist_ok=True)
    (served.runs / run / "weights").write_bytes(bytes(2_000_000))
    await people["admin"].post("/v1/quotas", json={"subject": "user:ann", "disk_gb": 0.001})
    refused = await people["ann"].post("/v1/runs", json=spec_json)
    assert refused.status_code == 429 and "headrace run delete" in refused.json()["message"]


async def test_requests_a_minute_are_bounded_and_say_when(people):
    await people["admin"].post("/v1/quotas", json={"subject": "user:eye", "requests_per_minute": 3})
    statuses = [(await people["eye"].get("/v1/me")).status_code for _ in range(5)]
    assert statuses.count(200) <= 3 < statuses.count(200) + statuses.count(429)
    refused = await people["eye"].get("/v1/me")
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    assert "requests_per_minute" in refused.json()["message"]
    assert (await people["ann"].get("/v1/me")).status_code == 200


async def test_streams_are_counted_while_they_are_open(served):
    quota, caller = served.coordinator.quotas, quotas.subjects
    from headrace_coordinator.api.refusal import Refused
    from headrace_coordinator.domain.access import Principal

    ann = Principal("ann", ("nlp",))
    limit(served.event_log.state, "team:nlp", streams=1)
    with quota.stream(ann), pytest.raises(Refused, match="quota of 1 streams: 1 are open"):
        quota.stream(Principal("ben", ("nlp",)))
    with quota.stream(ann):
        pass
    assert caller("ann", "nlp") == ("user:ann", "team:nlp")


async def test_usage_shows_one_s_own_and_operators_everybody_s(people, spec_json):
    await submitted(people["ann"], spec_json)
    await people["admin"].post("/v1/quotas", json={"subject": "team:nlp", "runs": 9, "devices": 4})
    mine = (await people["ann"].get("/v1/usage")).json()["usage"]
    assert [row["subject"] for row in mine] == ["team:nlp", "user:ann"]
    assert (mine[0]["runs"], mine[0]["queued"], mine[0]["limits"]) == (1, 1, {"runs": 9, "devices": 4})
    assert [row["subject"] for row in (await people["cho"].get("/v1/usage")).json()["usage"]] == [
        "team:vla",
        "user:cho",
    ]
    everybody = (await people["ops"].get("/v1/usage")).json()["usage"]
    assert {"team:nlp", "user:ann", "user:ops"} <= {row["subject"] for row in everybody}


@pytest.mark.parametrize(
    ("asked", "key"),
    [
        ({"subject": "ann", "runs": 1}, "subject"),
        ({"subject": "user:ann", "runs": -1}, "runs"),
        ({"subject": "user:ann", "rnus": 1}, "rnus"),
        ({"subject": "user:ann", "requests_per_minute": 0}, "requests_per_minute"),
        ({"subject": "user:ann", "device_hours": "many"}, "device_hours"),
    ],
)
async def test_bad_quotas_are_refused_by_their_key(people, asked, key):
    answer = await people["admin"].post("/v1/quotas", json=asked)
    assert answer.status_code == 422 and key in [each["key"] for each in answer.json()["problems"]]


async def test_a_quota_of_everybody_does_not_shut_the_admin_out_and_is_taken_away(served, people):
    everybody = {"subject": "user:*", "runs": 0, "requests_per_minute": 1}
    assert (await people["admin"].post("/v1/quotas", json=everybody)).status_code == 200
    assert {(await people["ann"].get("/v1/me")).status_code for _ in range(3)} == {200, 429}
    assert [each["subject"] for each in (await people["admin"].get("/v1/quotas")).json()["quotas"]] == [
        "user:*"
    ]
    await people["admin"].post("/v1/quotas", json={"subject": "user:*"})
    assert served.event_log.state.quotas == {}
    assert (await people["ann"].get("/v1/quotas")).status_code == 403
    assert (await people["admin"].get("/v1/usage")).status_code == 200
