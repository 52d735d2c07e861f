"""The HTTP API: what each route answers, and how it refuses."""

import json
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import yaml
from headrace_coordinator.api.http.openapi import description
from headrace_coordinator.domain import events as ev
from history_parts import train
from http_parts import problems


async def test_a_run_is_queued_and_shown(api, spec_json):
    answer = await api.post("/v1/runs", json=spec_json, headers={"Idempotency-Key": "k1"})
    assert (answer.status_code, answer.headers["idempotency-key"]) == (201, "k1")
    run = answer.json()
    assert run["state"] == "QUEUED"
    assert run["spec"]["algorithm"]["name"] == "grpo"
    assert (await api.get(f"/v1/runs/{run['id']}")).json() == run


async def test_a_figure_that_json_cannot_say_is_null(api, served, run_id):
    await train(served.event_log, 1, run=run_id)
    assert (await api.get(f"/v1/runs/{run_id}")).json()["last_step"]["figures"] == {"loss": None}


async def test_a_repeated_key_repeats_the_answer_and_refuses_another_body(api, spec_json, served):
    headers = {"Idempotency-Key": "k1"}
    first = await api.post("/v1/runs", json=spec_json, headers=headers)
    second = await api.post("/v1/runs", json=spec_json, headers=headers)
    assert first.json()["id"] == second.json()["id"]
    assert len(served.event_log.state.runs) == 1
    other = await api.post("/v1/runs", json=spec_json | {"steps": 3}, headers=headers)
    assert (other.status_code, other.json()["reason"]) == (409, "CONFLICT")


async def test_without_a_key_one_is_made_and_returned(api, spec_json):
    keys = {(await api.post("/v1/runs", json=spec_json)).headers["idempotency-key"] for _ in range(2)}
    assert len(keys) == 2


@pytest.mark.parametrize("flag", ["dry_run", "dry_run=true", "dry_run=1"])
async def test_a_dry_run_answers_the_spec_with_defaults_and_starts_nothing(api, spec_json, served, flag):
    answer = await api.post(f"/v1/runs?{flag}", json=spec_json)
    assert answer.status_code == 200
    assert answer.json()["optimizer"]["schedule"] == {
        "name": "constant",
        "warmup_steps": 0,
        "total_steps": None,
        "final_fraction": 0.0,
    }
    assert served.event_log.state.runs == {}


async def test_a_dry_run_names_the_engine_that_auto_stands_for_and_why(api, spec_json):
    asked = {**spec_json, "rollout": {"engine": "auto"}}
    answer = await api.post("/v1/runs?dry_run", json=asked)
    assert answer.json()["rollout"]["engine"] == "transformers"
    assert answer.headers["headrace-note"].startswith("rollout.engine: auto takes transformers: ")
    plain = await api.post("/v1/runs?dry_run", json=spec_json)
    assert "headrace-note" not in plain.headers


async def test_a_mistyped_dry_run_starts_nothing(api, spec_json, served):
    answer = await api.post("/v1/runs?dryrun=true", json=spec_json)
    assert answer.status_code == 422
    assert "did you mean dry_run?" in problems(answer)["dryrun"]
    assert served.event_log.state.runs == {}


@pytest.mark.parametrize("path", ["/v1/runs", "/v1/runs?dry_run"])
async def test_every_mistake_is_named_before_anything_starts(api, spec_json, served, path):
    wrong = spec_json | {"stpes": 3, "seed": "x", "data": {"source": "copy_digits", "heldout": -1}}
    answer = await api.post(path, json=wrong)
    assert (answer.status_code, answer.json()["reason"]) == (422, "INVALID")
    found = problems(answer)
    assert set(found) == {"stpes", "seed", "data.heldout"}
    assert "did you mean steps?" in found["stpes"]
    unfit = spec_json | {
        "rollout": {"instances": 5},
        "data": {"source": "reasoning_gym", "options": {"dataset": "x"}},
    }
    answer = await api.post(path, json=unfit)
    assert answer.status_code == 422
    assert {"rollout.instances", "data.options.dataset"} <= set(problems(answer))
    assert served.event_log.state.runs == {}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "is not JSON"),
        (b"{", "is not JSON"),
        (b"\xff", "is not JSON"),
        (b"[" * 50_000, "is not JSON"),
        (b'{"seed": NaN}', "is not JSON"),
        (b'{"x": [1e999]}', "beyond 1e308"),
        (b"3", "must be a mapping"),
        (b"null", "must be a mapping"),
    ],
)
async def test_a_body_that_is_no_spec(api, body, words):
    answer = await api.post("/v1/runs", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 422
    assert words in problems(answer)[""]


async def test_a_spec_as_yaml(api, spec_json):
    as_yaml = {"Content-Type": "application/yaml; charset=utf-8"}
    made = await api.post("/v1/runs", content=yaml.safe_dump(spec_json), headers=as_yaml)
    assert (made.status_code, made.json()["spec"]["name"]) == (201, spec_json["name"])
    for body, words in (
        (b"a: 1\nsteps: .nan", "line 2, column 8: .nan is not"),
        (b"\xff", "not UTF-8"),
        (b"[", "line 1"),
    ):
        refused = await api.post("/v1/runs", content=body, headers=as_yaml)
        assert refused.status_code == 422 and words in refused.json()["problems"][0]["problem"]


async def test_a_body_too_large_or_of_another_type(api, served):
    huge = await api.post(
        "/v1/runs",
        content=b" " * (1024 * 1024 + 1),
        headers={"Content-Type": "application/json; charset=utf-8"},
    )
    assert (huge.status_code, huge.json()["reason"]) == (413, "TOO_LARGE")
    form = await api.post("/v1/runs", content=b"{}", headers={"Content-Type": "text/plain"})
    assert (form.status_code, form.json()["reason"]) == (415, "UNSUPPORTED_MEDIA_TYPE")


async def test_pause_resume_cancel(api, run_id):
    for flag, intent in (("", "PAUSE"), ("?now", "PAUSE_NOW"), ("?now=true", "PAUSE_NOW")):
        paused = (await api.post(f"/v1/runs/{run_id}:pause{flag}")).json()
        assert (paused["state"], paused["intent"]) == ("PAUSED", intent)
        assert (await api.post(f"/v1/runs/{run_id}:resume")).json()["state"] == "QUEUED"
    assert (await api.post(f"/v1/runs/{run_id}:cancel")).json()["state"] == "CANCELLED"
    again = await api.post(f"/v1/runs/{run_id}:cancel")
    assert (again.status_code, again.json()["reason"]) == (409, "CONFLICT")


async def test_an_ended_run_is_deleted(api, run_id):
    early = await api.post(f"/v1/runs/{run_id}:delete")
    assert (early.status_code, early.json()["reason"]) == (409, "CONFLICT")
    await api.post(f"/v1/runs/{run_id}:cancel")
    assert (await api.post(f"/v1/runs/{run_id}:delete")).json() == {"id": run_id}
    assert (await api.get(f"/v1/runs/{run_id}")).status_code == 404


async def test_a_change_of_a_run(api, run_id):
    changed = await api.post(f"/v1/runs/{run_id}:set", json={"trainer": {"ranks": 2}})
    assert (changed.status_code, changed.json()["ranks"]) == (200, 2)
    for body, key in (
        ({"trainer": {"ranks": 0}}, "trainer.ranks"),
        ({"trainer": {"ranks": True}}, "trainer.ranks"),
        ({"trainer": {"rank": 2}}, "trainer.rank"),
        ({"steps": 5, "trainer": {"ranks": 2}}, "steps"),
        ({}, "trainer"),
    ):
        refused = await api.post(f"/v1/runs/{run_id}:set", json=body)
        assert refused.status_code == 422
        assert key in [problem["key"] for problem in refused.json()["problems"]], body


async def test_an_unknown_run_names_the_nearest(api, run_id):
    paths = ["", "/metrics", "/trajectories", "/checkpoints", "/certificates", "/events"]
    answers = [await api.get(f"/v1/runs/{run_id}x{path}") for path in paths]
    answers += [await api.post(f"/v1/runs/{run_id}x:{verb}") for verb in ("pause", "resume", "cancel")]
    for answer in answers:
        assert (answer.status_code, answer.json()["reason"]) == (404, "NOT_FOUND")
        assert f"did you mean {run_id}?" in answer.json()["message"]


async def test_leases_come_with_devices_and_a_service_is_scaled(api):
    assert (await api.get("/v1/leases")).json()["devices"][0]["name"] == "h/cpu:0"
    answer = await api.post("/v1/services/rollout:scale", json={"count": 3})
    assert answer.json() == {"kind": "rollout", "count": 3}
    unable = await api.post("/v1/services/simulator:scale", json={"count": 1})
    assert (unable.status_code, unable.headers["retry-after"]) == (503, "1")


async def test_a_summary_that_cannot_be_read_is_no_reason_to_ask_again(api, served, run_id):
    await train(served.event_log, 1, run=run_id)
    await served.event_log.commit(
        ev.RunStateChanged(at=1.0, run=run_id, state="CANCELLED", reason="r"),
    )
    await served.coordinator.archive.once()
    (served.event_log.history.directory(run_id) / "summary.json").write_text("{")
    answer = await api.get(f"/v1/runs/{run_id}")
    assert (answer.status_code, answer.json()["reason"]) == (409, "CONFLICT")
    assert "retry-after" not in answer.headers and "mend the file" in answer.json()["message"]


async def test_the_description_says_how_callers_show_their_token(api):
    found = (await api.get("/openapi.json")).json()
    scheme = found["components"]["securitySchemes"]["token"]
    assert (scheme["type"], scheme["scheme"], found["security"]) == ("http", "bearer", [{"token": []}])
    free = {
        path for path, each in found["paths"].items() if any(op.get("security") == [] for op in each.values())
    }
    assert free == {"/healthz", "/open", "/login", "/login/done"}


async def test_a_device_is_released_by_a_persons_word(api):
    answer = await api.post("/v1/devices:release", json={"device": "cpu:3"}, headers={"Idempotency-Key": "k"})
    assert (answer.status_code, answer.json()) == (200, {"device": "h/cpu:3"})
    assert (await api.post("/v1/devices:release", json={"device": "gpu:7"})).status_code == 404
    assert (await api.post("/v1/devices:release", json={"name": "gpu:0"})).status_code == 422


async def test_an_instance_is_drained(api):
    answer = await api.post("/v1/instances/rollout-1:drain", headers={"Idempotency-Key": "k"})
    assert answer.json() == {"instance": "rollout-1", "incarnation": "i-rollout-1"}
    assert (answer.status_code, answer.headers["idempotency-key"]) == (200, "k")
    assert (await api.post("/v1/instances/nobody:drain")).status_code == 404


async def test_the_flow_counts_every_slot_of_the_step_once(api, run_id):
    found = (await api.get(f"/v1/runs/{run_id}/flow")).json()
    places = ("waiting", "generating", "scoring", "scored", "learned", "dropped")
    assert sum(found[name] for name in places) == found["slots"]
    assert (await api.get("/v1/runs/nobody/flow")).status_code == 404


@pytest.mark.parametrize(
    ("kind", "body", "key", "words"),
    [
        ("rolout", {"count": 1}, "kind", "did you mean rollout?"),
        ("rollout", {"count": -1}, "count", "the nearest valid value is 0"),
        ("rollout", {"count": "2"}, "count", "write 2 without quotes"),
        ("rollout", {"cuont": 2}, "cuont", "did you mean count?"),
        ("rollout", {}, "count", "required key is missing"),
    ],
)
async def test_a_wrong_scale_is_named(api, kind, body, key, words):
    answer = await api.post(f"/v1/services/{kind}:scale", json=body)
    assert answer.status_code == 422
    assert words in problems(answer)[key]


async def test_the_spec_schema_describes_every_section(api, spec_json):
    schema = (await api.get("/v1/spec-schema")).json()
    assert set(spec_json) <= set(schema["properties"])
    assert "limits" in schema["properties"]


async def test_there_is_no_such_route(api):
    missing = await api.get("/v1/run")
    assert (missing.status_code, missing.json()["reason"]) == (404, "NOT_FOUND")
    assert "did you mean GET /v1/runs?" in missing.json()["message"]
    wrong = await api.delete("/v1/runs")
    assert (wrong.status_code, wrong.json()["reason"]) == (405, "METHOD_NOT_ALLOWED")
    assert (await api.get("/v1/runs/")).status_code in (404, 405)


async def test_a_bug_is_a_sentence_without_a_traceback(served, monkeypatch):
    def broken():
        raise KeyError("secret detail")

    monkeypatch.setattr(served.coordinator.reads, "instances", broken)
    transport = httpx.ASGITransport(served.app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        answer = await client.get("/v1/instances")
    assert (answer.status_code, answer.json()["reason"]) == (500, "INTERNAL")
    assert "secret detail" not in answer.text


async def test_with_a_token_every_request_bears_it(served, spec_json):
    transport = httpx.ASGITransport(served.app_with("s3cret"))
    async with httpx.AsyncClient(transport=transport, base_url="http://coordinator:8470") as client:
        assert (await client.get("/healthz")).json()["status"] == "ok"
        for wrong in ({}, {"Authorization": "Bearer other"}, {"Authorization": "Basic s3cret"}):
            for path in ("/v1/runs", "/metrics", "/openapi.json", "/nowhere"):
                answer = await client.get(path, headers=wrong)
                assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
        right = {"Authorization": "Bearer s3cret"}
        assert (await client.get("/v1/runs", headers=right)).status_code == 200
        refused = await client.post("/v1/runs", json=spec_json)
        assert refused.status_code == 401
    assert served.event_log.state.runs == {}


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:8470", 200),
        ("localhost:8470", 200),
        ("[::1]:8470", 200),
        ("10.1.2.3", 200),
        ("box.localhost", 200),
        ("evil.example", 403),
        ("evil.example:8470", 403),
        ("localhost.evil.example", 403),
    ],
)
async def test_without_a_token_other_names_of_this_machine_are_refused(api, host, status):
    assert (await api.get("/v1/runs", headers={"Host": host})).status_code == status


async def test_without_a_token_web_pages_of_other_sites_are_refused(api, run_id):
    cancel = f"/v1/runs/{run_id}:cancel"
    assert (await api.post(cancel, headers={"Origin": "https://evil.example"})).status_code == 403
    assert (await api.post(cancel, headers={"Origin": "null"})).status_code == 403
    assert (await api.post(cancel, headers={"Origin": "http://127.0.0.1"})).status_code == 200


@pytest.mark.parametrize("key", ["", "a b", "x" * 201, "é"])
async def test_an_ill_formed_key_is_refused(api, spec_json, served, key):
    answer = await api.post("/v1/runs", json=spec_json, headers=[("Idempotency-Key", key.encode("latin-1"))])
    assert answer.status_code == 422
    assert served.event_log.state.runs == {}


async def test_the_description_is_the_checked_in_one(api):
    checked_in = (Path(__file__).parents[1] / "openapi.json").read_text()
    assert checked_in == description(), (
        "run: python -m headrace_coordinator.api.http.openapi services/coordinator/openapi.json"
    )
    served = (await api.get("/openapi.json")).json()
    assert served == json.loads(checked_in)


def test_the_description_resolves_and_names_the_routes_of_the_architecture():
    text = description()
    document = json.loads(text)
    names = set(document["components"]["schemas"])
    assert {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]} <= names
    assert "HTTPValidationError" not in names
    routes = {f"{method} {path}" for path, methods in document["paths"].items() for method in methods}
    assert "post /v1/runs/{run_id}:pause" in routes
    assert "post /v1/plans" in routes
    assert {"get /v1/runs/{run_id}/timeline", "get /v1/runs/{run_id}/plan"} <= routes


def test_the_api_starts_at_once_and_without_heavy_packages():
    program = (
        "import sys, time\n"
        "import headrace_coordinator.api.http\n"
        "heavy = ('torch', 'grpc', 'pyarrow', 'datasets', 'reasoning_gym', 'tensorboardX', 'redis')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert output.stdout.strip() == "[]"


async def test_healthz_answers_503_with_the_reason(api, served):
    answer = await api.get("/healthz")
    assert (answer.status_code, answer.json()["status"]) == (200, "ok")
    served.event_log.store_trouble = "OOM"
    answer = await api.get("/healthz")
    assert answer.status_code == 503 and "takes no writes: OOM" in answer.json()["reason"]


async def test_head_answers_as_get_without_a_body(api, run_id):
    for path in ("/v1/runs", f"/v1/runs/{run_id}", f"/v1/runs/{run_id}/events", "/healthz", "/v1/runs/none"):
        head = await api.head(path)
        assert head.content == b"" and head.headers["content-type"]
        if not path.endswith("/events"):
            got = await api.get(path)
            changing = (
                {"content-length"} if path == "/healthz" else set()
            )  # It says the time and the loop's lag.
            same = [{*each.headers.items()} for each in (head, got)]
            assert head.status_code == got.status_code
            assert {name for name, _ in same[0] ^ same[1]} <= changing


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("DELETE", "/v1/runs", "GET, HEAD, POST"),
        ("PUT", "/v1/runs/x", "GET, HEAD"),
        ("PUT", "/v1/runs/x:pause", "GET, HEAD, POST"),
        ("POST", "/openapi.json", "GET, HEAD"),
        ("POST", "/open", "GET"),
    ],
)
async def test_405_names_the_methods_that_there_are(api, method, path, allowed):
    answer = await api.request(method, path)
    assert (answer.status_code, answer.headers["allow"]) == (405, allowed)


async def test_a_timeline_has_the_leases_that_the_run_holds_now(api, spec_json):
    run = (await api.post("/v1/runs", json=spec_json)).json()["id"]
    found = (await api.get(f"/v1/runs/{run}/timeline")).json()
    assert found == {"parts": [], "work": [], "holds": [], "labels": [], "older": False, "tail": None}
    assert (await api.get(f"/v1/runs/{run}/timeline?labels=true")).json() == found
    assert (await api.get(f"/v1/runs/{run}/timeline?steps=0")).status_code == 422
    assert (await api.get("/v1/runs/nobody/timeline")).status_code == 404
