"""What the audit has of requests, and what it never has."""

import json
import logging
import stat

from access_parts import OWN, submitted
from headrace_coordinator.access import audit as module
from headrace_coordinator.access.audit import Audit
from headrace_coordinator.domain.access import NOBODY, SYSTEM


def entries(served) -> list[dict]:
    text = (served.runs.parent / "audit" / "audit.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


async def test_it_has_who_did_what_from_where_with_which_outcome(served, people, spec_json):
    run = await submitted(people["ann"], spec_json)
    await people["cho"].post(f"/v1/runs/{run}:cancel")
    await people["eye"].post(f"/v1/runs/{run}:cancel")
    await people["ann"].post(f"/v1/runs/{run}:cancel")
    await people["ann"].get(f"/v1/runs/{run}")
    await people["ann"].get(f"/v1/runs/{run}/export")
    found = [(each["who"], each["what"], each["run"], each["status"]) for each in entries(served)]
    assert ("admin", "POST /v1/tokens", "", 201) in found
    assert ("ann", "POST /v1/runs", run, 201) in found
    assert ("eye", "POST /v1/runs/{run_id}:cancel", run, 403) in found
    assert ("cho", "POST /v1/runs/{run_id}:cancel", run, 404) in found
    assert ("ann", "POST /v1/runs/{run_id}:cancel", run, 200) in found
    assert ("ann", "GET /v1/runs/{run_id}/export", run, 404) in found, "downloads are written down"
    assert not [each for each in found if each[1] == "GET /v1/runs/{run_id}"], "other reads are not"
    first = entries(served)[-1]
    assert first["from"] == "127.0.0.1" and first["token"] == "ann" and first["outcome"] == "refused"


async def test_a_deleted_run_is_named(served, people, spec_json):
    run = await submitted(people["ann"], spec_json)
    await people["ann"].post(f"/v1/runs/{run}:cancel")
    await people["ann"].post(f"/v1/runs/{run}:delete")
    assert entries(served)[-1]["what"] == "POST /v1/runs/{run_id}:delete"
    assert entries(served)[-1]["run"] == run


async def test_no_secret_is_written_anywhere(served, people, spec_json, caplog):
    """Secrets in tokens, headers, queries, paths, bodies and specs, and all files that the coordinator has written."""
    caplog.set_level(logging.DEBUG)
    planted = [f"planted-{number}-0123456789abcdef" for number in range(6)]
    made = (await people["admin"].post("/v1/tokens", json={"name": "brief"})).json()["token"]
    mine = {"Authorization": f"Bearer {made}"}
    await people["nobody"].get("/v1/runs", headers={"Authorization": f"Bearer {planted[0]}"})
    await people["nobody"].get("/v1/runs", headers=mine | {"X-Api-Key": planted[1], "Cookie": planted[1]})
    await people["nobody"].get(f"/v1/runs?code={planted[2]}", headers=mine)
    await people["nobody"].get(f"/open?code={planted[2]}")
    await people["nobody"].get(f"/v1/runs/{planted[3]}/export", headers=mine)
    await people["nobody"].post(f"/v1/tokens/{planted[3]}:revoke", headers=mine)
    wrong = spec_json | {"model": {"path": "m", "api_key": planted[4]}}
    await people["nobody"].post("/v1/runs", headers=mine, json=wrong)
    options = {"source": "copy_digits", "options": {"api_key": planted[5]}}
    await people["nobody"].post("/v1/runs", headers=mine, json=spec_json | {"data": options})
    link = (await people["nobody"].post("/v1/links", headers=mine)).json()["path"]
    await people["nobody"].get(link)
    await served.event_log.flush()
    await served.event_log.history.written()
    code = link.partition("code=")[2]
    written = [path for path in served.runs.parent.rglob("*") if path.is_file()]
    assert any(path.name == "audit.jsonl" for path in written)
    texts = {str(path): path.read_bytes().decode(errors="replace") for path in written}
    ours = [record.getMessage() for record in caplog.records if record.name.startswith("headrace")]
    texts["log"], texts["store"] = "\n".join(ours), repr(vars(served.event_log._store))
    for where, text in texts.items():
        for secret in (*planted, made, code):
            assert secret not in text, f"{secret} in {where}"
        assert f"Bearer {OWN}" not in text


def test_its_files_are_this_user_s_and_are_rotated(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MOST_BYTES", 2000)
    made = Audit(tmp_path)
    for _ in range(50):
        made.record(SYSTEM, "127.0.0.1", "POST", "/v1/runs", "", 201, 0.1)
    made.close()
    folder = tmp_path / "audit"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    files = sorted(folder.iterdir())
    assert len(files) > 2 and all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in files)
    assert sum(len(path.read_text().splitlines()) for path in files) == 50


def test_a_link_in_its_place_is_not_followed(tmp_path, caplog):
    (tmp_path / "audit").mkdir()
    (tmp_path / "audit" / "audit.jsonl").symlink_to(tmp_path / "elsewhere")
    made = Audit(tmp_path)
    made.record(SYSTEM, "127.0.0.1", "POST", "/v1/runs", "", 201, 0.1)
    assert not (tmp_path / "elsewhere").exists()
    assert "is not written" in caplog.text


def test_strangers_do_not_fill_the_disk(tmp_path, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    made = Audit(tmp_path)
    for _ in range(1000):
        made.record(NOBODY, "10.0.0.1", "any", "none", "", 401, 0.0)
    clock[0] += 1.0
    made.record(NOBODY, "10.0.0.1", "any", "none", "", 401, 0.0)
    found = [json.loads(line) for line in (tmp_path / "audit" / "audit.jsonl").read_text().splitlines()]
    assert len(found) == 11 and found[-1]["left_out"] == 990


def test_it_is_shipped_as_log_records(tmp_path):
    """To a real collector: gRPC's service of logs."""
    import threading
    from concurrent.futures import ThreadPoolExecutor

    import grpc
    from headrace_servicekit.tracing import start_tracing, stop_tracing
    from opentelemetry.proto.collector.logs.v1 import logs_service_pb2, logs_service_pb2_grpc

    got, arrived = [], threading.Event()

    class Collector(logs_service_pb2_grpc.LogsServiceServicer):
        def Export(self, request, context):
            for resource in request.resource_logs:
                for scope in resource.scope_logs:
                    got.extend(scope.log_records)
            arrived.set()
            return logs_service_pb2.ExportLogsServiceResponse()

    server = grpc.server(ThreadPoolExecutor(2))
    logs_service_pb2_grpc.add_LogsServiceServicer_to_server(Collector(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    start_tracing(f"http://127.0.0.1:{port}", "coordinator", "coordinator")
    try:
        made = Audit(tmp_path)
        made.record(SYSTEM, "127.0.0.1", "POST", "/v1/runs", "r-1", 201, 0.1)
        assert arrived.wait(30)
    finally:
        stop_tracing()
        server.stop(0)
    attributes = {each.key: each.value for each in got[0].attributes}
    assert attributes["who"].string_value == "admin" and attributes["status"].int_value == 201
    assert json.loads(got[0].body.string_value)["run"] == "r-1"
