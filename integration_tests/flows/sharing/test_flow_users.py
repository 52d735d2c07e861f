"""Two people and an admin on a real fleet: nothing of one is the other's, by the command, the client and plain HTTP."""

from __future__ import annotations

import json
import threading

import httpx
import pytest
from harness.specs import small_spec
from harness.waiting import wait_for
from headrace.client import Client, HeadraceError

pytestmark = pytest.mark.nightly  # quick: services/coordinator/tests/test_access.py


@pytest.fixture(scope="module")
def clients(fleet):
    """A client for each of two people of two teams, and a third of the first one's team."""
    people = {"ann": "nlp", "ben": "nlp", "cho": "vla"}
    made = {}
    for name, team in people.items():
        token = fleet.headrace("token", "create", name, "--team", team).stdout.strip()
        made[name] = Client(fleet.url, token, patience_s=30.0)
    yield made
    for name, client in made.items():
        client.close()
        fleet.headrace("token", "revoke", name)


@pytest.fixture(scope="module")
def done(fleet, clients, tiny_model):
    """A run of ann's that has ended, with checkpoints, and an export."""
    spec = small_spec(tiny_model, name="anns", steps=2, export=True)
    run = clients["ann"].submit(spec)
    return clients["ann"].wait(run.id, 240)


def refused(call, *arguments, **options) -> HeadraceError:
    with pytest.raises(HeadraceError) as caught:
        call(*arguments, **options)
    return caught.value


def test_nothing_of_ann_s_is_cho_s(fleet, clients, done, tiny_model):
    assert (done.state, done.owner, done.team, done.visibility) == ("SUCCEEDED", "ann", "nlp", "private")
    cho, run = clients["cho"], done.id
    assert run not in [each.id for each in cho.list()]
    for call in (cho.get, cho.metrics, cho.trajectories, cho.checkpoints, cho.certificates, cho.cancel):
        assert refused(call, run).reason == "NOT_FOUND"
    for call in (cho.delete, cho.pause, cho.recordings, cho.timeline):
        assert refused(call, run).reason == "NOT_FOUND"
    fork = small_spec(tiny_model, steps=4) | {"from_checkpoint": {"run": run}}
    assert f"there is no run {run}" in str(refused(cho.submit, fork).problems)
    stolen = small_spec(tiny_model) | {"model": {"path": f"{done.run_directory}/export"}}
    assert refused(cho.submit, stolen).problems[0].key == "model.path"
    with httpx.Client(base_url=fleet.url, trust_env=False, headers=_bearer(cho)) as http:
        for path in ("export", "events", f"checkpoints/{clients['ann'].checkpoints(run)[0].name}"):
            assert http.get(f"/v1/runs/{run}/{path}").status_code == 404
    assert clients["ann"].get(run).state == "SUCCEEDED"


def test_a_team_sees_what_is_shared_with_it_and_changes_nothing(clients, done):
    clients["ann"].share(done.id, "team")
    ben, cho = clients["ben"], clients["cho"]
    assert ben.get(done.id).state == "SUCCEEDED" and ben.trajectories(done.id, limit=1)
    assert refused(ben.delete, done.id).reason == "FORBIDDEN"
    assert refused(cho.get, done.id).reason == "NOT_FOUND"
    clients["ann"].share(done.id, "private")
    assert refused(ben.get, done.id).reason == "NOT_FOUND"


def test_a_revoked_token_s_open_stream_ends(fleet, clients, tiny_model):
    token = fleet.headrace("token", "create", "brief", "--owner", "ann", "--team", "nlp").stdout.strip()
    run = clients["ann"].submit(small_spec(tiny_model, name="long", steps=500))
    begun, ended = threading.Event(), threading.Event()

    def listen() -> None:
        with (
            httpx.Client(base_url=fleet.url, timeout=60, trust_env=False) as http,
            http.stream("GET", f"/v1/runs/{run.id}/events", headers=_bearer(token)) as stream,
        ):
            for _ in stream.iter_lines():
                begun.set()
        ended.set()

    thread = threading.Thread(target=listen, daemon=True)
    thread.start()
    assert begun.wait(60)
    assert fleet.headrace("token", "revoke", "brief").returncode == 0
    assert ended.wait(30), "the stream goes on"
    thread.join(10)
    assert httpx.get(f"{fleet.url}/v1/runs", headers=_bearer(token)).status_code == 401
    wait_for(lambda: clients["ann"].get(run.id).step >= 1, "the run to go on")
    clients["ann"].cancel(run.id)


def test_what_was_done_is_written_down(fleet, clients, done):
    lines = (fleet.data_dir / "audit" / "audit.jsonl").read_text().splitlines()
    found = [(each["who"], each["what"], each["run"], each["outcome"]) for each in map(json.loads, lines)]
    assert ("ann", "POST /v1/runs", done.id, "done") in found
    assert ("cho", "POST /v1/runs/{run_id}:cancel", done.id, "refused") in found
    assert ("admin", "POST /v1/tokens", "", "done") in found
    usage = clients["ann"].access.usage()
    hours = {each.subject: each.device_hours for each in usage}
    assert hours["user:ann"] > 0 and hours["team:nlp"] > 0


def test_no_secret_is_in_what_the_fleet_writes(fleet, clients, done, tiny_model):
    """Planted in tokens, headers, queries and specs; looked for in all files but those of the fleet's tokens."""
    planted = [f"planted-{number}-0123456789abcdef" for number in range(4)]
    made = fleet.headrace("token", "create", "spy", "--owner", "ann").stdout.strip()
    with httpx.Client(base_url=fleet.url, trust_env=False) as http:
        assert http.get("/v1/runs", headers=_bearer(planted[0])).status_code == 401
        http.get("/v1/runs", headers=_bearer(made) | {"X-Api-Key": planted[1]}, params={"code": planted[2]})
        wrong = small_spec(tiny_model, data__options={"digits": 3, "api_key": planted[3]})
        assert http.post("/v1/runs", headers=_bearer(made), json=wrong).status_code == 422
    fleet.headrace("token", "revoke", "spy")
    own = {fleet.data_dir / "token", fleet.data_dir / "http-token"}
    files = [path for path in fleet.data_dir.rglob("*") if path.is_file() and path not in own]
    assert {"audit.jsonl", "coordinator.log"} <= {path.name for path in files}
    for path in files:
        written = path.read_bytes()
        for secret in (*planted, made, fleet.token):
            assert secret.encode() not in written, f"{secret} in {path}"


def _bearer(of: Client | str) -> dict[str, str]:
    token = of if isinstance(of, str) else of._transport._http.headers["authorization"].partition(" ")[2]
    return {"Authorization": f"Bearer {token}"}
