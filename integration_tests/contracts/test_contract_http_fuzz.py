"""A real coordinator's HTTP API under wrong bodies, parameters and headers: a 4xx with a problem, never a 500."""

from __future__ import annotations

import copy
import itertools
import json
import math
import random

import httpx
import pytest
from harness.services.alone import Coordinator
from harness.valkey import Valkey
from harness.wire.nasty import NAUGHTY_TEXT, junk

JSON = {"Content-Type": "application/json"}
SPECS = 250
VALUES = [
    *NAUGHTY_TEXT,
    *(None, True, [], {}, [[]], [{"a": 1}], -1, 0, 2**31, 2**63, 10**400, 1e308, -1e308, 0.5),
    *("/dev/null", "/proc/self/mem", "os.system", "nowhere.py:prompts", "reasoning_gym:\0"),
]
PAGES = ["-1", "0", "x", "²", "9" * 5000, "\0", "1e9", ""]


@pytest.fixture(scope="module")
def coordinator(tmp_path_factory):
    folder = tmp_path_factory.mktemp("http-fuzz")
    with Valkey(folder / "store") as store, Coordinator(folder / "coordinator", store.url) as service:
        yield service


@pytest.fixture
def ask(coordinator):
    """Sends a request; fails unless the answer is fine or a problem that the caller can act on."""
    with httpx.Client(
        base_url=f"http://{coordinator.http}", headers=coordinator.headers, timeout=60, trust_env=False
    ) as client:

        def ask(method, path, **request):
            before = coordinator.log
            response = client.request(method, path, **request)
            said = coordinator.log[len(before) :]
            what = f"{method} {path[:200]} {str(request)[:300]}\n{response.text[:500]}\n{said}"
            assert response.status_code < 500 or response.status_code == 503, what
            assert "Traceback" not in said, what
            if response.status_code >= 400:
                assert {"reason", "message"} <= set(response.json()), what
            return response

        yield ask
        assert client.get("/healthz").status_code == 200


def places(value, path=()):
    """Paths to every value of a JSON document."""
    if path:
        yield path
    if isinstance(value, dict):
        for key, item in value.items():
            yield from places(item, (*path, key))
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from places(item, (*path, index))


def changed(document, path, value):
    made = copy.deepcopy(document)
    inner = made
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return made


def test_bodies_that_are_no_document(ask):
    deep = b"[" * 100_000
    bodies = [
        *junk(1, 20),
        b"",
        deep,
        b'{"a":' * 50_000,
        b"1e999",
        b"NaN",
        b'"\\ud800"',
        b"[]",
        b"null",
        b"9" * 6000,
    ]
    for path, body in itertools.product(
        ["/v1/runs", "/v1/runs?dry_run", "/v1/services/rollout:scale"], bodies
    ):
        assert ask("POST", path, content=body, headers=JSON).status_code == 422, body[:50]


def test_specs_that_are_wrong_in_one_place(ask, spec_of):
    spec = spec_of()
    cases = list(itertools.product(places(spec), VALUES))
    random.Random(5).shuffle(cases)
    for path, value in cases[:SPECS]:
        content = json.dumps(changed(spec, path, value), allow_nan=True)
        response = ask("POST", "/v1/runs?dry_run", content=content.encode(), headers=JSON)
        assert response.status_code in (200, 422), (path, str(value)[:50], response.text[:300])


@pytest.mark.parametrize("count", [-1, 2**63, 10**400, 1.5, "2", None, [], {}, True, math.inf])
def test_counts_that_are_none(ask, count):
    content = json.dumps({"count": count}).encode()
    assert ask("POST", "/v1/services/rollout:scale", content=content, headers=JSON).status_code == 422


def test_names_tokens_and_ids_that_nobody_gave(ask):
    names = ["..%2F..%2Fetc%2Fpasswd", "%00", "x" * 5000, "%F0%9F%92%A9", "%FF%FE", "a:pause:pause"]
    for name in names:
        for rest in ("", "/events", "/metrics", "/trajectories", "/checkpoints", "/certificates"):
            assert ask("GET", f"/v1/runs/{name}{rest}").status_code == 404
        for verb in ("pause", "resume", "cancel"):
            assert ask("POST", f"/v1/runs/{name}:{verb}").status_code == 404
    for path, key in itertools.product(
        ["/v1/runs", "/v1/instances", "/v1/leases"], ["page_size", "page_token"]
    ):
        for value in PAGES:
            ask("GET", path, params={key: value})
    for value in [*PAGES[:4], "9" * 30, "%F0"]:
        headers = {"Last-Event-ID": value.encode("latin-1"), "Idempotency-Key": (value * 3).encode("latin-1")}
        ask("GET", "/v1/runs/nobody/events", headers=headers)
        ask("POST", "/v1/runs/nobody:pause", headers=headers)
