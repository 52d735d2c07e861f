"""No input makes the API answer 500: routes × generated parameters, headers and bodies."""

import asyncio
import json

import httpx
import pytest
from headrace_schema.spec import RunSpec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from served_parts import Served

RELAXED = settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
TEXT = st.text(st.characters(codec="utf-8"), max_size=12)
SEGMENT = TEXT.filter(lambda text: text not in ("", ".", ".."))
NAMES = ["page_size", "page_token", "after", "step", "now", "dry_run"]
QUERY = st.dictionaries(st.sampled_from(NAMES) | TEXT, TEXT | st.integers().map(str), max_size=3)
HEADERS = st.dictionaries(
    st.sampled_from(["Idempotency-Key", "Last-Event-ID", "Origin", "Host", "Authorization", "Content-Type"]),
    st.text(st.characters(min_codepoint=32, max_codepoint=255, exclude_characters="\x7f"), max_size=20),
    max_size=2,
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
GETS = ["", "/R", "/R/events", "/R/metrics", "/R/trajectories", "/R/checkpoints", "/R/certificates"]
ACCEPTABLE = {200, 201, 401, 403, 404, 405, 409, 413, 415, 422, 503}


@pytest.fixture
def ask(spec_json, tmp_path):
    """Sends one request to an API with one ended run; an exception in the API fails the test."""
    served = Served(tmp_path)

    async def send(method: str, path: str, **request) -> httpx.Response:
        transport = httpx.ASGITransport(served.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return await client.request(method, path, **request)

    def request(method: str, path: str, **request) -> None:
        response = runner.run(send(method, path, **request))
        assert response.status_code in ACCEPTABLE, (method, path, request, response.text)
        if response.status_code >= 400:
            assert set(response.json()) == {"reason", "message", "problems"}

    with asyncio.Runner() as runner:
        runner.run(served.open())
        runner.run(send("POST", "/v1/runs", json=spec_json))
        runner.run(served.end("sums-0", "SUCCEEDED"))
        yield request
        runner.run(served.close())


@RELAXED
@given(path=st.sampled_from(GETS), run=st.just("sums-0") | SEGMENT, query=QUERY, headers=HEADERS)
def test_reads(ask, path, run, query, headers):
    encoded = {name: value.encode("latin-1") for name, value in headers.items()}
    path = "/v1/runs" + path.replace("R", quoted(run))
    ask("GET", path, params=query, headers=encoded)


@RELAXED
@given(
    verb=st.sampled_from(["pause", "resume", "cancel"]) | SEGMENT,
    run=st.just("sums-0") | SEGMENT,
    query=QUERY,
)
def test_moves(ask, verb, run, query):
    ask("POST", f"/v1/runs/{quoted(run)}:{quoted(verb)}", params=query)


@RELAXED
@given(
    kind=st.sampled_from(["rollout", "simulator"]) | SEGMENT,
    body=JSON | st.fixed_dictionaries({"count": JSON}),
)
def test_scaling(ask, kind, body):
    content = json.dumps(body).encode()
    ask(
        "POST",
        f"/v1/services/{quoted(kind)}:scale",
        content=content,
        headers={"Content-Type": "application/json"},
    )


@RELAXED
@given(content=st.binary(max_size=40), type=st.sampled_from(["application/json", "application/x", ""]))
def test_bytes_as_a_spec(ask, content, type):
    ask("POST", "/v1/runs", content=content, headers={"Content-Type": type})


@RELAXED
@given(data=st.data())
def test_almost_a_spec(ask, spec_json, data):
    sections = data.draw(st.lists(st.sampled_from(list(RunSpec.model_fields)), max_size=3))
    for section in sections:
        value = spec_json.get(section)
        if isinstance(value, dict) and data.draw(st.booleans()):
            key = data.draw(st.sampled_from([*value, "x", "options", "prompt", "exclude"]))
            spec_json = {**spec_json, section: {**value, key: data.draw(JSON)}}
        else:
            spec_json = {**spec_json, section: data.draw(JSON)}
    content = json.dumps(spec_json).encode()
    query = data.draw(st.sampled_from(["", "?dry_run"]))
    ask("POST", f"/v1/runs{query}", content=content, headers={"Content-Type": "application/json"})


def quoted(segment: str) -> str:
    """A path segment, percent-encoded."""
    return "".join(f"%{byte:02X}" for byte in segment.encode())


HALF = "a \ud800 half"


@pytest.mark.parametrize(
    "change",
    [
        {"name": HALF},
        {HALF: 1},
        {"model": {"path": HALF}},
        {"data": {"source": HALF}},
        {"data": {"options": {HALF: HALF}}},
        {"data": {"prompt": {"template": HALF}}},
        {"reward": {"scorers": [{"name": HALF}]}},
        {"reward": {"scorers": [{"name": "regex", "options": {"pattern": HALF}}]}},
        {"sampling": {"stop": [HALF]}},
        {"tracking": {"trackers": [{"name": HALF}]}},
    ],
)
def test_half_of_a_surrogate_pair_in_a_spec_is_no_failure(ask, spec_json, change):
    for path in ("/v1/runs", "/v1/runs?dry_run=true"):
        ask(
            "POST",
            path,
            content=json.dumps({**spec_json, **change}),
            headers={"Content-Type": "application/json"},
        )
        ask("POST", path, content=json.dumps({"spec": HALF, HALF: change}))
