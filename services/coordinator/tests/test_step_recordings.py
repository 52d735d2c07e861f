"""Recordings over HTTP, and what a client of an instance tells the recorder."""

import io
import tarfile

import grpc
import pytest
from headrace.common.v1 import common_pb2
from headrace.reward.v1 import reward_pb2, reward_pb2_grpc
from headrace_coordinator.domain import events as ev
from headrace_coordinator.fleet.grpc_client import GrpcInstanceClient
from headrace_coordinator.fleet.instance_client import CallRefused
from headrace_servicekit.recording.files import read_recording
from headrace_servicekit.recording.recorder import Recorder, RunRecorder, read_wanted
from headrace_servicekit.rpc.errors import ServiceError
from headrace_servicekit.rpc.server import GrpcServer
from history_parts import train

HEADER = common_pb2.CommandHeader(run="runs/r-1")


class Scorer(reward_pb2_grpc.RewardServiceServicer):
    """Opens any run but one with a wrong config, and gives each answer its attempt as its reward."""

    async def OpenRun(self, request, context):
        if request.config_json != "{}":
            raise ServiceError(grpc.StatusCode.INVALID_ARGUMENT, "INVALID", "no such scorer")
        return reward_pb2.OpenRunResponse(scorer_digest="d")

    async def Score(self, request_iterator, context):
        async for request in request_iterator:
            results = [reward_pb2.ScoreResult(reward=item.attempt) for item in request.items]
            yield reward_pb2.ScoreResponse(results=results)


@pytest.fixture
async def told(tmp_path):
    """A run's recorder, and a client whose calls it hears."""
    server = GrpcServer("127.0.0.1:0", token=None)
    server.add_service(
        reward_pb2_grpc.add_RewardServiceServicer_to_server, Scorer(), "headrace.reward.v1.RewardService"
    )
    address = await server.start()
    recorder = Recorder()
    run = recorder.open(RunRecorder("runs/r-1", tmp_path / "runs" / "r-1" / "recordings", keep="all"))
    run.based("c", 1, "d", 0)
    run.begin(1)
    yield run, GrpcInstanceClient("reward", address, "reward-x", None, recorder)
    recorder.close(run)
    await server.drain(0)


async def test_a_client_tells_of_calls_of_their_streams_and_of_refusals(told):
    run, client = told
    await client.call("OpenRun", reward_pb2.OpenRunRequest(header=HEADER, config_json="{}"), 10)
    with pytest.raises(CallRefused):
        await client.call("OpenRun", reward_pb2.OpenRunRequest(header=HEADER, config_json="?"), 10)

    async def sent():
        for attempt in (1, 2):
            items = [reward_pb2.ScoreItem(attempt=attempt)]
            yield reward_pb2.ScoreRequest(header=HEADER if attempt == 1 else None, items=items)

    rewards = [each.results[0].reward async for each in client.stream("Score", sent(), 10)]
    opened, refused, scored = read_recording((await run.end(lambda: ("{}", []))).path).calls
    assert [call.incarnation for call in (opened, refused, scored)] == ["reward-x"] * 3
    assert opened.succeeded and (refused.reason, refused.succeeded) == ("INVALID", False)
    assert [each.is_request for each in scored.messages].count(True) == 2 and scored.succeeded
    recorded = [reward_pb2.ScoreResponse.FromString(m.data) for m in scored.messages if not m.is_request]
    assert [each.results[0].reward for each in recorded] == rewards == [1.0, 2.0]


@pytest.fixture
async def asked(api, served, spec_json):
    """Of r-0, which has ended, and r-1, which has made 3 steps of 9."""
    for _ in range(2):
        await api.post("/v1/runs", json={**spec_json, "name": "r", "steps": 9})
    await served.end("r-0", "SUCCEEDED")
    await train(served.event_log, 3, run="r-1")
    return served


async def test_recordings_are_listed_and_downloaded(api, asked, told):
    run, client = told
    await client.call("OpenRun", reward_pb2.OpenRunRequest(header=HEADER, config_json="{}"), 10)
    kept = await run.end(lambda: ("{}", []))
    (kept.path.parent / "step-9.recording").write_bytes(b"of another version")
    listed = (await api.get("/v1/runs/r-1/recordings")).json()
    [found] = listed["recordings"]
    assert (found["name"], found["step"], found["checkpoint"]) == ("step-1.recording", 1, "c")
    assert found["size_bytes"] == kept.size and listed["wanted"] == []
    answer = await api.get("/v1/runs/r-1/recordings/step-1.recording")
    assert answer.content == kept.path.read_bytes()
    gone = await api.get("/v1/runs/r-1/recordings/step-1.recording/checkpoint")
    assert gone.status_code == 404 and "checkpoints/c" in gone.json()["message"]
    checkpoint = kept.path.parents[1] / "checkpoints" / "c"
    checkpoint.mkdir(parents=True)
    (checkpoint / "state.json").write_text("{}")
    tar = (await api.get("/v1/runs/r-1/recordings/step-1.recording/checkpoint")).content
    with tarfile.open(fileobj=io.BytesIO(tar)) as files:
        assert [name.rpartition("/")[2] for name in files.getnames()] == ["state.json"]
    lacking = await api.get("/v1/runs/r-1/recordings/step-2.recording")
    assert lacking.status_code == 404 and "step-1.recording" in lacking.json()["message"]
    outside = await api.get("/v1/runs/r-1/recordings/..%2Fwanted.json")
    assert outside.status_code == 404


async def test_a_step_that_can_be_recorded_is_noted_and_others_are_refused_by_their_reason(
    api, asked, tmp_path
):
    assert (await api.post("/v1/runs/r-1:record?step=4")).json()["wanted"] == [4]
    assert read_wanted(tmp_path / "runs" / "r-1" / "recordings") == {4}
    for run, step, says in (
        ("r-1", 3, "was not recorded; ask for one of 4 to 9"),
        ("r-1", 10, "no such step"),
        ("r-0", 4, "SUCCEEDED"),
    ):
        refused = await api.post(f"/v1/runs/{run}:record?step={step}")
        assert refused.status_code == 409 and says in refused.json()["message"], refused.json()
    working = asked.fleet.recorder.open(RunRecorder("runs/r-1", tmp_path / "runs" / "r-1" / "recordings"))
    working.begin(5)
    await train(asked.event_log, 1, 3, run="r-1")
    late = await api.post("/v1/runs/r-1:record?step=5")
    assert late.status_code == 409 and "ask for one of 6 to 9" in late.json()["message"]
    assert (await api.post("/v1/runs/r-1:record?step=6")).json()["wanted"] == [4, 6]
    assert working.needs_base(6)
    suite = {"spec": {"samples": 1, "suite": {"name": "items"}}, "model": "m", "items": 1}
    spec = asked.event_log.state.runs["r-1"].spec
    await asked.post(ev.RunSubmitted(at=1.0, run="r-2", spec=spec, directory=str(tmp_path), evaluation=suite))
    assert "evaluation" in (await api.post("/v1/runs/r-2:record?step=7")).json()["message"]
