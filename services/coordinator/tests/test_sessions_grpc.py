"""Sessions over gRPC beside the same over HTTP: equal answers, refusals, rights and audit; what strangers get."""

import asyncio
import json

import grpc
import pytest
from access_parts import OWN
from headrace.sessions.v1 import sessions_pb2 as pb
from headrace.sessions.v1.sessions_pb2_grpc import SessionServiceStub, add_SessionServiceServicer_to_server
from headrace_coordinator.access.tokens import Doors
from headrace_coordinator.api.http.over_grpc import SERVICE, SessionServicer
from headrace_coordinator.domain.state import InstanceState
from headrace_servicekit.rpc.errors import metadata_of, reason_of
from headrace_servicekit.rpc.server import GrpcServer

SPEC = {"workflow": "session", "name": "loop", "model": {"path": "owner/model"}}
CALL = {"kind": "forward_backward", "data": [{"tokens": [1, 2], "targets": [2, 3]}]}


@pytest.fixture
async def grpc_of(served):
    """`grpc_of(http client)` speaks as the same person over gRPC."""
    able = {"backends": ["fsdp"], "algorithms": ["session"]}
    await served.register(InstanceState("trainer-9", "i-9", "trainer", "h", "h:1", ["h/cpu:3"], able))
    servicer = SessionServicer(served.app_with(OWN), served.coordinator, Doors(served.event_log, OWN))
    server = GrpcServer("127.0.0.1:0", token=OWN, instance="sessions", users=servicer.refusal)
    server.add_service(add_SessionServiceServicer_to_server, servicer, SERVICE.full_name)
    async with grpc.aio.insecure_channel(await server.start()) as channel:
        stub = SessionServiceStub(channel)

        def of(http):
            shown = http.headers.get("authorization")
            metadata = [("authorization", shown)] if shown else []

            async def ask(rpc, **fields):
                request = getattr(pb, f"{rpc}Request")(**fields)
                found = (await getattr(stub, rpc)(request, metadata=metadata, timeout=30)).body
                return json.loads(found) if found else None

            return ask

        of.channel = channel
        yield of
    await server.drain(0)


async def refusal(asked):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await asked
    return caught.value.code(), reason_of(caught.value), caught.value


async def test_every_rpc_answers_as_its_route(served, people, grpc_of):
    http, ask = people["ann"], grpc_of(people["ann"])
    opened = await ask("OpenSession", body=json.dumps(SPEC), key="k")
    assert opened == (await http.post("/v1/sessions", json=SPEC, headers={"Idempotency-Key": "k"})).json()
    session, path = opened["id"], f"/v1/sessions/{opened['id']}"
    assert await ask("GetSession", session=session) == (await http.get(path)).json()
    assert await ask("ListSessions") == (await http.get("/v1/sessions")).json()
    body = {"seq": 1, "call": CALL}
    called = await ask("CallSession", session=session, body=json.dumps(body))
    assert called == (await http.post(f"{path}/calls", json=body)).json() == {"future": "call:1"}
    samples = json.dumps({"samples": [{"prompt": [1]}, {"prompt": [2]}]})
    sampled = await ask("SampleSession", session=session, body=samples, key="s")
    assert sampled == {"futures": ["sample:s.0", "sample:s.1"]}
    futures = ["call:1", *sampled["futures"]]
    waited = await ask("GetResults", session=session, future=futures, wait_s=0.0)
    assert waited == {"results": {"call:1": {"kind": "pending", "waits_for": "queue"}}}
    query = {"future": futures, "wait_s": 0}
    assert waited == (await http.get(f"{path}/results", params=query)).json()
    assert await ask("ListSessionCheckpoints", session=session) == {"checkpoints": []}
    assert (await ask("CloseSession", session=session))["session"] == session
    code, reason, error = await refusal(
        ask("CallSession", session=session, body=json.dumps({**body, "seq": 2}))
    )
    answer = await http.post(f"{path}/calls", json={**body, "seq": 2})
    assert (code, reason) == (grpc.StatusCode.FAILED_PRECONDITION, "CONFLICT") and answer.status_code == 409
    assert error.details() == answer.json()["message"]
    code, reason, _ = await refusal(ask("DeleteSessionCheckpoint", session=session, name="none"))
    assert (code, reason) == (grpc.StatusCode.NOT_FOUND, "NOT_FOUND")


async def test_a_refusal_names_the_key_and_the_fix(people, grpc_of):
    ask = grpc_of(people["ann"])
    wrong = json.dumps(SPEC | {"evaluation": {"every": 2}})
    code, reason, error = await refusal(ask("OpenSession", body=wrong))
    assert (code, reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID")
    assert metadata_of(error)["key"] == "evaluation.every" and metadata_of(error)["fix"]
    assert "evaluation.every: " in error.details()
    session = (await ask("OpenSession", body=json.dumps(SPEC)))["id"]
    long = {"seq": 1, "call": {"kind": "forward", "data": [{"tokens": [1.5], "targets": [2]}]}}
    code, _, error = await refusal(ask("CallSession", session=session, body=json.dumps(long)))
    assert code is grpc.StatusCode.INVALID_ARGUMENT and "tokens" in metadata_of(error)["key"]
    code, _, error = await refusal(ask("CallSession", session=session, body="{"))
    assert code is grpc.StatusCode.INVALID_ARGUMENT and "JSON" in error.details()
    code, _, error = await refusal(ask("GetSession"))
    assert code is grpc.StatusCode.INVALID_ARGUMENT and metadata_of(error)["key"] == "session"


async def test_a_call_may_hold_the_sequences_of_a_step(people, grpc_of):
    """A hundred thousand tokens with four values each: what a body of a spec may not hold."""
    ask = grpc_of(people["ann"])
    session = (await ask("OpenSession", body=json.dumps(SPEC)))["id"]
    row = {"tokens": [7] * 1000, "targets": [7] * 1000} | dict.fromkeys(
        ("advantages", "log_probs"), [-0.123456] * 1000
    )
    call = {"kind": "forward_backward", "loss": "importance_sampling", "data": [row] * 100}
    body = json.dumps({"seq": 1, "call": call})
    assert len(body) > 2 << 20
    assert await ask("CallSession", session=session, body=body) == {"future": "call:1"}
    again = await people["ann"].post(
        f"/v1/sessions/{session}/calls", content=body, headers={"content-type": "application/json"}
    )
    assert again.json() == {"future": "call:1"}


async def test_who_may_not_over_http_may_not_over_grpc(served, people, grpc_of):
    session = (await grpc_of(people["ann"])("OpenSession", body=json.dumps(SPEC)))["id"]
    code, reason, _ = await refusal(grpc_of(people["cho"])("GetSession", session=session))
    assert (code, reason) == (grpc.StatusCode.NOT_FOUND, "NOT_FOUND"), "another's is not there"
    code, reason, error = await refusal(grpc_of(people["eye"])("OpenSession", body=json.dumps(SPEC)))
    assert (code, reason) == (
        grpc.StatusCode.PERMISSION_DENIED,
        "FORBIDDEN",
    ) and "lacks the scope" in error.details()
    code, reason, _ = await refusal(grpc_of(people["nobody"])("ListSessions"))
    assert (code, reason) == (grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED")
    lines = (served.runs.parent / "audit" / "audit.jsonl").read_text().splitlines()
    found = [
        (each["who"], each["what"], each["run"], each["status"], each["from"])
        for each in map(json.loads, lines)
    ]
    assert ("ann", "POST /v1/sessions", session, 201, "127.0.0.1") in found
    assert ("eye", "POST /v1/sessions", "", 403, "127.0.0.1") in found
    assert any(status == 401 for *_, status, _ in found), "who shows no token is written down"


async def test_a_revoked_token_ends_a_call_that_waits(people, grpc_of):
    ask = grpc_of(people["ben"])
    session = (await ask("OpenSession", body=json.dumps(SPEC)))["id"]
    await ask("CallSession", session=session, body=json.dumps({"seq": 1, "call": CALL}))
    waiting = asyncio.ensure_future(ask("GetResults", session=session, future=["call:1"], wait_s=25.0))
    await asyncio.sleep(0)
    assert (await people["admin"].post("/v1/tokens/ben:revoke")).status_code == 200
    code, _, _ = await refusal(waiting)
    assert code is grpc.StatusCode.UNAUTHENTICATED


async def test_nothing_of_a_stranger_is_read(people, grpc_of):
    """Whoever shows no token is refused before a message: one that never comes keeps nobody waiting."""

    async def never():
        await asyncio.Event().wait()
        yield b""

    for rpc in ("CallSession", "ListSessions"):
        stranger = grpc_of.channel.stream_unary(f"/{SERVICE.full_name}/{rpc}")(never(), timeout=20)
        code, reason, _ = await refusal(stranger)
        assert (code, reason) == (grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED")
    code, _, _ = await refusal(grpc_of(people["nobody"])("CallSession", session="x", body="x" * (60 << 20)))
    assert code is grpc.StatusCode.UNAUTHENTICATED
