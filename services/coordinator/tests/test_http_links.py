"""The dashboard's one-time links, and which token the HTTP API asks for."""

import argparse
import stat

import history_parts
import httpx
import pytest
from headrace_coordinator.__main__ import parse
from headrace_coordinator.api.http import links
from headrace_coordinator.domain import events as ev
from headrace_coordinator.fleet.online import endpoint_key
from headrace_coordinator.serving import Refusal, _http_token
from headrace_servicekit.session_marks import own_key

BEARER = {"Authorization": "Bearer s3 cret"}


@pytest.fixture
async def guarded(served, tmp_path):
    """A client without the token of an API that asks for one."""
    transport = httpx.ASGITransport(served.app_with("s3 cret"))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8470") as client:
        yield client


async def test_a_link_gives_the_token_once(guarded):
    assert (await guarded.post("/v1/links")).status_code == 401
    made = (await guarded.post("/v1/links", headers=BEARER)).json()
    followed = await guarded.get(made["path"])
    assert (followed.status_code, followed.headers["location"]) == (303, "/#token=s3%20cret")
    assert followed.headers["cache-control"] == "no-store"
    again = await guarded.get(made["path"])
    assert (again.status_code, "location" in again.headers) == (401, False)
    assert "headrace open" in again.json()["message"]


async def test_a_link_expires_and_cannot_be_guessed(guarded, monkeypatch):
    monkeypatch.setattr(links, "LIFE_S", -1.0)
    made = (await guarded.post("/v1/links", headers=BEARER)).json()
    for path in (made["path"], "/open", "/open?code=", "/open?code=%C3%A9"):
        assert (await guarded.get(path)).status_code == 401


async def test_old_links_make_room(guarded):
    paths = [
        (await guarded.post("/v1/links", headers=BEARER)).json()["path"] for _ in range(links.MAX_LINKS + 1)
    ]
    assert [(await guarded.get(path)).status_code for path in (paths[0], paths[1], paths[-1])] == [
        401,
        303,
        303,
    ]


async def test_without_a_token_a_link_is_the_plain_address(api):
    assert (await api.post("/v1/links")).json()["path"] == "/"


def asked(tmp_path, *flags) -> argparse.Namespace:
    return parse(["--data-dir", str(tmp_path / "data"), *flags])


def test_a_token_is_made_where_no_file_is_named(tmp_path):
    token = _http_token(asked(tmp_path))
    file = tmp_path / "data" / "http-token"
    assert token == file.read_text() and len(token) >= 32
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert _http_token(asked(tmp_path)) == token
    assert _http_token(asked(tmp_path, "--http", "0.0.0.0:1")) == token


def test_no_token_is_for_the_loopback_alone(tmp_path):
    assert _http_token(asked(tmp_path, "--no-token")) is None
    with pytest.raises(Refusal, match="run code here"):
        _http_token(asked(tmp_path, "--no-token", "--http", "0.0.0.0:8470"))
    with pytest.raises(Refusal, match=r"everybody who reaches 0\.0\.0\.0:8472"):
        _http_token(asked(tmp_path, "--no-token", "--sessions-grpc", "0.0.0.0:8472"))


def test_a_named_file_that_is_missing_is_a_sentence(tmp_path):
    with pytest.raises(Refusal, match="nowhere"):
        _http_token(asked(tmp_path, "--http-token-file", str(tmp_path / "nowhere")))


async def test_who_shows_no_key_of_a_run_is_told_of_no_lost_session_and_counts_none(
    guarded, served, tmp_path
):
    """Its rollout instance is gone. The address needs no token of the API, so that anybody may ask."""
    spec = {**history_parts.SPEC, "agent": {"online": True}}
    run = ev.RunSubmitted(at=1.0, run="sums-0", spec=spec, directory=str(tmp_path))
    admitted = ev.RunAdmitted(at=1.0, run="sums-0", rollouts=["gone"], trainers=[], devices=[])
    await served.post(run, admitted)
    key, session = endpoint_key(tmp_path), "abcdef0123456789"
    online, path = served.fleet.online["sums-0"], "/v1/runs/sums-0/endpoint/v1/chat/completions"
    for shown in ("", "sk-headrace-guessed", own_key("guessed", session), "é"):
        headers = {"X-Headrace-Session": session, "Authorization": f"Bearer {shown}".encode()}
        answer = await guarded.post(path, headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
    assert not online.ended
    for shown in (key, own_key(key, session)):
        answer = await guarded.post(
            path, headers={"X-Headrace-Session": session, "Authorization": f"Bearer {shown}"}
        )
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "session_lost")
    assert online.ended == {"lost": 1}


async def test_a_link_is_not_used_up_by_its_preview(served, tmp_path):
    transport = httpx.ASGITransport(served.app_with("s3cret"))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        made = await client.post("/v1/links", headers={"Authorization": "Bearer s3cret"})
        path = made.json()["path"]
        assert (await client.head(path)).status_code == 405
        assert (await client.get(path)).status_code == 303
