"""Who may do what over HTTP: the table of access, tokens, owners and visibility."""

import asyncio
import time

import pytest
from access_parts import OWN, PEOPLE, submitted
from headrace_coordinator.access.table import TABLE, Rule
from headrace_coordinator.access.tokens import digest_of
from headrace_coordinator.domain import events as ev
from headrace_coordinator.domain.state import restore, snapshot


def operations(app):
    """(method, path, operation id) of all that the API describes."""
    for path, methods in app.openapi()["paths"].items():
        for method, operation in methods.items():
            yield method.upper(), path, operation["operationId"]


def test_every_route_has_a_row_and_every_row_a_route(served):
    """Default deny: what is added without a row answers nobody, and this names it."""
    routes = {name for _, _, name in operations(served.app)}
    beside = {"relay", "openapi", "get_authority", "join_host"}
    beside |= {"get_dashboard", "get_dashboard_file", "get_docs", "get_docs_file"}
    beside |= {"tinker_read", "tinker_call", "tinker_change"}
    assert routes - TABLE.keys() == set(), "add a row to access/table.py"
    assert TABLE.keys() - routes - beside == set(), "rows without a route"
    names = [name for _, _, name in operations(served.app)]
    assert len(names) == len(set(names)), "two routes of one name would have one row"


def test_rows_name_a_parameter_of_their_path(served):
    for method, path, name in operations(served.app):
        row = TABLE[name]
        about = row.rule not in (Rule.NONE, Rule.LISTED)
        assert about == (f"{{{row.of}}}" in path), f"{method} {path}: {row}"


async def test_a_route_without_a_row_answers_nobody(served, people, monkeypatch):
    monkeypatch.delitem(TABLE, "list_services")
    answer = await people["admin"].get("/v1/services")
    assert answer.status_code == 403 and "has no row" in answer.json()["message"]


async def test_every_route_by_every_scope(served, people, spec_json):
    """What the table says of scopes holds: a caller gets 403 for exactly what it lacks."""
    run = await submitted(people["ann"], spec_json)
    for scopes in (["read"], ["submit"], ["operate"], ["admin"]):
        made = await people["admin"].post("/v1/tokens", json={"name": f"only-{scopes[0]}", "scopes": scopes})
        headers = {"Authorization": f"Bearer {made.json()['token']}"}
        for method, path, name in operations(served.app):
            row = TABLE[name]
            if row.scope and row.scope not in scopes and scopes != ["admin"]:
                at = path.format_map(_Anything(run))
                answer = await people["nobody"].request(method, at, headers=headers)
                assert answer.status_code == 403, f"{scopes} {method} {at}: {answer.status_code}"
                assert f"lacks the scope {row.scope}" in answer.json()["message"]
                unknown = await people["nobody"].request(method, at)
                assert unknown.status_code == 401, f"{method} {at}"


class _Anything(dict):
    """Values of all parameters of paths."""

    def __init__(self, run: str) -> None:
        super().__init__(run_id=run, evaluation_id=run, session=run)

    def __missing__(self, name: str) -> str:
        return "x"


@pytest.mark.parametrize("ended", [False, True])
async def test_another_s_private_run_is_not_there(served, people, spec_json, ended):
    """The same words and status as for a run that is not there, on every route about a run, ended ones too."""
    run, asked = await submitted(people["ann"], spec_json), 0
    if ended:
        await people["ann"].post(f"/v1/runs/{run}:cancel")
        await served.event_log.wait_until(lambda: run not in served.event_log.state.runs, 10, "the archive")
    for method, path, name in operations(served.app):
        row = TABLE[name]
        if row.rule in (Rule.NONE, Rule.LISTED):
            continue
        bodies = {"set_run": {"trainer": {"ranks": 1}}, "label_run": {"note": "x"}}
        query = {"record_step": {"step": 1}, "share_run": {"visibility": "fleet"}}.get(name, {})
        found = []
        for each in (run, "none-0"):
            at = path.format_map(_Anything(each))
            answer = await people["cho"].request(method, at, json=bodies.get(name), params=query)
            assert answer.status_code == 404, f"{method} {at}: {answer.status_code} {answer.text}"
            found.append(answer.json()["message"].replace(each, "ID").partition(";")[0])
            assert run not in answer.text.replace(at, "") or each == run
        assert found[0] == found[1], f"{method} {path}"
        asked += 1
    assert asked > 30
    view = (await people["ann"].get(f"/v1/runs/{run}")).json()
    assert view["state"] == ("CANCELLED" if ended else "QUEUED")


async def test_a_folder_around_the_data_directory_is_not_read(served, people, spec_json):
    """It has all runs below it: a data set of that folder would be another's trajectories."""
    for path in (served.runs.parents[1], f"{served.runs.parent}/../"):
        data = {"source": "huggingface", "options": {"dataset": str(path), "split": "train"}}
        answer = await people["cho"].post("/v1/runs?dry_run", json=spec_json | {"data": data})
        (first, *_) = answer.json()["problems"]
        assert first["key"] == "data.options.dataset" and "fleet's own files are below" in first["problem"]


async def test_lists_have_what_one_may_know_of(people, spec_json):
    runs = {name: await submitted(people[name], spec_json) for name in ("ann", "cho")}
    shared = await submitted(people["ben"], spec_json, visibility="team")
    seen = {
        "ann": {runs["ann"], shared},
        "ben": {shared},
        "cho": {runs["cho"]},
        "eye": set(),
        "ops": {*runs.values(), shared},
        "admin": {*runs.values(), shared},
    }
    for name, expected in seen.items():
        client = people[name]
        assert {run["id"] for run in (await client.get("/v1/runs")).json()["runs"]} == expected
        summaries = (await client.get("/v1/run-summaries")).json()
        assert {run["id"] for run in summaries["summaries"]} == expected
        assert (summaries["total"], sum(summaries["states"].values())) == (len(expected), len(expected))
    page = await people["cho"].get("/v1/runs", params={"page_token": runs["ann"]})
    gone = await people["cho"].get("/v1/runs", params={"page_token": "gone"})
    assert page.status_code == gone.status_code == 422


async def test_who_sees_steers_and_shares(people, spec_json):
    run = await submitted(people["ann"], spec_json)
    view = (await people["ann"].get(f"/v1/runs/{run}")).json()
    assert (view["owner"], view["team"], view["visibility"]) == ("ann", "nlp", "private")
    assert (await people["ben"].get(f"/v1/runs/{run}")).status_code == 404
    shared = await people["ann"].post(f"/v1/runs/{run}:share", params={"visibility": "team"})
    assert shared.json()["visibility"] == "team"
    assert (await people["ben"].get(f"/v1/runs/{run}/trajectories")).status_code == 200
    assert (await people["cho"].get(f"/v1/runs/{run}")).status_code == 404
    for verb in (":pause", ":cancel", ":delete", ":label", ":share"):
        answer = await people["ben"].post(f"/v1/runs/{run}{verb}")
        assert answer.status_code == 403 and "ann's (team)" in answer.json()["message"], verb
    assert (await people["ops"].get(f"/v1/runs/{run}")).status_code == 200
    assert (await people["ops"].get(f"/v1/runs/{run}/trajectories")).status_code == 403
    await people["ann"].post(f"/v1/runs/{run}:share", params={"visibility": "fleet"})
    assert (await people["cho"].get(f"/v1/runs/{run}")).status_code == 200
    await people["ann"].post(f"/v1/runs/{run}:share", params={"visibility": "private"})
    assert (await people["cho"].get(f"/v1/runs/{run}")).status_code == 404
    alone = await submitted(people["admin"], spec_json)
    refused = await people["admin"].post(f"/v1/runs/{alone}:share", params={"visibility": "team"})
    assert refused.status_code == 409 and "no team" in refused.text
    refused = await people["admin"].post("/v1/runs", json=spec_json, params={"visibility": "team"})
    assert refused.status_code == 422 and refused.json()["problems"][0]["key"] == "visibility"


async def test_an_operator_stops_what_is_another_s(people, spec_json):
    run = await submitted(people["ann"], spec_json)
    both = {"name": "both", "scopes": ["submit", "operate"]}
    token = (await people["admin"].post("/v1/tokens", json=both)).json()["token"]
    headers = {"Authorization": f"Bearer {token}"}
    assert (await people["nobody"].post(f"/v1/runs/{run}:cancel", headers=headers)).status_code == 200
    assert (await people["nobody"].post(f"/v1/runs/{run}:delete", headers=headers)).status_code == 403


async def test_an_ended_run_keeps_its_owner(served, people, spec_json):
    run = await submitted(people["ann"], spec_json)
    await people["ann"].post(f"/v1/runs/{run}:cancel")
    await served.event_log.wait_until(lambda: run in served.event_log.state.ended, 10, "the archive")
    assert (await people["cho"].get(f"/v1/runs/{run}")).status_code == 404
    assert (await people["ann"].get(f"/v1/runs/{run}")).json()["owner"] == "ann"
    await people["ann"].post(f"/v1/runs/{run}:share", params={"visibility": "fleet"})
    assert (await people["cho"].get(f"/v1/runs/{run}")).json()["visibility"] == "fleet"
    again = restore(snapshot(served.event_log.state))
    assert (again.ended[run].owner, again.ended[run].visibility) == ("ann", "fleet")


async def test_a_fork_and_a_path_into_another_s_run_are_refused(served, people, spec_json):
    run = await submitted(people["ann"], spec_json)
    directory = (await people["ann"].get(f"/v1/runs/{run}")).json()["run_directory"]
    fork = spec_json | {"from_checkpoint": {"run": run}}
    answer = await people["cho"].post("/v1/runs", json=fork)
    assert answer.status_code == 422 and f"there is no run {run}" in answer.text
    link = served.runs.parent.parent / "innocent"
    link.symlink_to(directory)
    for path in (f"{directory}/export", str(link / "export"), str(served.runs.parent / "http-token")):
        answer = await people["cho"].post("/v1/runs", json=spec_json | {"model": {"path": path}})
        assert answer.status_code == 422, path
        assert answer.json()["problems"][0]["key"] == "model.path"
        assert "is yours" in answer.json()["problems"][0]["fix"]
    mine = await people["ann"].post(
        "/v1/runs?dry_run", json=spec_json | {"model": {"path": f"{directory}/export"}}
    )
    assert "is yours" not in mine.text, "its owner may name it"


async def test_keys_of_another_are_not_found(people, spec_json):
    headers = {"Idempotency-Key": "same"}
    first = (await people["ann"].post("/v1/runs", json=spec_json, headers=headers)).json()["id"]
    again = (await people["ann"].post("/v1/runs", json=spec_json, headers=headers)).json()["id"]
    other = (await people["cho"].post("/v1/runs", json=spec_json, headers=headers)).json()["id"]
    assert first == again != other


async def test_texts_name_no_run_of_another(served, people, spec_json):
    hidden, mine = await submitted(people["ann"], spec_json), await submitted(people["cho"], spec_json)
    await served.note(mine, f"yields to {hidden}, which waits for devices")
    events = (await people["cho"].get(f"/v1/runs/{mine}/newest-events")).json()["events"]
    texts = [event["data"].get("text", "") for event in events]
    assert any("yields to another user's run, which" in text for text in texts), texts
    admins = (await people["admin"].get(f"/v1/runs/{mine}/newest-events")).text
    assert f"yields to {hidden}" in admins


async def test_the_store_has_the_digest_alone(served, people):
    made = (await people["admin"].post("/v1/tokens", json={"name": "new", "expires_in_s": 60})).json()
    assert (
        made["token"].startswith("hrt_") and made["owner"] == "new" and made["scopes"] == ["read", "submit"]
    )
    stored = snapshot(served.event_log.state).decode()
    assert made["token"] not in stored and digest_of(made["token"]) in stored
    listed = (await people["admin"].get("/v1/tokens")).json()["tokens"]
    assert {token["name"] for token in listed} == {*PEOPLE, "new"} and "token" not in listed[0]
    me = {"Authorization": f"Bearer {made['token']}"}
    assert (await people["nobody"].get("/v1/me", headers=me)).json()["name"] == "new"
    assert (await people["ann"].get("/v1/tokens")).status_code == 403


@pytest.mark.parametrize(
    ("asked", "key"),
    [
        ({"name": "admin"}, "name"),
        ({"name": "x", "owner": "admin"}, "owner"),
        ({"name": "../x"}, "name"),
        ({"name": "x", "scopes": ["root"]}, "scopes[0]"),
        ({"name": "x", "scopes": []}, "scopes"),
        ({"name": "x", "expires_in_s": -1}, "expires_in_s"),
        ({"name": "x", "visibilty": "team"}, "visibilty"),
    ],
)
async def test_bad_tokens_are_refused_by_their_key(people, asked, key):
    answer = await people["admin"].post("/v1/tokens", json=asked)
    assert answer.status_code == 422
    assert key in [problem["key"] for problem in answer.json()["problems"]], answer.text


async def test_a_name_is_taken_until_it_is_revoked(people):
    assert (await people["admin"].post("/v1/tokens", json={"name": "ann"})).status_code == 409
    assert (await people["admin"].post("/v1/tokens/ann:revoke")).status_code == 200
    assert (await people["ann"].get("/v1/runs")).status_code == 401
    assert (await people["admin"].post("/v1/tokens/ann:revoke")).status_code == 404
    assert (await people["admin"].post("/v1/tokens", json={"name": "ann"})).status_code == 201


async def test_an_expired_token_opens_nothing(served, people, monkeypatch):
    made = (await people["admin"].post("/v1/tokens", json={"name": "brief", "expires_in_s": 60})).json()
    headers = {"Authorization": f"Bearer {made['token']}"}
    assert (await people["nobody"].get("/v1/runs", headers=headers)).status_code == 200
    monkeypatch.setattr(served.event_log, "now", lambda: time.time() + 61)
    assert (await people["nobody"].get("/v1/runs", headers=headers)).status_code == 401
    listed = (await people["admin"].get("/v1/tokens")).json()["tokens"]
    assert [token["expired"] for token in listed if token["name"] == "brief"] == [True]


@pytest.mark.parametrize("end", ["revoked", "expired"])
async def test_an_open_stream_ends_with_its_token(served, people, spec_json, end):
    """In order, with what was sent; the request that follows is a 401. The run goes on."""
    life = {"expires_in_s": 3600} if end == "expired" else {}
    made = (await people["admin"].post("/v1/tokens", json={"name": "brief", **life})).json()
    run = await submitted(people["ann"], spec_json, visibility="fleet")
    sent, begun = [], asyncio.Event()

    async def send(message):
        sent.append(message)
        if b"event: run_submitted" in message.get("body", b""):
            begun.set()

    async def receive():
        await asyncio.Event().wait()

    bearer = f"Bearer {made['token']}".encode()
    scope = {"type": "http", "method": "GET", "path": f"/v1/runs/{run}/events", "query_string": b""}
    scope |= {"headers": [(b"authorization", bearer)], "client": ("127.0.0.1", 1), "http_version": "1.1"}
    scope |= {"scheme": "http", "server": ("127.0.0.1", 80), "root_path": "", "asgi": {"version": "3.0"}}
    app = served.app_with(OWN)
    stream = asyncio.create_task(app(scope, receive, send))
    async with asyncio.timeout(20):
        await begun.wait()
        assert not stream.done()
        if end == "revoked":
            await people["admin"].post("/v1/tokens/brief:revoke")
        else:
            served.event_log.now = lambda: time.time() + 3601
        await stream
    assert sent[0]["status"] == 200
    assert sent[-1] == {"type": "http.response.body", "body": b"", "more_body": False}
    answer = await people["nobody"].get("/v1/runs", headers={"Authorization": bearer.decode()})
    assert answer.status_code == 401
    assert served.event_log.state.runs[run].state == "QUEUED"


async def test_a_link_is_of_who_made_it(people, spec_json):
    run = await submitted(people["ann"], spec_json)
    link = (await people["ann"].post("/v1/links")).json()["path"]
    token = people["ann"].headers["authorization"].removeprefix("Bearer ")
    followed = await people["nobody"].get(link)
    assert followed.headers["location"] == f"/#token={token}"
    download = {"download": f"/v1/runs/{run}/export"}
    path = (await people["ann"].post("/v1/links", params=download)).json()["path"]
    assert "has no exported model" in (await people["nobody"].get(path)).text
    path = (await people["cho"].post("/v1/links", params=download)).json()["path"]
    assert f"there is no run {run}" in (await people["nobody"].get(path)).text
    path = (await people["ann"].post("/v1/links", params=download)).json()["path"]
    await people["admin"].post("/v1/tokens/ann:revoke")
    assert (await people["nobody"].get(path)).status_code == 401


def test_a_snapshot_keeps_tokens():
    from headrace_coordinator.domain.state import State

    state = State()
    made = ev.TokenCreated(at=1, name="a", digest="d", owner="a", team="t", scopes=["read"])
    state.apply(made)
    assert restore(snapshot(state)).tokens["d"].team == "t"
    state.apply(ev.TokenRevoked(at=2, name="a"))
    assert restore(snapshot(state)).tokens == {}
